"""psgrad's influence scores beside other people's: the same trained model, data and definition, and how far
apart the numbers are.

    python benchmarks/influence_agreement.py [--only captum dattri] [--json FILE]

A perceptron 64-16-10 is trained on 400 of scikit-learn's digits in float64, and 60 others are its queries;
two of its checkpoints have learning rates. Each line is one rival's scores, in psgrad's convention by the
factor that influence_contenders.py says, and the relative error |theirs - ours| / |ours| over the whole
matrix. Where definitions differ the worst query's Spearman correlation stands in its place, with the reason.
Needs the packages of requirements-rivals.txt; a rival that is not installed is left out, and named.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from influence_contenders import (
    Problem,
    captum_naive,
    captum_tracin,
    dattri_cg,
    dattri_explicit,
    dattri_tracin,
    dattri_trak,
    kronfluence_factored,
    margin,
    traker,
)
from influence_ours import scores
from torch import Tensor, nn

from benchmarks.script import command_line
from psgrad.engine.gradients.flat import Flat, as_gradients
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.gradient_products import TracIn
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.methods.projected import TRAK

# Relative error where definitions coincide, Spearman where they do not.
ERROR, SPEARMAN = 1e-4, 0.99
# Of the mean loss: enough that the Hessian of this perceptron has no negative eigenvalue, which captum would
# leave out.
DAMPING = 0.5
RIDGE = 0.01


@dataclass(frozen=True)
class Comparison:
    """One rival's scores and ours. same: whether definitions coincide; why: what they are."""

    library: str
    name: str
    same: bool
    why: str
    theirs: Callable[[Setting], Tensor]
    ours: Callable[[Setting], Tensor]


@dataclass(frozen=True)
class Outcome:
    """How far apart: `error` is relative, of the whole matrix; `spearman` the worst query's."""

    error: float
    spearman: float
    passed: bool


class Setting:
    """The trained perceptron, its data, and the projections of its two checkpoints."""

    def __init__(self, training: int = 400, queries: int = 60, hidden: int = 16, steps: int = 60) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        inputs, target = torch.as_tensor(data.data / 16)[order], torch.as_tensor(data.target)[order]
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        states = []
        for step in range(2 * steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[:training]), target[:training]).backward()
            optimizer.step()
            if (step + 1) % steps == 0:
                states.append(copy.deepcopy(model.state_dict()))
        asked = slice(training, training + queries)
        rows = (model, inputs[:training], target[:training], inputs[asked], target[asked])
        self.trajectory = Problem(*rows, states, (0.1, 0.03))
        self.last = Problem(*rows, states[1:])

    @cached_property
    def projections(self) -> list[Tensor]:
        """[p, k] for each checkpoint: what psgrad's TRAK projects with, had by projecting the unit
        vectors.
        """
        params = {name: value.detach() for name, value in self.last.model.named_parameters()}
        flat, method = Flat(params), trak(0.0)
        units = as_gradients(flat.split(torch.eye(flat.size, dtype=torch.float64)))
        return [
            Projector(method.projection, method.dimension, method.seed, number, params)(units)
            for number in range(2)
        ]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.last.model.parameters())


def trak(ridge: float) -> TRAK:
    return TRAK(dimension=64, projection="sparse", seed=3, damping=ridge)


def our_trak(problem: Problem, ridge: float) -> Tensor:
    """With the margin as the measurement; a query's scalar is a loss, and so minus the margin."""
    return scores(problem, trak(ridge), lambda output, target: -margin(output, target))


def hessian(solver: str = "exact") -> Influence:
    return Influence(curvature="hessian", damping=DAMPING, solver=solver, tolerance=1e-10)  # type: ignore[arg-type]


