"""How long influence scores take, beside other people's, on the same network and data, in one process.

    python benchmarks/influence_speed.py [--rounds 5] [--only gradient_dot cg ekfac] [--json FILE]

The network is the CNN of configs/digits/model.py, trained on 1,437 of scikit-learn's digits; 360 others are
the queries. All ways take turns in every round, and their scores are held against psgrad's before anything is
timed. What is timed is from model and data to the matrix of scores, for a rival with the best of a few batch
sizes:

    gradient_dot  psgrad's gradient_dot; captum's TracInCP; dattri's TracIn without a projection cg
    psgrad's influence by conjugate gradient, on the Hessian with enough damping that it has an inverse, as
    far as it takes to
                  the residual that dattri's IF-CG has after its ten iterations: both residuals are measured
                  with the same products; of a tenth of the queries, as dattri takes long
    ekfac         psgrad's ekfac and kronfluence's, with the empirical Fisher, so that nothing is drawn

The bars: gradient_dot and cg at least 10 times as fast as the fastest rival, ekfac twice. influence_scale.py
has the index and the memory.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from influence_contenders import Problem, captum_tracin, dattri_tracin, kronfluence_factored
from influence_ours import examples, scores
from norms import machine, time_in_turn
from torch import Tensor

from benchmarks.script import command_line, print_facts, write_json
from psgrad.engine.influence.curvature.curvature_products import curvature_products
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import GradientDot
from psgrad.engine.influence.methods.influence import Influence

BARS = {"gradient_dot": 10.0, "cg": 10.0, "ekfac": 2.0}
# Of the mean loss's Hessian.
CG_DAMPING = 1.0
EKFAC_DAMPING = 1e-4
WRONG = 1e-3
MODEL = Path(__file__).parents[1] / "configs" / "digits" / "model.py"


def build() -> torch.nn.Module:
    spec = importlib.util.spec_from_file_location("digits_model", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network: torch.nn.Module = module.build()
    return network


@cache
def posed(training: int = 1437, queries: int = 360, epochs: int = 5) -> Problem:
    """The CNN after a few epochs of Adam."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = torch.as_tensor(data.images / 16).float()[:, None], torch.as_tensor(data.target)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(training).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    asked = slice(training, training + queries)
    return Problem(model, images[:training], labels[:training], images[asked], labels[asked])


Ways = dict[str, Callable[[], Tensor]]


def gradient_dot(problem: Problem) -> Ways:
    n = len(problem.inputs)
    return {
        "psgrad": lambda: scores(problem, GradientDot()),
        "captum, one batch": lambda: captum_tracin(problem, n),
        "captum, batches of 256": lambda: captum_tracin(problem, 256),
        "dattri, one batch": lambda: dattri_tracin(problem),
        "dattri, batches of 256": lambda: dattri_tracin(problem, 256),
    }


def ekfac(problem: Problem) -> Ways:
    return {
        "psgrad": lambda: scores(problem, EKFAC(fisher="empirical", damping=EKFAC_DAMPING, exact_blocks=0)),
        "kronfluence, batches of 256": lambda: kronfluence_factored(
            problem, EKFAC_DAMPING, empirical=True, batch_size=256
        ),
        "kronfluence, one batch": lambda: kronfluence_factored(
            problem, EKFAC_DAMPING, empirical=True, batch_size=len(problem.inputs)
        ),
    }


