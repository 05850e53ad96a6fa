"""How long an exact scan of an index takes whose rows are 8-bit numbers.

    python benchmarks/index_scan.py [--rows 50000] [--columns 4096] [--queries 10] [--rounds 5] [--json FILE]

Ways to the scores of all rows, which take turns in every round of one process:

    read              the bytes added up as 64-bit numbers: what memory allows
    whole numbers     psgrad's: the query in three 8-bit digits, products of 8-bit numbers in 32 bits
    float32 blocks    the same rows made float32 in blocks that fit the cache, products in float32
    float32 rows      rows that were kept in float32, four times the bytes
    faiss             IndexScalarQuantizer(QT_8bit), all of its scores; where faiss is installed

"whole numbers" reads the files of an index through their memory map, block by block, as `psgrad influence`
does; the others have their rows in memory. Before anything is timed, scores are held against float64.

Approximate search is in index_search.py, whose rows are gradients: random rows have no neighbours.

The bar: under one second for 10 queries and a million rows of 4,096 columns (--rows 1000000, 4.1 GB of files
in the temporary folder, and as much memory; rivals have at most 100,000 rows, and their times are taken in
proportion).
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
from norms import machine
from script import command_line, print_facts, write_json
from torch import Tensor

from psgrad.engine.influence.index.index_rows import RowBlock
from psgrad.engine.influence.index.row_products import FloatRows, Queries
from psgrad.engine.influence.index.stored_index import StoredRows, encoded
from psgrad.run.gradient_index import GradientIndex

BAR, BAR_ROWS, BAR_COLUMNS, BAR_QUERIES = 1.0, 1_000_000, 4096, 10
SHARD, MOST_OF_RIVALS, CACHED = 4096, 100_000, 128
OURS = "whole numbers"


def stored_rows(folder: Path, rows: int, columns: int) -> StoredRows:
    """An index of random rows; all of its shards hold the same ones, which takes no less time to read."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(min(SHARD, rows), columns, generator=random)
    index = GradientIndex.create(
        folder / "index",
        {
            "rows": rows,
            "rows_per_shard": SHARD,
            "checkpoints": 1,
            "projection": "sparse",
            "dimension": columns,
            "seed": 0,
            "features": "loss",
            "dtype": "int8",
            "rank": None,
            "parameters": {"weight": [2 * columns]},
        },
    )
    size = values.square().sum(1).double()
    block = RowBlock(0, len(values), FloatRows(values), size, size)
    stored = StoredRows(index, 0)
    shard = encoded([block], "int8", stored.form)
    for number, place in enumerate(index.shards):
        index.write(0, number, {name: array[: len(place)] for name, array in shard.items()})
    return stored


def scan(rows: StoredRows, asked: Tensor) -> Tensor:
    queries = Queries(asked, slice(0, asked.shape[1]))
    return torch.cat([block.rows.products(queries) for block in rows.blocks()])


def float32_blocks(values: Tensor, scales: Tensor, asked: Tensor) -> Tensor:
    factor, found = asked.t().contiguous(), torch.empty(len(values), len(asked))
    cached = torch.empty(CACHED, values.shape[1])
    for start in range(0, len(values), CACHED):
        part = values[start : start + CACHED]
        torch.mm(cached[: len(part)].copy_(part), factor, out=found[start : start + CACHED])
    return found * scales


def contenders(rows: StoredRows, asked: Tensor) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """(rows, the way) by name."""
    blocks, held = [], 0
    for block in rows.blocks():
        blocks.append(block.rows)
        held += len(block.rows)
        if held >= MOST_OF_RIVALS:
            break
    values, scales = (torch.cat([getattr(each, name) for each in blocks]) for name in ("values", "scales"))
    scales, few = scales.float(), asked.float()
    floats = values.float() * scales
    result: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "read": (len(values), lambda: values.view(torch.int64).sum()),
        OURS: (len(rows), lambda: scan(rows, asked)),
        "float32 blocks": (len(values), lambda: float32_blocks(values, scales, few)),
        "float32 rows": (len(values), lambda: floats @ few.t()),
    }
    if importlib.util.find_spec("faiss") is not None:
        result["faiss"] = (len(values), faiss_scan(floats, few))
    return result


def faiss_scan(rows: Tensor, asked: Tensor) -> Callable[[], Tensor]:
    import faiss

    index = faiss.IndexScalarQuantizer(
        rows.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(rows[:1024].numpy())
    index.add(rows.numpy())
    return lambda: torch.from_numpy(index.search(asked.numpy(), 100)[0])


def error(rows: StoredRows, asked: Tensor) -> float:
    """Of the first block's scores, beside the sizes of row and query."""
    block = next(rows.blocks()).rows
    exact = block.double() @ asked.t()
    size = block.norms(slice(0, asked.shape[1])).unsqueeze(1) * asked.norm(dim=1)
    return float(((block.products(Queries(asked, slice(0, asked.shape[1]))) - exact).abs() / size).max())


def main() -> None:
    parser = command_line("Time exact scans of 8-bit rows.", rounds=5)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--columns", type=int, default=BAR_COLUMNS)
    parser.add_argument("--queries", type=int, default=BAR_QUERIES)
    arguments = parser.parse_args()
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    n, k, m = arguments.rows, arguments.columns, arguments.queries
    asked = torch.randn(m, k, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seconds: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = stored_rows(Path(folder), n, k)
        content: dict[str, Any] = {"machine": facts, "rows": n, "columns": k, "queries": m}
        content["error"] = error(rows, asked)
        ways = contenders(rows, asked)
        for _, way in ways.values():
            way()
        for _ in range(arguments.rounds):
            for name, (count, way) in ways.items():
                start, before = time.perf_counter(), time.process_time()
                way()
                took = time.perf_counter() - start, time.process_time() - before
                seconds.setdefault(name, []).append([each * n / count for each in took])
    # of the clock, and of the processor's cores together
    content["seconds"] = {name: np.median(each, 0).tolist() for name, each in seconds.items()}
    ours, own = content["seconds"][OURS]
    print(f"{'':16}  {'clock':>8}    ratio  {'processor':>10}    ratio")
    for name, (clock, cores) in content["seconds"].items():
        print(f"{name:16}  {clock:8.3f} s  {clock / ours:6.2f}  {cores:10.3f} s  {cores / own:6.2f}")
    print(f"largest error of {OURS}: {content['error']:.1e} of the norms of row and query")
    if (n, k, m) == (BAR_ROWS, BAR_COLUMNS, BAR_QUERIES):
        content["passed"] = ours < BAR
        print(f"under {BAR:g} s: {'pass' if content['passed'] else 'FAIL'}")
    write_json(arguments, content)


if __name__ == "__main__":
    main()
