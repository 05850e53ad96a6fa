"""The inputs of an influence run: model, loss and training data at each of its checkpoints, and what is
refused of them; and the queries, whose rows they are and which of them a config chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from psgrad.commands.class_names import errors_about
from psgrad.commands.setup import Setup, set_up
from psgrad.config import Config, QueriesConfig, is_callable_spec, nearest
from psgrad.config.values import names_in_condition
from psgrad.data.measurements import Measurement
from psgrad.data.reader import CheckedReader
from psgrad.data.rows import Samples
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.objective import BY_POSITION, Forward
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.errors import ConfigError
from psgrad.models.factory import load_model
from psgrad.run.results.analyze import rows_where

# -- checkpoints ---------------------------------------------------------------------------------------------


def first_setup(config: Config, processes: Processes) -> Setup:
    """Model, loss and training data at the first checkpoint. Raises ConfigError for a model that draws at
    random, and for what is not computed for losses with weights, or for groups of rows.
    """
    setup = set_up(config, "influence.parameters", processes)
    if setup.samples.weighted:
        _require_of_weights(config)
    if setup.draws_at_random():
        raise ConfigError(
            "the model draws random numbers in train mode, so an example has no one gradient",
            hint="set model.mode: eval",
        )
    return setup


class CalledModel(nn.Module):
    """A model that is called as the config says, with what the loss reads for its output."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.how = model, forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.how(self.model, *inputs)


def fresh_models(config: Config, setup: Setup) -> Callable[[int], nn.Module]:
    """seed -> a model with fresh weights, never a copy of the trained one. Those of its parameters are
    trained that the factory left so. It takes its inputs by position, and returns what the loss reads.
    """
    if config.model.pretrained is not None and not (config.model.checkpoint or config.influence.checkpoints):
        raise ConfigError(
            "models would be trained again from the trained weights: model.pretrained has the only ones",
            hint="set model.pretrained to the model before its training, and model.checkpoint to the result",
        )
    bare = config.model.model_copy(update={"checkpoint": None})

    def fresh(seed: int) -> nn.Module:
        model = load_model(bare, config.base).model.to(setup.device, setup.dtype)
        how = replace(setup.forward, weighted=False)  # a trainer knows no weights
        return model if how == BY_POSITION else CalledModel(model, how)

    return fresh


# Methods that read gradients alone, whatever rows a gradient is the sum of.
_FIRST_ORDER = ("gradient_dot", "gradient_cosine", "tracin")


def _require_of_weights(config: Config) -> None:
    """Raises ConfigError for a curvature that weights of losses would enter squared: that of gradients times
    themselves.
    """
    method, index = config.influence.method, config.influence.index
    options = {"curvature": "gauss_newton", "fisher": "sampled", **method.options}
    by_output = {"influence": options["curvature"] != "fisher", "ekfac": options["fisher"] != "empirical"}
    if not (method.name in _FIRST_ORDER or by_output.get(method.name, is_callable_spec(method.name))):
        problem = f"the method {method.name} with the options {dict(method.options)}"
    elif index is not None and index.features != "loss":
        problem = f"an index of the {index.features}"
    else:
        return
    raise ConfigError(
        f"data.weight: {problem} is not computed for losses with weights: its curvature would have their"
        " squares",
        hint=(
            f"choose {', '.join(_FIRST_ORDER)}, influence by the gauss_newton or hessian curvature, or ekfac"
            " with fisher: sampled or exact"
        ),
    )


# -- queries -------------------------------------------------------------------------------------------------


def queries_of(
    config: Config,
    setup: Setup,
    measurement: Measurement,
    at_last: Callable[[], Setup],
    processes: Processes,
) -> tuple[CheckedReader, np.ndarray]:
    """(the reader of the queries, which rows they are). at_last: the setup at its last checkpoint, whose
    losses and predictions queries are chosen by; a pass that the processes share.
    """
    wanted, samples = config.influence.queries, setup.samples
    with errors_about_queries():
        # A measurement has no weight, whatever weights the training losses have.
        if wanted is not None and (own := wanted.own_data) is not None:
            samples = setup.other_samples(own, weighted=False)
        reader = setup.reader_of(samples, measurement.criterion)
    if wanted is None:
        return reader, np.arange(len(samples))
    rows = _listed(wanted, samples)
    if wanted.choice_given - {"rows", "ids"}:
        with errors_about_queries():
            table = _table(wanted, rows, samples, at_last, processes)
        rows = _chosen(wanted, table)
    return reader, rows


