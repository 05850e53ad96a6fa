"""Loads what a config names: the model, the loss, the data, and the engine's stream over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad import random_state
from psgrad.config import Config, DataConfig
from psgrad.config.model import TASK_LOSSES
from psgrad.engine.execution.buckets import ModelSize, padding_is_masked
from psgrad.engine.execution.loading import Read, to_device
from psgrad.engine.execution.objective import Forward, GroupObjective, Objective
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.ranks import spread_rows
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.self_check import SelfCheck, self_check
from psgrad.engine.execution.sharded import shard
from psgrad.engine.execution.stored import Supply
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.output_values import summary_for
from psgrad.errors import ConfigError
from psgrad.inputs.derived import DrawnSamples, drawn_rows
from psgrad.inputs.loss import Criterion, resolve_loss
from psgrad.inputs.models.factory import load_model
from psgrad.inputs.models.loaded import LoadedModel
from psgrad.inputs.models.model_identity import ModelIdentity, identify
from psgrad.inputs.reader import CheckedReader
from psgrad.inputs.rows import Samples
from psgrad.workflows.devices import pick_device, pick_precision, use_machine
from psgrad.workflows.residence import Ranks, Residence, agreed_residence, share_weights, turn_to_read
from psgrad.workflows.samples import images_trained_on, samples_of

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Loaded:
    """What a config names, before any row went through the model.

    Attributes:
        dtype, autocast: see `pick_precision`.
        loaded: the model as its factory and checkpoint gave it, and where it came from.
        identity: the hashes of that model.
        model: the same on the device, as `place` puts it there.
        forward: how that model is called on a batch of the samples.
        residence: where its weights live.
        recompute: whether its repeated modules run again in the backward pass; None for never.
    """

    config: Config
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    loaded: LoadedModel
    identity: ModelIdentity
    criterion: Criterion
    samples: Samples
    model: nn.Module
    forward: Forward
    residence: Residence
    recompute: Recompute | None

    @property
    def supply(self) -> Supply | None:
        """What brings offloaded weights to the device; None where all are there."""
        return self.residence.supply

    def placed(self, model: nn.Module, frozen: str) -> nn.Module:
        """Another model, such as that of another checkpoint, where this one's is and as this one is."""
        found = share_weights(place(model, self.device, self.dtype, frozen, self.supply))
        return found if self.recompute is None else self.recompute.add(found)

    def class_count(self, criterion: Criterion) -> int | None:
        """How many classes the output has, by the first row; None where that is not known, or differs from
        row to row.
        """
        return None if self.samples.labels_are_positions else class_count(self.first_output, criterion)

    def more_samples(
        self, data: DataConfig, unit: str | None = None, weighted: bool | None = None
    ) -> Samples:
        """Another dataset for the same model and loss: labels by name mean the same as in the run's own.

        weighted: whether its losses are to have weights; None for as the run's own have.
        """
        names = self.config.data.class_names
        if data.class_names is None and names is not None:
            data = data.model_copy(update={"class_names": names})
        found = samples_of(
            data,
            self.config.base,
            unit,
            self.loaded.pretrained,
            criterion=self.criterion,
            trained_on=images_trained_on(self.config, self.loaded),
            allow_download=self.config.allow_download,
        )
        if found.ragged is not None and self.samples.ragged is not None:
            found.ragged = replace(found.ragged, masked=self.samples.ragged.masked)
        if found.weighted != (self.samples.weighted if weighted is None else weighted):
            raise ConfigError(
                f"only one of {self.config.data.source} and {data.source} has weights",
                expected="a column data.weight in both, or in neither",
            )
        if (found.ungrouped is None) != (self.samples.ungrouped is None):
            raise ConfigError(
                f"only one of {self.config.data.source} and {data.source} has groups",
                expected="a column data.group for both, or for neither",
                next_step="say group there, too; what is not said is taken from data",
            )
        return found

    def first_output(self) -> Any:
        """The model's output for the first row as a batch of one, without psgrad's transforms."""
        samples = self.samples if self.samples.ungrouped is None else self.samples.ungrouped
        inputs = samples.read(0, 1).inputs
        with torch.no_grad():
            return self.forward(
                self.model,
                *[x.to(self.device, self.dtype if x.is_floating_point() else None) for x in inputs],
            )


