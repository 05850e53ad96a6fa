"""How the time of per-sample norms grows: with samples, positions, vocabulary, width and depth.

    python benchmarks/scaling.py [--rounds 5] [--only samples vocabulary] [--json FILE] [--plot FILE]
    [--device cpu] [--tiny]

samples      a run over 10^2 to 10^5 rows of digits (the data set over and over) through the CNN of
configs/digits, in chunks, as the tool
             runs; `fixed` takes 100 rows at a time, `automatic` leaves the size to the tool
positions    GPT of 4 layers of 256, two samples of 64 to 2,048 tokens vocabulary   the same GPT, four samples
of 128 tokens, a table of 1,000 to 100,000 rows; `without head` leaves the output layer out, so that
             the table is only looked up in
width        GPT of 2 layers of 64 to 1,024
depth        GPT of 1 to 16 layers of 128

Beside the norms stands the ordinary forward and backward pass of the same batch, but for samples. For each
series the exponent k of time = c * size^k is fitted on logarithms, by least squares, with its standard error:
where a series is no power law, the exponent is its mean slope, and the plot tells.

The bars: samples linear to within 3 % (exponent between 0.97 and 1.03 in whole chunks of one size); without
head, norms independent of the vocabulary (exponent at most 0.03).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from models import GPT
from norms import draw_tokens, machine
from script import command_line, print_facts, write_json
from torch import Tensor, nn

from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.ragged import Block

DIGITS = Path(__file__).parents[1] / "configs" / "digits"
# |exponent - value| at most so much, by (axis, series).
BARS = {("samples", "fixed"): (1.0, 0.03), ("vocabulary", "norms without head"): (0.0, 0.03)}
UNITS = {
    "samples": "rows of the data set",
    "positions": "positions a sample",
    "vocabulary": "rows of the table",
    "width": "width of a layer",
    "depth": "layers",
}
# Rows of a first run that is not timed: so many that the automatic chunk is predicted.
WARM_ROWS = 3_000
Job = Callable[[], Any]
Chunking = int | Literal["auto"]


@dataclass(frozen=True)
class Fit:
    """time = c * size^exponent; `error` is the exponent's standard error."""

    exponent: float
    error: float


@dataclass(frozen=True)
class Axis:
    """What is varied, and a job for each series at each size."""

    name: str
    sizes: Sequence[int]
    jobs: Callable[[int, torch.device], dict[str, Job]]


# -- samples -------------------------------------------------------------------------------------------------


def digits_network() -> nn.Module:
    """The network of configs/digits, with fresh weights: a time does not depend on them."""
    specification = importlib.util.spec_from_file_location("digits_model", DIGITS / "model.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    network: nn.Module = module.build()
    return network


def over_samples(rows: int, device: torch.device) -> dict[str, Job]:
    with np.load(DIGITS / "digits.npz") as file:
        images, labels = torch.from_numpy(file["image"]), torch.from_numpy(file["label"])
    objective = Objective(digits_network().to(device), F.cross_entropy)

    repeated = ChosenRows(Block((images,), labels), torch.arange(rows) % len(images))

    def run(chunk: Chunking) -> Job:
        def job() -> None:
            stream = Stream(objective.loss, objective.params, repeated, chunk_size=chunk)
            for _ in stream.run(rows, [GradientNorms()]):
                pass

        return job

    return {"fixed": run(100), "automatic": run("auto")}


# -- the GPT -------------------------------------------------------------------------------------------------


class Headless(GPT):
    """The GPT without its output layer: tokens [n, t] to hidden states [n, t, width]."""

    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__(vocabulary, positions, width, layers, heads)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.token_embedding(tokens) + self.position_embedding(positions)))


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def energy(output: Tensor, target: Tensor) -> Tensor:
    """A loss of hidden states that has a gradient everywhere."""
    return (output - target.unsqueeze(-1).remainder(7)).square().mean()


def pair(
    model: nn.Module,
    tokens: Tensor,
    target: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor],
    suffix: str = "",
) -> dict[str, Job]:
    """The norms, and the ordinary pass of the same batch."""
    objective = Objective(model, criterion)

    def norms() -> Tensor:
        return per_sample_square_norms(
            objective.loss, objective.params, (tokens,), target, has_aux=True
        ).square_norms()

    def plain() -> None:
        model.zero_grad()
        criterion(model(tokens), target).backward()

    return {f"norms{suffix}": norms, f"plain{suffix}": plain}


