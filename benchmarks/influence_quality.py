"""How well influence scores predict retraining: linear datamodeling scores of psgrad's methods, other
people's, and controls, on digits.

    python benchmarks/influence_quality.py [--cache DIR] [--models 1 3 10] [--only NAME ...] [--json FILE]

The truth: 100 random halves of the 1,437 training digits, three models trained on each (influence_truth.py),
and the loss of 300 queries. A method's score is the mean over queries of Spearman's correlation, over the
halves, of the summed scores with minus the mean loss. Its interval is by the jackknife over halves, which all
queries share, and that of differences is paired. The other 60 queries and 30 other halves are what dampings
are tuned on: each method is there with the damping that it has by default, and with the best of a few.

Scores are of models of the whole training set, one or the mean of several; TRAK is there with models of
halves, too. The bars: psgrad's default method at one model at least .58, and ahead of every rival at one
model by more than the interval of the difference; at as many models ahead of TRAK; EK-FAC at least
kronfluence's; TRAK of ten models ahead of TRAK of one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from influence_contenders import (
    Problem,
    captum_naive,
    captum_tracin,
    dattri_cg,
    dattri_trak,
    kronfluence_factored,
    margin,
    traker,
)
from influence_ours import examples, fitted
from influence_truth import Array, Bench

from benchmarks.script import command_line, write_json
from psgrad.engine.influence.evaluation.controls import controls
from psgrad.engine.influence.evaluation.metrics import ceiling, lds, lds_mean
from psgrad.engine.influence.evaluation.statistics import score_matrix
from psgrad.engine.influence.method import Checkpoint, Method
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientCosine, GradientDot
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.projected import TRAK

MAIN = "psgrad influence"
LEAST = 0.58
WEIGHT_DECAY = 1e-4

# name -> (method, the relative dampings that it is tuned over; none for a method that has no damping)
DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
OURS: dict[str, tuple[Method, tuple[float, ...]]] = {
    MAIN: (Influence(weight_decay=WEIGHT_DECAY), DAMPINGS),
    "psgrad influence, leverage": (Influence(weight_decay=WEIGHT_DECAY, leverage=True), DAMPINGS),
    "psgrad influence, fisher": (Influence(curvature="fisher", weight_decay=WEIGHT_DECAY), DAMPINGS),
    "psgrad ekfac": (EKFAC(weight_decay=WEIGHT_DECAY), DAMPINGS),
    "psgrad ekfac, one draw": (EKFAC(fisher="sampled", draws=1, weight_decay=WEIGHT_DECAY), DAMPINGS),
    "psgrad trak": (TRAK(), DAMPINGS),
    "psgrad gradient_dot": (GradientDot(), ()),
    "psgrad gradient_cosine": (GradientCosine(), ()),
}
SEVERAL = (MAIN, "psgrad ekfac", "psgrad trak")

Ask = Callable[[Problem, Any], torch.Tensor]


@dataclass(frozen=True)
class Rival:
    """ask: scores by a setting, `default` being the library's own or its paper's. settings: what is tuned
    over. models: how many.
    """

    ask: Ask
    default: Any
    settings: Sequence[Any]
    models: tuple[int, ...] = (1,)


RIVALS = {
    "captum NaiveInfluenceFunction": Rival(
        lambda problem, damping: captum_naive(problem, damping),
        1e-6 / 1437,
        (1e-6 / 1437, 1e-4, 1e-3, 3e-3, 1e-2),
    ),
    "captum TracInCP": Rival(lambda problem, _: captum_tracin(problem), None, ()),
    "dattri IF-CG": Rival(
        lambda problem, damping: dattri_cg(problem, damping), 0.0, (0.0, 1e-4, 1e-3, 3e-3, 1e-2)
    ),
    "dattri TRAK": Rival(
        lambda problem, ridge: dattri_trak(problem, ridge), 0.0, (0.0, 0.01, 0.1, 1.0, 10.0), (1, 10)
    ),
    "kronfluence EK-FAC": Rival(
        lambda problem, damping: kronfluence_factored(problem, damping), None, (None, 1e-8, 1e-5, 1e-4, 1e-3)
    ),
    "traker": Rival(
        lambda problem, ridge: traker(problem, ridge), 0.0, (0.0, 0.1, 1.0, 10.0, 100.0), (1, 10)
    ),
}


@dataclass(frozen=True)
class Row:
    """A line of the table. tuned: what was chosen on other halves and queries; None for the default."""

    method: str
    models: int
    tuned: str | None
    scores: Array
    seconds: float


class Table:
    """Rows, as they come."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.rows = bench, list[Row]()
        self.curves: dict[str, dict[str, float]] = {}

    def add(self, method: str, models: int, scores: Array, seconds: float, tuned: str | None = None) -> None:
        self.rows.append(Row(method, models, tuned, scores[:, ~self.bench.tuning_queries], seconds))
        found = lds_mean(self.rows[-1].scores, self.bench.truth.subsets, self.bench.truth.losses)
        print(f"{self.title(self.rows[-1]):<60}{found:>8.3f}{seconds:>9.1f} s", flush=True)

    @staticmethod
    def title(row: Row) -> str:
        of = "one model" if row.models == 1 else f"{row.models} models"
        return f"{row.method}, {of}" + (f", {row.tuned}" if row.tuned else "")

    def worth(self, scores: Array) -> float:
        """On the halves and queries for tuning."""
        tuning = self.bench.tuning
        return lds_mean(scores[:, self.bench.tuning_queries], tuning.subsets, tuning.losses)

    def tune(self, label: str, scored: dict[str, Array], models: int, method: str, seconds: float) -> None:
        """A row of the best of these."""
        curve = {setting: self.worth(scores) for setting, scores in scored.items()}
        self.curves[label] = curve
        best = max(curve, key=lambda setting: curve[setting])
        self.add(method, models, scored[best], seconds, f"tuned: {best}")


