"""The method `replay`: metagradients, the exact derivatives of a query's measurement after training by each
training example's weight in the whole run. The passes over the run, forward and backward, are in
`training_run.py` and `training_steps.py` beside `methods`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from psgrad.engine.influence.evaluation.metrics import random_subsets, subset_sums
from psgrad.engine.influence.evaluation.statistics import spearman
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.training_run import TrainingRun
from psgrad.engine.transforms import vmap
from psgrad.errors import ConfigError, InfluenceError

# Queries that are pulled back through the run at once, at most; of the free memory the share for them.
_AT_ONCE, _SHARE = 64, 8
# The shares of the training set that are left out, to compare with what derivatives predict.
LEFT_OUT = (0.01, 0.05, 0.2)
# From these agreements at 1 % and 5 % on, and with slopes this near to one, scores are called amounts.
_AGREES, _SLOPE = 0.9, 0.1


@dataclass(frozen=True)
class Replay(Method):
    """score = - d m_q(theta_T) / d w_i: theta_T the weights after the run that influence.training describes,
    w_i the weight of the example's loss in each step that it is in, m_q the query's measurement.

    The derivative of the run itself, with its optimiser, order and batches, and no curvature or damping. It
    predicts what leaving examples out of this run does only where the run depends smoothly on its data, so
    some subsets are left out for real, all else the same, and compared: see `agreement`.

    Ilyas and Engstrom, "MAGIC: Near-Optimal Data Attribution for Deep Learning" (2025).

    Options:
        subsets: how many random subsets of each size (1, 5 and 20 % of the examples) are left out for real;
            0 for none, so that nothing is said about how far scores can be trusted.
    """

    subsets: int = 20

    name = "replay"

    def __post_init__(self) -> None:
        if self.subsets < 0 or self.subsets in (1, 2):
            raise ConfigError(
                f"influence.method.subsets: {self.subsets} subsets have no rank correlation; expected 3 or"
                " more, or 0"
            )

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        if checkpoint.run is None:
            raise InfluenceError(
                "replay has no training run to compute again",
                hint="describe it in influence.training: optimizer, epochs, batch_size, seed",
            )
        if len(training) != len(checkpoint.run.rows):
            raise InfluenceError(
                f"{len(checkpoint.run.rows) - len(training):,} training examples have a loss or a gradient"
                " that is not finite at the end of the run, of which they are a part",
                hint="leave them out of the data: psgrad analyze names them",
            )
        return FittedReplay(checkpoint.run, self, checkpoint)


class FittedReplay(Fitted):
    """A training run with the derivatives of its end."""

    has_self_influence = False

    def __init__(self, run: TrainingRun, options: Replay, checkpoint: Checkpoint) -> None:
        self.run, self.options, self.checkpoint = run, options, checkpoint
        training = {**asdict(run.recipe), "seed": run.seed}
        self.facts = {"steps": len(run.batches), "training": training}

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        if per != "total":
            raise InfluenceError(
                "replay has no scores of single layers: an example's weight acts on all of them in each step",
                hint="set influence.layers: none",
            )
        scores = -torch.cat([self.run.weight_derivatives(part) for part in self._parts(queries)]).T.cpu()
        if self.options.subsets:
            self._compare(scores.numpy(), queries)
        yield ScoreBlock(0, len(scores), {"": scores})

    def _parts(self, queries: Examples) -> list[Vectors]:
        """The gradients of the measurements of queries at the end of the run, name -> [k, *shape], in parts
        that are pulled back at once, as the free memory allows.
        """
        gradients = queries.materialise().to(self.run.device)
        at_once = min(_AT_ONCE, _models_at_once(self.run))
        return [queries.flat.split(part) for part in gradients.split(at_once)]

    def self_influence(self) -> Iterator[SelfBlock]:
        raise InfluenceError(
            "replay has no cheap self-influence: each example would be pulled back through the whole run",
            hint="set influence.self_influence: never, or name the examples as influence.queries",
        )

    def _compare(self, scores: np.ndarray, queries: Examples) -> None:
        """Note how well sums of scores predict what leaving subsets out of the run does."""
        found = agreement(self.run, scores, queries, self.options.subsets)
        self.facts["agreement"] = {f"{each.left_out:.0%} left out": each.rank for each in found}
        self.facts["slope"] = {f"{each.left_out:.0%} left out": each.slope for each in found}
        few = found[:2]
        self.calibrated = all(each.rank >= _AGREES and abs(each.slope - 1) <= _SLOPE for each in few)
        numbers = ", ".join(f"{each.rank:.2f} ({each.left_out:.0%} left out)" for each in found)
        verdict = (
            "this run depends smoothly on its data, and scores are amounts"
            if self.calibrated
            else "this run does not depend smoothly on its data, and scores are a guess: a smaller learning"
            " rate, a smooth activation or larger batches make it smoother"
        )
        self.facts["calibrated_because"] = verdict
        self.checkpoint.say(
            f"replay: with {self.options.subsets} subsets of each size left out for real, all else the same,"
            f" the rank correlation of predicted and actual changes is {numbers}; {verdict}"
        )


@dataclass(frozen=True)
class SubsetAgreement:
    """Predicted and actual changes of queries where a share of the examples is left out of the run.

    rank: the mean over queries of the rank correlation over subsets (LDS, same seed). slope: of the actual
    changes on the predicted ones, through zero.
    """

    left_out: float
    rank: float
    slope: float


def agreement(
    run: TrainingRun, scores: np.ndarray, queries: Examples, subsets: int, seed: int = 0
) -> list[SubsetAgreement]:
    """Sums of scores [n, m] beside training without subsets, for each share of LEFT_OUT."""
    rows, found = LoadedRows.of(queries), []
    whole = measured(queries, rows, {name: value.unsqueeze(0) for name, value in run.final.items()})
    random = np.random.default_rng([seed, 6])
    for share in LEFT_OUT:
        left_out = random_subsets(len(scores), subsets, max(share, 1 / len(scores)), random)
        trained = [run.retrained(torch.from_numpy(~part)) for part in _parts(left_out, run)]
        actual = np.concatenate([measured(queries, rows, params) for params in trained]) - whole
        predicted = subset_sums(scores, left_out)
        rank = float(np.nan_to_num(spearman(predicted, actual)).mean())
        slope = float((predicted * actual).sum() / max((predicted * predicted).sum(), np.finfo(float).tiny))
        found.append(SubsetAgreement(share, rank, slope))
    return found


def measured(queries: Examples, rows: LoadedRows, params: dict[str, torch.Tensor]) -> np.ndarray:
    """[K, m] float64: the measurement of each query by models with these parameters, name -> [K, *shape]."""
    dims = (None, 0, None if rows.target is None else 0)
    each = vmap(
        vmap(lambda *sample: queries.objective.loss(*sample)[0].double(), in_dims=dims), (0, None, None)
    )
    values: np.ndarray = each(params, rows.inputs, rows.target).cpu().numpy()
    return values


def _models_at_once(run: TrainingRun) -> int:
    """How many models are trained at once, as the free memory allows."""
    return max(1, free_memory(run.device) // _SHARE // (run.start.bytes * 2))


def _parts(left_out: np.ndarray, run: TrainingRun) -> list[np.ndarray]:
    """Subsets [S, n] in parts that are trained at once."""
    return np.array_split(left_out, -(-len(left_out) // _models_at_once(run)))
