"""What a config names, loaded and made ready: the model and where its weights live, the loss, the samples and
the reader of their rows, the function that is differentiated, and the engine's stream over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad import random_state
from psgrad.commands.class_names import (
    require_loss_of_the_head,
    require_names_of_outputs,
    require_one_numbering,
)
from psgrad.commands.weight_placement import WeightPlacement, pick_device, pick_precision, weight_placement_of
from psgrad.config import Config, DataConfig
from psgrad.data.derived import DrawnSamples, drawn_rows
from psgrad.data.loss import Criterion, resolve_loss
from psgrad.data.reader import CheckedReader
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.engine.execution.buckets import ModelSize, padding_is_masked
from psgrad.engine.execution.chunk_replay import ReplayCounts
from psgrad.engine.execution.loading import Rows, to_device
from psgrad.engine.execution.memory import give_freed_memory_back
from psgrad.engine.execution.objective import Forward, Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.ranks import OneProcess, Processes, spread_rows
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.self_check import SelfCheck, self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.measures.builtin.outputs import summary_for
from psgrad.errors import ConfigError
from psgrad.models.factory import LoadedModel, load_model
from psgrad.models.model_identity import identify
from psgrad.run.identity import ModelIdentity, hashes_of
from psgrad.wording import first_of

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Setup:
    """What a config names, and what is made of it.

    Attributes:
        trained: the key of the config with the patterns of the parameters that are differentiated.
        checkpoint: the one that this setup is at, where there is one.
        dtype, autocast: see `pick_precision`.
        loaded: the model as its factory and checkpoint gave it, and where it came from.
        identity: the hashes of that model.
        model: the same on the device, as `place` puts it there.
        placement: where its weights live.
        recompute: whether its repeated modules run again in the backward pass; None for never.
        objective: the function that is differentiated; its `forward` calls the model on a batch of samples.
        reader: of the rows. It knows how many classes there are once a row went through the model.
        counts: of the chunks of all streams of the run, at all checkpoints.
    """

    config: Config
    trained: str
    checkpoint: Path | None
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    loaded: LoadedModel
    identity: ModelIdentity
    criterion: Criterion
    samples: Samples
    model: nn.Module
    placement: WeightPlacement
    recompute: Recompute | None
    objective: Objective
    reader: CheckedReader
    counts: ReplayCounts = field(default_factory=ReplayCounts)

    @property
    def forward(self) -> Forward:
        """How the model is called on a batch of the samples."""
        return self.objective.forward

    @property
    def supply(self) -> Supply | None:
        """What brings offloaded weights to the device; None where all are there."""
        return self.placement.supply

    def with_drawn_rows(self, count: int, seed: int) -> Setup:
        """This setup on `count` rows of the dataset, drawn at random."""
        samples = DrawnSamples(self.samples, drawn_rows(len(self.samples), count, seed))
        return replace(self, samples=samples).with_reader()

    def with_reader(self, **options: bool) -> Setup:
        """This setup with another reader. options: of CheckedReader, what the reader notes about each row."""
        return replace(
            self, reader=CheckedReader(self.samples, self.criterion, self.reader.classes, **options)
        )

    def with_rows_described(self) -> Setup:
        """This setup with a reader that notes for the table of samples each row's digest, if it has no id,
        and its length, if positions count. Rows that can't be read are measured as not finite.
        """
        described = self.config.data.id is None
        lengths = self.criterion.kind == "token"
        return self.with_reader(with_digests=described, with_lengths=lengths, with_unreadable=True)

    def with_classes(self, targets_later: bool = False) -> Setup:
        """This setup when the first row went through the model, for the number of classes. targets_later: as
        for the reader.
        """
        classes = self.class_count(self.criterion)
        self.require_names_of_outputs(classes)
        reader = CheckedReader(self.samples, self.criterion, classes, targets_later=targets_later)
        _check_padding(self, classes)
        return replace(self, reader=reader)

    def model_at(self, checkpoint: Path) -> LoadedModel:
        """The model with the weights of another checkpoint, with the same parameters trained; on no device
        yet.
        """
        return _model_of(
            self.config.changed("model", checkpoint=checkpoint), self.trained, self.supply is not None
        )

    def hashes(self, specs: Iterable[str | None] = ()) -> dict[str, Any]:
        """The hashes of the model and of all code, that of `specs` included; see `hashes_of`."""
        return hashes_of(self.config, self.identity, self.samples.sources, specs)

    def class_count(self, criterion: Criterion) -> int | None:
        """The size of the output's class axis, by the first row; None where that differs from row to row, the
        loss has no classes, or the model fails (reported later).
        """
        if criterion.kind not in ("class", "token"):
            return None
        shape = self._shape_of_output()
        return None if len(shape) < 2 else shape[-1 if criterion.kind == "token" else 1]

    def require_names_of_outputs(self, classes: int | None) -> None:
        """Raises ConfigError or DataError where the classes have names, and not as many as the model has
        outputs. classes: as the loss counts them; of a loss of the user's own the model's output tells it,
        where that is one vector a row.
        """
        custom = self.criterion.kind == "custom"
        if custom and self.config.data.class_names is not None:
            shape = self._shape_of_output()
            classes = shape[1] if len(shape) == 2 else None
            if not self.samples.names_found and classes != len(self.config.data.class_names):
                return  # a loss of one's own may read the output as it likes
        require_names_of_outputs(self.config, self.samples, classes, custom)

    def _shape_of_output(self) -> tuple[int, ...]:
        """The shape of the model's output for the first row; empty where the model fails, which is reported
        later, or where its output is no tensor.
        """
        try:
            output = self.first_output()
        except Exception:
            return ()
        return tuple(output.shape) if isinstance(output, torch.Tensor) else ()

    def reader_of(self, samples: Samples, criterion: Criterion | None = None) -> CheckedReader:
        """A reader of another dataset, for another criterion where one is given."""
        criterion = self.criterion if criterion is None else criterion
        return CheckedReader(samples, criterion, self.class_count(criterion))

    def other_samples(
        self, data: DataConfig, unit: str | None = None, weighted: bool | None = None
    ) -> Samples:
        """Another dataset for the same model and loss: labels by name mean the same as in the run's own.

        weighted: whether its losses are to have weights; None for as the run's own have.
        """
        names = self.config.data.class_names
        if data.class_names is not None and names not in (None, data.class_names):
            raise ConfigError(
                f"class_names of {data.source} are {first_of(data.class_names, 20)}, and those of"
                f" {self.config.data.source} {first_of(names or [], 20)}; expected one order of the"
                " classes, that of the model's outputs",
            )
        if names is not None:
            data = data.model_copy(update={"class_names": names})
        found = samples_of(data, self.config, self.loaded, self.criterion, unit)
        require_one_numbering(names, self.config.data.source, found, data.source)
        if found.ragged is not None and self.samples.ragged is not None:
            found.ragged = replace(found.ragged, masked=self.samples.ragged.masked)
        if found.weighted != (self.samples.weighted if weighted is None else weighted):
            raise ConfigError(
                f"only one of {self.config.data.source} and {data.source} has weights; expected a column"
                " data.weight in both, or in neither",
            )
        return found

    def first_output(self) -> Any:
        """The model's output for the first row as a batch of one, without psgrad's transforms."""
        inputs = self.samples.take([0]).inputs
        with torch.no_grad():
            return self.forward(
                self.model,
                *[x.to(self.device, self.dtype if x.is_floating_point() else None) for x in inputs],
            )

    @property
    def randomness(self) -> str:
        """The randomness of the model's draws, as for vmap: a model in eval mode draws nothing."""
        return "different" if self.model.training else "error"

    def stream(
        self, say: Callable[[str], None], loss: Loss | None = None, rows: Rows | None = None
    ) -> Stream:
        """Gradients chunk by chunk, as the config's engine section says: of the dataset's rows, or of
        what `rows` and `loss` know.
        """
        return Stream(
            self.objective.loss if loss is None else loss,
            self.objective.params,
            self.reader if rows is None else rows,
            **self.stream_options(say),
        )

    def objective_of(self, samples: Samples) -> Objective:
        """The objective for another dataset: without weights where that has none."""
        return self.objective if samples.weighted else self.objective.unweighted()

    def stream_options(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The settings of chunks in the config's engine section, as arguments of Stream."""
        engine = self.config.engine
        return {
            "chunk_size": engine.chunk_size,
            "memory": self.placement.memory(engine.memory),
            "supply": self.supply,
            "recompute": self.recompute,
            "model_size": ModelSize.of(self.model),
            "randomness": self.randomness,
            "capture": engine.capture,
            "counts": self.counts,
            "say": say,
        }

    def draws_at_random(self) -> bool:
        """Whether the model draws random numbers: then a plain gradient checks nothing, as it draws anew."""
        if not self.model.training:
            return False  # psgrad's own pass refuses random operators there
        before = random_state.all_states()
        try:
            self.first_output()
        except Exception:
            return False
        return random_state.all_states() != before

    def self_check(self, stream: Stream) -> SelfCheck | None:
        """How far our gradients are from plain ones, on a few rows; None where the model draws at random, and
        can't be asked twice.
        """
        if self.draws_at_random():
            return None
        return self_check(self.objective, stream, len(self.samples), self.config.engine.verify)


def set_up(config: Config, trained: str = "analyze.trainable", processes: Processes | None = None) -> Setup:
    """Load all that a config names, and let the first row through the model. Raises PsgradError as `load`
    does.
    """
    return load(config, trained, processes=processes).with_classes()


def load(
    config: Config,
    trained: str,
    *,
    unit: str | None = None,
    updates: bool = False,
    processes: Processes | None = None,
) -> Setup:
    """Load all that a config names; no row goes through the model yet. All processes of a run do so together,
    once.

    Args:
        trained: the key of the config with the patterns of the parameters that are differentiated.
        unit: the column of the data that says whom each row belongs to.
        updates: whether the run writes to the parameters that are trained.
        processes: those that run it; None for this one alone.

    Raises PsgradError for everything that can be wrong with the config, the model or the data.
    """
    device = pick_device(config.engine.device)
    processes = OneProcess() if processes is None else processes
    placement = weight_placement_of(config, device, processes)
    if placement.where != "resident" and device.type == "cpu":
        give_freed_memory_back()  # before the first tensor is made
    loaded = _model_of(config, trained, placement.where != "resident")
    # Two keys are completed while files are read, as these alone tell them: the precision of a pretrained
    # model, which may be a cached one, by all of its weights, and the names of classes by all labels.
    if config.engine.dtype == "auto":
        found = "float32" if loaded.pretrained is None else loaded.pretrained.automatic_dtype
        config = config.changed("engine", dtype=found)
    dtype, autocast = pick_precision(config.engine.dtype)
    identity = identify(loaded.model)  # now: placing converts tensors
    placement = placement.supplied(device)
    model = place(loaded.model, device, dtype, config.model.dtype, placement.supply, trained_too=not updates)
    placement.require_memory(model)
    engine, recompute = config.engine, None
    if engine.recompute != "none":
        recompute = Recompute(engine.recompute == "blocks" or placement.supply is not None)
        recompute.add(model)
    criterion = resolve_loss(config.loss, config.base)
    require_loss_of_the_head(loaded, criterion)
    samples = samples_of(config.data, config, loaded, criterion, unit)
    if config.data.class_names is None and samples.class_names is not None:
        config = config.changed("data", class_names=list(samples.class_names))
    summary = summary_for(criterion.kind, criterion.ignore_index)
    forward = Forward(samples.keywords, loaded.pick, samples.weighted)
    return Setup(
        config=config,
        trained=trained,
        checkpoint=config.model.checkpoint,
        device=device,
        dtype=dtype,
        autocast=autocast,
        loaded=loaded,
        identity=identity,
        criterion=criterion,
        samples=samples,
        model=model,
        placement=placement,
        recompute=recompute,
        objective=Objective(model, criterion.function, summary, forward=forward, autocast=autocast),
        reader=CheckedReader(samples, criterion, None, targets_later=True),
    )


def _model_of(config: Config, trained: str, in_files: bool) -> LoadedModel:
    """The model of a config. trained: the key of the patterns of its trained parameters; where that has none,
    they are those that the factory left trainable.
    """
    section, key = trained.split(".")
    patterns = getattr(getattr(config, section), key)
    return load_model(config.model, config.base, patterns, trained, in_files=in_files)


def samples_of(
    data: DataConfig,
    config: Config,
    loaded: LoadedModel,
    criterion: Criterion,
    unit: str | None = None,
) -> Samples:
    """The dataset as `load_data` has it for a config's model and loss."""
    # timm's facts about the images that its model was trained on.
    images = getattr(loaded.model, "pretrained_cfg", None)
    return load_data(data, config.base, unit, loaded.pretrained, criterion=criterion, trained_on=images)


# Rows of which the shortest are compared with themselves padded.
_ROWS_CHECKED = 16
PADDING_NOTE = "padding changes this model's loss: only rows of equal length are computed together"


def _check_padding(setup: Setup, classes: int | None) -> None:
    """Have rows that differ in length computed apart, with a note, where the model reads padding."""
    samples, objective = setup.samples, setup.objective
    if samples.ragged is None or not samples.ragged.masked or setup.model.training:
        return
    reader = CheckedReader(samples, setup.criterion, classes)
    block = reader.take(np.array(spread_rows(len(samples), _ROWS_CHECKED)))
    on_device = to_device(block, setup.device, setup.dtype)
    halves = setup.autocast is not None
    if not padding_is_masked(objective.loss, objective.params, on_device, halves=halves):
        samples.ragged = replace(samples.ragged, masked=False)
        samples.notes = (*samples.notes, PADDING_NOTE)
