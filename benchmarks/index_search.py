"""Approximate search of an index beside the exact scan: queries in a second, and the share of the strongest
rows that is found.

    python benchmarks/index_search.py [--rows 100000] [--columns 256] [--rounds 3] [--json FILE]

The rows are the projected gradients of a small network (32-64-10) that was trained on classes of several
clusters each: random rows would have no neighbours. Ways to the ten strongest rows of either sign, which take
turns in every round of one process:

    exact scan        psgrad's: all rows, and the strongest of their scores
    faiss, all rows   IndexFlatIP: all rows in memory, in float32
    N of M lists      psgrad's approximate search: so many lists for either sign of a query, two candidates
                      for each ranked row, and the exact scores of all candidates

Recall is over the queries, against the exact scan. Lists are made once, and their time is printed by itself.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_ours import examples
from norms import machine
from script import command_line, print_facts, write_json
from torch import Tensor, nn

from psgrad.commands.influence_search import new_lists
from psgrad.engine.influence.index.build import build_index, from_index
from psgrad.engine.influence.index.estimators import FittedRows
from psgrad.engine.influence.index.search import FoundRows, found_rows, recalls, strongest_rows, vectors_of
from psgrad.engine.influence.index.stored_index import IndexSpec, StoredRows, describe
from psgrad.engine.influence.method import Checkpoint, Method
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot
from psgrad.engine.influence.methods.projected import TRAK
from psgrad.engine.influence.ranking import Strongest
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.row_lists import RowLists

TOP, CANDIDATES, FEATURES, CLASSES, CLUSTERS = 10, 2, 32, 10, 6
METHODS: dict[str, Method] = {
    "trak": TRAK(),
    "gradient_dot": GradientDot(),
    "gradient_cosine": GradientCosine(),
}
QUERIES = (1, 10, 100)
SHARES = (1, 2, 4, 8, 32)
EXACT = "exact scan"


def problem(rows: int, queries: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A trained network, training data, and queries of the same distribution."""
    torch.manual_seed(0)
    centres = 1.2 * torch.randn(CLASSES * CLUSTERS, FEATURES)
    which = torch.randint(len(centres), (rows + queries,))
    x, y = centres[which] + torch.randn(rows + queries, FEATURES), which % CLASSES
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in torch.randperm(rows)[: 256 * 400].split(256):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model, (x[:rows], y[:rows]), (x[rows:], y[rows:])


def built(folder: Path, rows: int, columns: int, queries: int) -> tuple[GradientIndex, Any]:
    """(the index, the queries)."""
    model, training, asked = problem(rows, queries)
    whole = examples(model, *training)
    index = GradientIndex.create(
        folder / "index", describe(IndexSpec(dimension=columns, features="margin"), whole, {})
    )
    build_index(index, lambda number: whole)
    return index, examples(model, *asked)


def approximate(fitted: FittedRows, lists: RowLists, projected: Tensor, probes: int) -> np.ndarray:
    """The rows that are found, after they were scored and ranked."""
    found = found_rows(lists, fitted, projected, TOP * CANDIDATES, probes)
    kept = Strongest(TOP, len(projected))
    for block in fitted.scores_of(projected, rows=FoundRows(fitted, projected, found).rows):
        kept.add(block.start, block.scores[""])
    return found


def contenders(
    fitted: FittedRows, lists: RowLists, projected: Tensor, flat: Any
) -> dict[str, Callable[[], Any]]:
    """The ways, by name."""
    vectors = fitted.query_vectors(projected).float().numpy()
    ways: dict[str, Callable[[], Any]] = {
        EXACT: lambda: strongest_rows(fitted, projected, TOP),
        "faiss, all rows": lambda: [flat.search(sign * vectors, TOP) for sign in (1, -1)],
    }
    for share in SHARES:
        probes = -(-lists.count // share)
        ways[f"{probes} of {lists.count} lists"] = (
            lambda probes=probes: approximate(fitted, lists, projected, probes)  # type: ignore[misc]
        )
    return ways


def measured(fitted: FittedRows, lists: RowLists, queries: Tensor, rounds: int) -> list[dict[str, Any]]:
    """A line for each number of queries and each way."""
    import faiss

    flat = faiss.IndexFlatIP(queries.shape[1])
    for _, vectors in vectors_of(fitted, fitted.source):
        flat.add(vectors)
    lines = []
    for count in QUERIES:
        projected = queries[:count]
        ways = contenders(fitted, lists, projected, flat)
        strongest = ways[EXACT]()
        recall = {
            name: float(np.mean(recalls(strongest, way())))
            for name, way in ways.items()
            if name.endswith("lists")
        }
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
        for name, each in seconds.items():
            took = float(np.median(each))
            lines.append(
                {
                    "queries": count,
                    "way": name,
                    "seconds": took,
                    "queries_per_second": count / took,
                    "recall": recall.get(name, 1.0),
                }
            )
            print(
                f"{count:7} {name:20} {took:9.4f} s {count / took:10.0f}/s  recall {lines[-1]['recall']:.3f}"
            )
    return lines


def main() -> None:
    parser = command_line("Time approximate searches of an index.", rounds=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=256)
    arguments = parser.parse_args()
    if importlib.util.find_spec("faiss") is None:
        raise SystemExit("faiss is not installed: pip install 'psgrad[faiss]'")
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    content: dict[str, Any] = {
        "machine": facts, "rows": arguments.rows, "columns": arguments.columns, "top": TOP, "methods": {}
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        index, asked = built(Path(folder), arguments.rows, arguments.columns, max(QUERIES))
        for name, method in METHODS.items():
            fitted = from_index(method, index).fit(asked, Checkpoint())
            assert isinstance(fitted, FittedRows)
            queries, start = fitted.projected(asked), time.perf_counter()
            source = fitted.source
            assert isinstance(source, StoredRows)
            lists = new_lists(fitted, source, max(1, round(len(source) ** 0.5)))
            made = time.perf_counter() - start
            print(f"\n{name}: {lists.count} lists made in {made:.1f} s")
            lines = measured(fitted, lists, queries, arguments.rounds)
            content["methods"][name] = {"lists": lists.count, "made": made, "lines": lines}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
