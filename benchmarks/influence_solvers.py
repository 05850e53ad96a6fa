"""What the influence solvers are predicted to cost, beside the processor time that they take: where the
constants of choice.py come from.

    python benchmarks/influence_solvers.py [--rounds 1] [--small] [--json FILE]

Each case is a network 64-hidden-outputs, trained for a little while on scikit-learn's digits, with their
label modulo `outputs`. A row is one solver's fit and scores. `predicted` is `Work.operations`, in billions;
`rate` is that over the measured processor seconds. The prediction only has to order the solvers, so what
counts is how far their rates are apart. Below stand the constants of
psgrad/engine/influence/solvers/choice.py as these runs would have them, next to those in use:

    _INNER       the inner products of rows: their time, as a multiple of the predicted
    _PRODUCT     the time of a product of conjugate gradients, for each sample and parameter
    _ITERATIONS  products for each query, and for a hundred of those who share a Krylov space
    _FEWEST      products for each of many hundreds of queries

Times are in operations at the rate of the exact solver.

Run it with OMP_NUM_THREADS=1 on a quiet machine: the median of the rounds is taken.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from influence_ours import examples
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from benchmarks.script import command_line
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import gauss_newton_rows
from psgrad.engine.execution.row_grams import gram_matrix, inner_product_operations
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.solvers import choice
from psgrad.engine.influence.solvers.choice import LARGEST_MATRIX, Work

SOLVERS = ("exact", "dual", "conjugate_gradient")
STEPS, HUNDREDS = 100, 5
MEMORY = 16 << 30  # told to the prediction, so that it leaves out nothing that is measured


@dataclass(frozen=True)
class Case:
    """A network 64-hidden-outputs, trained on `count` digits and asked about `queries` of them."""

    hidden: int
    outputs: int
    count: int
    queries: int

    def data(self) -> tuple[Examples, Examples]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, self.hidden), nn.Tanh(), nn.Linear(self.hidden, self.outputs))
        digits = load_digits()
        inputs, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target % self.outputs)
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(STEPS):
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs[: self.count]), labels[: self.count]).backward()
            optimiser.step()
        return examples(model, inputs[: self.count], labels[: self.count]), examples(
            model, inputs[-self.queries :], labels[-self.queries :]
        )

    @property
    def size(self) -> int:
        return 65 * self.hidden + (self.hidden + 1) * self.outputs

    def work(self, training: Examples) -> Work:
        inner = inner_product_operations(gauss_newton_rows(training))
        return Work(self.size, self.count, self.count * self.outputs, inner, self.queries, 1.0, MEMORY)


# The networks and sizes of the table in docs/explanation/influence.md, about, and one with many queries.
CASES = (
    Case(16, 3, 1000, 5),
    Case(16, 3, 1000, 800),
    Case(64, 10, 500, 1),
    Case(64, 10, 500, 50),
    Case(64, 10, 500, 200),
    Case(307, 2, 1500, 20),
    Case(500, 10, 400, 100),
    Case(2000, 10, 400, 100),
)
SMALL = (Case(2, 3, 30, 2), Case(2, 3, 30, 120))


def processor_seconds(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The median over some rounds of the processor time, and what the last one returned."""
    times, found = [], None
    for _ in range(rounds):
        start = time.process_time()
        found = run()
        times.append(time.process_time() - start)
    return statistics.median(times), found


def measured(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row for each solver that would be chosen for the case."""
    training, queries = case.data()
    work, rows = case.work(training), []
    for solver in SOLVERS:
        if solver not in work.operations() or (solver == "exact" and case.size > LARGEST_MATRIX):
            continue
        rows.append(_row(case, solver, work, training, queries, rounds))
    return rows


def _row(
    case: Case, solver: Any, work: Work, training: Examples, queries: Examples, rounds: int
) -> dict[str, Any]:
    operations = work.operations()[solver]

    def run() -> Any:
        fitted = Influence(solver=solver).fit(training, Checkpoint(queries=case.queries))
        for _ in fitted.scores(queries):
            pass
        return fitted

    seconds, fitted = processor_seconds(run, rounds)
    row = {"solver": solver, "operations": operations, "seconds": seconds, "rate": operations / seconds}
    if solver == "dual":
        assert work.rows is not None
        row["kernel_operations"] = work.rows**2 * work.inner
        row["kernel_seconds"] = processor_seconds(lambda: gram_matrix(fitted.rows), rounds)[0]
    if solver == "conjugate_gradient":
        behind = (
            choice._PRECONDITIONER if case.queries < choice._MANY else 0
        )  # which the solver does not count as its own
        row |= {
            "products": fitted.facts.solved.products,
            "predicted_products": work.solved_products() - behind,
            "preconditioner": behind,
        }
    return row


def constants(found: list[tuple[Case, list[dict[str, Any]]]]) -> dict[str, dict[str, float]]:
    """Of each constant what these runs would have it be, and what it is. A median over the cases that say
    something about it.
    """
    exact = statistics.median([row["rate"] for _, rows in found for row in rows if row["solver"] == "exact"])
    parts: dict[str, list[float]] = {"_INNER": [], "_PRODUCT": [], "_ITERATIONS": [], "_FEWEST": []}
    for case, rows in found:
        for row in rows:
            if row["solver"] == "dual":
                parts["_INNER"].append(row["kernel_seconds"] * exact / row["kernel_operations"])
            if row["solver"] == "conjugate_gradient":
                parts["_PRODUCT"].append(
                    row["seconds"]
                    * exact
                    / ((row["products"] + row["preconditioner"]) * case.count * case.size)
                )
                name = "_FEWEST" if case.queries >= HUNDREDS * choice._MANY else "_ITERATIONS"
                parts[name].append(
                    row["products"] / (case.queries if name == "_FEWEST" else min(case.queries, choice._MANY))
                )
    return {
        name: {"measured": statistics.median(values), "in_use": getattr(choice, name)}
        for name, values in parts.items()
        if values
    }


def main() -> None:
    parser = command_line(
        "Hold the predicted work of influence solvers against their processor time.", rounds=1
    )
    parser.add_argument("--small", action="store_true", help="cases that take no time, and say nothing")
    arguments = parser.parse_args()
    titles = f"{'parameters':>10} {'samples':>8} {'outputs':>8} {'queries':>8}"
    print(f"{titles}  {'solver':<20}{'predicted':>10}{'seconds':>9}{'rate':>8}")
    found = []
    measured(SMALL[0], 1)  # what is imported and allocated once
    for case in SMALL if arguments.small else CASES:
        rows = measured(case, arguments.rounds)
        found.append((case, rows))
        for row in rows:
            sizes = f"{case.size:>10,} {case.count:>8,} {case.outputs:>8} {case.queries:>8}"
            times = f"{row['operations'] / 1e9:>10.2f}{row['seconds']:>9.2f}{row['rate'] / 1e9:>8.2f}"
            products = (
                f"  {row['products']:,} of {row['predicted_products']:,.0f} predicted products"
                if "products" in row
                else ""
            )
            print(f"{sizes}  {row['solver']:<20}{times}{products}")
        fastest, least = (
            min(rows, key=lambda row, key=key: row[key])["solver"] for key in ("seconds", "operations")
        )
        print(f"{'':>40}fastest: {fastest}; least predicted: {least}")
    said = constants(found)
    for name, values in said.items():
        print(f"{name:<12} {values['measured']:8.2f} measured {values['in_use']:8.2f} in use")
    if arguments.json is not None:
        cases = [{**case.__dict__, "parameters": case.size, "solvers": rows} for case, rows in found]
        content = {
            "machine": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cases": cases,
            "constants": said,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
