"""What it costs to project per-sample gradients of twenty million parameters to a few thousand numbers each.

    python benchmarks/project.py [--samples 32] [--columns 4096] [--rounds 5] [--only sparse two-sided]
    [--json FILE] [--device cpu]

A perceptron 1024-4096-4096-10 and one batch. Its pass forward and back is run before the clock starts; what
is timed goes from its factors to the [samples, columns] numbers:

    rademacher   independent signs, columns x parameters of them: they are made anew for each call and shared
    by its samples sparse       a count sketch, one sign a parameter two-sided    a sketch of each weight's
    rows and of its columns, as many columns for each parameter

Beside each its rival, which takes the samples' gradients as one matrix, as TRAK and its kin do: it writes
them out, and multiplies by blocks of a random matrix from PyTorch's generator, adds its columns up by an
index, or multiplies from two sides. The dense rival is timed on a few columns, and the time multiplied
(`--rival-columns`).

Peak is the process's own high-water mark over what it held with the factors, in a fresh process for each way
(Linux only). `error` is the root mean square error of the samples' inner products, over the product of their
norms: near 1 / sqrt(columns) for the first two.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from memory import resident
from models import mlp
from norms import machine, seconds
from script import command_line, print_facts, write_json
from torch import Tensor

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import (
    PerSampleGradients,
    Projection,
    Rademacher,
    Sparse,
    TwoSided,
    per_sample_gradients,
)

WIDTHS = (1024, 4096, 4096, 10)
KINDS = ("rademacher", "sparse", "two-sided")


@dataclass(frozen=True)
class Found:
    """One way's numbers: seconds a call (the dense rival's for all columns), bytes at the peak, None where
    the system does not tell.
    """

    seconds: float
    peak: int | None


class Contest:
    """The ways, on one network and the factors of one batch."""

    def __init__(self, samples: int, columns: int, rival_columns: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.columns, self.rival_columns = columns, min(rival_columns, columns)
        objective = Objective(mlp(WIDTHS).to(device), F.cross_entropy)
        inputs, target = (
            torch.randn(samples, WIDTHS[0], device=device),
            torch.randint(WIDTHS[-1], (samples,), device=device),
        )
        found = per_sample_gradients(objective.loss, objective.params, (inputs,), target, has_aux=True)
        self.gradients: PerSampleGradients = found
        self.parameters = sum(gradient.shape.numel() for gradient in found.gradients.values())

    def projection(self, kind: str) -> Projection:
        if kind == "two-sided":
            side = math.isqrt(self.columns)
            return TwoSided(side, side)
        return Rademacher(self.columns) if kind == "rademacher" else Sparse(self.columns)

    def ours(self, kind: str) -> Tensor:
        return self.gradients.project(self.projection(kind))

    def rival(self, kind: str) -> Tensor:
        """The like, from gradients that are written out."""
        written = self.gradients.materialise()
        if kind == "two-sided":
            return torch.cat([self._from_two_sides(gradient) for gradient in written.values()], 1)
        rows = torch.cat([gradient.flatten(1) for gradient in written.values()], 1)
        del written
        generator = torch.Generator(rows.device).manual_seed(0)
        if kind == "sparse":
            index = torch.randint(self.columns, (self.parameters,), generator=generator, device=rows.device)
            signs = torch.randint(2, (self.parameters,), generator=generator, device=rows.device) * 2.0 - 1
            return torch.zeros(len(rows), self.columns, device=rows.device).index_add_(
                1, index, rows.mul_(signs)
            )
        parts = []
        for start in range(0, self.rival_columns, 8):
            matrix = torch.empty(self.parameters, min(8, self.rival_columns - start), device=rows.device)
            parts.append(rows @ matrix.bernoulli_(0.5, generator=generator).mul_(2).sub_(1))
        return torch.cat(parts, 1)

    def _from_two_sides(self, gradient: Tensor) -> Tensor:
        side = math.isqrt(self.columns)
        if gradient.dim() == 2:
            return gradient @ torch.randn(gradient.shape[1], side * side, device=gradient.device)
        left, right = (torch.randn(size, side, device=gradient.device) for size in gradient.shape[1:])
        return (left.t() @ gradient @ right).flatten(1)

    def error(self, rows: Tensor) -> float:
        """Root mean square error of inner products of two projected samples, over the product of
        their norms.
        """
        rows = rows.double()
        exact = sum(
            (
                (left @ left.t()) * (right @ right.t()) if right is not None else left @ left.t()
                for left, right in self._factors()
            ),
            start=torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device),
        )
        lengths = exact.diagonal().sqrt()
        error = (rows @ rows.t() - exact) / (lengths * lengths.unsqueeze(1))
        apart = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        return error[apart].square().mean().sqrt().item()

    def _factors(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each parameter's factors in float64: one position a weight."""
        found: list[tuple[Tensor, Tensor | None]] = []
        for gradient in self.gradients.gradients.values():
            factors = [factor.double().flatten(1) for factor in gradient.terms[0].term.factors]
            found.append((factors[0], factors[1] if len(factors) > 1 else None))
        return found

    def ways(self, kind: str) -> dict[str, Callable[[], Any]]:
        return {"psgrad": lambda: self.ours(kind), "rival": lambda: self.rival(kind)}

    def share(self, kind: str, way: str) -> float:
        """What a call's time is multiplied by: the dense rival does some of the columns."""
        return self.columns / self.rival_columns if (kind, way) == ("rademacher", "rival") else 1.0


