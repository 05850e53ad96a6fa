"""The parts of every evaluation: methods that are compared, a trainer, and numbers of retrained models, which
are stored for a run that is interrupted.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.commands.influence_checkpoints import fresh_models
from psgrad.commands.influence_setup import InfluenceSetup, method_from
from psgrad.config import Config, EvaluationConfig
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Forward
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.influence.evaluation.retraining import (
    EnsembleTrainer,
    FunctionTrainer,
    Trainer,
    fresh_model,
    measured,
)
from psgrad.engine.influence.evaluation.statistics import CheckpointExamples
from psgrad.engine.influence.method import Fitted, Method
from psgrad.engine.influence.ranking import Average, Normalize
from psgrad.engine.transforms.private_torch import tree_leaves
from psgrad.models.training_functions import resolve_training
from psgrad.reports.words import duration
from psgrad.run import RunFolder
from psgrad.run.results import Progress, Say

Array = np.ndarray[Any, Any]
Fits = dict[str, tuple[Method, list[Fitted]]]
_NOTED_SECONDS = 60.0  # a longer predicted time of retraining is said before it begins
# Numbers of models that are trained already. A run that takes the place of an earlier one leaves them, and
# uses what is still true.
RETRAINED = "retrained"


@dataclass
class EvaluationParts:
    """The parts of an evaluation.

    methods: by the names that they have in tables, the config's first. asked: [m] the rows of the query data
    that are reported on. rows: the training data. train: makes models of jobs. models: how many were asked
    for. notes: sentences for people.
    """

    setup: InfluenceSetup
    wanted: EvaluationConfig
    methods: dict[str, Method]
    asked: Array
    rows: LoadedRows
    train: Trainer
    store: ShardStore
    fingerprint: str
    progress: Say
    notes: list[str] = field(default_factory=list)
    models: int = 0

    @property
    def main(self) -> str:
        return next(iter(self.methods))

    @property
    def seeds(self) -> int:
        """Trainings of each subset: one where all seeds lead to one minimum."""
        exact = self.wanted.train.function is None and self.wanted.train.optimizer == "newton"
        return 1 if exact else self.wanted.seeds

    @property
    def training(self) -> Examples:
        """The training examples as the first checkpoint's model sees them."""
        return self.setup.views[0].training

    @property
    def normalize(self) -> Normalize | None:
        """What the scores of the config's method are divided by."""
        wanted = self.setup.run.config.influence.normalize
        return None if wanted == "none" else wanted

    @property
    def average(self) -> Average:
        """How scores of several checkpoints are averaged."""
        return self.setup.run.config.influence.average

    def places(self) -> list[CheckpointExamples]:
        """The training examples as the model of each checkpoint sees them."""
        return [(view.training, view.checkpoint) for view in self.setup.views]

    def queries(self, rows: Array) -> list[Examples]:
        """These rows of the query data, as the model of each checkpoint sees them."""
        return [view.queries for view in self.setup.with_queries(rows).views]

    def outcomes(self, jobs: Sequence[Job], queries: Array) -> Array:
        """[jobs, m]: what each retrained model measures on these rows of the query data, larger being
        worse.
        """
        asked = self.queries(queries)[0]
        rows, criterion = LoadedRows.of(asked), asked.objective.criterion
        self.models += len(jobs)
        self.progress(Progress(0, len(jobs), "retraining", unit="model"))
        begun = perf_counter()
        told, before = False, 0

        def tell(done: int) -> None:
            nonlocal begun, told, before
            self.progress(Progress(done, len(jobs), "retraining", unit="model"))
            # Batches that an earlier run has stored take no time: the first that is trained tells.
            predicted = (perf_counter() - begun) / (done - before) * (len(jobs) - done)
            if not told and predicted > _NOTED_SECONDS:
                told = True
                said = (
                    f"the other {len(jobs) - done:,} models are predicted to take {duration(predicted)};"
                    " seeds, subsets, removals, ks and explained under influence.evaluate decide how many"
                    " there are; an interrupted evaluation goes on from its finished models"
                )
                self.progress(Progress(0, 0, "evaluation", said))
            begun, before = perf_counter(), done

        return measured(
            jobs,
            self.train,
            lambda members: members.measured(rows, criterion),
            self.store,
            f"{self.fingerprint} queries {rows.digest()}",
            self.wanted.train.together,
            tell=tell,
            processes=self.setup.processes,
        )


