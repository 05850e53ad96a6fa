"""All that a GPU can show, within eight minutes and in one file: the tests with a device, and the figures.

    python benchmarks/gpu.py [--device cuda] [--seconds 480] [--only NAME ...] [--json FILE] [--small]

Each part is a process of its own, so that one that fails or takes too long leaves the others' numbers:

    tests         PSGRAD_TEST_DEVICE=DEVICE pytest: how many pass
    tutorial      PyTorch's per-sample-gradient tutorial: dense gradients, norms, and a loop over samples
    networks      the four networks of norms.py: norms and clipped sums beside plain and torch.func
    transformers  the shapes of GPT-2, BERT-base and ViT-B, in float32, TF32 and under autocast to bfloat16
    graphs        a recorded chunk (on a GPU a CUDA graph) beside the eager one
    adapters      an 8-billion-parameter decoder in bfloat16 with adapters of rank 16: norms of the adapters
    copies        a pass whose rows come from the host, beside one whose rows are on the device

With --small all shapes are tiny, which shows on any machine that the script runs. It needs torch alone, but
for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, Block, cnn
from norms import CASES, Case, Contest, draw_images, draw_tokens, machine, time_in_turn
from torch import Tensor, nn

from psgrad.engine.execution.loading import Block as Rows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.measures.gradient_norms import GradientNorms
from psgrad.engine.transforms import capture

Facts = dict[str, Any]
BARS = {"dense": 0.5e-3, "norms": 0.25e-3, "times faster than the loop": 300.0}
_ROUNDS = 11


def tutorial(device: torch.device, small: bool) -> Facts:
    contest = Contest(Case("", cnn, lambda: draw_images(8 if small else 64, 1, 28)), device)
    loss, params = contest.objective.loss, contest.objective.params

    def dense() -> Any:
        found = per_sample_gradients(loss, params, (contest.inputs,), contest.target, has_aux=True)
        return {name: each.materialise() for name, each in found.gradients.items()}

    def loop() -> list[Any]:
        model, parameters = contest.model, list(contest.model.parameters())
        losses = (
            F.cross_entropy(model(x[None]), y[None])
            for x, y in zip(contest.inputs, contest.target, strict=True)
        )
        return [torch.autograd.grad(each, parameters) for each in losses]

    ways = {"plain": contest.plain, "dense": dense, "norms": contest.norms, "loop": loop}
    if not small:
        ways |= {"dense, recorded": capture(dense), "norms, recorded": capture(contest.norms)}
    timings = time_in_turn(ways, 3 if small else _ROUNDS, device)
    faster = timings["loop"].median / timings["norms"].median
    return {"seconds": _medians(timings), "times faster than the loop": faster, "bars": BARS}


def networks(device: torch.device, small: bool) -> Facts:
    found = {}
    for name in ["mlp"] if small else CASES:
        contest = Contest(CASES[name], device)
        timings = time_in_turn(contest.ways(), 3 if small else _ROUNDS, device)
        found[name] = {"errors": contest.errors(), "seconds": _medians(timings)}
    return found


class Encoder(nn.Module):
    """Blocks without a mask behind an embedding, of tokens or of patches, and a head of 1,000 classes."""

    def __init__(self, embedding: nn.Module, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = embedding
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.Sequential(*(layer(activation="gelu", norm_first=True) for _ in range(layers)))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embedding(x)).mean(1))
        return found


class Patches(nn.Module):
    """Images [n, 3, h, w] as [n, patches, width]."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, size, size)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.convolution(x).flatten(2).transpose(1, 2)
        return found


