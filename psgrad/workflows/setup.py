"""The parts of a run: what its config names, the function that is differentiated, the reader of its rows, and
the engine's stream over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad import random_state
from psgrad.config import Config
from psgrad.engine.execution.buckets import ModelSize, padding_is_masked
from psgrad.engine.execution.loading import Read, to_device
from psgrad.engine.execution.objective import GroupObjective, Objective
from psgrad.engine.execution.ranks import spread_rows
from psgrad.engine.execution.self_check import SelfCheck, self_check
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.outputs import summary_for
from psgrad.errors import ConfigError
from psgrad.inputs.derived import DrawnSamples, drawn_rows
from psgrad.inputs.reader import CheckedReader
from psgrad.inputs.rows import Samples
from psgrad.workflows.loaded_parts import Loaded, Trained, load
from psgrad.workflows.residence import Ranks

Loss = Callable[..., Any]


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
