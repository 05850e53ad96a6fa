"""Questions about several rows at once, answered from all scores [n, m]: groups of training examples,
contrasts of two queries, clusters of queries, and means by class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.influence.ranking import OverQueries, Strongest, over_queries, summed_over_groups
from psgrad.errors import InfluenceError
from psgrad.reports.words import amount
from psgrad.results import has_classes
from psgrad.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs
from psgrad.results.influence_details import (
    CLUSTER_COLUMNS,
    CONTRAST_COLUMNS,
    GROUP_COLUMNS,
    QuestionTables,
)
from psgrad.workflows.influence_queries import least_queries
from psgrad.workflows.influence_setup import InfluenceSetup

Array = np.ndarray[Any, Any]
# `clusters: auto` chooses among so many.
_MOST_CLUSTERS = 10
# A summary by class or by group has so many of them at most.
_MOST_SUMMARISED = 30


# Of all scores, in float64, so many copies are alive at once at most: while blocks are joined, and while
# queries are compared.
_COPIES = 4


def require_room(setup: InfluenceSetup, matrix: bool) -> None:
    """Raises InfluenceError where all scores are to be kept and do not fit in memory. matrix: whether they
    are to become a file.
    """
    wanted, n, m = setup.run.config.influence, len(setup.training_rows), len(setup.query_rows)
    asked = {"groups": wanted.groups, "contrast": setup.contrasts or None, "clusters": wanted.clusters}
    reasons = [f"influence.{key}" for key, given in asked.items() if given is not None] + [
        "--matrix"
    ] * matrix
    each, free = _COPIES * 8 * n, free_host_memory()
    if not reasons or each * m <= free:
        return
    raise InfluenceError(
        f"all {n:,} x {m:,} scores take {amount(each * m)} of memory, and {amount(free)} are free",
        expected="scores that fit: training examples times queries, in four copies of 8 bytes",
        cause=f"{', '.join(reasons)} need them all at once",
        next_step=(
            f"leave that out, or ask about {max(1, free // each):,} of the queries (influence.queries.rows,"
            " worst)"
        ),
    )


def answered(
    setup: InfluenceSetup,
    scores: Array,
    queries: pd.DataFrame,
    training: pd.DataFrame,
    say: Callable[[str], None],
) -> QuestionTables:
    """All that the config asks of the scores [n, m] of the rows that have some, and the summary by class.

    queries, training: the tables of the run, with the rows that are left out, too.
    """
    wanted = setup.run.config.influence
    ids, rows = setup.run.samples.ids, setup.training_rows
    query_ids = setup.query_reader.samples.ids
    clusters, labels, inside, between = pd.DataFrame(), list[int](), float("nan"), float("nan")
    if wanted.clusters is not None and scores.shape[1] < least_queries(wanted.clusters):
        say(f"influence.clusters: {scores.shape[1]} queries have scores, too few for clusters")
    elif wanted.clusters is not None:
        found = clusters_of(scores, wanted.clusters)
        inside, between = cosines(scores, found)
        clusters = cluster_table(scores, found, ids[rows], rows, wanted.top)
        of_row = dict(zip(setup.query_rows.tolist(), found.tolist(), strict=True))
        labels = [of_row.get(row, -1) for row in queries["index"].tolist()]
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
        groups = group_table(
            scores, setup.groups[rows], query_ids[setup.query_rows], setup.query_rows, wanted.top,
            wanted.over_queries,
        )  # fmt: skip
    return QuestionTables(
        groups=groups,
        contrasts=pd.concat(contrasts, ignore_index=True) if contrasts else pd.DataFrame(),
        clusters=clusters,
        of_query=labels,
        inside=inside,
        between=between,
        summary=summary_table(setup, scores, queries, training),
    )


# -- groups --------------------------------------------------------------------------------------------------


def codes_of(groups: Array) -> tuple[Array, torch.Tensor]:
    """(the names of the groups, which of them each row belongs to [n])."""
    names, codes = np.unique(groups, return_inverse=True)
    return names, torch.from_numpy(codes.reshape(-1))


def group_sums(scores: Array, groups: Array) -> tuple[Array, Array]:
    """(the names of the groups, the sums of the scores [n, m] over the rows of each, [groups, m])."""
    names, codes = codes_of(groups)
    sums = summed_over_groups(torch.from_numpy(np.ascontiguousarray(scores)), codes, len(names))
    return names, sums.numpy()


def group_table(
    scores: Array, groups: Array, query_ids: Array, query_rows: Array, top: int, how: OverQueries
) -> pd.DataFrame:
    """See QuestionTables.groups."""
    names, sums = group_sums(scores, groups)
    sizes = codes_of(groups)[1].bincount(minlength=len(names)).numpy()
    joined = torch.from_numpy(sums)
    value, count = over_queries(joined.unsqueeze(2), how)[:, :, 0]
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


# -- clusters ------------------------------------------------------------------------------------------------


def directions(scores: Array) -> Array:
    """[n, m]: the scores of each query with a sum of squares of 1; 0 where there is no score."""
    known = np.where(np.isfinite(scores), scores, 0.0)
    sizes = np.sqrt((known**2).sum(0))
    found: Array = known / np.where(sizes > 0, sizes, 1.0)
    return found


def clusters_of(scores: Array, count: int | Literal["auto"]) -> Array:
    """[m]: the cluster of each query, by agglomerative clustering of the cosines of their scores; the largest
    cluster is 0. There are more queries than clusters.
    """
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    unit = directions(scores)
    distances = np.clip(1 - unit.T @ unit, 0, None)
    np.fill_diagonal(distances, 0)

    def labelled(wanted: int) -> Array:
        model = AgglomerativeClustering(n_clusters=wanted, metric="precomputed", linkage="average")
        found: Array = model.fit_predict(distances)
        return found

    if count == "auto":
        tried = {k: labelled(k) for k in range(2, min(_MOST_CLUSTERS, len(distances) - 1) + 1)}
        best = max(tried, key=lambda k: silhouette_score(distances, tried[k], metric="precomputed"))
        labels = tried[best]
    else:
        labels = labelled(count)
    order = np.argsort(-np.bincount(labels), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    found: Array = place[labels]
    return found


def cosines(scores: Array, labels: Array) -> tuple[float, float]:
    """The mean cosine of the scores of two queries of one cluster, and of two clusters; NaN without such."""
    unit = directions(scores)
    products = unit.T @ unit
    pairs = ~np.eye(len(labels), dtype=bool)
    same = labels[:, None] == labels
    inside, between = products[pairs & same], products[pairs & ~same]
    return (
        float(inside.mean()) if inside.size else float("nan"),
        float(between.mean()) if between.size else float("nan"),
    )


def cluster_table(scores: Array, labels: Array, train_ids: Array, rows: Array, top: int) -> pd.DataFrame:
    """See QuestionTables.clusters."""
    unit, tables = directions(scores), []
    for cluster in range(int(labels.max()) + 1):
        members = labels == cluster
        share = unit[:, members].mean(1)
        strongest = _strongest(torch.from_numpy(share)[:, None], top)
        pairs = ranked_pairs(["-"], [0], train_ids, strongest.values.numpy(), strongest.rows.numpy())
        own = scores[pairs["train_index"].to_numpy()][:, members]
        sign = np.sign(pairs["score"].to_numpy())[:, None]
        tables.append(
            pairs.assign(
                cluster=cluster,
                queries=int(members.sum()),
                share=pairs["score"],
                score=np.nanmean(own, 1),
                same_sign=(np.sign(own) == sign).mean(1),
                train_index=rows[pairs["train_index"]],
            )[list(CLUSTER_COLUMNS)]
        )
    return pd.concat(tables, ignore_index=True)


# -- the summary ---------------------------------------------------------------------------------------------


def summary_table(
    setup: InfluenceSetup, scores: Array, queries: pd.DataFrame, training: pd.DataFrame
) -> pd.DataFrame:
    """See QuestionTables.summary; empty where rows have no class, or there are many."""
    if not (has_classes(queries) and has_classes(training)):
        return pd.DataFrame()
    of_queries = queries.set_index("index")["target"].reindex(setup.query_rows).to_numpy()
    classes = training.set_index("index")["target"].reindex(setup.training_rows).to_numpy()
    by = {"class": classes}
    if setup.groups is not None:
        by["group"] = setup.groups[setup.training_rows]
    if len(np.unique(of_queries)) > _MOST_SUMMARISED:
        return pd.DataFrame()
    parts = []
    for name, groups in by.items():
        if len(np.unique(groups)) > _MOST_SUMMARISED:
            continue
        known = pd.DataFrame(scores).groupby(groups).mean().T  # a row a query, a column a group
        means = known.groupby(of_queries).mean().rename_axis("query_class").reset_index()
        found = means.melt(id_vars="query_class", var_name="of", value_name="score")
        sizes = pd.Series(groups).value_counts()
        parts.append(found.assign(by=name, rows=found["of"].map(sizes), of=found["of"].astype(str)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
