"""Models that are trained again for an evaluation: the methods that are compared with them, the trainer, and
what the trained models measure, which is stored for a run that is interrupted.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.commands.influence_inputs import fresh_models
from psgrad.commands.influence_setup import InfluenceSetup, errors_of_own_method, method_from
from psgrad.commands.setup import Setup
from psgrad.config import Config, EvaluationConfig, MeasurementConfig
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Criterion
from psgrad.engine.influence.evaluation.controls import controls
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import (
    EnsembleTrainer,
    FunctionTrainer,
    Trainer,
    fresh_model,
    measured,
)
from psgrad.engine.influence.evaluation.statistics import score_matrix
from psgrad.engine.influence.method import Fitted, Method
from psgrad.errors import InfluenceError
from psgrad.models.training_functions import resolve_training
from psgrad.run import RunFolder
from psgrad.run.identity import digest
from psgrad.run.results import Progress
from psgrad.run.run import Run

Array = np.ndarray[Any, Any]
Fits = dict[str, tuple[Method, list[Fitted]]]
# Numbers of models that are trained already. A run that takes the place of an earlier one leaves them, and
# uses what is still true.
RETRAINED = "retrained"


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation compares, and the models that it compares with.

    methods: by the names that they have in tables, the config's first. asked: [m] the rows of the query data
    that are reported on. train: makes models of jobs. fingerprint: of what their measurements depend on. run:
    shows progress, and says what people should know.
    """

    setup: InfluenceSetup
    methods: dict[str, Method]
    asked: Array
    train: Trainer
    store: ShardStore
    fingerprint: str
    run: Run[Any]

    @property
    def wanted(self) -> EvaluationConfig:
        return self.setup.config.influence.evaluate

    @property
    def main(self) -> str:
        return next(iter(self.methods))

    @property
    def seeds(self) -> int:
        """Trainings of each set of rows: one where all seeds lead to one minimum."""
        exact = self.wanted.train.function is None and self.wanted.train.optimizer == "newton"
        return 1 if exact else self.wanted.seeds

    @property
    def training(self) -> Examples:
        """The training examples as the first checkpoint's model sees them."""
        return self.setup.views[0].training

    def queries(self, rows: Array) -> list[Examples]:
        """These rows of the query data, as the model of each checkpoint sees them."""
        return [view.queries for view in self.setup.with_queries(rows).views]

    def retrained(
        self, sets: Mapping[str, Array], queries: Array, seed: Callable[[int, int], int]
    ) -> dict[str, Array]:
        """name -> [seeds, m]: what models that are trained on these rows alone measure on the queries, larger
        being worse.

        seed: of the set of this number, in this repetition.
        """
        jobs = [
            Job(f"{name}, seed {repeat}", rows, seed(number, repeat))
            for number, (name, rows) in enumerate(sets.items())
            for repeat in range(self.seeds)
        ]
        asked = self.queries(queries)[0]
        rows, criterion = LoadedRows.of(asked), asked.objective.criterion
        outcomes = measured(
            jobs,
            self.train,
            lambda members: members.measured(rows, criterion),
            self.store,
            f"{self.fingerprint} queries {rows.digest()}",
            self.wanted.train.together,
            tell=lambda done: self.run.progress(Progress(done, len(jobs), "retraining", unit="model")),
            processes=self.setup.processes,
        )
        return dict(zip(sets, outcomes.reshape(len(sets), self.seeds, -1), strict=True))

    def fitted(self) -> Fits:
        """name -> (method, fitted at each checkpoint). A compared method that has no scores is named and left
        out; the config's raises.
        """
        found: Fits = {}
        for name, method in self.methods.items():
            with self._or_left_out(name):
                found[name] = method, self.setup.fitted(method)
        return found

    def scores(
        self, fits: Fits, asked: Array, only: Collection[str] | None = None
    ) -> tuple[dict[str, Array], set[str]]:
        """(name -> [n, m] of methods and controls, the names of the controls). only: which of these."""
        queries, divided_by = self.queries(asked), self.setup.config.influence.normalize
        scores = {}
        for name, (method, fitted) in fits.items():
            normalize = divided_by if name == self.main and divided_by != "none" else None
            with self._or_left_out(name):
                scores[name] = score_matrix(method, fitted, queries, normalize)
        beside, notes = controls(self.training, queries[0], self.wanted.seed)
        for note in notes:
            self.run.say(note)
        beside = {name: matrix for name, matrix in beside.items() if only is None or name in only}
        return {**scores, **beside}, set(beside)

    @contextmanager
    def _or_left_out(self, name: str) -> Iterator[None]:
        """A compared method that fails inside is reported; the config's own raises InfluenceError."""
        try:
            with errors_of_own_method(name.partition(" (")[0]):  # without options, as a config names it
                yield
        except InfluenceError as error:
            if name == self.main:
                raise
            self.run.say(f"left out: {name}, as {error.message}")


