"""All that a GPU can show, within eight minutes and in one file: the tests with a device, and the figures.

    python benchmarks/gpu.py [--device cuda] [--seconds 480] [--only NAME ...] [--json FILE] [--small]

Each part is a process of its own, so that one that fails or takes too long leaves the others' numbers:

    tests         PSGRAD_TEST_DEVICE=DEVICE pytest: how many pass
    tutorial      PyTorch's per-sample-gradient tutorial: dense gradients, norms, and a loop over samples
    networks      the four networks of norms.py: norms and clipped sums beside plain and torch.func
    transformers  the shapes of GPT-2 (once more with a head that Opacus takes), BERT-base and ViT-B: in
                  float32 beside torch.func and, where it is installed, Opacus; in TF32; in autocast to
                  bfloat16
    graphs        a recorded chunk (on a GPU a CUDA graph) beside the eager one
    private       private steps of these four shapes beside steps without privacy, and Opacus's
    texts         norms of texts of 8 to 512 tokens through BERT's shape: by programs of few lengths, chunk by
                  chunk, and by torch.func of padded chunks
    adapters      Llama's shapes of 1 and 8 billion parameters, in bfloat16 and in 4 bits, with adapters of
                  rank 16: their norms, beside a plain step and torch.func, and tokens a second
    offloaded     the same shape in float32, all of it trained and kept in pinned host memory: its norms
    copies        a pass whose rows come from the host, beside one whose rows are on the device

With --small all shapes are tiny, which shows on any machine that the script runs. It needs torch alone, but
for the tests; Opacus and bitsandbytes take part where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contenders import RIVALS, Problem, Way
from gpu_models import (
    LLAMAS,
    SMALL,
    adapters,
    llama,
    medians,
    peak,
    private_steps,
    ragged_texts,
)
from models import GPT, Block, cnn
from norms import CASES, Case, Contest, draw_images, draw_tokens, machine, time_in_turn
from rivals import UntiedGPT, prepared
from torch import Tensor, nn

from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, PAYS_FROM, ChunkReplay
from psgrad.engine.execution.loading import Block as Rows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.transforms import capture

Facts = dict[str, Any]
BARS = {"dense": 0.5e-3, "norms": 0.25e-3, "times faster than the loop": 300.0}
_ROUNDS = 11


def tutorial(device: torch.device, small: bool) -> Facts:
    contest = Contest(Case("", cnn, lambda: draw_images(8 if small else 64, 1, 28)), device)
    loss, params = contest.objective.loss, contest.objective.params

    def dense() -> Any:
        found = per_sample_gradients(loss, params, (contest.inputs,), contest.target, has_aux=True)
        return found.materialise()

    def loop() -> list[Any]:
        model, parameters = contest.model, list(contest.model.parameters())
        losses = (
            F.cross_entropy(model(x[None]), y[None])
            for x, y in zip(contest.inputs, contest.target, strict=True)
        )
        return [torch.autograd.grad(each, parameters) for each in losses]

    ways = {"plain": contest.plain, "dense": dense, "norms": contest.norms, "loop": loop}
    ways |= {"dense, recorded": capture(dense), "norms, recorded": recorded(contest)}
    timings = time_in_turn(ways, 3 if small else _ROUNDS, device)
    faster = timings["loop"].median / timings["norms, recorded"].median
    return {"seconds": medians(timings), "times faster than the loop": faster, "bars": BARS}


def recorded(contest: Contest) -> Way:
    """The norms of a chunk as the commands compute them, once they have recorded it."""

    def norms(params: Any, inputs: Any, target: Any) -> Tensor:
        found = per_sample_square_norms(contest.objective.loss, params, inputs, target, has_aux=True)
        return found.square_norms().sqrt()

    replay = ChunkReplay(norms, contest.objective.params)

    def way() -> Any:
        return replay((contest.inputs,), contest.target, PAYS_FROM)

    for _ in range(NOT_REPLAYED):
        way()
    # sums of another order: of float32, or of bfloat16, whatever the dtype of the norms
    torch.testing.assert_close(way(), contest.norms(), rtol=1e-2, atol=0)
    assert replay.chunks, replay.how
    return way


def networks(device: torch.device, small: bool) -> Facts:
    found = {}
    for name in ["mlp"] if small else CASES:
        contest = Contest(CASES[name], device)
        timings = time_in_turn(contest.ways(), 3 if small else _ROUNDS, device)
        found[name] = {"errors": contest.errors(), "seconds": medians(timings)}
    return found


class Encoder(nn.Module):
    """Blocks without a mask behind an embedding, of tokens or of patches, and a head of 1,000 classes."""

    def __init__(self, embedding: nn.Module, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
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
        "GPT-2, head not tied": Case(
            "", lambda: UntiedGPT(words, t, width, layers, heads), lambda: draw_tokens(n, t, words)
        ),
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
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "TF32"):
                half = torch.bfloat16 if precision == "bfloat16" else None
                contest.objective = Objective(contest.model, F.cross_entropy, autocast=half)

                def plain(contest: Contest = contest, half: torch.dtype | None = half) -> None:
                    with _autocast(device, half):
                        contest.plain()

                ways = {"plain": plain, "norms": contest.norms, "clipped": contest.clipped}
                ways["norms, recorded"] = recorded(contest)
                norms = contest.norms()
                exact = norms if exact is None else exact
                others, reasons = _of_rivals(contest) if precision == "float32" else ({}, {})
                ways |= others
                found[f"{name}, {precision}"] = {
                    "rivals that are not timed": reasons,
                    "seconds": medians(time_in_turn(ways, 3 if small else 5, device)),
                    "largest difference of norms from float32": ((norms - exact).abs() / exact).max().item(),
                    "peak bytes": peak(device, contest.clipped),
                }
                del ways, others
        del contest
    return found


def _of_rivals(contest: Contest) -> tuple[dict[str, Way], dict[str, str]]:
    """How the rivals compute norms and clipped sums, and why each of the others is not timed: it is not
    installed, it refuses the network, or its numbers are wrong.
    """
    problem = Problem(contest.model, contest.inputs, contest.target, contest.bound.item())
    expected = {"norms": contest.norms(), "clipped": list(contest.clipped().values())}
    ways: dict[str, Way] = {}
    reasons: dict[str, str] = {}
    for name in ("torch.func", "Opacus hooks", "Opacus ghost"):
        for task, way in prepared(problem, RIVALS[name], expected).items():
            if isinstance(way, str):
                reasons[f"{name}, {task}"] = way
            else:
                ways[f"{name}, {task}"] = way
    return ways, reasons


def _autocast(device: torch.device, half: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if half is None else torch.autocast(device.type, half)


def graphs(device: torch.device, small: bool) -> Facts:
    found = {}
    for name in ["mlp"] if small else ["cnn", "mlp", "gpt"]:
        contest = Contest(CASES[name], device)
        ways = {"plain": contest.plain, "eager": contest.norms, "recorded": recorded(contest)}
        found[name] = medians(time_in_turn(ways, 3 if small else _ROUNDS, device))
    return found


def private(device: torch.device, small: bool) -> Facts:
    return private_steps(shapes(small), device, 1 if small else 3)


def texts(device: torch.device, small: bool) -> Facts:
    return ragged_texts(device, small)


def offloaded(device: torch.device, small: bool) -> Facts:
    """Norms of all parameters of that model, whose float32 weights stay in host memory but for 8 GiB."""
    t, n = (8, 2) if small else (256, 4)
    budget = 1 << 14 if small else 8 << 30
    model = llama(device, SMALL if small else LLAMAS["8 billion"]).cpu()
    gc.collect()
    supply = Supply(device, budget)
    began = time.perf_counter()
    model = place(model, device, torch.float32, "as-saved", supply)
    Recompute(True).add(model)
    placed = time.perf_counter() - began
    objective = Objective(model, F.cross_entropy)
    inputs, target = (value.to(device) for value in draw_tokens(n, t, SMALL["vocabulary"]))

    def norms() -> Any:
        arguments = objective.loss, objective.params, (inputs,), target
        return per_sample_square_norms(*arguments, has_aux=True).square_norms()

    norms()  # the first pass shows the order of the weights
    before = supply.moved
    most = peak(device, norms)
    moved = supply.moved - before
    timing = time_in_turn({"plain": norms}, 1 if small else 2, device)["plain"]
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "seconds to place": placed,
        "seconds": timing.median,
        "moved bytes": moved,
        "moved bytes a second": moved / timing.median,
        "peak bytes": most,
    }


def copies(device: torch.device, small: bool) -> Facts:
    contest = Contest(CASES["mlp"], device)
    count = 2000 if small else 200_000
    inputs, target = torch.randn(count, 784), torch.randint(10, (count,))
    there = inputs.to(device), target.to(device)

    def run(x: Tensor, y: Tensor) -> float:
        objective = contest.objective
        stream = Stream(objective.loss, objective.params, Rows((x,), y), chunk_size=1000, capture="off")
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
    # Without the options of pyproject.toml, which ask for pytest-xdist; a file that imports a library that is
    # missing here is left out.
    command += ["-o", "addopts=", "-m", "not sweep", "--continue-on-collection-errors"]
    if not small and find_spec("xdist") is not None:
        command += ["-n", str(min(os.cpu_count() or 1, 14)), "--dist", "worksteal"]
    command += ["tests/engine/gradients/test_layers.py"] if small else ["tests"]
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PSGRAD_TEST_DEVICE": str(device), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (ended.stdout.strip() or ended.stderr.strip()).replace(f"{root}/", "").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])
    }
    return {**counts, "said last": lines[-1], "not passed": failed[:50]}


PARTS: dict[str, Callable[[torch.device, bool], Facts]] = {
    each.__name__: each
    for each in (
        tutorial,
        networks,
        transformers,
        graphs,
        private,
        texts,
        adapters,
        offloaded,
        copies,
        tests,
    )
}


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
            return {"failed": ended.stderr.strip().splitlines()[-8:]}
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
