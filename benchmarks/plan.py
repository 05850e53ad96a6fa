"""What the planner predicts, beside what happens: the peak memory and the time of a pass over a chunk.

    python benchmarks/plan.py [--only cnn text] [--chunks 1 8 32 128] [--rounds 5] [--json FILE] [--device
    cpu]

For the networks of norms.py and the two examples in configs/, and for norms alone and gradients that are
kept: the peak beyond parameters and inputs, as predicted from shapes and as PyTorch's allocator counts it
(see memory.py), and the seconds of norms, as `psgrad plan` predicts them from two chunks and as the
median of some rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import allocated
from norms import CASES, draw_images, draw_tokens, draw_vectors
from script import command_line, write_json
from torch import Tensor

from psgrad.config import load_config
from psgrad.data.loss import resolve_loss
from psgrad.data.sources.load import load_data
from psgrad.engine.execution.chunk_plan import plan_chunk
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.run_plan import plan_run
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.gradients.machine import device_name
from psgrad.models.factory import load_model
from psgrad.ragged import Block

CONFIGS = Path(__file__).parent.parent / "configs"
# Bars: how far a prediction may be off, as a share of what happens.
MEMORY_BAR, TIME_BAR = 0.25, 0.40
MOST_BYTES = 2e9  # chunks that would take more are left out


@dataclass(frozen=True)
class Subject:
    """A model with its loss, and how to draw rows for it."""

    objective: Objective
    draw: Callable[[int], tuple[Tensor, Tensor]]


def subjects(device: torch.device) -> dict[str, Callable[[], Subject]]:
    """Name -> what builds it."""
    draws: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
        "cnn": lambda n: draw_images(n, 1, 28),
        "mlp": lambda n: draw_vectors(n, 784),
        "gpt": lambda n: draw_tokens(n, 128, 8192),
        "resnet": lambda n: draw_images(n, 3, 32),
    }

    def network(name: str) -> Callable[[], Subject]:
        def build() -> Subject:
            torch.manual_seed(0)
            return Subject(Objective(CASES[name].build().to(device), F.cross_entropy), draws[name])

        return build

    def example(name: str) -> Callable[[], Subject]:
        def build() -> Subject:
            config = load_config(CONFIGS / f"{name}.yaml")
            samples = load_data(config.data, config.base)
            criterion = resolve_loss(config.loss, config.base)

            def rows(n: int) -> tuple[Tensor, Tensor]:
                block = samples.read(0, n)
                assert block.target is not None
                return block.inputs[0], block.target

            return Subject(
                Objective(load_model(config.model, config.base).model.to(device), criterion.function), rows
            )

        return build

    return {**{name: network(name) for name in draws}, **{name: example(name) for name in ("digits", "text")}}


def bound(subject: Subject, how: Callable[..., Any]) -> Callable[..., Any]:
    """One of the passes, as a function of parameters, inputs and target."""
    return lambda params, inputs, target: how(subject.objective.loss, params, inputs, target, has_aux=True)


def peaks(subject: Subject, chunk: int, how: Callable[..., Any], device: torch.device) -> tuple[int, int]:
    """(predicted, measured) bytes of a pass over a chunk."""
    inputs, target = (x.to(device) for x in subject.draw(chunk))
    way, params = bound(subject, how), subject.objective.params
    predicted = plan_chunk(way, params, (inputs,), target).peak_bytes
    way(params, (inputs,), target)  # what is made once is no part of it
    return predicted, allocated(lambda: way(params, (inputs,), target), device)


def seconds(subject: Subject, chunk: int, rounds: int, device: torch.device) -> tuple[float, float]:
    """(predicted, measured) seconds of the norms of a chunk."""
    inputs, target = subject.draw(max(chunk, 8))
    stream = Stream(
        subject.objective.loss,
        subject.objective.params,
        lambda start, stop: Block((inputs[start:stop],), target[start:stop]),
        chunk_size=chunk,
        capture="off",
    )
    predicted = plan_run(stream, chunk).chunk_seconds if chunk >= 8 else plan_run(stream, 8).chunk_seconds
    way, found = bound(subject, per_sample_square_norms), []
    some = (inputs[:chunk].to(device),), target[:chunk].to(device)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        way(subject.objective.params, *some)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return predicted, statistics.median(found[1:])


def main() -> None:
    parser = command_line("Hold predicted memory and time against measured ones.", rounds=5, device=True)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 8, 32, 128])
    arguments = parser.parse_args()
    device = arguments.device
    kind = device_name(device)
    print(
        f"torch {torch.__version__}, {kind}, {torch.get_num_threads()} threads, {arguments.rounds} rounds\n"
    )
    print(
        f"{'model':<8}{'chunk':>6}{'norms: MB':>12}{'predicted':>11}"
        f"{'kept: MB':>12}{'predicted':>11}{'norms: ms':>12}{'predicted':>11}"
    )
    rows: list[dict[str, Any]] = []
    for name, build in subjects(device).items():
        if arguments.only and name not in arguments.only:
            continue
        subject = build()
        for chunk in arguments.chunks:
            inputs, target = subject.draw(1)
            way = bound(subject, per_sample_gradients)
            if (
                plan_chunk(
                    way, subject.objective.params, (inputs.to(device),), target.to(device), chunk
                ).peak_bytes
                > MOST_BYTES
            ):
                continue
            norms = peaks(subject, chunk, per_sample_square_norms, device)
            kept = peaks(subject, chunk, per_sample_gradients, device)
            taken = seconds(subject, chunk, arguments.rounds, device)
            gc.collect()
            pairs = {"norms": norms, "kept": kept, "seconds": taken}
            cells = "".join(
                f"{factor * measured:>12.2f}{predicted / measured:>10.2f}x"
                for (predicted, measured), factor in zip(pairs.values(), (1e-6, 1e-6, 1e3), strict=True)
            )
            print(f"{name:<8}{chunk:>6}{cells}", flush=True)
            rows.append(
                {"model": name, "chunk": chunk}
                | {
                    key: dict(zip(("predicted", "measured"), pair, strict=True))
                    for key, pair in pairs.items()
                }
            )
    for what, keys, bar in (("memory", ("norms", "kept"), MEMORY_BAR), ("time", ("seconds",), TIME_BAR)):
        worst = max(abs(row[key]["predicted"] / row[key]["measured"] - 1) for row in rows for key in keys)
        print(f"{what}: at most {worst:.0%} off, the bar is {bar:.0%}: {'pass' if worst <= bar else 'FAIL'}")
    content = {
        "machine": kind,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    write_json(arguments, content)


if __name__ == "__main__":
    main()