class ShardStore:
    """Arrays as files of a run folder, in a folder of their own there."""

    def __init__(self, folder: RunFolder, name: str = RETRAINED) -> None:
        self._folder, self._name = folder, name

    def load(self, name: str) -> Array | None:
        """The array that was saved under this name; None where there is none, or it is damaged."""
        try:
            found: Array = np.load(self._folder.path / self._name / f"{name}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found

    def save(self, name: str, values: Array) -> None:
        """Keep an array, durably. Raises OutputError."""
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        self._folder.write_bytes(f"{self._name}/{name}.npy", buffer.getvalue())


def evaluation_of(setup: InfluenceSetup, run: Run[Any]) -> Evaluation:
    """The evaluation that a config describes, with what is stored in the run's folder. Raises ConfigError
    for methods or a training function that are not there.
    """
    config, wanted = setup.config, setup.config.influence.evaluate
    fresh = fresh_models(config, setup.common)
    rows = LoadedRows.of(setup.views[0].training)
    train = trainer_of(config, fresh, rows, setup.common.criterion.function)
    asked = setup.query_rows
    if wanted.queries is not None and wanted.queries < len(asked):  # a random choice of them, in order
        asked = np.sort(np.random.default_rng([wanted.seed, 2]).choice(asked, wanted.queries, replace=False))
    methods, mark = (
        compared(config, setup.method),
        fingerprint(setup.common, rows, config.influence.measurement),
    )
    _say_what_differs(setup, methods, fresh, run.say)
    return Evaluation(setup, methods, asked, train, ShardStore(run.folder), mark, run)


def trainer_of(
    config: Config, fresh: Callable[[int], nn.Module], rows: LoadedRows, criterion: Criterion
) -> Trainer:
    """What trains models on some of these rows, as influence.evaluate.train says. Raises ConfigError for a
    training function that is not there.
    """
    wanted = config.influence.evaluate.train
    if wanted.function is not None:
        return FunctionTrainer(fresh, rows, resolve_training(wanted.function, config.base))
    return EnsembleTrainer(fresh, rows, criterion, Recipe(**wanted.model_dump(exclude={"function"})))


def _say_what_differs(
    setup: InfluenceSetup,
    methods: Mapping[str, Method],
    fresh: Callable[[int], nn.Module],
    say: Callable[[str], None],
) -> None:
    """Say what training again does not take from the config or from a method."""
    one, other = (dict(fresh_model(fresh, seed).named_parameters()) for seed in (0, 1))
    if all(torch.equal(value, other[name]) for name, value in one.items()):
        say(
            "the model's factory gives the same weights whatever the seed: trainings differ in the order of"
            " the rows alone"
        )
    if setup.common.objective.autocast is not None:
        say("models are retrained in float32, without autocast")
    if setup.config.influence.index is not None:
        say("the index is not asked: methods are fitted to the training data, with projections of their own")
    train = setup.config.influence.evaluate.train
    for name, method in methods.items():
        decay = getattr(method, "weight_decay", train.weight_decay)
        if train.function is None and decay != train.weight_decay:
            say(
                f"{name} takes a weight decay of {decay:g} for the one of training, and models are trained"
                f" again with {train.weight_decay:g}"
            )


def compared(config: Config, main: Method) -> dict[str, Method]:
    """name -> method: the config's and those it is compared with. Of methods of one name the options are in
    the name, too.
    """
    wanted = [config.influence.method, *config.influence.evaluate.methods]
    names = [each.name for each in wanted]
    found: dict[str, Method] = {}
    for each in wanted:
        options = ", ".join(f"{key} {value}" for key, value in each.options.items())
        name = f"{each.name} ({options})" if options and names.count(each.name) > 1 else each.name
        if name not in found:
            found[name] = method_from(each, config.base) if found else main
    return found


def fingerprint(setup: Setup, rows: LoadedRows, measurement: MeasurementConfig | None = None) -> str:
    """A digest of all that retrained models and their measurements depend on, besides the queries and the
    seeds. rows: the training data, by their numbers: one file may have several columns of labels.
    """
    config, train = setup.config, setup.config.influence.evaluate.train
    specs, measured = [train.function], {}
    if measurement is not None:
        specs, measured = [*specs, measurement.name], {"measurement": measurement.model_dump(mode="json")}
    content = {
        "model": config.model.model_dump(mode="json", exclude={"checkpoint"}),
        "loss": config.loss.model_dump(mode="json"),
        **measured,
        "train": train.model_dump(mode="json", exclude={"together"}),
        "engine": config.engine.dtype,
        "code": setup.hashes(specs)["code"],
        "rows": rows.digest(),
    }
    return digest(content)
