"""psgrad beside the others that compute per-sample gradients, on the same networks and batches, in one
process.

    python benchmarks/rivals.py [--rounds 7] [--only cnn gpt] [--tasks norms clipped] [--json FILE] [--device
    cpu]

For each network there are three tasks: the norms, the sum of the gradients after each is clipped to the
median norm, and all gradients written out. contenders.py has everybody's way of doing each. Before a way is
timed, its numbers are held against psgrad's, and psgrad's against a float64 loop over single samples: a way
that is wrong, or that refuses the network, is named with its reason and not timed. All ways take turns in
every round.

The bars: norms and clipped sums at least 1.3 times as fast as the best of the others; materialised gradients
no slower than any. Needs the packages of requirements-rivals.txt; a rival that is not installed is left out,
and named.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from contenders import RIVALS, TASKS, Problem, Way, plain, psgrad
from models import GPT
from norms import CASES, Case, Timing, draw_tokens, machine, time_in_turn
from script import command_line, print_facts, write_json
from torch import Tensor, nn

# How many times psgrad's time the best rival must take at least.
BARS = {"norms": 1.3, "clipped": 1.3, "materialised": 1.0}
# Relative; some take norms of millions of float32 in a row, which costs them 1e-4. More than this is not
# rounding.
WRONG = 1e-3
CHECKED_SAMPLES = 5


class UntiedGPT(GPT):
    """The GPT as those need it who have a formula a layer type: a head of its own, and a position index for
    every sample.
    """

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.head.weight = nn.Parameter(torch.randn_like(self.token_embedding.weight) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))


UNTIED = Case(
    "the same GPT, head not tied, a position index a sample", UntiedGPT, lambda: draw_tokens(16, 128, 8192)
)
NETWORKS = CASES | {"gpt-untied": UNTIED}


@dataclass(frozen=True)
class Verdict:
    """The best rival's time over psgrad's, whether that keeps the bar, and whether the quartiles of the two
    times overlap.
    """

    best: str
    speedup: float
    bar: float
    overlap: bool

    @property
    def passed(self) -> bool:
        return self.speedup >= self.bar


def pose(case: Case, device: torch.device) -> Problem:
    """The network and its batch, with the median norm to clip to."""
    torch.manual_seed(0)
    model = case.build().to(device)
    inputs, target = (value.to(device) for value in case.draw())
    bound = float(psgrad(Problem(model, inputs, target, 1.0))["norms"]().median())
    return Problem(model, inputs, target, bound)


def exact_gradients(problem: Problem) -> list[Tensor]:
    """[k, *shape] float64 for each parameter: plain autograd, one of the first k samples at a time."""
    model = copy.deepcopy(problem.model).double()
    rows = []
    for inputs, target in zip(
        problem.inputs[:CHECKED_SAMPLES], problem.target[:CHECKED_SAMPLES], strict=True
    ):
        loss = F.cross_entropy(
            model(inputs.double()[None] if inputs.is_floating_point() else inputs[None])[0], target
        )
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def distance(task: str, found: Any, expected: Any) -> float:
    """The relative error: the median over samples, of a clipped sum that of the whole.

    The median, because a ReLU whose input is zero but for rounding may go either way: one sample's gradient
    then differs by a part in a hundred, and neither is wrong. A wrong formula is wrong for most samples.
    """
    if task == "norms":
        return (
            float(((found.double() - expected).abs() / expected).median())
            if found.shape == expected.shape
            else math.inf
        )
    if any(one.shape != other.shape for one, other in zip(found, expected, strict=True)):
        return math.inf
    keep = 0 if task == "clipped" else 1
    apart = sum(
        (one.double() - other).square().flatten(keep).sum(-1)
        for one, other in zip(found, expected, strict=True)
    )
    size = sum(other.double().square().flatten(keep).sum(-1) for other in expected)
    return float((apart / size).sqrt().median())


def check_ours(problem: Problem, ways: dict[str, Way]) -> float:
    """psgrad's relative error, of gradients and of norms, against float64. Raises AssertionError where it is
    wrong itself.
    """
    exact = exact_gradients(problem)
    error = distance(
        "materialised", [gradient[:CHECKED_SAMPLES] for gradient in ways["materialised"]()], exact
    )
    squares = torch.stack([gradient.square().flatten(1).sum(1) for gradient in exact]).sum(0)
    error = max(error, distance("norms", ways["norms"]()[:CHECKED_SAMPLES], squares.sqrt()))
    assert error < 1e-5, f"psgrad is {error:.1e} off; nothing is timed"
    return error


def prepared(
    problem: Problem, build: Callable[[Problem], dict[str, Way]], expected: dict[str, Any]
) -> dict[str, Way | str]:
    """A rival's ways by task; in place of one that can't be timed, why."""
    try:
        ways = build(problem)
    except ImportError as error:
        return dict.fromkeys(TASKS, f"not installed: {error.name}")
    except Exception as error:
        return dict.fromkeys(TASKS, _refusal(error))
    found: dict[str, Way | str] = {}
    for task in [task for task in expected if task in ways]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                error = distance(task, ways[task](), expected[task])
                found[task] = ways[task] if error < WRONG else f"wrong: relative error {error:.0e}"
            except Exception as failure:
                found[task] = _refusal(failure, [str(warning.message) for warning in said])
                ways = build(problem)  # without what a failed pass left behind
    return found


def _refusal(error: Exception, warned: Sequence[str] = ()) -> str:
    """The first line of the error, or of BackPACK's warning that foretold it."""
    foretold = [warning for warning in warned if warning.startswith("Extension saving to")]
    message = (foretold or [f"{type(error).__name__}: {error}"])[0]
    return f"not supported: {message.strip().splitlines()[0]}"[:150]


