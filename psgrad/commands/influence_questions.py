"""Questions beside the ranking. About several rows at once, answered from all scores [n, m]: groups of
training examples, and contrasts of two queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.influence.ranking import Strongest, over_queries, summed_over_groups
from psgrad.errors import InfluenceError
from psgrad.reports.words import amount
from psgrad.run.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs
from psgrad.run.results.influence_details import (
    CONTRAST_COLUMNS,
    GROUP_COLUMNS,
    QuestionTables,
)

Array = np.ndarray[Any, Any]
# At most this number of copies of all scores, in float64, exist at once: while blocks are joined, and while
# queries are compared.
_COPIES = 4


def require_room(setup: InfluenceSetup, matrix: bool) -> None:
    """Raises InfluenceError where all scores are to be kept and do not fit in memory. matrix: whether they
    are to become a file.
    """
    wanted, n, m = setup.run.config.influence, len(setup.training_rows), len(setup.query_rows)
    asked = {"groups": wanted.groups, "contrast": setup.contrasts or None}
    reasons = [f"influence.{key}" for key, given in asked.items() if given is not None] + [
        "--matrix"
    ] * matrix
    each, free = _COPIES * 8 * n, free_host_memory()
    if not reasons or each * m <= free:
        return
    raise InfluenceError(
        f"all {n:,} x {m:,} scores take {amount(each * m)} of memory, and {amount(free)} are free",
        hint=(
            f"{', '.join(reasons)} need them all at once; leave that out, or ask about"
            f" {max(1, free // each):,} of the queries (influence.queries.rows, worst)"
        ),
    )


def answered(setup: InfluenceSetup, scores: Array, say: Callable[[str], None]) -> QuestionTables:
    """All that the config asks of the scores [n, m] of the rows that have some."""
    wanted = setup.run.config.influence
    ids, rows = setup.run.samples.ids, setup.training_rows
    query_ids = setup.query_reader.samples.ids
    contrasts = []
    for pair in setup.contrasts:
        places = [np.flatnonzero(setup.query_rows == row) for row in pair]
        if not all(map(len, places)):
            say(f"influence.contrast: {query_ids[pair[0]]} and {query_ids[pair[1]]} do not both have scores")
            continue
        both = scores[:, [int(place[0]) for place in places]]
        contrasts.append(contrast_table(both, query_ids[list(pair)], ids[rows], rows, wanted.top))
    groups = pd.DataFrame()
    if setup.groups is not None:
        asked = query_ids[setup.query_rows]
        groups = group_table(scores, setup.groups[rows], asked, setup.query_rows, wanted.top)
    return QuestionTables(
        groups=groups,
        contrasts=pd.concat(contrasts, ignore_index=True) if contrasts else pd.DataFrame(),
    )


# -- groups --------------------------------------------------------------------------------------------------


def group_sums(scores: Array, groups: Array) -> tuple[Array, Array, Array]:
    """(the names of the groups, how many rows each has, the sums of the scores [n, m] over these,
    [groups, m]).
    """
    names, codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    whole = torch.from_numpy(np.ascontiguousarray(scores))
    sums = summed_over_groups(whole, torch.from_numpy(codes.reshape(-1)), len(names))
    return names, sizes, sums.numpy()


def group_table(scores: Array, groups: Array, query_ids: Array, query_rows: Array, top: int) -> pd.DataFrame:
    """See QuestionTables.groups."""
    names, sizes, sums = group_sums(scores, groups)
    joined = torch.from_numpy(sums)
    value, count = over_queries(joined.unsqueeze(2))[:, :, 0]
    whole = _strongest((value / count).unsqueeze(1), len(names))
    single = _strongest(joined, top)
    tables = [
        ranked_pairs([ALL_QUERIES], [ALL_INDEX], names, whole.values.numpy(), whole.rows.numpy()),
        ranked_pairs(query_ids, query_rows, names, single.values.numpy(), single.rows.numpy()),
    ]
    found = pd.concat(tables, ignore_index=True).rename(columns={"train_id": "group"})
    return found.assign(rows=sizes[found["train_index"]])[list(GROUP_COLUMNS)]


def _strongest(scores: torch.Tensor, count: int) -> Strongest:
    found = Strongest(count, scores.shape[1])
    found.add(0, scores)
    return found


# -- contrasts -----------------------------------------------------------------------------------------------


def contrast_table(both: Array, query_ids: Array, train_ids: Array, rows: Array, top: int) -> pd.DataFrame:
    """See QuestionTables.contrasts. both: [n, 2], the scores for the first query and for the second."""
    strongest = _strongest(torch.from_numpy(both[:, :1] - both[:, 1:]), top)
    pairs = ranked_pairs(["-"], [0], train_ids, strongest.values.numpy(), strongest.rows.numpy())
    places = pairs["train_index"].to_numpy()
    return pairs.assign(
        first=str(query_ids[0]),
        second=str(query_ids[1]),
        score_first=both[places, 0],
        score_second=both[places, 1],
        train_index=rows[places],
    )[list(CONTRAST_COLUMNS)]
