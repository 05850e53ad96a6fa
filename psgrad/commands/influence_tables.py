"""The rows of an influence run that have scores, those whose loss and gradient are finite at every
checkpoint, with warnings about the others; the tables: queries, training examples, ranked pairs, and their
files; and which parameters scores are about, by the parts of a language model (attention, MLP, experts,
adapters, embedding, head).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from torch import nn

from psgrad.commands.influence_index import stored_row_norms
from psgrad.commands.influence_queries import chosen_rows, errors_about_queries
from psgrad.commands.influence_ranking import QueryRankings, of_all
from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.config import Config, EvaluationKind
from psgrad.engine.influence.method import RowNorms, row_norms
from psgrad.errors import InfluenceError
from psgrad.run import RunFolder
from psgrad.run.folders import manifest_of
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.results import Progress, Say
from psgrad.run.results.influence import (
    EVALUATION_FILE,
    QUERY_COLUMNS,
    SIGN,
    TRAINING_COLUMNS,
    InfluenceResult,
    harmful_rows,
)
from psgrad.run.results.manifest import InfluenceFacts, read_manifest
from psgrad.wording import first_of

_NAMED = 5  # rows in a warning


class Warnings:
    """What the run says to people: printed at once, and kept for the report."""

    def __init__(self, progress: Say) -> None:
        self.messages: list[str] = []
        self._progress = progress

    def __call__(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)
            self._progress(Progress(0, 0, "influence", message))


class ScreenedRows:
    """The result of one pass over training examples and queries: whose numbers are finite at every
    checkpoint, and the last one's columns.
    """

    def __init__(self, training: list[RowNorms], queries: list[RowNorms]) -> None:
        self.training, self.queries = training[-1], queries[-1]
        self.kept = torch.stack([each.finite for each in training]).all(0).numpy()
        self.asked = torch.stack([each.finite for each in queries]).all(0).numpy()


def without_nonfinite(
    setup: InfluenceSetup, store: GradientIndex | None, say: Callable[[str], None]
) -> tuple[InfluenceSetup, ScreenedRows]:
    """The setup without the rows whose loss or gradient is not finite at some checkpoint, which are named.

    store: the index that answers. It has no score for such training examples, and they are not read again.
    Raises InfluenceError where nothing is left.
    """
    training = (
        [row_norms(view.training) for view in setup.views] if store is None else stored_row_norms(store)
    )
    with errors_about_queries():
        queries = [row_norms(view.queries) for view in setup.views]
    screening = ScreenedRows(training, queries)
    samples = setup.run.samples
    for what, kept, ids in (
        ("training examples", screening.kept, samples.ids),
        ("queries", screening.asked, setup.query_reader.samples.ids[setup.query_rows]),
    ):
        out = np.flatnonzero(~kept)
        if len(out) == len(kept):
            raise InfluenceError(
                f"the loss or the gradient of every one of the {len(kept):,} {what} is not finite",
                hint=(
                    "a checkpoint of a run that diverged, or data with NaN; run psgrad analyze to see"
                    " which rows and parameters"
                ),
            )
        if len(out):
            say(
                f"excluded {len(out):,} of {len(kept):,} {what}, whose loss or gradient is not finite:"
                f" {first_of(list(map(str, ids[out])), _NAMED)}"
            )
    if screening.kept.all() and screening.asked.all():
        return setup, screening
    setup = setup.with_queries(setup.query_rows[screening.asked])
    rows = np.flatnonzero(screening.kept) if store is None else setup.training_rows
    read, numbers = chosen_rows(setup.run.reader, rows), torch.from_numpy(rows)
    views = [
        replace(view, training=replace(view.training, read=read, count=len(rows), numbers=numbers))
        for view in setup.views
    ]
    return replace(setup, views=views, training_rows=rows), screening


def warn_of_unranked(setup: InfluenceSetup, rankings: QueryRankings, say: Callable[[str], None]) -> None:
    """Say which queries have no proponent and no opponent."""
    ids, rows = setup.query_reader.samples.ids, np.setdiff1d(setup.query_rows, rankings.scores["query_index"])
    if len(rows):
        say(
            f"{len(rows):,} of {len(setup.query_rows):,} queries have no score but zeros and NaN, and no"
            f" ranking: {first_of(list(map(str, ids[rows])), _NAMED)}"
        )


def warn_of_plain_mean(setup: InfluenceSetup, rankings: QueryRankings, say: Callable[[str], None]) -> None:
    """Warn of a plain mean over checkpoints of scores that are on a scale of their own at each."""
    config, shares = setup.run.config.influence, rankings.largest_share
    if config.average != "plain" or len(shares) == 0 or setup.method.joins_by_own_rule:
        return
    share = float(np.nanmedian(shares)) if np.isfinite(shares).any() else float("nan")
    say(
        f"influence.average: plain: this is a plain mean of the scores of {len(setup.views)} checkpoints, and"
        f" their sizes differ: for half of the queries one checkpoint makes {share:.0%} of it or more"
        f" ({1 / len(setup.views):.0%} if all were alike). Such means of the loss rank much worse than"
        " average: relative, the default"
    )


def query_table(setup: InfluenceSetup, screening: ScreenedRows) -> pd.DataFrame:
    """One row for each query, excluded ones too; see QUERY_COLUMNS."""
    reader, rows = setup.query_reader, setup.asked_rows
    targets = reader.targets_at(rows)
    columns = {
        "id": reader.samples.ids[rows],
        "index": rows,
        **({} if targets is None else {"target": targets}),
        **screening.queries.columns,
        "measurement": setup.measurement.sign * screening.queries.losses,
        "status": np.where(screening.asked, "ok", "nonfinite"),
    }
    return pd.DataFrame({name: columns[name] for name in QUERY_COLUMNS if name in columns})


def training_table(setup: InfluenceSetup, screening: ScreenedRows, own: np.ndarray | None) -> pd.DataFrame:
    """One row for each training example, excluded ones too; see TRAINING_COLUMNS. `overall` comes later."""
    samples, reader, kept = setup.run.samples, setup.run.reader, screening.kept
    everything = np.arange(len(samples))
    targets = reader.targets_at(everything)
    columns = {
        "id": samples.ids,
        "index": everything,
        **({} if targets is None else {"target": targets}),
        **screening.training.columns,
        "loss": screening.training.losses,
        "grad_norm": screening.training.norms,
        **({} if own is None else {"self_influence": of_all(own, setup.training_rows, len(kept))}),
        "status": np.where(kept, "ok", "nonfinite"),
    }
    return _in_order(columns)


def with_overall(training: pd.DataFrame, rows: np.ndarray, overall: np.ndarray) -> pd.DataFrame:
    """The table of training examples with the mean of their scores over the queries: `overall` [n], of these
    rows [n].
    """
    return _in_order({**training, "overall": of_all(overall, rows, len(training))})


def _in_order(columns: Mapping[str, Any]) -> pd.DataFrame:
    return pd.DataFrame({name: columns[name] for name in TRAINING_COLUMNS if name in columns})


def with_agreement(queries: pd.DataFrame, rows: np.ndarray, agreement: np.ndarray) -> pd.DataFrame:
    """The table of queries with the agreement of the checkpoints on these rows; as it is without any."""
    if not len(agreement):
        return queries
    known = pd.Series(agreement, index=rows)
    found = queries.assign(agreement=known.reindex(queries["index"]).to_numpy())
    return found[[name for name in QUERY_COLUMNS if name in found]]


def write_tables(result: InfluenceResult, matrix: Mapping[str, np.ndarray] | None, folder: RunFolder) -> None:
    """scores.parquet and scores.csv, self_influence.parquet, queries.parquet, harmful.csv, the answers to the
    config's questions, and the matrix where it is wanted.
    """
    # pandas keeps `attrs` in the file's metadata; a CSV file has none, and says it in a column.
    for name, frame in (("scores.parquet", result.scores), ("self_influence.parquet", result.training)):
        said = frame.copy()
        said.attrs = {"unit": result.unit, "sign": SIGN, "predicts_removal": result.predicts_removal}
        folder.write_table(name, said)
    folder.write_csv("scores.csv", result.scores.assign(unit=result.unit))
    folder.write_table("queries.parquet", result.queries)
    folder.write_csv("harmful.csv", harmful_rows(result.training))
    for name, frame in result.questions.files().items():
        folder.write_table(name, frame)
    if result.tokens:
        tables = [pair.table() for pair in result.tokens]
        folder.write_table("tokens.parquet", pd.concat(tables, ignore_index=True))
    if matrix is not None:
        from safetensors.numpy import save

        folder.write_bytes("matrix.safetensors", save(dict(matrix)))


def earlier_evaluations(config: Config, facts: InfluenceFacts) -> dict[str, dict[str, Any]]:
    """kind -> its part of evaluation.json, of finished evaluations of the same method, measurement,
    checkpoints and queries beside the config's output.
    """
    found = {}
    for kind in get_args(EvaluationKind):
        folder = config.output_of(kind)
        manifest = manifest_of(folder)
        if manifest is None or not (folder / EVALUATION_FILE).is_file():
            continue
        if _about(read_manifest(manifest).influence) != _about(facts):
            continue
        try:
            content = json.loads((folder / EVALUATION_FILE).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content.get(kind), dict):
            found[kind] = content[kind]
    return found


def _about(facts: InfluenceFacts) -> tuple[Any, ...]:
    """What scores and evaluations of the same thing agree in."""
    hashes = [each.get("sha256") for each in facts.checkpoints]
    return facts.method, facts.measurement, facts.normalize, hashes, facts.queries.get("fingerprint")


OTHER = "other layers"
# The first part whose pattern a component of a parameter's name has. Names of an expert are also those of an
# MLP, and an adapter stands inside the layer that it adapts.
_PARTS = (
    ("adapters", r"lora_.*|.*adapter.*|ia3_.*|prompt_encoder|prefix_encoder"),
    ("experts", r"experts?|moe|.*_moe|shared_expert.*|router|gate"),
    ("norms", r".*norm(_.*|\d*)|ln_.*|ln\d*"),
    ("attention", r".*attn|.*attention|.*_attn_.*"),
    ("head", r"lm_head|embed_out|score|.*classifier|cls|qa_outputs|head|output_projection|pooler"),
    ("embedding", r"wte|wpe|emb|embed.*|.*embeddings?|shared"),
    ("MLP", r"mlp|ffn?|feed_?forward|intermediate|fc\d+|.*_mlp|mlp_.*|dense.*dense"),
)


def part_of(name: str) -> str:
    """The part that a parameter belongs to, by its name."""
    components = [each.lower() for each in name.split(".")]
    for part, pattern in _PARTS:
        if any(re.fullmatch(pattern, each) for each in components):
            return part
    # the second half of the MLP of BERT is called output, beside the intermediate one
    return "MLP" if "output" in components else OTHER


def coverage(
    model: nn.Module, covered: Collection[str], facts: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A row for each part: `part`, how many numbers its parameters have, how many of these are `covered`, and
    the names of those that are `left_out`; the largest part first.

    covered: the names of the parameters that scores are about. facts: of the method at each checkpoint; where
    it has blocks, `blocks` says of what kinds those of the part are, and how many.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        row = rows.setdefault(
            part_of(name),
            {"part": part_of(name), "parameters": 0, "covered": 0, "left_out": [], "blocks": {}},
        )
        row["parameters"] += parameter.numel()
        if name in covered:
            row["covered"] += parameter.numel()
        else:
            row["left_out"].append(name)
    for label, kind in (facts[0].get("blocks") or {}).items() if facts else ():
        counted = rows[part_of(re.split(r"[ \[]", label)[0])]["blocks"]
        name = re.split(r",? \d", kind)[0]  # without its sizes
        counted[name] = counted.get(name, 0) + 1
    return sorted(rows.values(), key=lambda row: -row["parameters"])