def cg(problem: Problem, few: int = 36) -> dict[str, Any]:
    """psgrad's scores against dattri's solve alone, each timed once, for the first few queries: dattri takes
    minutes for them, and for more as many times as long. psgrad's seconds for all queries stand beside.

    Residuals are of dattri's ten iterations, and of ours where it stops: of the solutions, in float64 with
    the same products, relative to the right-hand side, of these queries together.
    """
    first, whole = (
        replace(problem, query_inputs=problem.query_inputs[:few], query_target=problem.query_target[:few]),
        problem,
    )
    start = time.perf_counter()
    rival = _dattri_solutions(first)
    theirs = time.perf_counter() - start
    print(f"  cg: dattri's solve of {few} queries {theirs:.1f} s", flush=True)
    training = examples(whole.model, whole.inputs, whole.target)
    asked = examples(first.model, first.query_inputs, first.query_target).materialise()
    products = curvature_products(training, "hessian")
    left = products.apply(rival.double()) + CG_DAMPING * rival.double()
    residual = float((left - asked).norm() / asked.norm())
    method = Influence(
        curvature="hessian", solver="conjugate_gradient", damping=CG_DAMPING, tolerance=residual
    )
    seconds: dict[str, float] = {"dattri, its solve alone": theirs}
    facts: dict[str, Any] = {}
    for count, part in ((few, first), (len(whole.query_inputs), whole)):
        start = time.perf_counter()
        fitted = method.fit(training, Checkpoint())
        for _ in fitted.scores(examples(part.model, part.query_inputs, part.query_target)):
            pass
        seconds[f"psgrad, {count} queries"] = time.perf_counter() - start
        facts[f"{count} queries"] = {
            name: value for name, value in fitted.facts.content().items() if isinstance(value, (int, float))
        }
        print(
            f"  cg: psgrad {count} queries {seconds[f'psgrad, {count} queries']:.1f} s,"
            f" {facts[f'{count} queries']}",
            flush=True,
        )
    speedup = theirs / seconds[f"psgrad, {few} queries"]
    verdict = "pass" if speedup >= BARS["cg"] else "FAIL"
    print(
        f"  cg: {speedup:.1f} times as fast as dattri's solve to a residual of {residual:.2g}, at least"
        f" {BARS['cg']:.0f}: {verdict}"
    )
    return {"seconds": seconds, "residual": residual, "psgrad": facts, "speedup": speedup}


def _dattri_solutions(problem: Problem) -> Tensor:
    """[m, p]: what dattri's conjugate gradient makes of the queries' gradients in ten iterations."""
    from dattri.func.hessian import ihvp_at_x_cg

    params = {name: value.detach() for name, value in problem.model.named_parameters()}
    sizes = [value.numel() for value in params.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = {
            name: part.view(params[name].shape) for name, part in zip(params, flat.split(sizes), strict=True)
        }
        return F.cross_entropy(
            torch.func.functional_call(problem.model, parts, problem.inputs), problem.target
        )

    flat = torch.cat([value.flatten() for value in params.values()])
    queries = examples(problem.model, problem.query_inputs, problem.query_target).materialise()
    found: Tensor = ihvp_at_x_cg(loss, flat, regularization=CG_DAMPING)(queries)
    return found.detach()


def contest(task: str, ways: Ways, rounds: int) -> dict[str, Any]:
    """Times the ways whose scores are psgrad's, and prints the table."""
    expected = ways["psgrad"]()
    able: Ways = {}
    for name, way in ways.items():
        try:
            error = float((way().double() - expected).norm() / expected.norm())
        except ImportError as missing:
            print(f"  {name}: not installed: {missing.name}")
            continue
        if error < WRONG:
            able[name] = way
        else:
            print(f"  {name}: wrong: relative error {error:.0e}")
    # the first way is what the ratios of time_in_turn are to
    timings = time_in_turn({"plain": able["psgrad"], **able}, rounds, torch.device("cpu"))
    del timings["plain"]
    ours = timings["psgrad"].median
    for name, timing in timings.items():
        quartiles = f"{timing.lower_quartile:.3f} .. {timing.upper_quartile:.3f}"
        print(
            f"  {task:<14}{name:<28}{timing.median:>9.3f} s{quartiles:>22}{timing.median / ours:>9.1f} x"
            " psgrad",
            flush=True,
        )
    rivals = {name: timing for name, timing in timings.items() if name != "psgrad"}
    best = min((timing.median for timing in rivals.values()), default=float("nan"))
    verdict = "pass" if best / ours >= BARS[task] else "FAIL"
    print(
        f"  {task}: {best / ours:.1f} times as fast as the best of the others, at least {BARS[task]:.0f}:"
        f" {verdict}"
    )
    return {"seconds": {name: asdict(timing) for name, timing in timings.items()}, "speedup": best / ours}


def main() -> None:
    parser = command_line(
        "Time psgrad's influence scores beside captum's, dattri's and kronfluence's.", rounds=5, only=BARS
    )
    arguments = parser.parse_args()
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    content: dict[str, Any] = {"machine": facts, "rounds": arguments.rounds, "bars": BARS}
    problem = posed()
    for task in arguments.only:
        if task == "cg":
            content[task] = cg(problem)
        else:
            content[task] = contest(
                task, (gradient_dot if task == "gradient_dot" else ekfac)(problem), arguments.rounds
            )
    write_json(arguments, content)


if __name__ == "__main__":
    main()
