"""The method `replay`: metagradients, the exact derivatives of a query's measurement after training by each
training example's weight in the whole run. The passes over the run, forward and backward, are in
`training_run.py` and `training_steps.py` beside `methods`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from psgrad.engine.influence.evaluation.metrics import random_subsets, subset_sums
from psgrad.engine.influence.evaluation.statistics import spearman
from psgrad.engine.influence.method import Checkpoint, Fitted, Method, Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.spectrum import TOLD_SECONDS, duration_words
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
        runs: 1 for the run itself. More for that many other runs on random halves of the examples, where each
            two runs have all examples: scores are the mean over the runs that an example is in. That predicts
            what a removal does to a model that is trained so, where one run is chaotic, in place of what it
            does to this run, and takes as many times as long.
    """

    subsets: int = 20
    runs: int = 1

    name = "replay"

    def __post_init__(self) -> None:
        if self.subsets < 0 or self.subsets in (1, 2):
            raise ConfigError(
                f"influence.method.subsets: {self.subsets} subsets have no rank correlation; expected 3 or"
                " more, or 0 for no comparison",
            )

        if self.runs < 1:
            raise ConfigError(
                f"influence.method.runs: {self.runs} runs have no scores; expected 1 for the run itself,"
                " or how many runs on random halves are averaged",
            )

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        if checkpoint.run is None:
            raise InfluenceError(
                "replay has no training run to compute again; expected influence.training: the optimiser,"
                " epochs, batches and seed of the run, or a step of your own",
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
        self.facts = {
            "steps": len(run.batches),
            "training": run.facts,
            "runs": options.runs,
        }

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        if per != "total":
            raise InfluenceError(
                "replay has no scores of single layers: an example's weight acts on all of them in each step",
                hint="set influence.layers: none",
            )
        if self.options.runs > 1:
            scores = self._over_halves(queries)
        else:
            parts = _parts_of_queries(self.run, queries)
            self._tell_of_time(self.run, parts)
            scores = _scores(self.run, parts)
            if self.options.subsets:
                self._compare(scores.numpy(), queries)
        yield ScoreBlock(0, len(scores), {"": scores})

    def _over_halves(self, queries: Examples) -> torch.Tensor:
        """[n, m]: the mean over runs on random halves, of those that an example is in."""
        count = len(self.run.rows)
        total, runs = torch.zeros(count, len(queries), dtype=torch.float64), torch.zeros(count, 1)
        for number, rows in enumerate(halves(count, self.options.runs, self.run.seed)):
            run = self.run.on(rows.to(self.run.device), self.run.seed + 1 + number)
            objective = copy(queries.objective)
            objective.params = run.final
            parts = _parts_of_queries(run, replace(queries, objective=objective))
            if number == 0:
                self._tell_of_time(run, parts)
            total[rows] += _scores(run, parts)
            runs[rows] += 1
        return total / runs

    def _tell_of_time(self, run: TrainingRun, parts: Sequence[Vectors]) -> None:
        """Say what scores are predicted to take, where that is long, by one step of each kind. parts: the
        cotangents of queries that are pulled back together.
        """
        options, count = self.options, sum(len(next(iter(part.values()))) for part in parts)
        backward = run.derivative_seconds(parts[0]) * len(parts) * options.runs
        compared = 0.0
        if options.subsets and options.runs == 1:
            at_once = min(options.subsets, _models_at_once(run))
            trainings = len(LEFT_OUT) * options.subsets / at_once
            compared = run.retraining_seconds(at_once) * trainings
        if backward + compared <= TOLD_SECONDS:
            return
        cheaper = ["fewer influence.queries take less"]
        if options.runs > 1:
            cheaper.append(f"each of the {options.runs:,} influence.method.runs takes as long")
        if compared:
            cheaper.append(f"influence.method.subsets: 0 saves {duration_words(compared)} of that")
        if run.levels > 1 and run.disk is None:
            cheaper.append(
                "influence.training.states: disk keeps the states that do not fit into memory, and which are"
                f" computed {run.levels} times so"
            )
        self.checkpoint.say(
            f"replay goes back through {len(run.batches):,} steps for {count:,} queries, predicted to take"
            f" {duration_words(backward + compared)}; {'; '.join(cheaper)}"
        )

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


def halves(count: int, runs: int, seed: int) -> Iterator[torch.Tensor]:
    """The row numbers of each of `runs` runs, in order: a random half of all, then the other half."""
    random = np.random.default_rng([seed, 7])
    for number in range(runs):
        if number % 2 == 0:
            order = torch.from_numpy(random.permutation(count))
        yield (order[: count // 2] if number % 2 == 0 else order[count // 2 :]).sort().values


def _parts_of_queries(run: TrainingRun, queries: Examples) -> list[Vectors]:
    """The gradients of the measurements of queries at the end of the run, name -> [k, *shape], in parts that
    are pulled back at once, as the free memory allows.
    """
    gradients = queries.materialise()
    at_once = max(1, min(_AT_ONCE, free_memory(run.device) // _SHARE // (run.start.bytes * 2)))
    return [queries.flat.split(part) for part in gradients.to(run.device).split(at_once)]


def _scores(run: TrainingRun, parts: Sequence[Vectors]) -> torch.Tensor:
    """[n, m]: minus the derivatives of the measurements of queries at the end of the run, by the weight of
    each of its examples. parts: of the queries' gradients.
    """
    return -torch.cat([run.weight_derivatives(part) for part in parts]).T.cpu()


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