@dataclass(frozen=True)
class Setup(Loaded):
    """The parts of a run: what the config names, with the function that is differentiated and the reader of
    the rows.
    """

    objective: Objective
    reader: CheckedReader

    def with_drawn_rows(self, count: int, seed: int) -> Setup:
        """The same on so many rows of the dataset, drawn at random."""
        samples = DrawnSamples(self.samples, drawn_rows(len(self.samples), count, seed))
        reader = CheckedReader(samples, self.criterion, self.reader.classes)
        return replace(self, samples=samples, reader=reader)

    def with_rows_described(self) -> Setup:
        """The same, with a reader that keeps what the table of samples says of each row: a digest where it
        has no id, and its length where positions count; rows that can't be read are measured as not finite.
        """
        described = self.config.data.id is None and self.config.data.group is None
        digests, lengths = described, self.criterion.kind == "token"
        reader = CheckedReader(
            self.samples,
            self.criterion,
            self.reader.classes,
            with_digests=digests,
            with_lengths=lengths,
            with_unreadable=True,
        )
        return replace(self, reader=reader)

    @property
    def randomness(self) -> str:
        """Of what a model draws, as for vmap: a model in eval mode draws nothing."""
        return "different" if self.model.training else "error"

    def stream(
        self, say: Callable[[str], None], loss: Loss | None = None, read: Read | None = None
    ) -> Stream:
        """Gradients chunk by chunk, as the config's engine section says: of the dataset's rows, or of
        what `read` and `loss` know.
        """
        return Stream(
            self.objective.loss if loss is None else loss,
            self.objective.params,
            self.reader if read is None else read,
            **self.stream_options(say),
        )

    def objective_of(self, samples: Samples) -> Objective:
        """The objective for another dataset: without weights where that has none."""
        return self.objective if samples.weighted else self.objective.unweighted()

    def stream_options(self, say: Callable[[str], None]) -> dict[str, Any]:
        """What the config's engine section says of chunks, as arguments of Stream."""
        engine = self.config.engine
        return {
            "chunk_size": engine.chunk_size,
            "memory": self._chunk_memory(),
            "supply": self.supply,
            "recompute": self.recompute,
            "scales_losses": self.autocast == torch.float16,
            "tokens": engine.tokens_per_chunk,
            "model_size": ModelSize.of(self.model),
            "randomness": self.randomness,
            "capture": "off" if self.supply is not None else engine.capture,
            "compile": engine.compile,
            "say": say,
        }

    def _chunk_memory(self) -> int | None:
        """Bytes for a chunk; None for what is free."""
        memory = self.config.engine.memory
        if memory == "auto":
            return None
        return memory if self.supply is None else memory - self.supply.budget

    def self_check(self, stream: Stream) -> SelfCheck | None:
        """How far our gradients are from plain ones, on a few rows; None where the model draws at random, and
        can't be asked twice.
        """
        if draws_at_random(self.first_output, self.model):
            return None
        return self_check(self.objective, stream, len(self.samples), self.config.engine.verify)


@dataclass(frozen=True)
class Trained:
    """The parameters that are differentiated.

    patterns: of their names; None for those that the factory left trainable. key: the config's name for the
    patterns.
    """

    patterns: Sequence[str] | None
    key: str


def load(
    config: Config,
    *,
    trained: Trained,
    unit: str | None = None,
    kept: Path | None = None,
    updates: bool = False,
    ranks: Ranks | None = None,
) -> Loaded:
    """Load all that a config names. All processes of a run do so together, once.

    Args:
        trained: the parameters that are differentiated.
        unit: the column of the data that says whom each row belongs to.
        kept: the folder of a run that keeps the tokens of texts.
        updates: whether the run writes to the parameters that are trained.
        ranks: those that run it; None for this process alone.

    Raises PsgradError for everything that can be wrong with the config, the model or the data.
    """
    device = pick_device(config.engine.device)
    use_machine(config, device)
    dtype, autocast = pick_precision(config.engine.dtype)
    ranks = Ranks.of(None) if ranks is None else ranks
    residence = agreed_residence(config, device, ranks)
    parts = ranks.parts(residence)
    with turn_to_read(config.model, config.base):
        loaded = load_model(
            config.model,
            config.base,
            trained.patterns,
            trained.key,
            allow_download=config.allow_download,
            in_files=residence.where != "resident",
        )
        identity = identify(loaded.model)  # now: placing converts tensors
        residence = residence.supplied(loaded.model, device, config.engine.memory == "auto")
        if parts is not None:
            shard(loaded.model, dtype, config.model.dtype, parts, trained_too=not updates)
        model = share_weights(
            place(loaded.model, device, dtype, config.model.dtype, residence.supply, trained_too=not updates)
        )
        residence.require_room(model)
    if parts is not None:  # when no rank waits for its turn
        parts.serve(identity.weights_sha256)
    how = config.engine.recompute
    recompute = None
    if how != "none":
        patterns = how if isinstance(how, list) else ()
        recompute = Recompute(how != "auto" or residence.supply is not None, patterns)
        recompute.add(model)
    criterion = resolve_loss(config.loss, config.base)
    _require_loss_of_the_head(loaded, criterion)
    samples = samples_of(
        config.data,
        config.base,
        unit,
        loaded.pretrained,
        kept,
        criterion=criterion,
        trained_on=images_trained_on(config, loaded),
        allow_download=config.allow_download,
    )
    if config.data.class_names is None and samples.class_names is not None:
        named = config.data.model_copy(update={"class_names": list(samples.class_names)})
        config = config.model_copy(update={"data": named})
    forward = Forward(samples.keywords, loaded.pick, samples.weighted, samples.loss_columns)
    return Loaded(
        config,
        device,
        dtype,
        autocast,
        loaded,
        identity,
        criterion,
        samples,
        model,
        forward,
        residence,
        recompute,
    )


