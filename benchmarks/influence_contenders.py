"""Other people's influence scores of one model, each in psgrad's convention: [n, m], positive where a
training example helps the query.

Each function takes a Problem and says how its library is asked, and what its scores are multiplied by:
captum's influence function is that of the summed loss already, dattri's and kronfluence's of the mean, n
times too large for the removal of one example. The libraries are imported where they are used:
requirements-rivals.txt has their versions, and README.md how to install them beside a CPU build of PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

State = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A classifier with cross-entropy, n training rows and m queries.

    states: the checkpoints, of which methods for one take the first; empty for the model as it is.
    learning_rates: one for each of them.
    """

    model: nn.Module
    inputs: Tensor
    target: Tensor
    query_inputs: Tensor
    query_target: Tensor
    states: Sequence[State] = ()
    learning_rates: Sequence[float] = field(default=(1.0,))

    @property
    def training(self) -> TensorDataset:
        return TensorDataset(self.inputs, self.target)

    @property
    def queries(self) -> TensorDataset:
        return TensorDataset(self.query_inputs, self.query_target)

    @property
    def checkpoints(self) -> list[State]:
        return [dict(state) for state in self.states] or [
            {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        ]

    def load(self, number: int = 0) -> nn.Module:
        """The model at one checkpoint."""
        self.model.load_state_dict(self.checkpoints[number])
        return self.model


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without the libraries' progress bars and warnings."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


# -- captum --------------------------------------------------------------------------------------------------


def _captum_options(problem: Problem, sample_wise: bool) -> dict[str, Any]:
    states = problem.checkpoints

    def load(model: nn.Module, name: str) -> float:
        model.load_state_dict(states[int(name)])
        return problem.learning_rates[int(name)]

    loss = nn.CrossEntropyLoss(reduction="sum" if sample_wise else "none")
    return {"checkpoints_load_func": load, "loss_fn": loss, "sample_wise_grads_per_batch": sample_wise}


def captum_tracin(problem: Problem, batch_size: int = 256, sample_wise: bool = True) -> Tensor:
    """TracInCP over all checkpoints. sample_wise: gradients from hooks, for linear and convolution layers;
    else one backward pass each.
    """
    from captum.influence import TracInCP

    names = [str(number) for number in range(len(problem.checkpoints))]
    with silent():
        found = TracInCP(
            problem.model,
            problem.training,
            names,
            batch_size=batch_size,
            **_captum_options(problem, sample_wise),
        )
        return found.influence((problem.query_inputs, problem.query_target)).T


def captum_naive(problem: Problem, damping: float, tolerance: float = 1e-5, batch_size: int = 512) -> Tensor:
    """NaiveInfluenceFunction at full rank: the Hessian of the summed loss plus n times `damping`, without
    eigenvalues below `tolerance`.

    Its dot products are those of gradients multiplied by the inverse's square root, which leaves negative
    eigenvalues out: where all are above the tolerance, it is the influence function.
    """
    from captum.influence._core.influence_function import NaiveInfluenceFunction

    rank = sum(parameter.numel() for parameter in problem.model.parameters())
    with silent():
        found = NaiveInfluenceFunction(
            problem.model,
            problem.training,
            "0",
            batch_size=batch_size,
            projection_dim=rank,
            hessian_reg=damping * len(problem.inputs),
            hessian_inverse_tol=tolerance,
            **_captum_options(problem, True),
        )
        return found.influence((problem.query_inputs, problem.query_target)).T


# -- dattri --------------------------------------------------------------------------------------------------


def margin(logits: Tensor, target: Tensor) -> Tensor:
    """z_y - log sum of exp z_c over the other classes, of one sample: what TRAK differentiates."""
    own = torch.arange(logits.shape[-1]) == target
    return (logits * own).sum() - logits.masked_fill(own, -torch.inf).logsumexp(-1)


def _dattri_task(problem: Problem, criterion: Callable[[Tensor, Tensor], Tensor] | None = None) -> Any:
    from dattri.task import AttributionTask

    def loss(params: State, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch
        output = torch.func.functional_call(problem.model, params, inputs)
        return F.cross_entropy(output, target)

    def loss_of_one(params: State, sample: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = sample
        output = torch.func.functional_call(problem.model, params, inputs[None])[0]
        return F.cross_entropy(output, target) if criterion is None else criterion(output, target)

    return AttributionTask(
        loss_func=loss if criterion is None else loss_of_one,
        model=problem.model,
        checkpoints=problem.checkpoints,
    )


def _loaders(problem: Problem, batch_size: int | None = None) -> tuple[Any, Any]:
    """Of the training set and the queries, in one batch each unless said: dattri's scores depend on the batch
    size.
    """
    training = DataLoader(problem.training, batch_size=batch_size or len(problem.inputs))
    return training, DataLoader(problem.queries, batch_size=batch_size or len(problem.query_inputs))


def dattri_tracin(problem: Problem, batch_size: int | None = None) -> Tensor:
    """TracIn without its random projection, which is the default."""
    from dattri.algorithm.tracin import TracInAttributor

    with silent():
        found = TracInAttributor(
            _dattri_task(problem, F.cross_entropy),
            torch.tensor(problem.learning_rates),
            normalized_grad=False,
        )
        found.projector_kwargs = None
        return found.attribute(*_loaders(problem, batch_size))


def dattri_explicit(problem: Problem, damping: float) -> Tensor:
    """IFAttributorExplicit: the Hessian of the mean loss in one batch, plus `damping`."""
    from dattri.algorithm.influence_function import IFAttributorExplicit

    return _dattri_influence(problem, lambda task: IFAttributorExplicit(task, regularization=damping))


def dattri_cg(problem: Problem, damping: float, iterations: int = 10) -> Tensor:
    """IFAttributorCG: the same by so many steps of conjugate gradient, whatever the residual."""
    from dattri.algorithm.influence_function import IFAttributorCG

    return _dattri_influence(
        problem, lambda task: IFAttributorCG(task, regularization=damping, max_iter=iterations)
    )


def _dattri_influence(problem: Problem, build: Callable[[Any], Any]) -> Tensor:
    with silent():
        training, queries = _loaders(problem)
        found = build(_dattri_task(problem))
        found.cache(training)
        return found.attribute(training, queries).detach() / len(problem.inputs)


def dattri_trak(
    problem: Problem, ridge: float, projections: Sequence[Tensor] | None = None, dimension: int = 512
) -> Tensor:
    """TRAKAttributor on the margin. projections: [p, k], one for each checkpoint, in place of its own. ridge:
    is added to Phi'Phi, where the rows of Phi are the projected gradients over the square root of p.
    """
    from dattri.algorithm import trak

    task = _dattri_task(problem, margin)

    def probability(params: State, sample: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = sample
        return torch.func.functional_call(problem.model, params, inputs[None])[0].softmax(-1)[target]

    def given(*_: Any, **__: Any) -> Callable[..., Tensor]:
        return lambda rows, ensemble_id: rows @ projections[ensemble_id]

    options = {"proj_dim": dimension, "proj_max_batch_size": 32, "proj_seed": 0, "device": "cpu"}
    replaced = (
        contextlib.nullcontext() if projections is None else mock.patch.object(trak, "random_project", given)
    )
    with silent(), replaced:
        found = trak.TRAKAttributor(task, probability, projector_kwargs=options, regularization=ridge)
        training, queries = _loaders(problem)
        found.cache(training)
        return found.attribute(queries).detach()


# -- kronfluence ---------------------------------------------------------------------------------------------


def kronfluence_factored(
    problem: Problem,
    damping: float | None = None,
    empirical: bool = False,
    strategy: Literal["ekfac", "kfac", "diagonal"] = "ekfac",
    batch_size: int = 512,
) -> Tensor:
    """Its EK-FAC. damping: None for a tenth of each layer's mean eigenvalue, as in the paper (its own default
    is 1e-8).
    """
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, target = batch
            logits = model(inputs)
            if sample:
                with torch.no_grad():
                    chances = logits.movedim(1, -1).softmax(-1)
                    target = torch.multinomial(chances.flatten(0, -2), 1).view_as(target)
            return F.cross_entropy(logits, target, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    dtype = problem.inputs.dtype
    factors = FactorArguments(strategy=strategy, use_empirical_fisher=empirical)
    scores = ScoreArguments(damping_factor=damping)
    for arguments in (factors, scores):
        for name in vars(arguments):
            if name.endswith("_dtype") and name not in ("amp_dtype", "eigendecomposition_dtype"):
                setattr(arguments, name, dtype)
    with silent(), tempfile.TemporaryDirectory() as folder:
        task = Classification()
        model = prepare_model(copy.deepcopy(problem.load()), task)
        analyzer = Analyzer("contender", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("f", problem.training, per_device_batch_size=batch_size, factor_args=factors)
        analyzer.compute_pairwise_scores(
            "s",
            "f",
            problem.queries,
            problem.training,
            per_device_query_batch_size=batch_size,
            per_device_train_batch_size=batch_size,
            score_args=scores,
        )
        return analyzer.load_pairwise_scores("s")["all_modules"].T.to(dtype) / len(problem.inputs)


# -- TRAK ----------------------------------------------------------------------------------------------------


def traker(
    problem: Problem,
    ridge: float = 0.0,
    projections: Sequence[Tensor] | None = None,
    dimension: int = 512,
    batch_size: int = 359,
) -> Tensor:
    """TRAKer in float32, over all checkpoints, with its projector for a CPU. projections: [p, k], one for
    each checkpoint, in its place.

    Its scores have no scale: each checkpoint's are divided by the mean size of its inverse's entries.
    """
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType
    from trak.utils import vectorize

    class Kept(BasicProjector):
        def free_memory(self) -> None:
            """Nothing: of a single checkpoint it would not make its matrix again, and fail."""

    class Given(Kept):
        def project(self, grads: State, model_id: int) -> Tensor:
            return vectorize(grads, device="cpu").float() @ matrices[model_id]

    matrices = [] if projections is None else [matrix.float() for matrix in projections]
    width = dimension if projections is None else matrices[0].shape[1]
    size = sum(parameter.numel() for parameter in problem.model.parameters())
    kind = Kept if projections is None else Given
    projector = kind(size, width, 0, ProjectionType.rademacher, "cpu", block_size=width, dtype=torch.float32)
    training = TensorDataset(problem.inputs.float(), problem.target)
    queries = TensorDataset(problem.query_inputs.float(), problem.query_target)
    with silent(), tempfile.TemporaryDirectory() as folder:
        found = TRAKer(
            copy.deepcopy(problem.model).float(),
            "image_classification",
            len(training),
            save_dir=folder,
            device="cpu",
            projector=projector,
            proj_dim=width,
            use_half_precision=False,
            lambda_reg=ridge,
            logging_level=40,
        )
        for number, state in enumerate(problem.checkpoints):
            found.load_checkpoint(state, model_id=number)
            for batch in DataLoader(training, batch_size=batch_size):
                found.featurize(batch=batch, num_samples=len(batch[0]))
        found.finalize_features()
        for number, state in enumerate(problem.checkpoints):
            found.start_scoring_checkpoint("queries", state, model_id=number, num_targets=len(queries))
            for batch in DataLoader(queries, batch_size=batch_size):
                found.score(batch=batch, num_samples=len(batch[0]))
        return torch.as_tensor(found.finalize_scores("queries")).clone()
