"""The rows of an influence run that have scores: those whose loss and gradient are finite at every
checkpoint; and warnings about the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from psgrad.engine.influence.method import Screened, screened
from psgrad.errors import InfluenceError
from psgrad.results import Progress, Say
from psgrad.storage.gradient_index import GradientIndex
from psgrad.workflows.influence_index import screened_rows
from psgrad.workflows.influence_queries import chosen_rows, errors_about_queries
from psgrad.workflows.influence_ranking import QueryRankings
from psgrad.workflows.influence_setup import InfluenceSetup


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

    def __init__(self, training: list[Screened], queries: list[Screened]) -> None:
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
    training = [screened(view.training) for view in setup.views] if store is None else screened_rows(store)
    with errors_about_queries():
        queries = [screened(view.queries) for view in setup.views]
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
                cause="a checkpoint of a run that diverged, or data with NaN",
                next_step="run psgrad analyze to see which rows and parameters",
            )
        if len(out):
            say(
                f"excluded {len(out):,} of {len(kept):,} {what}, whose loss or gradient is not finite:"
                f" {named(ids[out])}"
            )
    if screening.kept.all() and screening.asked.all():
        return setup, screening
    rows = np.flatnonzero(screening.kept) if store is None else setup.training_rows
    asked = setup.query_rows[screening.asked]
    views = [
        replace(
            view,
            training=replace(
                view.training,
                read=chosen_rows(setup.run.reader, rows),
                count=len(rows),
                numbers=torch.from_numpy(rows),
            ),
            queries=replace(view.queries, read=chosen_rows(setup.query_reader, asked), count=len(asked)),
        )
        for view in setup.views
    ]
    return replace(setup, views=views, query_rows=asked, training_rows=rows), screening


def named(ids: np.ndarray) -> str:
    """The first few of some ids."""
    return ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


def warn_of_unranked(setup: InfluenceSetup, rankings: QueryRankings, say: Callable[[str], None]) -> None:
    """Say which queries have no proponent and no opponent."""
    ids, rows = setup.query_reader.samples.ids, np.setdiff1d(setup.query_rows, rankings.scores["query_index"])
    if len(rows):
        say(
            f"{len(rows):,} of {len(setup.query_rows):,} queries have no score but zeros and NaN, and no"
            f" ranking: {named(ids[rows])}"
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