def _require_loss_of_the_head(loaded: LoadedModel, criterion: Criterion) -> None:
    """Raises ConfigError where a head of several labels a row, or of one a token, would be compared with one
    class a row.
    """
    task = None if loaded.pretrained is None else loaded.pretrained.task
    if task is not None and TASK_LOSSES[task] == "token_cross_entropy" and criterion.kind == "class":
        raise ConfigError(
            f"the task {task} has a label for each token, and the loss {criterion.name} takes one a row",
            expected="loss: token_cross_entropy, or a loss of your own",
            next_step="leave loss out: the task has its own",
        )
    problem = None if loaded.pretrained is None else getattr(loaded.pretrained.config, "problem_type", None)
    if problem == "multi_label_classification" and criterion.kind == "class":
        raise ConfigError(
            f"the model has several labels a row ({problem}), and the loss {criterion.name} has one",
            expected="loss: bce_with_logits, or a loss of your own",
            next_step="say the loss in the config; the task's own is that of one label",
        )


def set_up(config: Config, kept: Path | None = None, ranks: Ranks | None = None) -> Setup:
    """Load all that a config names, and make the parts of a run of it; see `load`."""
    trained = Trained(config.analyze.trainable, "analyze.trainable")
    return setup_of(load(config, trained=trained, kept=kept, ranks=ranks))


def setup_of(parts: Loaded) -> Setup:
    """The parts of a run of what was loaded. The first row goes through the model, for the number of
    classes.
    """
    criterion = parts.criterion
    summary = summary_for(criterion.kind, criterion.ignore_index)
    objective = Objective(
        parts.model, criterion.function, summary, forward=parts.forward, autocast=parts.autocast
    )
    reader = CheckedReader(parts.samples, criterion, parts.class_count(criterion))
    _check_padding(parts, objective)
    if parts.samples.ungrouped is not None:
        objective = GroupObjective(objective)
    return Setup(**vars(parts), objective=objective, reader=reader)


# Rows of which the shortest are compared with themselves padded.
_ROWS_CHECKED = 16
PADDING_NOTE = "padding changes this model's loss: only rows of equal length are computed together"


def _check_padding(parts: Loaded, objective: Objective) -> None:
    """Have rows that differ in length computed apart, with a note, where the model reads padding."""
    samples = parts.samples
    if samples.ragged is None or not samples.ragged.masked or parts.model.training:
        return
    rows = samples if samples.ungrouped is None else samples.ungrouped
    reader = CheckedReader(rows, parts.criterion, parts.class_count(parts.criterion))
    block = reader.take(np.array(spread_rows(len(rows), _ROWS_CHECKED)))
    inputs, target = to_device(block.inputs, block.target, parts.device, parts.dtype)
    on_device = replace(block, inputs=inputs, target=target)
    halves = parts.autocast is not None
    if not padding_is_masked(objective.loss, objective.params, on_device, halves=halves):
        samples.ragged = replace(samples.ragged, masked=False)
        samples.notes = (*samples.notes, PADDING_NOTE)


def require_precision_of_all(config: Config, command: str) -> None:
    """Raises ConfigError for a precision that `analyze` alone has: sums over samples, and products with
    curvature, are not scaled sample by sample.
    """
    if config.engine.dtype == "float16":
        raise ConfigError(
            f"engine.dtype: float16, and {command} has no losses that are scaled sample by sample",
            expected="float32, float64 or bfloat16; float16 is for analyze",
            next_step="set engine.dtype: bfloat16, which has the range of float32",
        )


def class_count(first_output: Callable[[], Any], criterion: Criterion) -> int | None:
    """The size of the output's class axis, from one sample; None where the loss has no classes, or the
    model fails (told later).
    """
    if criterion.kind not in ("class", "token"):
        return None
    try:
        output = first_output()
    except Exception:
        return None
    if not isinstance(output, torch.Tensor) or output.dim() < 2:
        return None
    return int(output.shape[-1 if criterion.kind == "token" else 1])


def draws_at_random(first_output: Callable[[], Any], model: nn.Module) -> bool:
    """Whether the model draws random numbers: then a plain gradient can check nothing, as it draws anew."""
    if not model.training:
        return False  # psgrad's own pass refuses random operators there
    before = random_state.all_states()
    try:
        first_output()
    except Exception:
        return False
    return random_state.all_states() != before
