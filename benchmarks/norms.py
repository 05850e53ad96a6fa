"""What per-sample gradient norms and clipped sums cost, as a multiple of the ordinary forward and backward
pass.

    python benchmarks/norms.py [--rounds 11] [--only cnn mlp] [--json FILE] [--device cpu]

For each network, four ways to spend a batch are timed in turn, round after round in one process, so that
whatever else the machine does falls on all of them alike:

    plain        forward and backward of the batch's mean loss
    torch.func   vmap(grad) of the one-sample loss, then the norms
    norms        psgrad's norms
    clipped      psgrad's norms, and the sum of the gradients after each is clipped to the median norm

Before anything is timed, psgrad's norms are held against torch.func's.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, cnn, mlp, resnet
from script import command_line, print_facts, write_json
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import (
    SquareNorms,
    per_sample_square_norms,
    per_sample_weighted_sum,
)

# What norms, and norms and clipped sums together, may cost on two CPU cores, as a multiple of plain.
BARS = {"norms": 1.25, "clipped": 1.5}
# A quick way is called as often in each round as fits into this many seconds, so that the clock's grain does
# not show.
SHORTEST_TIMING = 0.05


@dataclass(frozen=True)
class Case:
    """A network and its batch."""

    description: str
    build: Callable[[], nn.Module]
    draw: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Timing:
    """Seconds a batch over the rounds, and what they are to plain's median."""

    median: float
    lower_quartile: float
    upper_quartile: float
    ratio: float


def draw_images(n: int, channels: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, size, size), torch.randint(10, (n,))


def draw_vectors(n: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, width), torch.randint(10, (n,))


