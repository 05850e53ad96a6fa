"""What the measures of `psgrad analyze` cost, as a multiple of the norm pass: each by itself, and all of a
kind together.

    python benchmarks/measures.py [--rounds 11] [--only NAME ...] [--json FILE]

The network and the images are those of configs/digits.yaml. The ways take turns in every round of one
process, and each is a whole run from the images on: the stream of gradients, the first pass, the second look
where measures take one, their own passes, and what is gathered, without tables and reports. `norms` is the
run without measures. Beside the clock's seconds stand the processor's, of all cores together, which others'
work does not count in.

Kinds of measures:

    one pass             they look at the gradients and outputs of the one pass; together at most 1.5 times
    the norm pass own passes           they go over the samples again by themselves (other gradients than
    those of the parameters) second derivatives   they differentiate gradients checkpoints          they look
    at several checkpoints, and are not timed here
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from inner import DIGITS, digits_network
from norms import machine
from script import command_line, print_facts, write_json

from psgrad.commands.measure_setup import joined_summary
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective, Summary
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.measures.builtin.outputs import Predictions, summary_for
from psgrad.engine.measures.mean_gradient import MeanGradient
from psgrad.engine.measures.measure import Measure, Setting
from psgrad.engine.measures.passes import second_pass
from psgrad.errors import MeasureError
from psgrad.plugins import MEASURES, own_classes
from psgrad.ragged import Block

# All measures of the one pass together, as a multiple of the norm pass, on two CPU cores.
BAR = 1.5
SECOND_DERIVATIVES = ("hessian_top_eigenvalue", "hessian_trace")
# It takes the gradients of outputs when all samples have passed.
AFTERWARDS = ("ntk",)


@dataclass(frozen=True)
class Timing:
    """Seconds over the rounds: by the clock, and of the processor's cores together; each with its ratio to
    the norm pass.
    """

    median: float
    lower_quartile: float
    upper_quartile: float
    ratio: float
    processor: float
    processor_ratio: float


class Digits:
    """The images of configs/digits.yaml, their labels, and the network."""

    def __init__(self, samples: int | None = None) -> None:
        data = numpy.load(DIGITS / "digits.npz")
        self.images, self.labels = (torch.from_numpy(data[key])[:samples] for key in ("image", "label"))
        self.model = digits_network(torch.device("cpu"))

    def setting(self, summary: Summary) -> Setting:
        """Made anew for each run, so that none knows what another found."""
        objective = Objective(self.model, F.cross_entropy, summary)
        return Setting(Examples(objective, Block((self.images,), self.labels)), "class", self.labels, 10)

    def run(self, measures: Sequence[Measure]) -> None:
        """One whole run with these measures."""
        needed = [MeanGradient()] if any(MeanGradient.name in each.needs for each in measures) else []
        every = [GradientNorms(), Predictions(summary_for("class")), *needed, *measures]
        setting = self.setting(partial(joined_summary, every))
        for measure in every:
            measure.prepare(setting)
        stream, count = setting.examples.stream, len(setting)
        again = [measure for measure in every if measure.needs_second_pass]
        rows = _joined(stream.run(count, every, materialise=True))
        passes = [own for measure in every for own in measure.passes()]
        if again:
            for measure in again:
                measure.between()
            passes.insert(0, second_pass(again, setting.examples))
        for own in passes:
            rows |= _joined(own.run(range(len(setting)), stream.chunk_size))
        rows["ok"] = torch.isfinite(rows["loss"]) & torch.isfinite(rows["grad_norm"])
        for measure in measures:
            measure.gather(rows)


def _joined(chunks: Any) -> dict[str, torch.Tensor]:
    parts = [columns.values for columns in chunks]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def kinds(problem: Digits, names: Sequence[str]) -> dict[str, list[str]]:
    """kind -> measures of that kind, among those of these names."""
    found: dict[str, list[str]] = {
        "one pass": [],
        "own passes": [],
        "second derivatives": [],
        "checkpoints": [],
    }
    for name in names:
        measure = own_classes(MEASURES)[name]()
        try:
            setting = problem.setting(measure.summary)
            MeanGradient().prepare(setting)
            measure.prepare(setting)
            own = bool(measure.passes()) or name in AFTERWARDS
        except MeasureError:
            found["checkpoints"].append(name)
            continue
        found[
            "second derivatives" if name in SECOND_DERIVATIVES else "own passes" if own else "one pass"
        ].append(name)
    return found


def with_needed(names: Sequence[str]) -> list[Measure]:
    """The measures of these names, those that they need before them."""
    found: dict[str, Measure] = {}

    def add(name: str) -> None:
        measure = own_classes(MEASURES)[name]()
        for each in measure.needs:
            add(each)
        found.setdefault(name, measure)

    for name in names:
        add(name)
    return list(found.values())


def time_in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Every way once a round, after a first call that is thrown away."""
    for way in ways.values():
        way()
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began, worked = time.perf_counter(), time.process_time()
            way()
            clock[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - worked)
    base = statistics.median(clock["norms"]), statistics.median(processor["norms"])
    found = {}
    for name in ways:
        lower, middle, upper = (
            torch.tensor(clock[name]).double().quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        )
        worked = statistics.median(processor[name])
        found[name] = Timing(middle, lower, upper, middle / base[0], worked, worked / base[1])
    return found


def main() -> None:
    parser = command_line(
        "Time the measures of psgrad analyze against the norm pass.", rounds=11, only=own_classes(MEASURES)
    )
    parser.add_argument("--samples", type=int, help="how many of the digits (default: all)")
    arguments = parser.parse_args()
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    problem = Digits(arguments.samples)
    sorted_names = kinds(problem, arguments.only)
    ways: dict[str, Callable[[], Any]] = {"norms": lambda: problem.run([])}
    for kind in ("one pass", "own passes", "second derivatives"):
        names = sorted_names[kind]
        ways |= {name: lambda name=name: problem.run(with_needed([name])) for name in names}  # type: ignore[misc]
        if len(names) > 1:
            ways[f"all: {kind}"] = lambda names=names: problem.run(with_needed(names))  # type: ignore[misc]
    timings = time_in_turn(ways, arguments.rounds)
    print(f"  {'':<28}{'median':>10}{'quartiles':>20}{'x norms':>10}{'processor':>11}")
    for name, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.0f} .. {1e3 * timing.upper_quartile:.0f}"
        numbers = (
            f"{1e3 * timing.median:>7.0f}"
            f" ms{quartiles:>20}{timing.ratio:>10.2f}{timing.processor_ratio:>11.2f}"
        )
        bar = (
            f"   at most {BAR}: {'pass' if timing.ratio <= BAR else 'FAIL'}"
            if name == "all: one pass"
            else ""
        )
        print(f"  {name:<28}{numbers}{bar}", flush=True)
    content = {
        "machine": facts,
        "rounds": arguments.rounds,
        "samples": len(problem.images),
        "bar": BAR,
        "kinds": sorted_names,
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
    }
    write_json(arguments, content)


if __name__ == "__main__":
    main()