def peak(arguments: argparse.Namespace, kind: str, way: str) -> int | None:
    """The high-water mark of one way in a process of its own."""
    if arguments.device.type != "cpu" or not Path("/proc/self/clear_refs").exists():
        return None
    # the rival's memory does not grow with columns that are done one block after the other
    sizes = [
        "--samples",
        arguments.samples,
        "--columns",
        arguments.columns,
        "--rival-columns",
        min(8, arguments.columns),
    ]
    command = [sys.executable, str(Path(__file__).resolve()), "--peak", kind, way, *map(str, sizes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(contest: Contest, kind: str, arguments: argparse.Namespace) -> tuple[dict[str, Found], float]:
    """Both ways in turn, the dense ones once, as they take their time; and the error of psgrad's numbers."""
    rounds = 1 if kind == "rademacher" else arguments.rounds
    error = math.nan
    taken: dict[str, list[float]] = {way: [] for way in contest.ways(kind)}
    for number in range(rounds + (kind != "rademacher")):
        for way, call in contest.ways(kind).items():
            rows: list[Tensor] = []
            spent = seconds(
                lambda call=call, rows=rows: rows.append(call()), 1, arguments.device
            ) * contest.share(kind, way)
            error = contest.error(rows[0]) if way == "psgrad" else error
            if number or kind == "rademacher":  # a first call is thrown away
                taken[way].append(spent)
    return {way: Found(median(times), peak(arguments, kind, way)) for way, times in taken.items()}, error


def print_rows(contest: Contest, kind: str, found: dict[str, Found], error: float) -> None:
    one = 4 * contest.parameters
    for way, numbers in found.items():
        held = "" if numbers.peak is None else f"{numbers.peak / 1e6:>10,.0f} MB{numbers.peak / one:>10.2f}"
        each = 1e3 * numbers.seconds / len(contest.gradients)
        tail = (
            f"   error {error:.4f}"
            if way == "psgrad"
            else f"   {numbers.seconds / found['psgrad'].seconds:.1f} times psgrad's time"
        )
        print(f"  {kind:<12}{way:<8}{numbers.seconds:>10.3f} s{each:>12.2f} ms{held}{tail}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(
        "Time random projections of per-sample gradients against writing the gradients out.",
        only=KINDS,
        device=True,
    )
    parser.add_argument("--samples", type=int, default=32, help="in the batch (default: %(default)s)")
    parser.add_argument(
        "--columns", type=int, default=4096, help="of the projection, a square number (default: %(default)s)"
    )
    parser.add_argument(
        "--rival-columns",
        type=int,
        default=16,
        help="that the dense rival is timed on (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="timings of each way but the dense ones (default: %(default)s)"
    )
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "WAY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    contest = Contest(arguments.samples, arguments.columns, arguments.rival_columns, arguments.device)
    if arguments.peak:
        kind, way = arguments.peak
        names = list(contest.gradients.gradients)
        contest.gradients.select(names[-1:]).project(contest.projection(kind))  # loads the code
        if (kind, way) == (
            "rademacher",
            "psgrad",
        ):  # block by block: what it holds does not grow with the parameters
            contest.gradients = contest.gradients.select(names[:1])
        print(resident(contest.ways(kind)[way]))
        return
    facts = machine(arguments.device)
    print_facts(facts, arguments)
    print(f"{contest.parameters:,} parameters, {arguments.samples} samples, to {arguments.columns} columns")
    print(f"  {'':<20}{'a batch':>12}{'a sample':>15}{'peak':>13}{'of one sample gradient':>24}")
    results: dict[str, Any] = {}
    for kind in arguments.only:
        found, error = measure(contest, kind, arguments)
        print_rows(contest, kind, found, error)
        results[kind] = {"error": error, **{way: asdict(numbers) for way, numbers in found.items()}}
    sizes = {"parameters": contest.parameters, "samples": arguments.samples, "columns": arguments.columns}
    write_json(arguments, {"machine": facts, **sizes, "kinds": results})


if __name__ == "__main__":
    main()