COMPARISONS = (
    Comparison(
        "captum",
        "TracInCP, gradients by layer formulas",
        True,
        "sum over two checkpoints, each times its learning rate",
        lambda s: captum_tracin(s.trajectory),
        lambda s: scores(s.trajectory, TracIn()),
    ),
    Comparison(
        "captum",
        "TracInCP, gradients by a loop",
        True,
        "the same",
        lambda s: captum_tracin(s.trajectory, sample_wise=False),
        lambda s: scores(s.trajectory, TracIn()),
    ),
    Comparison(
        "captum",
        "NaiveInfluenceFunction",
        True,
        "Hessian of the summed loss plus n times the damping, all of whose eigenvalues are positive",
        lambda s: captum_naive(s.last, DAMPING),
        lambda s: scores(s.last, hessian()),
    ),
    Comparison(
        "dattri",
        "TracIn",
        True,
        "without its random projection; it keeps scores in float32",
        lambda s: dattri_tracin(s.trajectory),
        lambda s: scores(s.trajectory, TracIn()),
    ),
    Comparison(
        "dattri",
        "IF explicit",
        True,
        "Hessian of the mean loss plus the damping, in one batch (of several it adds the inverses); divided"
        " by n",
        lambda s: dattri_explicit(s.last, DAMPING),
        lambda s: scores(s.last, hessian()),
    ),
    Comparison(
        "dattri",
        "IF conjugate gradient, 40 iterations",
        True,
        "the same; ours by conjugate gradient, too",
        lambda s: dattri_cg(s.last, DAMPING, 40),
        lambda s: scores(s.last, hessian("conjugate_gradient")),
    ),
    Comparison(
        "dattri",
        "TRAK, two checkpoints, no ridge",
        True,
        "psgrad's projections put in place of its own",
        lambda s: dattri_trak(s.trajectory, 0.0, s.projections),
        lambda s: our_trak(s.trajectory, 0.0),
    ),
    Comparison(
        "dattri",
        "TRAK, two checkpoints, ridge",
        True,
        "the same; its rows are divided by the root of p, and its ridge is of their sum: n / p times ours",
        lambda s: dattri_trak(s.trajectory, RIDGE * len(s.last.inputs) / s.parameters, s.projections),
        lambda s: our_trak(s.trajectory, RIDGE),
    ),
    Comparison(
        "kronfluence",
        "EK-FAC, empirical Fisher",
        True,
        "damping a tenth of each layer's mean eigenvalue; divided by n",
        lambda s: kronfluence_factored(s.last, None, empirical=True),
        lambda s: scores(s.last, EKFAC(fisher="empirical", relative_damping=0.1, exact_blocks=0)),
    ),
    Comparison(
        "kronfluence",
        "EK-FAC, empirical Fisher, damping 1e-8",
        True,
        "its default damping; divided by n",
        lambda s: kronfluence_factored(s.last, 1e-8, empirical=True),
        lambda s: scores(s.last, EKFAC(fisher="empirical", damping=1e-8, exact_blocks=0)),
    ),
    Comparison(
        "traker",
        "TRAKer, one checkpoint, no ridge",
        False,
        "psgrad's projection in float32; its scores are divided by the mean size of its inverse's entries",
        lambda s: traker(s.last, 0.0, s.projections[:1]),
        lambda s: our_trak(s.last, 0.0),
    ),
)


def compare(comparison: Comparison, setting: Setting) -> Outcome:
    """Raises ImportError where the rival is not installed."""
    from scipy.stats import spearmanr

    theirs, ours = comparison.theirs(setting).double(), comparison.ours(setting)
    error = float((theirs - ours).norm() / ours.norm())
    spearman = min(
        float(spearmanr(one, other).statistic)
        for one, other in zip(theirs.T.numpy(), ours.T.numpy(), strict=True)
    )
    return Outcome(error, spearman, error < ERROR if comparison.same else spearman > SPEARMAN)


def main() -> None:
    libraries = sorted({comparison.library for comparison in COMPARISONS})
    parser = command_line(
        "Hold psgrad's influence scores against captum's, dattri's, kronfluence's and TRAK's.", only=libraries
    )
    arguments = parser.parse_args()
    setting = Setting()
    found = []
    print(f"{'':<54}{'relative error':>16}{'Spearman':>14}")
    for comparison in COMPARISONS:
        if comparison.library not in arguments.only:
            continue
        title = f"{comparison.library} {comparison.name}"
        try:
            outcome = compare(comparison, setting)
        except ImportError as error:
            print(f"{title:<54} not installed: {error.name}")
            continue
        verdict = "pass" if outcome.passed else "FAIL"
        shown = f"{outcome.error:>16.0e}" if comparison.same else f"{'another scale':>16}"
        print(f"{title:<54}{shown}{outcome.spearman:>14.8f}  {verdict}: {comparison.why}", flush=True)
        facts = {
            "library": comparison.library,
            "name": comparison.name,
            "same": comparison.same,
            "why": comparison.why,
        }
        found.append(facts | {"version": importlib.metadata.version(comparison.library)} | asdict(outcome))
    if arguments.json is not None:
        content = {
            "torch": torch.__version__,
            "bars": {"error": ERROR, "spearman": SPEARMAN},
            "comparisons": found,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