def shapes(small: bool) -> dict[str, Case]:
    width, layers, heads, words = (32, 2, 2, 100) if small else (768, 12, 12, 50257)
    t, n, size = (8, 2, 32) if small else (512, 8, 224)

    def classes(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, torch.randint(1000, (len(inputs),))

    return {
        "GPT-2": Case("", lambda: GPT(words, t, width, layers, heads), lambda: draw_tokens(n, t, words)),
        "BERT-base": Case(
            "",
            lambda: Encoder(nn.Embedding(words, width), width, layers, heads),
            lambda: classes(torch.randint(words, (2 * n, t // 4))),
        ),
        "ViT-B": Case(
            "",
            lambda: Encoder(Patches(width, 16), width, layers, heads),
            lambda: classes(torch.randn(2 * n, 3, size, size)),
        ),
    }


def transformers(device: torch.device, small: bool) -> Facts:
    found: Facts = {}
    for name, case in shapes(small).items():
        contest, exact = Contest(case, device), None
        for precision in ("float32", "TF32", "bfloat16"):
            torch.backends.cuda.matmul.allow_tf32 = precision == "TF32"
            half = torch.bfloat16 if precision == "bfloat16" else None
            contest.objective = Objective(contest.model, F.cross_entropy, autocast=half)

            def plain(contest: Contest = contest, half: torch.dtype | None = half) -> None:
                with _autocast(device, half):
                    contest.plain()

            ways = {"plain": plain, "norms": contest.norms, "clipped": contest.clipped}
            norms = contest.norms()
            exact = norms if exact is None else exact
            found[f"{name}, {precision}"] = {
                "seconds": _medians(time_in_turn(ways, 3 if small else 5, device)),
                "largest difference of norms from float32": ((norms - exact).abs() / exact).max().item(),
                "peak bytes": _peak(device, contest.clipped),
            }
        del contest
    return found


def _autocast(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if half is None else torch.autocast(device.type, half)


def graphs(device: torch.device, small: bool) -> Facts:
    found = {}
    for name in ["mlp"] if small else ["cnn", "mlp", "gpt"]:
        contest = Contest(CASES[name], device)
        recorded = capture(contest.norms)
        torch.testing.assert_close(recorded(), contest.norms())
        ways = {"plain": contest.plain, "eager": contest.norms, "recorded": recorded}
        found[name] = _medians(time_in_turn(ways, 3 if small else _ROUNDS, device))
    return found


class WithAdapter(nn.Module):
    """A linear layer that is frozen, and a product of rank 16 that is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        options: Facts = {"bias": False, "device": layer.weight.device, "dtype": torch.float32}
        self.down = nn.Linear(layer.in_features, rank, **options)
        self.up = nn.Linear(rank, layer.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.up(self.down(x))
        return found


def adapters(device: torch.device, small: bool) -> Facts:
    """A decoder of 8 billion parameters: 38 blocks of width 4096, and 128,256 tokens."""
    width, layers, heads, words, t, n = (32, 2, 2, 100, 8, 2) if small else (4096, 38, 32, 128_256, 256, 4)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = GPT(words, t, width, layers, heads).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.query_key_value = WithAdapter(block.query_key_value)  # type: ignore[assignment]
        block.attention_out = WithAdapter(block.attention_out)  # type: ignore[assignment]
    place(model, device, torch.float32, "as-saved")
    objective = Objective(model, F.cross_entropy)
    inputs, target = (value.to(device) for value in draw_tokens(n, t, words))

    def norms() -> Any:
        found = per_sample_gradients(objective.loss, objective.params, (inputs,), target, has_aux=True)
        return found.square_norms()

    def plain() -> None:
        with torch.no_grad():
            model(inputs)

    timings = time_in_turn({"plain": plain, "norms": norms}, 3, device)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "trained": sum(each.numel() for each in objective.params.values()),
        "seconds (plain: forward alone)": _medians(timings),
        "peak bytes": _peak(device, norms),
    }


def copies(device: torch.device, small: bool) -> Facts:
    contest = Contest(CASES["mlp"], device)
    count = 2000 if small else 200_000
    inputs, target = torch.randn(count, 784), torch.randint(10, (count,))
    there = inputs.to(device), target.to(device)

    def run(x: Tensor, y: Tensor) -> float:
        def read(start: int, stop: int) -> Rows:
            return Rows((x[start:stop],), y[start:stop])

        objective = contest.objective
        stream = Stream(objective.loss, objective.params, read, chunk_size=1000, capture="off")
        start = time.perf_counter()
        for _ in stream.run(count, [GradientNorms()]):
            pass
        return time.perf_counter() - start

    run(*there)
    rounds = [(run(inputs, target), run(*there)) for _ in range(3)]
    hosts, theirs = (sorted(each)[1] for each in zip(*rounds, strict=True))
    return {"seconds, rows on the host": hosts, "seconds, rows on the device": theirs}


def tests(device: torch.device, small: bool) -> Facts:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["tests/engine/gradients/test_layers.py"] if small else ["tests/engine"]
    ended = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PSGRAD_TEST_DEVICE": str(device)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])
    }
    return {**counts, "said last": lines[-1], "not passed": failed[:50]}


PARTS: dict[str, Callable[[torch.device, bool], Facts]] = {
    each.__name__: each for each in (tutorial, networks, transformers, graphs, adapters, copies, tests)
}


def _medians(timings: dict[str, Any]) -> Facts:
    return {name: asdict(timing) for name, timing in timings.items()}


def _peak(device: torch.device, way: Callable[[], Any]) -> int | None:
    """Bytes on the GPU at most while `way` runs; None on another device."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    way()
    return torch.cuda.max_memory_allocated(device)


def in_a_process(name: str, arguments: argparse.Namespace, seconds: float) -> Facts:
    """What a part found, or why it found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "facts.json"
        command = [sys.executable, __file__, "--part", name, "--json", str(file)]
        command += ["--device", str(arguments.device), *(["--small"] if arguments.small else [])]
        start = time.perf_counter()
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} seconds"}
        if ended.returncode != 0:
            return {"failed": ended.stderr.strip().splitlines()[-1:]}
        return {"took": time.perf_counter() - start, **json.loads(file.read_text(encoding="utf-8"))}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests and take all figures on a GPU.")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--seconds", type=float, default=480, help="for all parts (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.part is not None:
        torch.manual_seed(0)
        found = PARTS[arguments.part](arguments.device, arguments.small)
        arguments.json.write_text(json.dumps(found), encoding="utf-8")
        return
    facts = machine(arguments.device)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    end, parts = time.monotonic() + arguments.seconds, {}
    for name in arguments.only:
        left = end - time.monotonic()
        parts[name] = in_a_process(name, arguments, left) if left > 0 else {"failed": "no time was left"}
        print(f"\n{name}\n{json.dumps(parts[name], indent=1)}", flush=True)
        if arguments.json is not None:  # after each part: what is done is kept
            content = json.dumps({"machine": facts, "small": arguments.small, "parts": parts}, indent=1)
            arguments.json.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