def add_ours(table: Table, name: str, models: int, halves: bool = False) -> None:
    """With the damping by default, and tuned."""
    method, dampings = OURS[name]
    bench = table.bench
    problem = bench.problem(bench.halves if halves else bench.whole, models)
    label = f"{name} (halves)" if halves else name
    start = time.perf_counter()
    # TRAK is about the margin, and a query's scalar is a loss; of the other methods' rankings only the scale
    # would change
    fits, queries = fitted(
        problem, method, (lambda output, target: -margin(output, target)) if "trak" in name else _loss
    )
    default = score_matrix(method, fits, queries)
    table.add(label, models, default, time.perf_counter() - start)
    if not dampings or not hasattr(method, "relative_damping"):
        return
    places = [
        (examples(problem.load(number), problem.inputs, problem.target), Checkpoint(number, of=models))
        for number in range(models)
    ]
    scored = {}
    for relative in dampings:
        changed: Any = method
        changed = replace(changed, damping=None, relative_damping=relative)
        again = [changed.fit(*place) for place in places]
        scored[f"{relative:g} of the mean eigenvalue"] = score_matrix(changed, again, queries)
    table.tune(f"{label}, {models}", scored, models, label, time.perf_counter() - start)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output[None], target[None])


def add_rival(table: Table, name: str, models: int, halves: bool = False) -> None:
    rival, bench = RIVALS[name], table.bench
    problem = bench.problem(bench.halves if halves else bench.whole, models)
    label = f"{name} (halves)" if halves else name
    scored: dict[str, Array] = {}
    start = time.perf_counter()
    try:
        default = rival.ask(problem, rival.default).double().numpy()
        table.add(label, models, default, time.perf_counter() - start)
        for setting in rival.settings:
            same = setting == rival.default
            scored[str(setting)] = default if same else rival.ask(problem, setting).double().numpy()
    except ImportError as error:
        print(f"{label:<60} not installed: {error.name}")
        return
    if scored:
        table.tune(f"{label}, {models}", scored, models, label, time.perf_counter() - start)


def add_controls(table: Table) -> None:
    bench = table.bench
    problem = bench.problem(bench.whole, 1)
    model = problem.load()
    asked = examples(model, problem.query_inputs, problem.query_target)
    for name, found in controls(examples(model, problem.inputs, problem.target), asked)[0].items():
        table.add(f"control: {name}", 1, found, 0.0)