def drawn(n: int, positions: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, target = draw_tokens(n, positions, vocabulary)
    return tokens.to(device), target.to(device)


def over_positions(positions: int, device: torch.device) -> dict[str, Job]:
    return pair(GPT(positions=positions).to(device), *drawn(2, positions, 8192, device), next_token)


def over_vocabulary(rows: int, device: torch.device) -> dict[str, Job]:
    batch = drawn(4, 128, rows, device)
    whole = pair(GPT(rows).to(device), *batch, next_token)
    return whole | pair(Headless(rows, 128, 256, 4, 4).to(device), *batch, energy, " without head")


def over_width(width: int, device: torch.device) -> dict[str, Job]:
    return pair(GPT(1024, 128, width, 2, 4).to(device), *drawn(2, 128, 1024, device), next_token)


def over_depth(layers: int, device: torch.device) -> dict[str, Job]:
    return pair(GPT(1024, 128, 128, layers, 4).to(device), *drawn(2, 128, 1024, device), next_token)


AXES = [
    Axis("samples", (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000), over_samples),
    Axis("positions", (64, 128, 256, 512, 1024, 2048), over_positions),
    Axis("vocabulary", (1_000, 3_000, 10_000, 30_000, 100_000), over_vocabulary),
    Axis("width", (64, 128, 256, 512, 1024), over_width),
    Axis("depth", (1, 2, 4, 8, 16), over_depth),
]

# -- timing --------------------------------------------------------------------------------------------------


def time_axis(axis: Axis, rounds: int, device: torch.device) -> dict[str, list[list[float]]]:
    """series -> seconds [size][round]. Within a round all sizes and series take turns, so that a busy machine
    slows them alike.
    """
    torch.manual_seed(0)
    jobs = {size: axis.jobs(size, device) for size in axis.sizes}
    series = list(jobs[axis.sizes[0]])
    times: dict[str, list[list[float]]] = {name: [[] for _ in axis.sizes] for name in series}
    for name in series:  # code is loaded, kernels are chosen and chunks predicted on a first call
        for size in (
            axis.sizes if axis.name != "samples" else [rows for rows in axis.sizes if rows <= WARM_ROWS]
        ):
            jobs[size][name]()
    for _ in range(rounds):
        for place, size in enumerate(axis.sizes):
            for name in series:
                start = time.perf_counter()
                jobs[size][name]()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times[name][place].append(time.perf_counter() - start)
    return times


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Least squares of log seconds on log sizes."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    x_mean, y_mean = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    exponent = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - y_mean - exponent * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    return Fit(exponent, math.sqrt(rest / max(len(x) - 2, 1) / spread))


def measure(axis: Axis, rounds: int, device: torch.device) -> dict[str, Any]:
    """What the JSON has of one axis; prints it."""
    times = time_axis(axis, rounds, device)
    print(
        f"\n{axis.name} ({UNITS[axis.name]}), milliseconds\n  {'':<20}"
        + "".join(f"{size:>10}" for size in axis.sizes)
        + "   exponent"
    )
    found: dict[str, Any] = {}
    for name, rows in times.items():
        medians = [statistics.median(row) for row in rows]
        fitted = fit(axis.sizes, medians)
        print(
            f"  {name:<20}"
            + "".join(f"{1e3 * value:>10.1f}" for value in medians)
            + f"   {fitted.exponent:.3f} +- {fitted.error:.3f}",
            end="",
        )
        found[name] = {
            "seconds": medians,
            "least": [min(row) for row in rows],
            "most": [max(row) for row in rows],
        } | asdict(fitted)
        if (axis.name, name) in BARS:
            value, width = BARS[axis.name, name]
            passed = abs(fitted.exponent - value) <= width
            found[name] |= {"bar": [value - width, value + width], "passed": passed}
            print(f"   {value - width:.2f} to {value + width:.2f}: {'pass' if passed else 'FAIL'}", end="")
        print(flush=True)
    return {"sizes": list(axis.sizes), "series": found}


# -- the plot ------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind readers can tell apart; the markers differ, too.
STYLES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-"), ("#CC79A7", "D", "--"))


def draw(found: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    """One panel an axis: the medians, the range of the rounds as bars, and each exponent in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7.6), constrained_layout=True)
    panels = list(grid.flat)
    for panel, (name, axis) in zip(panels, found.items(), strict=False):
        for (colour, marker, line), (series, values) in zip(STYLES, axis["series"].items(), strict=False):
            milliseconds = [1e3 * value for value in values["seconds"]]
            below = [
                1e3 * (middle - low) for middle, low in zip(values["seconds"], values["least"], strict=True)
            ]
            above = [
                1e3 * (high - middle) for middle, high in zip(values["seconds"], values["most"], strict=True)
            ]
            label = f"{series}: exponent {values['exponent']:.2f} ± {values['error']:.2f}"
            style = {
                "color": colour,
                "marker": marker,
                "linestyle": line,
                "markersize": 5,
                "linewidth": 1.6,
                "capsize": 2,
            }
            panel.errorbar(axis["sizes"], milliseconds, yerr=[below, above], label=label, **style)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xticks(
            axis["sizes"], labels=[f"{size:,}" for size in axis["sizes"]], rotation=30, ha="right"
        )
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        low, high = panel.get_ylim()
        panel.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
        panel.set_title(name, fontsize=12, fontweight="bold")
        panel.set_xlabel(UNITS[name])
        panel.set_ylabel("time (ms)")
        panel.grid(True, which="major", color="#dddddd", linewidth=0.6)
        panel.legend(fontsize=8.5, loc="upper left", frameon=False)
    for panel in panels[len(found) :]:
        panel.axis("off")
    if len(found) < len(panels):
        words = (
            "Time of per-sample gradient norms (psgrad),\nand of the ordinary forward and backward pass\nof"
            " the same batch (plain).\n\nsamples: the whole data set, in chunks of 100 rows\n(fixed) and of"
            " the tool's choice (automatic);\nelsewhere: one batch.\n\nPoints are medians, bars run from the"
            " fastest round\nto the slowest. Exponents are least squares on\nlogarithms, ± standard"
            f" error.\n\n{facts['device']}, {facts['threads']} threads, torch {facts['torch']}"
        )
        panels[-1].text(
            0, 0.95, words, va="top", fontsize=10, linespacing=1.5, transform=panels[-1].transAxes
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "How the time of per-sample gradient norms grows.",
        rounds=5,
        only=[axis.name for axis in AXES],
        device=True,
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the two smallest sizes of each axis, to see the script run"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    facts = machine(arguments.device)
    print_facts(facts, arguments)
    found = {}
    for axis in AXES:
        if axis.name in arguments.only:
            chosen = Axis(axis.name, axis.sizes[:2], axis.jobs) if arguments.tiny else axis
            found[axis.name] = measure(chosen, arguments.rounds, arguments.device)
    content = {"machine": facts, "rounds": arguments.rounds, "axes": found}
    write_json(arguments, content)
    if arguments.plot is not None:
        draw(found, facts, arguments.plot)


if __name__ == "__main__":
    main()
