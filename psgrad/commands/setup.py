"""The parts of a run: what its config names, the function that is differentiated, the reader of its rows, and
the engine's stream over them; the same at other checkpoints of a training run, each of which is known to be
there and to fit the model before any work, and loaded when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from psgrad import random_state
from psgrad.commands.loaded_parts import Loaded, Trained, load
from psgrad.config import Config
from psgrad.data.derived import DrawnSamples, drawn_rows
from psgrad.data.reader import CheckedReader
from psgrad.data.rows import Samples
from psgrad.engine.execution.buckets import ModelSize, padding_is_masked
from psgrad.engine.execution.chunk_replay import ReplayCounts
from psgrad.engine.execution.loading import Rows, to_device
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.ranks import Processes, spread_rows
from psgrad.engine.execution.self_check import SelfCheck, self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.outputs import summary_for
from psgrad.engine.measures.measure import CheckpointModel
from psgrad.errors import CheckpointError, ConfigError
from psgrad.models.checkpoint_files import require_checkpoint
from psgrad.models.factory import checkpoint_hash
from psgrad.models.model_identity import identify
from psgrad.wording import first_of

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Setup(Loaded):
    """The parts of a run: what the config names, with the function that is differentiated and the reader of
    the rows.

    Attributes:
        counts: of the chunks of all streams of the run, at all checkpoints.
    """

    objective: Objective
    reader: CheckedReader
    counts: ReplayCounts = field(default_factory=ReplayCounts)

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

    def at_checkpoint(self, path: Path) -> Setup:
        """This setup with the weights of another checkpoint. Raises CheckpointError for the checkpoint of a
        model with other parameters.
        """
        loaded, section = self.model_at(path), self.config.model.model_copy(update={"checkpoint": path})
        model = self.placed(loaded.model)
        objective = self.objective.with_model(model)
        ours, theirs = (
            {name: tuple(value.shape) for name, value in each.params.items()}
            for each in (self.objective, objective)
        )
        odd = sorted({name for name, _ in ours.items() ^ theirs.items()})
        if odd:
            raise CheckpointError(
                f"the model of the checkpoint {path} has other parameters than the config's model:"
                f" {first_of(odd, 1)}; expected checkpoints of one training run",
                hint="a folder of another model, or an adapter where the config has none",
            )
        config = self.config.model_copy(update={"model": section})
        return replace(self, config=config, loaded=loaded, model=model, objective=objective)

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

    def self_check(self, stream: Stream) -> SelfCheck | None:
        """How far our gradients are from plain ones, on a few rows; None where the model draws at random, and
        can't be asked twice.
        """
        if draws_at_random(self.first_output, self.model):
            return None
        return self_check(self.objective, stream, len(self.samples), self.config.engine.verify)


def set_up(config: Config, processes: Processes | None = None) -> Setup:
    """Load all that a config names, and make the parts of a run of it; see `load`."""
    trained = Trained(config.analyze.trainable, "analyze.trainable")
    return setup_of(load(config, trained=trained, processes=processes))


def setup_of(parts: Loaded, targets_later: bool = False) -> Setup:
    """The parts of a run of what was loaded. The first row goes through the model, for the number of
    classes. targets_later: as for the reader.
    """
    criterion = parts.criterion
    summary = summary_for(criterion.kind, criterion.ignore_index)
    objective = Objective(
        parts.model, criterion.function, summary, forward=parts.forward, autocast=parts.autocast
    )
    classes = parts.class_count(criterion)
    parts.require_names_of_outputs(classes)
    reader = CheckedReader(parts.samples, criterion, classes, targets_later=targets_later)
    _check_padding(parts, objective)
    return Setup(**vars(parts), objective=objective, reader=reader)


# Rows of which the shortest are compared with themselves padded.
_ROWS_CHECKED = 16
PADDING_NOTE = "padding changes this model's loss: only rows of equal length are computed together"


def _check_padding(parts: Loaded, objective: Objective) -> None:
    """Have rows that differ in length computed apart, with a note, where the model reads padding."""
    samples = parts.samples
    if samples.ragged is None or not samples.ragged.masked or parts.model.training:
        return
    reader = CheckedReader(samples, parts.criterion, parts.class_count(parts.criterion))
    block = reader.take(np.array(spread_rows(len(samples), _ROWS_CHECKED)))
    on_device = to_device(block, parts.device, parts.dtype)
    halves = parts.autocast is not None
    if not padding_is_masked(objective.loss, objective.params, on_device, halves=halves):
        samples.ragged = replace(samples.ragged, masked=False)
        samples.notes = (*samples.notes, PADDING_NOTE)


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


# -- checkpoints ---------------------------------------------------------------------------------------------


def checkpoint_models(run: Setup) -> list[CheckpointModel]:
    """The checkpoints of `analyze.checkpoints`, named as in the config; one at a time is in memory.

    Raises ConfigError for a file that is not there and for the same weights twice, CheckpointError for a file
    that can't be read or does not fit the model.
    """
    paths, base = run.config.analyze.checkpoints or [], run.config.base
    for path in paths:  # all of them, before the first is read
        require_checkpoint(base / path)
    met: dict[str, Path] = {}
    for path in paths:
        weights = identify(run.model_at(path).model).weights_sha256
        if weights in met:
            raise same_weights(met[weights], path, "analyze.checkpoints")
        met[weights] = path
    return [CheckpointModel(str(path), partial(_objective, run, path)) for path in paths]


def _objective(run: Setup, path: Path) -> Objective:
    return run.at_checkpoint(path).objective.with_summary(None)


def same_weights(first: object, second: object, key: str) -> ConfigError:
    """What is said of two checkpoints of the config's `key` with equal weights. Files are not compared, as
    torch.save writes a file's name into it.
    """
    return ConfigError(
        f"the checkpoints {first} and {second} hold the same weights; expected each checkpoint once",
        hint=(
            "one file under two names, or a training run that did not train in between; leave one of"
            f" them out of {key}; it would count double"
        ),
    )


def checkpoints_sha256(run: Setup) -> dict[str, str]:
    """The hash of each checkpoint's file, by its name in the config."""
    return {
        str(path): checkpoint_hash(run.config.base / path) for path in run.config.analyze.checkpoints or []
    }
