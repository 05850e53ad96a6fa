"""`influence.index_search: approximate`: the strongest rows of an index are found without reading all of
them, and what is found gets its exact scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.config import Config
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.influence.index.estimators import FittedRows
from psgrad.engine.influence.index.search import FoundRows, found_rows, recalls, strongest_rows, vectors_of
from psgrad.engine.influence.index.stored_index import ChosenRows, StoredRows
from psgrad.engine.influence.method import Fitted
from psgrad.errors import ConfigError, InfluenceError
from psgrad.reports.words import amount
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.results import Progress, Say
from psgrad.run.row_lists import RowLists, require_faiss
from psgrad.run.run import Run

Array = np.ndarray[Any, Any]

_LOW = 0.9  # a recall below it is warned of
_SAMPLE = 64  # rows for each list, from which its mean is found
_CANDIDATES = 2  # rows that are found, and scored exactly, for each one that is ranked
_MEASURED = 20  # queries that are also answered by reading all rows
_SEARCHED = 4  # by default one in this number of lists
_BYTES = 6  # of a number: in the lists, and twice more while they are written


@dataclass(frozen=True)
class Search:
    """What an approximate search has found.

    setup: with the rows that were found as its training examples. fitted: the method on these. facts: plain
    values, for the manifest.
    """

    setup: InfluenceSetup
    fitted: list[Fitted]
    facts: dict[str, Any]


def require_searchable(config: Config, *, matrix: bool, processes: Processes) -> None:
    """Raises ConfigError for what an approximate search has no answer to, and where faiss is missing."""
    if not config.influence.index_search.approximate:
        return
    reasons = {
        "--matrix": matrix and "it needs the scores of all rows",
        "several processes": processes.size > 1 and "they share the reading of all rows, which is left out",
    }
    for what, why in reasons.items():
        if why:
            raise ConfigError(
                f"influence.index_search: approximate does not go with {what}: {why}",
                hint=f"set influence.index_search: exact, or leave {what} out",
            )
    require_faiss()


def searched(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    run: Run[Any],
    warnings: Callable[[str], None],
) -> Search:
    """Find the strongest rows of each query, and of all queries together; and measure for a sample of them
    which share was found.

    Raises ConfigError for more lists than rows, and InfluenceError where the lists do not fit in memory.
    """
    wanted, top = setup.run.config.influence.index_search, setup.run.config.influence.top
    (whole,) = fitted
    assert isinstance(whole, FittedRows)
    assert isinstance(whole.source, StoredRows)
    with run.clock("lists"):
        lists = _lists_of(whole, whole.source, warnings, run.progress)
    probes = wanted.probes or -(-lists.count // _SEARCHED)
    if probes > lists.count:
        raise ConfigError(
            f"influence.index_search.probes: {probes}, and the rows are in {lists.count} lists",
            hint="with as many probes as lists no row is missed; set no more, or leave it out",
        )
    with run.clock("search"):
        projected = whole.projected(setup.views[0].queries)
        asked = torch.cat([projected, whole.mean_query(projected)])
        most = min(top * _CANDIDATES, whole.source.finite)
        found = found_rows(lists, whole, asked, most, probes)
    if not len(found):
        raise InfluenceError(
            f"the {probes} of {lists.count} lists that were searched for each query hold no row",
            hint="set more influence.index_search.probes, or index_search: exact",
        )
    facts: dict[str, Any] = {
        "lists": lists.count,
        "probes": probes,
        "rows": len(setup.training_rows),
        "rows_scored": len(found),
        "top": top,
        "queries": len(projected),
    }
    with run.clock("recall"):
        facts |= _measured(whole, asked, found, min(_MEASURED, len(projected)), top)
    _tell(facts, warnings)
    narrowed = replace(setup, training_rows=setup.training_rows[found])
    return Search(narrowed, [FoundRows(whole, projected, found)], facts)


def _lists_of(
    whole: FittedRows,
    source: StoredRows,
    say: Callable[[str], None],
    progress: Say,
) -> RowLists:
    """The lists beside the index, if they were made of its rows; else new ones, which are stored there."""
    store, n = source.store, source.finite
    assert isinstance(store, GradientIndex)
    count = max(1, round(n**0.5))
    kind = "directions" if whole.by_direction else "rows"
    said = f"{store.identity_of_rows(source.number)} {count} {kind} {source.projector.width}"
    identity, folder = sha256(said.encode()).hexdigest(), store.file(source.number, None).parent
    lists, why = RowLists.stored(folder, identity)
    if lists is not None:
        return lists
    size, free = n * source.projector.width * _BYTES, free_host_memory()
    if size > free:
        raise InfluenceError(
            f"lists of {n:,} rows of {source.projector.width:,} numbers take {amount(size)} of memory, and"
            f" {amount(free)} are free",
            hint="build an index with a smaller dimension, or set influence.index_search: exact",
        )
    progress(Progress(0, 0, "lists", f"{count:,} lists of neighbouring rows are made: {why}"))
    lists = new_lists(whole, source, count, progress)
    try:
        lists.store(folder, identity)
    except OSError as error:
        say(
            f"the lists of neighbouring rows can't be kept beside the index ({error.strerror or error}), and"
            " are made anew in each run"
        )
    return lists


def new_lists(whole: FittedRows, source: StoredRows, count: int, progress: Say = lambda _: None) -> RowLists:
    """So many lists of the rows of an index, in one pass over them."""
    sample = np.unique(np.linspace(0, len(source) - 1, min(len(source), _SAMPLE * count)).astype(np.int64))
    parts = [vectors for _, vectors in vectors_of(whole, ChosenRows(source, sample))]

    def blocks() -> Iterator[tuple[Array, Array]]:
        done = 0
        for numbers, vectors in vectors_of(whole, source):
            yield numbers, vectors
            done += len(numbers)
            progress(Progress(done, source.finite, "lists", unit="training example"))

    return RowLists.built(count, np.concatenate(parts), blocks())


def _measured(whole: FittedRows, asked: torch.Tensor, found: Array, count: int, top: int) -> dict[str, Any]:
    """The recall of some queries, evenly spaced, and of all of them together, which are the last of those
    that are asked.
    """
    places = [*(place * (len(asked) - 1) // count for place in range(count)), len(asked) - 1]
    *each, of_all = recalls(strongest_rows(whole, asked[places], top), found)
    return {
        "measured": count,
        "recall": float(np.mean(each)),
        "lowest_recall": min(each),
        "recall_of_all": of_all,
    }


def _tell(facts: dict[str, Any], say: Callable[[str], None]) -> None:
    """Warn of what a user would not expect of these facts."""
    if min(facts["recall"], facts["recall_of_all"]) < _LOW:
        more = min(2 * facts["probes"], facts["lists"])
        say(
            f"approximate search misses rows: recall@{facts['top']} is {facts['recall']:.0%} (all queries"
            f" together: {facts['recall_of_all']:.0%}) with {facts['probes']} of {facts['lists']} lists;"
            f" influence.index_search.probes: {more} finds more, and index_search: exact all"
        )
    if facts["measured"] == facts["queries"]:
        say(
            f"to measure the recall, all {facts['queries']} queries were also answered by reading all rows:"
            " for so few, influence.index_search: exact is as fast"
        )
