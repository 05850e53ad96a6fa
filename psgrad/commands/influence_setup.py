"""The parts of an influence run, made from its config: training examples and queries, as the model of each
checkpoint sees them, and the method; which rows have scores, and what a score is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.commands.checkpoints import checkpoints_of, same_weights, setup_at
from psgrad.commands.completion import completed_for_influence
from psgrad.commands.influence_inputs import (
    contrasted_rows,
    errors_about_queries,
    first_setup,
    queries_of,
    with_rows,
)
from psgrad.commands.run_manifest import identity, require_same_on_ranks
from psgrad.commands.setup import Setup
from psgrad.config import Config, MethodConfig, is_callable_spec
from psgrad.data.measurements import Measurement, resolve_measurement
from psgrad.data.reader import CheckedReader
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.influence.method import (
    RELATIVE,
    REMOVAL,
    UNCALIBRATED,
    Checkpoint,
    Fitted,
    Method,
    RowNorms,
    row_norms,
)
from psgrad.engine.influence.methods.gradient_products import TracIn
from psgrad.engine.influence.ranking import is_relative
from psgrad.engine.measures.builtin.outputs import summary_for
from psgrad.errors import InfluenceError, PsgradError
from psgrad.models.run_checkpoints import adam_state, second_moments
from psgrad.plugins import METHODS, configured
from psgrad.run.identity import digest, flattened
from psgrad.run.progress import read_ahead
from psgrad.run.results.influence import SIGN
from psgrad.run.results.manifest import CheckpointFacts, Coverage, InfluenceFacts, QueryFacts
from psgrad.run.run import Run
from psgrad.user_code import describe_failure
from psgrad.wording import first_of

_NAMED = 5  # rows in a warning


@dataclass(frozen=True)
class CheckpointView:
    """Training examples and queries as the model of one checkpoint sees them. path, sha256: of the
    checkpoint's file, where it has one.
    """

    checkpoint: Checkpoint
    training: Examples
    queries: Examples
    path: str | None
    sha256: str | None


@dataclass(frozen=True)
class InfluenceSetup:
    """What an influence run is made of.

    common: what all commands set up, at the first checkpoint. requested_rows: the rows of `query_reader`
    that the config asks about. query_rows: [m], those of them that have scores. training_rows: [n], those of
    the training data that are ranked. groups: [rows of the training data], the group of each, where the
    config names a column. contrasts: pairs of rows of `query_reader`.
    """

    common: Setup
    method: Method
    measurement: Measurement
    views: list[CheckpointView]
    query_reader: CheckedReader
    requested_rows: np.ndarray
    query_rows: np.ndarray
    training_rows: np.ndarray
    groups: np.ndarray | None = None
    contrasts: tuple[tuple[int, int], ...] = ()

    @property
    def config(self) -> Config:
        return self.common.config

    @property
    def processes(self) -> Processes:
        return self.views[0].training.processes

    def fitted(self, method: Method) -> list[Fitted]:
        """A method, fitted at each checkpoint."""
        return [method.fit(view.training, view.checkpoint) for view in self.views]

    def with_queries(self, rows: np.ndarray) -> InfluenceSetup:
        """This setup with `rows` as its only queries."""
        views = [
            replace(view, queries=with_rows(view.queries, self.query_reader, rows)) for view in self.views
        ]
        return replace(self, views=views, query_rows=rows)


# -- the method ----------------------------------------------------------------------------------------------


def method_from(config: MethodConfig, base: Path) -> Method:
    """The method that a config names, with its options. Raises ConfigError for a name or options that are not
    known, or can't be.
    """
    method: Method = configured(METHODS, config.name, config.options, base)
    return method


@contextmanager
def errors_of_own_method(name: str) -> Iterator[None]:
    """An exception of a user's own method becomes an InfluenceError that names the method. Exceptions of
    psgrad's methods stay as they are.
    """
    try:
        yield
    except PsgradError:
        raise
    except Exception as error:
        if not is_callable_spec(name):
            raise
        raise InfluenceError(
            f"scoring by the method {name} raised {describe_failure(error)}",
            hint="psgrad.engine.influence.method says what a method returns; --debug shows the line",
        ) from error


# -- loading -------------------------------------------------------------------------------------------------


def set_up_influence(config: Config, run: Run[Any]) -> InfluenceSetup:
    """Load all that a config names: model, data, queries, method, and each checkpoint. run: its processes
    share the passes; it shows how far these have come, and says what people should know.

    Raises PsgradError for everything that can be wrong with the config, the model, a checkpoint or the data.
    """
    say, processes, watch = run.say, run.processes, run.passes()
    config = completed_for_influence(config, say)
    method = method_from(config.influence.method, config.base)
    setup = first_setup(config, processes)
    # Before queries are chosen by their ids or losses.
    read_ahead(setup.samples, len(setup.samples), run.progress)
    if processes.size > 1:
        section = setup.config.model_dump(mode="json")["influence"]
        first = {**identity(setup, len(setup.samples)), **flattened({"influence": section})}
        require_same_on_ranks("training data", first, processes)
    measurement = resolve_measurement(config.influence.measurement, setup.criterion, config.base)
    if isinstance(method, TracIn) and method.optimizer == "sgd":
        _warn_of_adam(config, say)
    count = len(checkpoints_of(config))
    reader, rows = queries_of(config, setup, measurement, lambda: setup_at(setup, count - 1), processes)
    views: list[CheckpointView] = []
    for number in range(count):
        there = setup_at(setup, number)
        _require_another(views, there)
        checkpoint, options = _checkpoint(there, number, len(rows), say), there.stream_options(say)
        shared: dict[str, Any] = {"options": options, "processes": processes, "watch": watch}
        training = Examples(there.objective, there.reader, **shared)
        measured = _measured(there, measurement, reader)
        queries = Examples(measured, ChosenRows(reader, rows), **shared)
        name = None if there.checkpoint is None else str(there.checkpoint)
        views.append(CheckpointView(checkpoint, training, queries, name, there.loaded.sha256))
    asked = {
        "queries (their content)": reader.samples.content(),
        "queries (their rows)": digest({"rows": np.ascontiguousarray(rows, np.int64).tolist()}),
        "influence.checkpoints (their content)": [view.sha256 for view in views],
    }
    require_same_on_ranks("queries", asked, processes)
    column = config.influence.groups
    groups = None if column is None else setup.other_samples(config.data, column).units
    contrasts = contrasted_rows(config, reader.samples, rows)
    ranked = np.arange(len(setup.samples))
    return InfluenceSetup(
        setup, method, measurement, views, reader, rows, rows, ranked, groups=groups, contrasts=contrasts
    )


def _warn_of_adam(config: Config, say: Callable[[str], None]) -> None:
    """Say that a run took steps of Adam, where the state of one lies beside a checkpoint."""
    paths = [each.path if each is not None else config.model.checkpoint for each in checkpoints_of(config)]
    states = (adam_state(config.base / path) for path in paths if path is not None)
    if (state := next(filter(None, states), None)) is not None:
        say(
            f"{os.path.relpath(state, config.base)} has the state of Adam, and tracin undoes plain gradient"
            " steps, which this run did not take: its scores are no amounts; influence.method: {name: tracin,"
            " optimizer: adam} undoes steps of Adam, by this state"
        )


def _require_another(views: list[CheckpointView], setup: Setup) -> None:
    """Raises ConfigError for the weights of an earlier checkpoint."""
    weights = setup.model.state_dict()
    for view in views:
        own = view.training.objective.model.state_dict()
        if own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own):
            raise same_weights(view.path, setup.checkpoint, "influence.checkpoints")


def _checkpoint(setup: Setup, number: int, queries: int, say: Callable[[str], None]) -> Checkpoint:
    """What a method is told of a checkpoint. setup: at it. queries: how many there are."""
    listed, path = checkpoints_of(setup.config), setup.checkpoint
    checkpoint = listed[number]
    return Checkpoint(
        number,
        None if checkpoint is None else checkpoint.learning_rate,
        say,
        queries,
        of=len(listed),
        second_moments=lambda: (
            None if path is None else second_moments(setup.config.base / path, setup.model)
        ),
    )


def _measured(setup: Setup, measurement: Measurement, reader: CheckedReader) -> Objective:
    """The objective of the queries: what is measured of them, by the model of a setup."""
    custom = measurement.criterion.kind == "custom"
    summary = None if custom else summary_for(setup.criterion.kind, setup.criterion.ignore_index)
    return setup.objective_of(reader.samples).with_scalar(measurement.criterion.function, summary)


# -- rows that have scores -----------------------------------------------------------------------------------


class ScreenedRows:
    """The result of one pass over training examples and queries: whose numbers are finite at every
    checkpoint, and the last one's columns.
    """

    def __init__(self, training: list[RowNorms], queries: list[RowNorms]) -> None:
        self.training, self.queries = training[-1], queries[-1]
        self.kept = torch.stack([each.finite for each in training]).all(0).numpy()
        self.asked = torch.stack([each.finite for each in queries]).all(0).numpy()


def without_nonfinite(
    setup: InfluenceSetup, say: Callable[[str], None], stored: list[RowNorms] | None = None
) -> tuple[InfluenceSetup, ScreenedRows]:
    """The setup without the rows whose loss or gradient is not finite at some checkpoint, which are named.

    stored: the norms that an index holds. Its scores of such training examples are NaN, and no example is
    read again. Raises InfluenceError where nothing is left.
    """
    training = [row_norms(view.training) for view in setup.views] if stored is None else stored
    with errors_about_queries():
        queries = [row_norms(view.queries) for view in setup.views]
    screening = ScreenedRows(training, queries)
    samples = setup.common.samples
    for what, kept, ids in (
        ("training examples", screening.kept, samples.ids),
        ("queries", screening.asked, setup.query_reader.samples.ids[setup.query_rows]),
    ):
        out = np.flatnonzero(~kept)
        if len(out) == len(kept):
            raise InfluenceError(
                f"the loss or the gradient of every one of the {len(kept):,} {what} is not finite",
                hint="psgrad analyze shows which rows and parameters",
            )
        if len(out):
            say(
                f"excluded {len(out):,} of {len(kept):,} {what}, whose loss or gradient is not finite:"
                f" {first_of(list(map(str, ids[out])), _NAMED)}"
            )
    if screening.kept.all() and screening.asked.all():
        return setup, screening
    setup = setup.with_queries(setup.query_rows[screening.asked])
    rows = np.flatnonzero(screening.kept) if stored is None else setup.training_rows
    reader, numbers = setup.common.reader, torch.from_numpy(rows)
    views = [
        replace(view, training=replace(with_rows(view.training, reader, rows), numbers=numbers))
        for view in setup.views
    ]
    return replace(setup, views=views, training_rows=rows), screening


# -- what a score is ----------------------------------------------------------------------------------------


def unit_of(setup: InfluenceSetup, fitted: Sequence[Fitted] = ()) -> str:
    """What a score is, for headers. fitted: the method at each checkpoint, once there is one."""
    calibrated = (
        setup.method.unit == UNCALIBRATED and len(fitted) > 0 and all(each.calibrated for each in fitted)
    )
    unit = REMOVAL if calibrated else setup.method.unit
    if is_on_one_scale(setup):
        return f"{RELATIVE}{_ONE_SCALE}{_DIVIDED[setup.config.influence.normalize]}"
    return unit.format(change=setup.measurement.change) + _DIVIDED[setup.config.influence.normalize]


def is_on_one_scale(setup: InfluenceSetup) -> bool:
    """Whether each checkpoint's scores of a query are divided by their own scale before they are averaged."""
    return is_relative(setup.method, len(setup.views))