def verdicts(means: dict[str, float], found: dict[str, Any]) -> dict[str, bool]:
    """The bars, by title of the rows that there are."""
    main = f"{MAIN}, one model"
    rivals = [name for name in found if name.startswith(tuple(RIVALS)) and "one model" in name]
    least = {name: found[name].ahead_interval[0] for name in rivals}
    bars = {f"{MAIN} at least {LEAST}": means[main] >= LEAST}
    bars |= {f"{MAIN} ahead of {name}": low > 0 for name, low in least.items()}
    for count in (1, 3, 10):
        of = "one model" if count == 1 else f"{count} models"
        for label in ("psgrad trak", "psgrad trak (halves)"):
            if f"{label}, {of}" in means and f"{MAIN}, {of}" in means:
                bars[f"{MAIN}, {of}, ahead of {label}"] = means[f"{MAIN}, {of}"] > means[f"{label}, {of}"]
    if {"psgrad ekfac, one model", "kronfluence EK-FAC, one model"} <= means.keys():
        bars["EK-FAC at least kronfluence's"] = (
            means["psgrad ekfac, one model"] >= means["kronfluence EK-FAC, one model"]
        )
    if {"psgrad trak, one model", "psgrad trak, 10 models"} <= means.keys():
        bars["TRAK of ten models ahead of TRAK of one"] = (
            means["psgrad trak, 10 models"] > means["psgrad trak, one model"]
        )
    return bars


def report(table: Table) -> dict[str, Any]:
    """Prints the table with its intervals, and returns what the JSON has of it."""
    truth = table.bench.truth
    scores = {table.title(row): row.scores for row in table.rows}
    found = lds(scores, truth.subsets, truth.losses, f"{MAIN}, one model")
    best = ceiling(truth.losses)
    print(f"\n{'':<66}{'LDS':>6}{'interval':>18}{'behind the first':>26}")
    content: dict[str, Any] = {
        "ceiling": None if best is None else asdict(best),
        "rows": [],
        "tuning": table.curves,
    }
    for row in sorted(table.rows, key=lambda row: -found[table.title(row)].mean):
        title = table.title(row)
        one = found[title]
        behind = (
            ""
            if one.ahead is None or one.ahead_interval is None
            else f"{one.ahead:+.3f} ({_span(one.ahead_interval)})"
        )
        print(f"{title:<66}{one.mean:>6.3f}{_span(one.interval):>18}{behind:>26}")
        content["rows"].append(
            {"method": row.method, "models": row.models, "tuned": row.tuned, "seconds": row.seconds}
            | {"mean": one.mean, "interval": one.interval, "undefined": one.undefined}
            | {"ahead": one.ahead, "ahead_interval": one.ahead_interval}
        )
    if best is not None:
        print(
            f"one seed against another {best.single:.3f}; what the true expectation would score"
            f" {best.best:.3f}"
        )
    content["bars"] = verdicts({title: one.mean for title, one in found.items()}, found)
    for bar, kept in content["bars"].items():
        print(f"{'pass' if kept else 'FAIL'}: {bar}")
    return content


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} .. {interval[1]:.3f}"


def fill(table: Table, counts: Sequence[int], only: Sequence[str]) -> None:
    for name in OURS:
        if name in only:
            for count in counts:
                if count == 1 or name in SEVERAL:
                    add_ours(table, name, count)
                    if "trak" in name:
                        add_ours(table, name, count, halves=True)
    for name, rival in RIVALS.items():
        if name in only:
            for count in counts:
                if count in rival.models:
                    add_rival(table, name, count)
                    if len(rival.models) > 1:
                        add_rival(table, name, count, halves=True)
    add_controls(table)


def main() -> None:
    names = [*OURS, *RIVALS]
    parser = command_line(
        "Linear datamodeling scores of psgrad's influence methods and other people's, on digits.", only=names
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "psgrad-influence",
        metavar="DIR",
        help="trained models",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        type=int,
        default=[1, 3, 10],
        metavar="N",
        help="of how many models (default: 1 3 10)",
    )
    arguments = parser.parse_args()
    bench = Bench(arguments.cache)
    start = time.perf_counter()
    print(
        f"truth: {bench.truth.losses.shape} outcomes, tuning {bench.tuning.losses.shape},"
        f" {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    table = Table(bench)
    fill(table, sorted({1, *arguments.models}), [MAIN, *arguments.only])
    content = report(table)
    write_json(arguments, {"torch": torch.__version__} | content)


if __name__ == "__main__":
    main()
