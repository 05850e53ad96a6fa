"""What secure noise costs: normals by each generator, and the share of a private step that goes into them.

    python benchmarks/noise.py [--parameters 10000000] [--rounds 11] [--json FILE]

Two contests, whose ways take turns in every round:

    normals      so many normals: psgrad's generator (AES-256 in counter mode, float64), torch.randn, and,
                 where randomgen is installed, its AES and ChaCha generators
    step         a perceptron of about so many parameters, a batch of 256: the ordinary step of SGD, the
    private one (clip, noise, SGD),
                 the same without noise, and the noise by itself. Records are not drawn, and rows not fetched

The bar: the noise is at most a quarter of the private step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from models import mlp
from norms import Timing, machine, time_in_turn
from script import command_line, print_facts, write_json

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise

CPU = torch.device("cpu")
# What the noise may be of the whole step.
BAR = 0.25
BATCH = 256
CLASSES, INPUTS = 10, 784


def generators(count: int) -> dict[str, Callable[[], Any]]:
    """Ways to `count` float32 normals; torch.randn is the plain one."""
    aes = make_generator()
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: torch.randn(count),
        "psgrad aes": lambda: aes.normal_blocks(count, 1.0, lambda start, block: None),
    }
    try:
        import numpy as np
        from randomgen import AESCounter, ChaCha
    except ImportError:
        return ways
    for name, bits in (("randomgen aes", AESCounter()), ("randomgen chacha", ChaCha())):
        drawn = np.random.Generator(bits)
        ways[name] = lambda drawn=drawn: drawn.standard_normal(count, dtype=np.float32)
    return ways


def hidden_width(parameters: int) -> int:
    """Of a perceptron with two hidden layers of the same width w and about so many parameters: w^2 + (784 +
    10) w of them.
    """
    half = (INPUTS + CLASSES) / 2
    return max(1, round((half**2 + parameters) ** 0.5 - half))


def steps(parameters: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """The ways of the second contest, and how many parameters there are."""
    torch.manual_seed(0)
    width = hidden_width(parameters)
    model = mlp((INPUTS, width, width, CLASSES))
    inputs, target = torch.randn(BATCH, INPUTS), torch.randint(CLASSES, (BATCH,))
    objective = Objective(model, F.cross_entropy)
    trained = dict(model.named_parameters())
    optimizer = torch.optim.SGD(trained.values(), lr=1e-6)
    clipping, generator = Clipping.flat(trained, 1.0), make_generator()
    source = batch_source(objective.loss, objective.params, (inputs,), target, has_aux=True)
    sums = source(clipping).sums

    def plain() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()

    def private(multiplier: float) -> None:
        noisy = Noise(multiplier).add(source(clipping).sums, clipping, "add_or_remove_one", generator)
        for name, parameter in trained.items():
            parameter.grad = noisy[name].div_(BATCH).to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()

    ways: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "private": lambda: private(1.0),
        "without noise": lambda: private(0.0),
        "noise": lambda: Noise(1.0).add(sums, clipping, "add_or_remove_one", generator),
    }
    return ways, sum(parameter.numel() for parameter in trained.values())


def share(timings: dict[str, Timing]) -> float:
    """How much of the private step is noise."""
    return timings["noise"].median / timings["private"].median


def print_table(title: str, timings: dict[str, Timing]) -> None:
    print(f"\n{title}\n  {'':<18}{'median':>10}{'quartiles':>20}{'x plain':>10}")
    for name, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.1f} .. {1e3 * timing.upper_quartile:.1f}"
        print(f"  {name:<18}{1e3 * timing.median:>7.1f} ms{quartiles:>20}{timing.ratio:>10.2f}", flush=True)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = command_line("Time secure noise, by itself and as a part of a private step.", rounds=11)
    parser.add_argument(
        "--parameters", type=int, default=10_000_000, help="about so many (default: %(default)s)"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    facts = machine(CPU)
    print_facts(facts, arguments)

    normals = time_in_turn(generators(arguments.parameters), arguments.rounds, CPU)
    print_table(f"{arguments.parameters} normals (plain: torch.randn)", normals)
    ways, parameters = steps(arguments.parameters)
    step = time_in_turn(ways, arguments.rounds, CPU)
    print_table(f"a step of {parameters} parameters, a batch of {BATCH}", step)
    print(
        f"  noise is {share(step):.0%} of the private step; at most {BAR:.0%}:"
        f" {'pass' if share(step) <= BAR else 'FAIL'}"
    )

    content = {
        "machine": facts,
        "rounds": arguments.rounds,
        "normals": {
            "count": arguments.parameters,
            "seconds": {name: asdict(timing) for name, timing in normals.items()},
        },
        "step": {
            "parameters": parameters,
            "batch": BATCH,
            "seconds": {name: asdict(timing) for name, timing in step.items()},
            "share": share(step),
            "bar": BAR,
        },
    }
    write_json(arguments, content)


if __name__ == "__main__":
    main()
