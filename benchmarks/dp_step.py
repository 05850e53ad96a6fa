"""What a differentially private step costs, as a multiple of the ordinary step, beside Opacus.

    python benchmarks/dp_step.py [--rounds 11] [--only cnn mlp] [--json FILE] [--device cpu] [--no-memory]
    [--processor-time]

For each network of models.py, everybody of dp_contenders.py takes whole steps of training on one dataset in
memory: draw the records, take their rows, clip, add noise, divide by the expected batch size, SGD. All take
turns in every round. The records are drawn by each in its own way, and paid for; the rows that are taken are
the same for all, a Poisson batch that has the expected size, so that nobody has the luck of a small one.

Before anything is timed, the noise is left out, and each step is held against a float64 loop over single
samples. Where psgrad's is off by more than 1e-5, nothing is timed; an Opacus way that is off by more than
1e-3, or refuses the network, is named with its reason.

Memory is what a step allocates at its highest beyond the parameters and the batch, by PyTorch's allocator, as
in memory.py.

`--processor-time` is for a machine that does other things meanwhile: one thread, and the processor's time in
place of the clock's.

The bars: time at most 1.6 times plain's, and 1 / 1.3 of Opacus's fastest way that takes the network; memory
at most 1.4 times plain's. Needs opacus of requirements-rivals.txt; where it is not installed its ways are
left out, and named.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from contenders import sample_losses
from dp_contenders import RIVALS, Step, Training, plain, psgrad
from memory import MEGABYTE, allocated
from norms import Case, Timing, machine, time_in_turn
from rivals import NETWORKS, versions
from script import command_line, print_facts, write_json
from torch import Tensor

BARS = {"time": 1.6, "memory": 1.4, "speedup": 1.3}
# So many batches make the dataset.
BATCHES = 32
NOISE_MULTIPLIER = 1.0
# The largest relative error of an update without noise. Opacus's clip factor is bound / (norm + 1e-6).
WRONG = {"psgrad": 1e-5, "rivals": 1e-3}


class Dataset:
    """Rows in memory, and the records of one Poisson batch of them: one that happens to have the expected
    size.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        drawn = [case.draw() for _ in range(BATCHES)]
        self.inputs = torch.cat([inputs for inputs, _ in drawn]).to(device)
        self.target = torch.cat([target for _, target in drawn]).to(device)
        self.batch = torch.zeros(0, dtype=torch.int64)
        while len(self.batch) != len(self.inputs) // BATCHES:
            self.batch = (torch.rand(len(self.inputs)) < 1 / BATCHES).nonzero().squeeze(1)

    def rows(self) -> tuple[Tensor, Tensor]:
        batch = self.batch.to(self.inputs.device)
        return self.inputs[batch], self.target[batch]


def pose(case: Case, device: torch.device) -> tuple[Training, Dataset]:
    """The training, with gradients clipped to the median of the batch's norms, and its dataset."""
    torch.manual_seed(0)
    model = case.build().to(device)
    data = Dataset(case, device)
    records = len(data.inputs)
    norms = torch.stack(
        [torch.stack([g.norm() for g in gradients]).norm() for gradients in gradients_of(model, *data.rows())]
    )
    return Training(model, records, 1 / BATCHES, float(norms.median()), NOISE_MULTIPLIER), data


def gradients_of(model: torch.nn.Module, inputs: Tensor, target: Tensor) -> Any:
    """One sample's gradients after the other, in float64: plain autograd."""
    exact = copy.deepcopy(model).double()
    for one, expected in zip(inputs, target, strict=True):
        one = one.double() if one.is_floating_point() else one
        yield torch.autograd.grad(
            sample_losses(exact(one[None]), expected[None]).sum(), list(exact.parameters())
        )


def exact_update(training: Training, data: Dataset) -> list[Tensor]:
    """What a step without noise adds to each parameter, float64."""
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in training.model.parameters()]
    for gradients in gradients_of(training.model, *data.rows()):
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        factor = float((training.bound / norm).clamp(max=1))
        for part, gradient in zip(total, gradients, strict=True):
            part.add_(gradient, alpha=factor)
    return [part * (-training.learning_rate / training.expected_batch_size) for part in total]