def judge(task: str, timings: dict[str, Timing]) -> Verdict | None:
    """None where nobody else could do it."""
    rivals = {name: timing for name, timing in timings.items() if name not in ("plain", "psgrad")}
    if not rivals:
        return None
    best = min(rivals, key=lambda name: rivals[name].median)
    ours, theirs = timings["psgrad"], rivals[best]
    overlap = ours.lower_quartile <= theirs.upper_quartile and theirs.lower_quartile <= ours.upper_quartile
    return Verdict(best, theirs.median / ours.median, BARS[task], overlap)


def contest(case: Case, tasks: list[str], rounds: int, device: torch.device) -> dict[str, Any]:
    """Every task on one network: prints its tables, and returns what the JSON has of it."""
    problem = pose(case, device)
    ours = psgrad(problem)
    error = check_ours(problem, ours)
    print(f"\n{case.description}; psgrad's relative error {error:.0e}")
    expected = {"norms": ours["norms"]()} | {
        task: [x.double() for x in ours[task]()] for task in ("clipped", "materialised") if task in tasks
    }
    rivals = {name: prepared(problem, build, expected) for name, build in RIVALS.items()}
    del expected
    gc.collect()

    found: dict[str, Any] = {"error": error}
    for task in tasks:
        able = {name: ways[task] for name, ways in rivals.items() if callable(ways.get(task))}
        refused = {name: ways[task] for name, ways in rivals.items() if isinstance(ways.get(task), str)}
        timings = time_in_turn({"plain": plain(problem), "psgrad": ours[task], **able}, rounds, device)
        verdict = judge(task, timings)
        print_table(task, timings, refused, verdict)
        found[task] = {
            "seconds": {name: asdict(timing) for name, timing in timings.items()},
            "refused": refused,
            "verdict": None if verdict is None else asdict(verdict) | {"passed": verdict.passed},
        }
    return found


def print_table(
    task: str, timings: dict[str, Timing], refused: dict[str, str], verdict: Verdict | None
) -> None:
    print(f"\n  {task:<22}{'median':>11}{'quartiles':>20}{'x plain':>10}{'x psgrad':>10}")
    ours = timings["psgrad"].median
    for name, timing in timings.items():
        quartiles = f"{1e3 * timing.lower_quartile:.1f} .. {1e3 * timing.upper_quartile:.1f}"
        print(
            f"    {name:<20}{1e3 * timing.median:>8.1f}"
            f" ms{quartiles:>20}{timing.ratio:>10.2f}{timing.median / ours:>10.2f}"
        )
    for name, reason in refused.items():
        print(f"    {name:<20} {reason}")
    if verdict is not None:
        outcome = ("pass" if verdict.passed else "FAIL") + (
            " (their quartiles overlap)" if verdict.overlap else ""
        )
        print(
            f"    {verdict.speedup:.2f} times as fast as {verdict.best}, at least {verdict.bar:.1f}:"
            f" {outcome}",
            flush=True,
        )


def versions() -> dict[str, str]:
    found = {}
    for name in ("opacus", "backpack-for-pytorch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "Time psgrad beside torch.func, Opacus and BackPACK.", rounds=7, only=NETWORKS, device=True
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS)
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")  # the rivals' own, on every pass
    facts = machine(arguments.device) | versions()
    print_facts(facts, arguments)
    cases = {
        name: contest(NETWORKS[name], arguments.tasks, arguments.rounds, arguments.device)
        for name in arguments.only
    }
    content = {"machine": facts, "rounds": arguments.rounds, "bars": BARS, "cases": cases}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
