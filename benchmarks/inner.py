"""What the inner products of per-sample gradients of two sets cost, beside gradients that are written out and
multiplied.

    python benchmarks/inner.py [--samples 1000] [--others 1000] [--rounds 11] [--json FILE] [--device cpu]

The network and the images are those of configs/digits.yaml. All ways take turns in every round of one
process, so that a busy machine slows them alike; medians and quartiles, and the processor's seconds beside
the clock's, which others' work does not count in.

    with the factors there       one pass over each set is done
      written out                each parameter's gradients of both sets written out, multiplied as matrices,
      and added up joined                     the same, all parameters side by side in one matrix for each set
      inner                      grads.inner(others) gram                       grads.gram(), of one set with
      itself

    with the passes              from the images on
      torch.func                 vmap(grad) of both sets, each parameter's gradients multiplied as matrices
      written out, inner         as above

Before anything is timed, all are held against products in float64 of gradients that are written out.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from norms import machine
from safetensors.torch import load_file
from script import command_line, print_facts, write_json
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients

DIGITS = Path(__file__).parent.parent / "configs" / "digits"
# Of a thousand by a thousand, on two CPU cores, with the factors there: how many times faster than the better
# of the two rivals.
BAR = 5.0
RIVALS = ("written out", "joined")
FACTORS = "with the factors there"


@dataclass(frozen=True)
class Timing:
    """Seconds over the rounds: by the clock, and of the processor's cores together."""

    median: float
    lower_quartile: float
    upper_quartile: float
    processor: float


