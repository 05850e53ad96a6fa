"""Questions beside the ranking. About several rows at once, answered from all scores [n, m]: groups of
training examples, and contrasts of two queries. With `level: token`: the ranked pairs of the queries that
are shown, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.data.rows import Samples
from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.influence.method import Fitted, Preconditioned
from psgrad.engine.influence.ranking import Strongest, over_queries, summed_over_groups
from psgrad.engine.influence.token_scores import TokenTerms, token_scores
from psgrad.errors import ConfigError, InfluenceError
from psgrad.reports.words import amount
from psgrad.run.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs
from psgrad.run.results.influence_details import (
    CONTRAST_COLUMNS,
    GROUP_COLUMNS,
    QuestionTables,
    TokenPair,
    TokenText,
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


# -- tokens -------------------------------------------------------------------------------------------------


def require_tokens(setup: InfluenceSetup) -> None:
    """Raises ConfigError where scores of tokens are asked for, and the loss, the measurement or the processes
    have none.
    """
    wanted = setup.run.config.influence
    if wanted.level != "token":
        return
    problem = None
    if setup.run.criterion.kind != "token":
        problem = f"the loss {setup.run.criterion.name} has one value a sample"
    elif setup.measurement.name != "loss":
        problem = f"the measurement {setup.measurement.name} is not divided over tokens"
    elif setup.processes.size > 1:
        problem = f"{setup.processes.size} processes share this run"
    if problem is not None:
        raise ConfigError(
            f"influence.level: token: {problem}",
            hint="set influence.level: sample",
        )


def token_pairs(
    setup: InfluenceSetup, fitted: Sequence[Fitted], scores: pd.DataFrame, shown: Sequence[int]
) -> list[TokenPair]:
    """The ranked pairs of these queries, token by token; none where the config asks for samples. scores: the
    table of ranked pairs.
    """
    if setup.run.config.influence.level != "token":
        return []
    solver, view = _solver(setup, fitted[-1]), setup.views[-1]
    ignored = _ignored(setup)
    training_ids, query_ids = setup.run.samples.ids, setup.query_reader.samples.ids
    terms_of = cache(lambda place: TokenTerms.of(view.training, place, ignored))
    found = []
    for query in shown:
        pairs = scores[scores["query_index"] == query]
        rows = pairs["train_index"].drop_duplicates().tolist()
        terms = TokenTerms.of(view.queries, int(np.flatnonzero(setup.query_rows == query)[0]), ignored)
        places, text = _text(terms, setup.query_reader.samples, setup)
        if not len(places) or not rows:
            continue
        training = [terms_of(int(np.searchsorted(setup.training_rows, row))) for row in rows]
        matrices = token_scores(solver, terms, torch.from_numpy(places), training)
        for row, own, matrix in zip(rows, training, matrices, strict=True):
            counted, own_text = _text(own, setup.run.samples, setup)
            found.append(
                TokenPair(
                    *(str(query_ids[query]), int(query), str(training_ids[row]), int(row)),
                    *(text, own_text, matrix.numpy()[:, counted]),
                )
            )
    return found


def _solver(setup: InfluenceSetup, fitted: Fitted) -> Preconditioned:
    """What multiplies gradients by the inverse curvature. Raises InfluenceError for scores that are not such
    a product, and so have no parts that add up.
    """
    solver = fitted.solver()
    if solver is None or solver is not fitted:
        raise InfluenceError(
            f"influence.level: token: the scores of {setup.run.config.influence.method.name} with these"
            " options are not a sum over tokens",
            hint="choose ekfac, or influence with leverage: false and change: gradient",
        )
    return solver


def _ignored(setup: InfluenceSetup) -> int:
    """The target that does not count."""
    found = setup.run.criterion.ignore_index
    return -100 if found is None else found


def _text(terms: TokenTerms, samples: Samples, setup: InfluenceSetup) -> tuple[np.ndarray, TokenText]:
    """(the positions of the terms that count, the tokens of a sample)."""
    places = np.flatnonzero(terms.counted.cpu().numpy())
    ids, later = _tokens(tuple(x.cpu() for x in terms.inputs), terms.target.cpu(), terms.ignored)
    pieces = samples.pieces(ids.tolist()) if setup.run.config.report.include_inputs else None
    return places, TokenText(ids.numpy(), places + later, pieces or ())


def _tokens(inputs: tuple[torch.Tensor, ...], target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, int]:
    """(the ids of a sample's tokens, how many places behind its position the token is that is predicted
    there): 1 in a language model, whose targets are the next tokens of its input, else 0.
    """
    counted = target != ignored
    ids = next((x for x in inputs if x.shape == target.shape and not x.is_floating_point()), target)
    later = int(bool(((target[:-1] == ids[1:]) | ~counted[:-1]).all() and counted[:-1].any()))
    if later and counted[-1]:
        ids = torch.cat([ids, target[-1:]])
    return ids, later
