"""Class probabilities out of sample, for the issue table: models are trained without a part of the rows each,
and say how likely the classes of that part are.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from psgrad.commands.influence_inputs import fresh_models
from psgrad.commands.influence_retraining import ShardStore, fingerprint, trainer_of
from psgrad.commands.setup import Setup
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows
from psgrad.engine.influence.evaluation.retraining import fresh_model, measured
from psgrad.errors import ConfigError
from psgrad.run.folders import SHARDS
from psgrad.run.results import SAMPLE_COLUMNS, Progress
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
        both = zip(fresh.values(), setup.model.state_dict().values(), strict=False)
        if all(torch.equal(one, other) for one, other in both):
            problem = "model.factory gives the weights that are measured, which may have seen all labels"
            hint = "name a factory that gives fresh weights, and the trained ones as model.checkpoint"
    if problem:
        raise ConfigError(f"analyze.folds: {problem}", hint=hint)


def fold_probabilities(setup: Setup, frame: pd.DataFrame, run: Run[Any]) -> Array:
    """[n, classes]: of each row by a model that was trained without its fold. Folds have equal shares of each
    label, as far as rows of one group of the dataset, analyze.outliers.group_by, are in one fold. Finished
    models are kept in the run's folder, until the run is finished.

    frame: the samples of the run. Rows that are not finite are in no fold: their label has probability 1.

    Raises ConfigError where there are fewer rows or groups than folds, or fewer rows of each label,
    InfluenceError and ModelError where the model can't be trained.
    """
    config, folds = setup.config, setup.config.analyze.folds
    assert folds is not None
    usable = np.flatnonzero((frame["status"] == "ok").to_numpy(bool))
    labels = frame["target"].to_numpy()
    if len(usable) < folds:
        raise ConfigError(f"analyze.folds: {folds} folds of {len(usable)} rows; expected at most one a row")
    parts = _parts(setup, frame.iloc[usable], folds)
    examples = Examples(setup.objective, ChosenRows(setup.reader, usable), setup.stream_options(run.say))
    rows, fresh = LoadedRows.of(examples), fresh_models(config, setup)
    seed = config.analyze.seed
    jobs = [Job(f"the model without fold {number}", known, seed) for number, (known, _) in enumerate(parts)]
    outputs = fresh_model(fresh, seed).eval()(*(x[:1] for x in rows.inputs))
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
        raise ConfigError("analyze.folds: the model gives no vector of one number a class for a row")
    found = measured(
        jobs,
        trainer_of(config, fresh, rows, setup.criterion.function),
        lambda members: members.measured(rows, _probabilities),
        ShardStore(run.folder, FOLDS),
        fingerprint(setup, rows),
        config.influence.evaluate.train.together,
        tell=lambda done: run.progress(Progress(done, folds, "training on folds", unit="model")),
    )
    result: Array = (np.arange(outputs.shape[1]) == labels.astype(float)[:, None]).astype(float)
    for number, (_, left_out) in enumerate(parts):
        result[usable[left_out]] = found[number, left_out]
    return result


def _parts(setup: Setup, frame: pd.DataFrame, folds: int) -> list[tuple[Array, Array]]:
    """For each fold (the rows of the table that are trained on, those that are left out)."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    seed, by = setup.config.analyze.seed, setup.config.analyze.outliers.group_by
    labels, groups = frame["target"].astype(str), None
    if by in frame and by not in SAMPLE_COLUMNS:
        groups = frame[by].astype(str)
        if groups.nunique() < folds:
            raise ConfigError(
                f"analyze.folds: {folds} folds of {groups.nunique()} groups by {by}; expected at most one a"
                " group"
            )
    most = int(labels.value_counts().iloc[0])
    if most < folds:
        raise ConfigError(
            f"analyze.folds: {folds} folds, and no label has more than {most} rows; expected a label with a"
            " row in each fold",
            hint="set fewer folds",
        )
    with warnings.catch_warnings():  # of labels with fewer rows than folds, which some folds have none of
        warnings.simplefilter("ignore", UserWarning)
        kind = StratifiedKFold if groups is None else StratifiedGroupKFold
        return list(kind(folds, shuffle=True, random_state=seed).split(frame, labels, groups))


def _probabilities(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.double().softmax(-1)
