"""How long an index takes to answer, and how much memory scores take, for many training rows.

    python benchmarks/influence_scale.py [--rows 20000] [--json FILE]

An index of so many random images, as the CNN of configs/digits/model.py sees them, is built by `psgrad
influence index`; then `psgrad influence --no-report` asks it for 100 queries, with gradient_dot and with
trak, from the start of the process to its end. Memory is the most that a process has resident while the
gradient dot products of 2,000 rows, and of ten times as many, stream past, beyond what it had before.

The bars: 5 s for the answer; for ten times the rows at most a tenth more memory, and a megabyte for what an
allocator keeps.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from influence_ours import examples
from influence_speed import MODEL, build
from torch import Tensor

from benchmarks.script import command_line, write_json
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.gradient_products import GradientDot

QUERIES = 100
SECONDS, GROWTH, SLACK = 5.0, 1.1, 1 << 20
CONFIG = """
version: 1
model: {{factory: "{model}:build", checkpoint: {folder}/model.safetensors}}
loss: cross_entropy
data: {{path: {folder}/train.npz, inputs: image, target: label}}
influence:
  queries: {{path: {folder}/queries.npz, inputs: image, target: label}}
  method: {method}
  index: {{path: {folder}/index, features: margin}}
output: {folder}/{method}
"""


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images [count, 1, 8, 8] and labels: time and memory do not depend on what they show."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)


def index(rows: int) -> dict[str, Any]:
    """Seconds to build an index, and to answer from it."""
    from safetensors.torch import save_file

    found: dict[str, Any] = {"rows": rows, "queries": QUERIES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        save_file(build().state_dict(), folder / "model.safetensors")
        for part, count, seed in (("train", rows, 0), ("queries", QUERIES, 1)):
            inputs, labels = images(count, seed)
            np.savez(folder / f"{part}.npz", image=inputs.numpy(), label=labels.numpy())
        for method in ("gradient_dot", "trak"):
            (folder / f"{method}.yaml").write_text(
                CONFIG.format(folder=folder, model=MODEL, method=method), encoding="utf-8"
            )
        found["build"] = _psgrad("influence", "index", str(folder / "trak.yaml"))
        found["answer"] = {
            method: _psgrad("influence", "--no-report", str(folder / f"{method}.yaml"))
            for method in ("gradient_dot", "trak")
        }
    slowest = max(found["answer"].values())
    found["passed"] = slowest <= SECONDS
    times = ", ".join(f"{method} {seconds:.1f} s" for method, seconds in found["answer"].items())
    print(
        f"index of {rows} rows: built in {found['build']:.1f} s; {QUERIES} queries: {times}; at most"
        f" {SECONDS} s: {_verdict(found)}"
    )
    return found


def _psgrad(*words: str) -> float:
    """Seconds that a command takes, its start included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "psgrad", *words], check=True, capture_output=True)
    return time.perf_counter() - start


def held(count: int) -> int:
    """Bytes that scores of so many rows take at the most, beyond what was held before: in this process, which
    must be a fresh one.
    """
    torch.manual_seed(0)
    model, (inputs, target), (asked, labels) = build(), images(count), images(QUERIES, 1)
    queries = examples(model, asked, labels)
    options = {"chunk_size": 256}
    before = 0
    for rows in (256, count):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if rows == count else 0
        training = examples(model, inputs[:rows], target[:rows], **options)
        for _ in GradientDot().fit(training, Checkpoint()).scores(queries):
            pass
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def memory(rows: int) -> dict[str, Any]:
    """Of a tenth of the rows, and of all."""
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import influence_scale; "
    found: dict[str, Any] = {"bytes": {}}
    for count in (rows // 10, rows):
        code = start + f"print(influence_scale.held({count}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found["bytes"][count] = int(done.stdout)
    few, many = found["bytes"].values()
    found["passed"] = many <= GROWTH * few + SLACK
    print(
        f"memory beyond a first chunk: {few / 1e6:.1f} MB for {rows // 10} rows, {many / 1e6:.1f} MB for"
        f" {rows}: {_verdict(found)}"
    )
    return found


def _verdict(found: dict[str, Any]) -> str:
    return "pass" if found["passed"] else "FAIL"


def main() -> None:
    parser = command_line("Time an index's answers, and measure the memory of scores, for many rows.")
    parser.add_argument("--rows", type=int, default=20_000, help="of the training set (default: %(default)s)")
    arguments = parser.parse_args()
    content = {"index": index(arguments.rows), "memory": memory(arguments.rows)}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