class ShardStore:
    """Arrays as files of a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def load(self, name: str) -> Array | None:
        """The array that was saved under this name; None where there is none, or it is damaged."""
        try:
            found: Array = np.load(self._folder.path / RETRAINED / f"{name}.npy", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found

    def save(self, name: str, values: Array) -> None:
        """Keep an array, durably. Raises OutputError."""
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        self._folder.write_bytes(f"{RETRAINED}/{name}.npy", buffer.getvalue())


def evaluation_of(setup: InfluenceSetup, folder: RunFolder, progress: Say) -> EvaluationParts:
    """The parts that a config names. Raises ConfigError for methods or a training function that are not
    there.
    """
    config, wanted = setup.run.config, setup.run.config.influence.evaluate
    fresh = fresh_models(config, setup.run)
    rows = LoadedRows.of(setup.views[0].training)
    train: Trainer
    if wanted.train.function is not None:
        train = FunctionTrainer(fresh, rows, resolve_training(wanted.train.function, config.base))
    else:
        recipe = Recipe(**wanted.train.model_dump(exclude={"function"}))
        train = EnsembleTrainer(fresh, rows, setup.run.criterion.function, recipe)
    asked = setup.query_rows
    if wanted.queries is not None and wanted.queries < len(asked):  # a random choice of them, in order
        asked = np.sort(np.random.default_rng([wanted.seed, 2]).choice(asked, wanted.queries, replace=False))
    notes, methods = list[str](), compared(config, setup.method)
    one, other = (dict(fresh_model(fresh, seed).named_parameters()) for seed in (0, 1))
    if all(torch.equal(value, other[name]) for name, value in one.items()):
        notes.append(
            "the model's factory gives the same weights whatever the seed: trainings differ in the order of"
            " the rows alone"
        )
    if setup.run.objective.autocast is not None:
        notes.append("models are retrained in float32, without autocast")
    if config.influence.index is not None:
        notes.append(
            "the index is not asked: methods are fitted to the training data, with projections of their own"
        )
    for name, method in methods.items():
        decay, trained = getattr(method, "weight_decay", wanted.train.weight_decay), wanted.train.weight_decay
        if wanted.train.function is None and decay != trained:
            notes.append(
                f"{name} takes a weight decay of {decay:g} for the one of training, and models are trained"
                f" again with {trained:g}"
            )
    return EvaluationParts(
        setup=setup,
        wanted=wanted,
        methods=methods,
        asked=asked,
        rows=rows,
        train=train,
        store=ShardStore(folder),
        fingerprint=f"{fingerprint(setup, rows)} {behaviour(fresh, rows, setup.run.forward)}",
        progress=progress,
        notes=notes,
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


def behaviour(fresh: Callable[[int], nn.Module], rows: LoadedRows, forward: Forward) -> str:
    """A digest of a fresh model's weights and of what it says to the first row: it is another where code that
    the factory imports is.
    """
    model = fresh_model(fresh, 0).eval()
    with torch.no_grad():
        output = forward(model, *[x[:1] for x in rows.inputs])
    said = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return LoadedRows((*model.state_dict().values(), *said), None).digest()


def fingerprint(setup: InfluenceSetup, rows: LoadedRows) -> str:
    """A digest of all that retrained models and their measurements depend on, besides the queries and the
    seeds. rows: the training data, by their numbers: one file may have several columns of labels.
    """
    config = setup.run.config
    influence = config.influence
    named = [influence.measurement.name, influence.evaluate.train.function]
    content = {
        "model": config.model.model_dump(mode="json", exclude={"checkpoint", "state_dict_key"}),
        "loss": config.loss.model_dump(mode="json"),
        "measurement": influence.measurement.model_dump(mode="json"),
        "train": influence.evaluate.train.model_dump(mode="json", exclude={"together"}),
        "engine": config.engine.dtype,
        "code": setup.run.hashes(named)["code"],
        "rows": rows.digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