def update_of(build: Callable[[Training], Step], training: Training, data: Dataset) -> list[Tensor]:
    """What a step of this contender adds to each parameter."""
    step = build(training)
    before = [parameter.detach().clone() for parameter in step.parameters]
    step.update(*data.rows())
    return [
        after.detach().double() - first.double() for after, first in zip(step.parameters, before, strict=True)
    ]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative error of an update, over all parameters."""
    apart = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return float((apart / sum(float(other.square().sum()) for other in expected)) ** 0.5)


def able(
    training: Training, data: Dataset
) -> tuple[dict[str, Callable[[Training], Step]], dict[str, str], dict[str, float]]:
    """(who can be timed, why the others can't, relative error of each). Raises AssertionError where psgrad is
    wrong itself.
    """
    # The learning rate is large because the update is taken as a difference of parameters, whose own rounding
    # must not show in it.
    silent = Training(
        training.model, training.records, training.sample_rate, training.bound, 0.0, learning_rate=1e3
    )
    expected = exact_update(silent, data)
    ours = update_of(psgrad, silent, data)
    errors = {"psgrad": distance(ours, expected)}
    assert errors["psgrad"] < WRONG["psgrad"], f"psgrad is {errors['psgrad']:.1e} off; nothing is timed"
    found, refused = {}, {}
    for name, build in RIVALS.items():
        try:
            errors[name] = distance(update_of(build, silent, data), expected)
        except ImportError as error:
            refused[name] = f"not installed: {error.name}"
        except Exception as error:
            refused[name] = f"not supported: {type(error).__name__}: {str(error).strip().splitlines()[0]}"[
                :150
            ]
        else:
            if errors[name] < WRONG["rivals"]:
                found[name] = build
            else:
                refused[name] = f"wrong: relative error {errors[name]:.0e}"
    return found, refused, errors


def timed(step: Step, data: Dataset) -> Callable[[], None]:
    """A whole step: the records are drawn, and the same rows taken by all."""

    def run() -> None:
        step.draw()
        step.update(*data.rows())

    return run


def peak(step: Step, data: Dataset, device: torch.device) -> int:
    """Bytes of tensors that a step takes at its highest, beyond parameters and batch."""
    rows = data.rows()
    step.update(*rows)  # what a first step leaves behind is not the step's
    step.forget()
    return allocated(lambda: step.update(*rows), device)


def verdicts(seconds: dict[str, Timing], memory: dict[str, int]) -> dict[str, Any]:
    """What psgrad has to keep, and whether it does."""
    found: dict[str, Any] = {
        "time": seconds["psgrad"].ratio,
        "time_kept": seconds["psgrad"].ratio <= BARS["time"],
    }
    if memory:
        ratio = memory["psgrad"] / memory["plain"]
        found |= {"memory": ratio, "memory_kept": ratio <= BARS["memory"]}
    rivals = {name: timing.median for name, timing in seconds.items() if name in RIVALS}
    if rivals:
        best = min(rivals, key=lambda name: rivals[name])
        speedup = rivals[best] / seconds["psgrad"].median
        found |= {"best": best, "speedup": speedup, "speedup_kept": speedup >= BARS["speedup"]}
    return found


def contest(
    case: Case,
    rounds: int,
    device: torch.device,
    *,
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Everybody on one network: prints the table, and returns what the JSON has of it."""
    training, data = pose(case, device)
    rivals, refused, errors = able(training, data)
    builders = {"plain": plain, "psgrad": psgrad, **rivals}
    peaks = {name: peak(build(training), data, device) for name, build in builders.items()} if memory else {}
    gc.collect()
    seconds = time_in_turn(
        {name: timed(build(training), data) for name, build in builders.items()}, rounds, device, clock
    )
    verdict = verdicts(seconds, peaks)
    print_table(case, len(data.batch), seconds, peaks, errors, refused, verdict)
    return {
        "batch": len(data.batch),
        "errors": errors,
        "refused": refused,
        "seconds": {name: asdict(timing) for name, timing in seconds.items()},
        "bytes": peaks,
        "verdict": verdict,
    }


def print_table(
    case: Case,
    batch: int,
    seconds: dict[str, Timing],
    peaks: dict[str, int],
    errors: dict[str, float],
    refused: dict[str, str],
    verdict: dict[str, Any],
) -> None:
    print(f"\n{case.description}; a batch of {batch}")
    print(f"  {'':<18}{'median':>10}{'quartiles':>18}{'x plain':>9}{'memory':>12}{'x plain':>9}{'error':>8}")
    for name, timing in seconds.items():
        quartiles = f"{1e3 * timing.lower_quartile:.1f} .. {1e3 * timing.upper_quartile:.1f}"
        line = f"  {name:<18}{1e3 * timing.median:>7.1f} ms{quartiles:>18}{timing.ratio:>9.2f}"
        line += (
            f"{peaks[name] / MEGABYTE:>9.1f} MB{peaks[name] / peaks['plain']:>9.2f}" if peaks else " " * 21
        )
        print(line + (f"{errors[name]:>8.0e}" if name in errors else ""))
    for name, reason in refused.items():
        print(f"  {name:<18} {reason}")

    def outcome(bar: str) -> str:
        return "pass" if verdict[f"{bar}_kept"] else "FAIL"

    words = [f"time at most {BARS['time']} x plain: {outcome('time')}"]
    if "memory" in verdict:
        words.append(f"memory at most {BARS['memory']} x plain: {outcome('memory')}")
    if "best" in verdict:
        words.append(
            f"{verdict['speedup']:.2f} times as fast as {verdict['best']}, at least {BARS['speedup']}:"
            f" {outcome('speedup')}"
        )
    print("  " + "; ".join(words), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "Time and memory of a differentially private step, beside the ordinary one and Opacus's.",
        rounds=11,
        only=NETWORKS,
        device=True,
    )
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="one thread's processor time, for a machine that is busy (CPU)",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")  # the rivals' own, on every pass
    clock = time.perf_counter
    if arguments.processor_time:
        torch.set_num_threads(1)
        clock = time.process_time
    facts = {"clock": clock.__name__} | machine(arguments.device) | {"opacus": versions()["opacus"]}
    print_facts(facts, arguments)
    options = {"memory": not arguments.no_memory, "clock": clock}
    cases = {
        name: contest(NETWORKS[name], arguments.rounds, arguments.device, **options)
        for name in arguments.only
    }
    content = {"machine": facts, "rounds": arguments.rounds, "bars": BARS, "cases": cases}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
