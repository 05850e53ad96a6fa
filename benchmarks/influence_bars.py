"""Seconds of influence scores by solves, of 360 queries on 1,437 digits, beside others' ways to the numbers.

    python benchmarks/influence_bars.py [--only NAME ...] [--json FILE]

    exact   4,810 parameters: the Gauss-Newton matrix materialised and factored; bar 2 s. The rival has its
            rows by torch.func's jacrev, one matrix product and one Cholesky factor, all in float64
    ten     the same at ten checkpoints; bar 15 s
    sampled the same by one random row of the curvature for each example
    ekfac   974,710 parameters; bar 5 s. The rival, if it is installed, is kronfluence; both have the
            empirical Fisher, so that nothing is drawn
    dual    974,710 parameters, by the inner products of the curvature's rows; bar 60 s
    dual, sampled   the same by one random row for each example

Fit and scores together, of the wall clock, after one run that imports what is imported once. Scores of psgrad
and a rival are compared before anything is timed. Run it on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from influence_contenders import Problem, kronfluence_factored
from influence_ours import scores
from influence_truth import Bench
from script import command_line, write_json
from torch import Tensor, nn

from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.influence import Influence

BARS = {"exact": 2.0, "ten": 15.0, "ekfac": 5.0, "dual": 60.0, "sampled": 15.0, "dual, sampled": 60.0}
CHECKPOINTS, STEPS, DAMPING = 10, 20, 1e-3
WRONG = 1e-3


def posed(model: nn.Module, cache: Path, checkpoints: int = 1) -> Problem:
    """The digits, and a model after each of some times of a few steps of Adam."""
    training, queries = Bench(cache).data
    optimizer, states = torch.optim.Adam(model.parameters(), 1e-3), []
    assert training.target is not None
    assert queries.target is not None
    for _ in range(checkpoints):
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(training.inputs[0]), training.target).backward()
            optimizer.step()
        states.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    rates = (1.0,) * checkpoints
    return Problem(
        model, training.inputs[0], training.target, queries.inputs[0], queries.target, states, rates
    )


def small(cache: Path, checkpoints: int = 1) -> Problem:
    torch.manual_seed(0)
    return posed(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), cache, checkpoints)


def large(cache: Path) -> Problem:
    torch.manual_seed(0)
    layers = nn.Linear(64, 950), nn.ReLU(), nn.Linear(950, 950), nn.ReLU(), nn.Linear(950, 10)
    return posed(nn.Sequential(*layers), cache)


def plain_exact(problem: Problem) -> Tensor:
    """[n, m] float64 of the first checkpoint."""
    model = problem.load(0).double()
    params = {name: value.detach() for name, value in model.named_parameters()}

    def output(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x.unsqueeze(0),)).squeeze(0)  # type: ignore[no-any-return]

    def rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
        each = torch.func.vmap(torch.func.jacrev(output), (None, 0))(params, inputs.double())
        jacobian = torch.cat([value.flatten(2) for value in each.values()], dim=2)
        return jacobian, model(inputs.double()).detach().softmax(1)

    jacobian, chances = rows(problem.inputs)
    asked, asked_chances = rows(problem.query_inputs)
    gradient, query = (
        torch.einsum("nc,ncp->np", chance - nn.functional.one_hot(target, 10), each)
        for each, chance, target in (
            (jacobian, chances, problem.target),
            (asked, asked_chances, problem.query_target),
        )
    )
    mean = torch.einsum("nc,ncp->np", chances, jacobian)
    curved = (chances.sqrt().unsqueeze(2) * (jacobian - mean.unsqueeze(1))).flatten(0, 1)
    matrix = curved.t() @ curved
    matrix.diagonal().add_(DAMPING * len(jacobian))
    return gradient @ torch.cholesky_solve(query.t(), torch.linalg.cholesky(matrix))


def cases(cache: Path) -> dict[str, dict[str, Callable[[], Tensor]]]:
    exact, dual = Influence(solver="exact", damping=DAMPING), Influence(solver="dual", damping=DAMPING)
    sampled = Influence(curvature="sampled", damping=DAMPING)
    factored = EKFAC(fisher="empirical", damping=DAMPING, exact_blocks=0)
    one, ten, wide = small(cache), small(cache, CHECKPOINTS), large(cache)
    rival: dict[str, Callable[[], Tensor]] = {}
    if importlib.util.find_spec("kronfluence") is not None:
        rival["kronfluence"] = lambda: kronfluence_factored(wide, DAMPING, empirical=True, batch_size=360)
    return {
        "exact": {"psgrad": lambda: scores(one, exact), "torch.func": lambda: plain_exact(one)},
        "ten": {"psgrad": lambda: scores(ten, exact)},
        "ekfac": {"psgrad": lambda: scores(wide, factored), **rival},
        "dual": {"psgrad": lambda: scores(wide, dual)},
        "sampled": {"psgrad": lambda: scores(ten, sampled)},
        "dual, sampled": {"psgrad": lambda: scores(wide, sampled)},
    }


def main() -> None:
    arguments = command_line("Seconds of influence scores by solves, on digits.", only=BARS).parse_args()
    content: dict[str, Any] = {"cases": {}}
    found = cases(Path(tempfile.gettempdir()) / "psgrad-influence")
    scores(small(Path(), 1), Influence(solver="exact", damping=DAMPING))  # imports
    for name in arguments.only:
        seconds: dict[str, float] = {}
        results: dict[str, Tensor] = {}
        for who, run in found[name].items():
            wall, processor = time.perf_counter(), time.process_time()
            results[who] = run().double()
            seconds[who] = time.perf_counter() - wall
            seconds[f"{who}, of the processor"] = time.process_time() - processor
        apart = [
            float((each - results["psgrad"]).norm() / results["psgrad"].norm()) for each in results.values()
        ]
        assert max(apart) < WRONG, f"{name}: scores are {max(apart):.2g} apart"
        reached = seconds["psgrad"] <= BARS[name]
        told = ", ".join(f"{who} {value:.2f} s" for who, value in seconds.items())
        print(f"{'pass' if reached else 'FAIL'}: {name} within {BARS[name]:g} s: {told}", flush=True)
        content["cases"][name] = {"seconds": seconds, "bar": BARS[name], "reached": reached}
    content |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    write_json(arguments, content)


if __name__ == "__main__":
    main()