def draw_tokens(n: int, positions: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (n, positions + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CASES = {
    "cnn": Case("tutorial CNN, 64 x 1x28x28", cnn, lambda: draw_images(64, 1, 28)),
    "mlp": Case("MLP 784-512-512-10, 256 x 784", mlp, lambda: draw_vectors(256, 784)),
    "gpt": Case("GPT 4 layers of 256, 16 x 128 of 8192 tokens", GPT, lambda: draw_tokens(16, 128, 8192)),
    "resnet": Case("GroupNorm ResNet-20, 32 x 3x32x32", resnet, lambda: draw_images(32, 3, 32)),
}


class Contest:
    """The four ways, on one network and one batch."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = case.build().to(device)
        self.inputs, self.target = (value.to(device) for value in case.draw())
        self.parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        self.objective = Objective(self.model, F.cross_entropy)

    @cached_property
    def bound(self) -> Tensor:
        """What clipped sums clip to: the median norm."""
        return self.norms().median()

    def plain(self) -> Tensor:
        self.model.zero_grad()
        output = self.model(self.inputs)
        # [n, classes] or [n, t, classes]: every sample has as many terms, so that the mean of all is the mean
        # of the samples.
        loss = F.cross_entropy(output.flatten(0, -2), self.target.flatten())
        loss.backward()
        return loss.detach()

    def torch_func(self, accumulate_in: torch.dtype | None = None) -> Tensor:
        def loss_of_one(parameters: dict[str, Tensor], inputs: Tensor, target: Tensor) -> Tensor:
            output = torch.func.functional_call(self.model, parameters, (inputs[None],))
            return F.cross_entropy(output[0], target)

        gradients = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(
            self.parameters, self.inputs, self.target
        )
        norms = [gradient.flatten(1).norm(dim=1, dtype=accumulate_in) for gradient in gradients.values()]
        return torch.stack(norms).norm(dim=0)

    def norms(self) -> Tensor:
        found = per_sample_square_norms(
            self.objective.loss, self.objective.params, (self.inputs,), self.target, has_aux=True
        )
        return found.square_norms().sqrt()

    def clipped(self) -> dict[str, Tensor]:
        def weights(norms: SquareNorms) -> Tensor:
            return (self.bound / norms.square_norms().sqrt()).clamp(max=1)

        loss, params = self.objective.loss, self.objective.params
        return per_sample_weighted_sum(
            loss, params, (self.inputs,), self.target, weights=weights, has_aux=True
        ).sums

    def errors(self) -> dict[str, float]:
        """The largest relative error of the norms, ours and torch.func's, against a loop of one-sample
        gradients in float64.
        """
        exact = self.loop_in_float64()
        ways = {"norms": self.norms(), "torch.func": self.torch_func(accumulate_in=torch.float64)}
        return {
            name: ((norms[: len(exact)].double() - exact).abs() / exact).max().item()
            for name, norms in ways.items()
        }

    def loop_in_float64(self, samples: int = 8) -> Tensor:
        """[samples]: plain autograd, one sample at a time."""
        model = copy.deepcopy(self.model).double()
        norms = []
        for inputs, target in zip(self.inputs[:samples], self.target[:samples], strict=True):
            inputs = inputs.double() if inputs.is_floating_point() else inputs
            loss = F.cross_entropy(model(inputs[None])[0], target)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norms.append(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        return torch.stack(norms)

    def ways(self) -> dict[str, Callable[[], Any]]:
        return {
            "plain": self.plain,
            "torch.func": self.torch_func,
            "norms": self.norms,
            "clipped": self.clipped,
        }


Clock = Callable[[], float]


def seconds(
    way: Callable[[], Any], repeats: int, device: torch.device, clock: Clock = time.perf_counter
) -> float:
    """Time of one call by the clock on the wall (or another one), the mean over `repeats` of them."""
    start = clock()
    for _ in range(repeats):
        way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - start) / repeats


def time_in_turn(
    ways: dict[str, Callable[[], Any]], rounds: int, device: torch.device, clock: Clock = time.perf_counter
) -> dict[str, Timing]:
    """Every way once a round, after a first call of each that is thrown away and a second that tells how
    often to repeat it.
    """
    for way in ways.values():
        seconds(way, 1, device)
    repeats = {name: 1 + int(SHORTEST_TIMING / seconds(way, 1, device)) for name, way in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(seconds(way, repeats[name], device, clock))

    quartiles = {
        name: torch.tensor(times).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        for name, times in taken.items()
    }
    plain = quartiles["plain"][1]
    return {
        name: Timing(middle, lower, upper, middle / plain)
        for name, (lower, middle, upper) in quartiles.items()
    }


def verdicts(timings: dict[str, Timing]) -> dict[str, str]:
    """What each of psgrad's two ways has to keep, and whether it does."""
    return {
        way: f"at most {bar}: {'pass' if timings[way].ratio <= bar else 'FAIL'}" for way, bar in BARS.items()
    }


def machine(device: torch.device) -> dict[str, str | int]:
    """What the numbers depend on beside the code."""
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [
            line.split(":", 1)[1].strip()
            for line in information.read_text().splitlines()
            if line.startswith("model name")
        ]
        processor = models[0] if models else processor
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def print_table(
    case: Case, timings: dict[str, Timing], errors: dict[str, float], device: torch.device
) -> None:
    # The bars are for two CPU cores; elsewhere the ratios stand for themselves.
    bars = verdicts(timings) if device.type == "cpu" else {}
    print(
        f"\n{case.description}; relative error in float32: "
        + ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    )
    print(f"  {'':<12}{'median':>10}{'quartiles':>20}{'x plain':>10}   bar")
    for name, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.1f} .. {1e3 * timing.upper_quartile:.1f}"
        print(
            f"  {name:<12}{1e3 * timing.median:>7.1f} ms{quartiles:>20}{timing.ratio:>10.2f}  "
            f" {bars.get(name, '')}".rstrip(),
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "Time per-sample gradient norms against the ordinary backward pass.",
        rounds=11,
        only=CASES,
        device=True,
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings(
        "ignore", message="There is a performance drop"
    )  # torch.func's loop over samples for attention on CPU
    facts = machine(arguments.device)
    print_facts(facts, arguments)

    results: dict[str, dict[str, Any]] = {}
    for name in arguments.only:
        contest = Contest(CASES[name], arguments.device)
        errors = contest.errors()
        timings = time_in_turn(contest.ways(), arguments.rounds, arguments.device)
        print_table(CASES[name], timings, errors, arguments.device)
        results[name] = {
            "errors": errors,
            "seconds": {way: asdict(timing) for way, timing in timings.items()},
        }
    write_json(arguments, {"machine": facts, "rounds": arguments.rounds, "bars": BARS, "cases": results})


if __name__ == "__main__":
    main()