_ONE_SCALE = (
    ": the mean over checkpoints of scores that are divided, for each query, by their root mean square over"
    " the training examples"
)
_DIVIDED: dict[str, str] = {
    "none": "",
    "self_influence": ", divided by the square root of the training example's influence on itself",
    "preconditioned_norm": ", divided by the norm of the training example's preconditioned gradient",
}


def described(setup: InfluenceSetup) -> InfluenceFacts:
    """Facts about the scores for manifest.json, before there are any scores."""
    wanted = setup.config.influence
    return InfluenceFacts(
        method=setup.method.name,
        sign=SIGN,
        unit=unit_of(setup),
        predicts_removal=(
            setup.method.predicts_removal and wanted.normalize == "none" and not is_on_one_scale(setup)
        ),
        measurement=setup.measurement.name,
        normalize=wanted.normalize,
        parameters=list(setup.views[0].training.params),
        coverage=coverage(setup.common.model, setup.views[0].training.params),
        checkpoints=[
            CheckpointFacts(view.path, view.sha256, view.checkpoint.learning_rate) for view in setup.views
        ],
        queries=QueryFacts(len(setup.query_rows), setup.query_reader.samples.fingerprint),
    )


def coverage(model: nn.Module, covered: Collection[str]) -> Coverage:
    """How much of a model the scores are about."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return Coverage(
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if name in covered),
        [name for name in sizes if name not in covered],
    )