def digits_network(device: torch.device) -> nn.Module:
    spec = importlib.util.spec_from_file_location("digits_model", DIGITS / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.build()
    model.load_state_dict(load_file(DIGITS / "model.safetensors"))
    return model.to(device)


def multiplied(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """[n, m], parameter by parameter."""
    total: Any = 0
    for name, value in one.items():
        total = total + value.flatten(1) @ other[name].flatten(1).t()
    return total


def joined(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten(1) for value in gradients.values()], 1)


class Contest:
    """Two sets of images, the digits' first and last, and the ways to the inner products of their
    gradients.
    """

    def __init__(self, samples: int, others: int, device: torch.device) -> None:
        self.model = digits_network(device)
        self.objective = Objective(self.model, F.cross_entropy)
        data = numpy.load(DIGITS / "digits.npz")
        images, labels = (torch.from_numpy(data[key]).to(device) for key in ("image", "label"))
        if max(samples, others) > len(images):
            raise SystemExit(f"there are {len(images)} images")
        self.sets = [
            (images[part], labels[part]) for part in (slice(0, samples), slice(len(images) - others, None))
        ]
        self.one, self.other = (self.gradients(*each) for each in self.sets)

    def gradients(
        self, images: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32
    ) -> PerSampleGradients:
        params = {name: value.to(dtype) for name, value in self.objective.params.items()}
        return per_sample_gradients(self.objective.loss, params, (images.to(dtype),), labels, has_aux=True)

    def torch_func(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        def loss_of_one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(
                torch.func.functional_call(self.model, parameters, (image[None],))[0], label
            )

        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(parameters, images, labels)

    def with_factors(self) -> dict[str, Callable[[], Tensor]]:
        one, other = self.one, self.other
        return {
            "written out": lambda: multiplied(one.materialise(), other.materialise()),
            "joined": lambda: joined(one.materialise()) @ joined(other.materialise()).t(),
            "inner": lambda: one.inner(other),
            "gram": one.gram,
        }

    def with_passes(self) -> dict[str, Callable[[], Tensor]]:
        one, other = self.sets
        return {
            "torch.func": lambda: multiplied(self.torch_func(*one), self.torch_func(*other)),
            "written out": lambda: multiplied(
                self.gradients(*one).materialise(), self.gradients(*other).materialise()
            ),
            "inner": lambda: self.gradients(*one).inner(self.gradients(*other)),
        }

    def errors(self) -> dict[str, dict[str, float]]:
        """The largest error of each way, by the lengths of the two gradients.

        With the factors there, beside the products in float64 of the same gradients; with the passes, of
        gradients that were float64 from the images on, as the passes round, too.
        """
        found = {}
        for title, ways in self.parts().items():
            sides = (
                (self.one, self.other)
                if title == FACTORS
                else [self.gradients(*each, torch.float64) for each in self.sets]
            )
            x, y = (
                joined({name: value.double() for name, value in each.materialise().items()}) for each in sides
            )
            found[title] = {}
            for name, way in ways.items():
                right = x if name == "gram" else y
                lengths = x.norm(dim=1)[:, None] * right.norm(dim=1)
                found[title][name] = float(((way() - x @ right.t()).abs() / lengths).max())
        return found

    def parts(self) -> dict[str, dict[str, Callable[[], Tensor]]]:
        return {FACTORS: self.with_factors(), "with the passes": self.with_passes()}


def time_in_turn(ways: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, Timing]:
    """Every way once a round, after a call of each that is thrown away."""
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start, started = time.perf_counter(), time.process_time()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                clock[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - started)
    timings = {}
    for name, seconds in clock.items():
        lower, median, upper = torch.tensor(seconds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        timings[name] = Timing(median, lower, upper, statistics.median(processor[name]))
    return timings


def operations(ways: dict[str, Callable[[], Any]]) -> dict[str, int]:
    """Floating-point operations of matrix products; convolutions are not among them, and are the same for
    all.
    """
    found = {}
    for name, way in ways.items():
        with FlopCounterMode(display=False) as counter:
            way()
        counts = counter.get_flop_counts()["Global"]
        found[name] = sum(count for operator, count in counts.items() if "mm" in str(operator))
    return found


def print_table(
    title: str, timings: dict[str, Timing], flops: dict[str, int], errors: dict[str, float]
) -> None:
    print(
        f"\n{title}\n "
        f" {'':<12}{'median':>10}{'quartiles':>20}{'processor':>13}"
        f"{'inner is':>12}{'products':>14}{'error':>9}"
    )
    ours = timings["inner"]
    for name, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.0f} .. {1e3 * timing.upper_quartile:.0f}"
        faster = f"{timing.median / ours.median:.1f}x" if name not in ("inner", "gram") else ""
        error = f"{errors[name]:.0e}"
        row = (
            f"{1e3 * timing.median:>7.0f} ms{quartiles:>20}{1e3 * timing.processor:>10.0f}"
            f" ms{faster:>12}{flops[name] / 1e9:>9.1f} GFlop"
        )
        print(f"  {name:<12}{row}{error:>9}")


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "Time inner products of per-sample gradients against writing them out.", rounds=11, device=True
    )
    parser.add_argument("--samples", type=int, default=1000, help="of the first set (default: %(default)s)")
    parser.add_argument("--others", type=int, default=1000, help="of the second (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    facts = machine(arguments.device)
    print_facts(facts, arguments)
    print(f"inner products of {arguments.samples} by {arguments.others} gradients of the digits CNN")
    contest = Contest(arguments.samples, arguments.others, arguments.device)
    errors = contest.errors()
    parts: dict[str, Any] = {}
    for title, ways in contest.parts().items():
        timings, flops = time_in_turn(ways, arguments.rounds, arguments.device), operations(ways)
        print_table(title, timings, flops, errors[title])
        parts[title] = {
            name: asdict(timing) | {"operations": flops[name]} for name, timing in timings.items()
        }
        if title == FACTORS:
            ratio = min(timings[name].median for name in RIVALS) / timings["inner"].median
            print(
                f"  at least {BAR:g}x faster than the better of {' and '.join(RIVALS)}: {ratio:.1f}x,"
                f" {'pass' if ratio >= BAR else 'FAIL'}"
            )
    sizes = {"samples": arguments.samples, "others": arguments.others, "rounds": arguments.rounds}
    content = {"machine": facts, **sizes, "bar": BAR, "errors": errors, "parts": parts}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
