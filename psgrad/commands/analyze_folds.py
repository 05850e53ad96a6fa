"""Class probabilities out of sample, for the issue table: models are trained without a part of the rows each,
and say how likely the classes of that part are.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from psgrad.commands.influence_inputs import fresh_models
from psgrad.commands.influence_retraining import ShardStore, trainer_of
from psgrad.commands.setup import Setup
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.objective import Criterion
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members
from psgrad.engine.influence.evaluation.retraining import fresh_model, measured
from psgrad.errors import ConfigError
from psgrad.run.folders import SHARDS
from psgrad.run.results import Progress
from psgrad.run.run import Run

Array = npt.NDArray[Any]
# What the trained models say, until the run is finished.
FOLDS = f"{SHARDS}/folds"


def require_folds(setup: Setup) -> None:
    """Raises ConfigError where no models can be trained for analyze.folds."""
    problem, hint = "", "leave analyze.folds out"
    if setup.criterion.kind != "class":
        problem = f"the loss {setup.config.loss.name} has no classes; expected cross_entropy or nll"
    elif setup.samples.weighted:
        problem = "models are not trained again on rows with weights (data.weight)"
    else:
        fresh = fresh_model(fresh_models(setup.config, setup), setup.config.analyze.seed).state_dict()
        own = setup.model.state_dict()
        if all(torch.equal(value, own[name]) for name, value in fresh.items()):
            problem = "model.factory gives the weights that are measured, which may have seen all labels"
            hint = "name a factory that gives fresh weights, and the trained ones as model.checkpoint"
    if problem:
        raise ConfigError(f"analyze.folds: {problem}", hint=hint)


def fold_probabilities(setup: Setup, frame: pd.DataFrame, run: Run[Any]) -> Array:
    """[n, classes]: of each row by a model that was trained without its fold. Folds have equal shares of each
    label. Finished models are kept in the run's folder, until the run is finished.

    frame: the samples of the run. Rows that are not finite are in no fold: their label has probability 1.

    Raises ConfigError where there are fewer rows than folds, InfluenceError and ModelError where the model
    can't be trained.
    """
    from sklearn.model_selection import StratifiedKFold

    config, folds = setup.config, setup.config.analyze.folds
    assert folds is not None
    usable = np.flatnonzero((frame["status"] == "ok").to_numpy(bool))
    labels = frame["target"].to_numpy()
    if len(usable) < folds:
        raise ConfigError(f"analyze.folds: {folds} folds of {len(usable)} rows; expected at most one a row")
    examples = Examples(setup.objective, ChosenRows(setup.reader, usable), setup.stream_options(run.say))
    rows, fresh = LoadedRows.of(examples), fresh_models(config, setup)
    with warnings.catch_warnings():  # of labels with fewer rows than folds, which some folds have none of
        warnings.simplefilter("ignore", UserWarning)
        divided = StratifiedKFold(folds, shuffle=True, random_state=config.analyze.seed)
        parts = list(divided.split(usable, labels[usable].astype(str)))
    seed = config.analyze.seed
    jobs = [Job(f"the model without fold {number}", known, seed) for number, (known, _) in enumerate(parts)]
    train = config.influence.evaluate.train
    about = [
        config.model.model_dump(mode="json", exclude={"checkpoint"}),
        config.loss.model_dump(mode="json"),
        train.model_dump(mode="json", exclude={"together"}),
        setup.hashes([train.function])["code"],
        rows.digest(),
    ]
    outputs = fresh_model(fresh, seed).eval()(*(x[:1] for x in rows.inputs))
    classes = outputs.shape[-1] if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 else 0
    if not classes:
        raise ConfigError("analyze.folds: the model gives no vector of one number a class for a row")

    def probabilities(members: Members) -> Array:
        found = [members.measured(rows, _probability_of(each)) for each in range(classes)]
        return np.stack(found, axis=-1).reshape(len(members), -1)

    found = measured(
        jobs,
        trainer_of(config, fresh, rows, setup.criterion.function),
        probabilities,
        ShardStore(run.folder, FOLDS),
        hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(),
        train.together,
        tell=lambda done: run.progress(Progress(done, folds, "training on folds", unit="model")),
    ).reshape(folds, len(usable), classes)
    result: Array = (np.arange(classes) == labels.astype(float)[:, None]).astype(float)
    for number, (_, left_out) in enumerate(parts):
        result[usable[left_out]] = found[number, left_out]
    return result


def _probability_of(label: int) -> Criterion:
    def scalar(output: Any, _: Any) -> torch.Tensor:
        probability: torch.Tensor = output.double().softmax(-1)[label]
        return probability

    return scalar