def _listed(wanted: QueriesConfig, samples: Samples) -> np.ndarray:
    """The rows that a config lists, in its order; all where it lists none."""
    if wanted.ids is not None:
        return _rows_of_ids("influence.queries.ids", wanted.ids, samples, np.arange(len(samples)))
    if wanted.rows is None:
        return np.arange(len(samples))
    rows = np.array(wanted.rows, dtype=np.int64)
    if rows.max() >= len(samples):
        raise ConfigError(
            f"influence.queries.rows names row {rows.max()}, and the rows go from 0 to {len(samples) - 1}",
        )
    return rows


def _rows_of_ids(key: str, ids: Sequence[str | int], samples: Samples, among: np.ndarray) -> np.ndarray:
    """The rows of these ids, among some rows. Raises ConfigError, with the config's key, for an id that none
    of them has.
    """
    places = dict(zip(map(str, samples.ids[among].tolist()), among.tolist(), strict=True))
    missing = [each for each in ids if str(each) not in places]
    if missing:
        close = nearest(str(missing[0]), list(places))
        more = f" (nor {len(missing) - 1} more of them)" if len(missing) > 1 else ""
        raise ConfigError(
            f"{key} names {missing[0]!r}, which no row has{more}",
            hint=f"did you mean {close}?" if close else f"ids are such as {', '.join(list(places)[:3])}",
        )
    return np.array([places[str(each)] for each in ids], dtype=np.int64)


def contrasted_rows(config: Config, samples: Samples, rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The pairs of queries that a config contrasts, as rows; `rows` are those of the queries."""
    pairs = config.influence.contrast or []
    found = _rows_of_ids("influence.contrast", [each for pair in pairs for each in pair], samples, rows)
    return tuple((int(one), int(other)) for one, other in found.reshape(-1, 2))


def _table(
    wanted: QueriesConfig,
    rows: np.ndarray,
    samples: Samples,
    at_last: Callable[[], Setup],
    processes: Processes,
) -> pd.DataFrame:
    """A row a query that may be chosen, with the columns of QUERY_NAMES that there are. A forward pass, where
    what the config asks takes one.
    """
    columns = {"id": samples.ids[rows], "index": rows}
    names = set() if wanted.where is None else set(names_in_condition(wanted.where))
    targets = None if samples.targets is None else samples.targets[rows]
    known = {"id", "index"} | (set() if targets is None else {"target", "label"})
    if wanted.worst is not None or names - known:
        setup = at_last()
        reader = setup.reader_of(samples)
        columns |= losses_of(setup, reader, rows, lambda _: None, processes)
        targets = reader.targets_at(rows)
        if "confidence" in columns and targets is not None:
            columns["correct"] = columns["prediction"] == targets
    if targets is not None:
        columns |= {"target": targets, "label": targets}
    return pd.DataFrame(columns)


def _chosen(wanted: QueriesConfig, table: pd.DataFrame) -> np.ndarray:
    """The rows of a table that a config chooses; the worst first. Raises ConfigError where none is left."""
    of = f"{len(table):,} rows"
    if wanted.where is not None:
        table = table[rows_where(table, wanted.where, "influence.queries.where")]
    if wanted.worst is not None:
        worst = table.sort_values("loss", ascending=False, kind="stable", na_position="first")
        table = worst.head(wanted.worst)
    if not len(table):
        said = ", ".join(sorted(wanted.choice_given - {"rows", "ids"}))
        raise ConfigError(f"influence.queries: {said} leave none of {of}", hint="ask for other rows")
    return table["index"].to_numpy(np.int64)


def errors_about_queries() -> AbstractContextManager[None]:
    """Errors about data, losses and models say that they are about the queries, not the training data."""
    return errors_about("the queries", "influence.queries and influence.measurement")


def losses_of(
    setup: Setup,
    reader: CheckedReader,
    rows: np.ndarray,
    say: Callable[[str], None],
    processes: Processes | None = None,
) -> dict[str, np.ndarray]:
    """The loss, and what else a forward pass tells, of these rows of a dataset: name -> [n]."""
    options, shared = setup.stream_options(say), OneProcess() if processes is None else processes
    examples = Examples(
        setup.objective_of(reader.samples), ChosenRows(reader, rows), options, processes=shared
    )
    chunks = [found for _, found in examples.losses()]
    return {name: torch.cat([chunk[name] for chunk in chunks]).cpu().numpy() for name in chunks[0]}


def with_rows(examples: Examples, reader: CheckedReader, rows: np.ndarray) -> Examples:
    """The same model and scalar with these rows of a dataset."""
    return replace(examples, rows=ChosenRows(reader, rows))
