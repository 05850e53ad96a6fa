"""`psgrad validate --deep`: the model and the data loaded, and loss and gradients of a few rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from psgrad.commands.class_names import label_facts_of
from psgrad.commands.influence_queries import chosen_rows
from psgrad.commands.influence_setup import method_from
from psgrad.commands.measure_setup import measures_of
from psgrad.commands.plan import plan_of
from psgrad.commands.setup import Setup, set_up
from psgrad.commands.validation import Validation
from psgrad.config import Config
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import spread_rows
from psgrad.engine.execution.run_plan import plan_run
from psgrad.reports.labels import label_warning, label_words
from psgrad.user_code import with_code_beside

# Rows whose loss is taken, from all over the dataset; the second number where they have classes.
_ROWS = (32, 128)


@with_code_beside
def validate_deep(config: Config, found: Validation, say: Callable[[str], None]) -> int | None:
    """Add to what was found: options of measures and methods, the fit of weights and model, the losses of
    some rows, the self-check, and the memory that a run would take. Returns the number of rows, where they
    can be read.
    """
    count_of_rows: int | None = None
    with found.problems_at("analyze.measures"):
        measures_of(config)
    with found.problems_at("influence.method"):
        method_from(config.influence.method, config.base)
    with found.problems_at(""):
        run = set_up(config)
        trainable = sum(parameter.numel() for parameter in run.objective.params.values())
        found.facts["trained"] = (
            f"{trainable:,} numbers in {len(run.objective.params):,} parameters, on {run.device}, in"
            f" {run.config.engine.dtype}"
        )
        count_of_rows = len(run.samples.ids)  # ids are read, too
        found.facts["rows"] = f"{count_of_rows:,}"
        columns = _forward(run, say)
        found.facts["losses"] = _losses(columns["loss"].to_numpy())
        names = run.config.data.class_names
        labels = label_facts_of(run.criterion, columns, names)
        if labels is not None and (words := label_words(labels, names)):
            found.facts["labels"] = words
        if labels is not None and (warning := label_warning(labels, names)):
            found.notes.append(warning)
        stream = run.stream(say)
        check = run.self_check(stream)
        found.facts["self-check"] = (
            "left out, as the model draws at random"
            if check is None
            else f"worst relative error {check.worst:.2g}, against a plain one-sample gradient"
        )
        plan = plan_of(plan_run(run.stream(say), len(run.samples)))
        found.facts["memory"] = (
            f"about {plan.total_bytes / 1e6:,.1f} MB at its highest, {plan.chunk_size:,} rows at a time"
        )
    return count_of_rows


def _forward(run: Setup, say: Callable[[str], None]) -> pd.DataFrame:
    """Loss and label, and what the model says, of some rows from all over the dataset."""
    criterion = run.criterion
    lengths = criterion.kind == "token"
    reader = CheckedReader(run.samples, criterion, run.reader.classes, with_lengths=lengths)
    rows = np.array(spread_rows(len(run.samples), _ROWS[criterion.kind in ("class", "binary")]))
    options = run.stream_options(say)
    chunks = [
        chunk for _, chunk in Examples(run.objective, chosen_rows(reader, rows), len(rows), options).losses()
    ]
    columns = {name: torch.cat([chunk[name] for chunk in chunks]).cpu().numpy() for name in chunks[0]}
    targets = reader.targets_at(rows)
    columns |= {} if targets is None else {"target": targets}
    columns |= {} if reader.lengths is None else {"length": reader.lengths[rows]}
    return pd.DataFrame(columns)


def _losses(losses: np.ndarray) -> str:
    finite = losses[np.isfinite(losses)]
    words = (
        f"{finite.min():.4g} to {finite.max():.4g} over {len(losses)} rows"
        if len(finite)
        else f"none of {len(losses)} is finite"
    )
    return words + (
        f", {len(losses) - len(finite)} of them not finite" if 0 < len(finite) < len(losses) else ""
    )
