"""What a transform costs by itself: per-sample gradients of a network so small that its kernels take no time.

    python benchmarks/overhead.py [--rounds 41] [--inductor] [--json FILE]

A perceptron of three layers, eight samples, one thread. The ways take turns in one process, round after
round, so that whatever else the machine does falls on all of them alike:

    plain        forward and backward of the batch's summed loss, which gives one gradient in place of eight
    torch.func   vmap(grad) of the one-sample loss
    psgrad       the same, by psgrad's vmap and grad
    replay       psgrad's, captured once as a program, which runs without Python
    inductor     the same program, compiled (with --inductor)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from norms import Timing, machine, time_in_turn
from script import command_line, print_facts, write_json
from torch import Tensor, nn

from psgrad.engine.transforms import capture, functional_call, grad, vmap

# At most so many times torch.func's median.
BARS = {"psgrad": 0.9, "replay": 1 / 3}


def contest(*, inductor: bool) -> dict[str, Callable[[], Any]]:
    """The ways, on one network and one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    inputs, target = torch.randn(8, 64), torch.randint(10, (8,))

    def plain() -> None:
        model.zero_grad()
        F.cross_entropy(model(inputs), target, reduction="sum").backward()

    def loss(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda parameters, x, y: F.cross_entropy(call(model, parameters, (x,)), y)

    theirs = torch.func.vmap(torch.func.grad(loss(torch.func.functional_call)), in_dims=(None, 0, 0))
    ours = vmap(grad(loss(functional_call)), in_dims=(None, 0, 0))
    ways = {"torch.func": theirs, "psgrad": ours, "replay": capture(ours)}
    if inductor:
        ways["inductor"] = capture(ours, compile="inductor")
    expected = theirs(parameters, inputs, target)
    for way in ways.values():
        torch.testing.assert_close(way(parameters, inputs, target), expected)
    return {
        "plain": plain,
        **{name: lambda way=way: way(parameters, inputs, target) for name, way in ways.items()},
    }


def print_table(timings: dict[str, Timing]) -> None:
    print(f"  {'':<12}{'median':>10}{'quartiles':>20}{'x torch.func':>14}   bar")
    for name, timing in timings.items():
        quartiles = f"{1e6 * timing.lower_quartile:.0f} .. {1e6 * timing.upper_quartile:.0f}"
        ratio = timing.median / timings["torch.func"].median
        bar = f"at most {BARS[name]:.2f}: {'pass' if ratio <= BARS[name] else 'FAIL'}" if name in BARS else ""
        print(f"  {name:<12}{1e6 * timing.median:>7.0f} us{quartiles:>20}{ratio:>14.2f}   {bar}".rstrip())


def parse_arguments() -> argparse.Namespace:
    parser = command_line("Time psgrad's vmap(grad), eager and replayed, against torch.func's.", rounds=41)
    parser.add_argument(
        "--inductor", action="store_true", help="with the compiled record, too; needs a C++ compiler"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    timings = time_in_turn(contest(inductor=arguments.inductor), arguments.rounds, torch.device("cpu"))
    print_table(timings)
    seconds = {name: asdict(timing) for name, timing in timings.items()}
    content = {"machine": facts, "rounds": arguments.rounds, "seconds": seconds}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
