"""Reads rows of a dataset and computes their gradients, all at once; a row that fails is named in the error.

Which rows, and how many fit in memory, is decided by the stream (streaming.py).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.execution.bucket_plan import positions_of
from psgrad.engine.execution.buckets import RaggedChunks, first_rows
from psgrad.engine.execution.chunk_memory import (
    LARGEST_AUTO_CHUNK,
    SHARE_OF_ROWS,
    ChunkMemory,
    measured_memory,
    peak_bytes,
)
from psgrad.engine.execution.chunk_replay import ReplayCounts
from psgrad.engine.execution.loading import Chunk, Rows, to_device
from psgrad.engine.execution.memory import is_out_of_memory
from psgrad.engine.gradients.per_sample import per_sample_gradients, per_sample_square_norms
from psgrad.errors import ModelError, PsgradError, one_line
from psgrad.ragged import Block

# If the loss runs at least this often on one chunk, for fewer rows than that each, a loop may be as fast.
_MANY_PASSES = 8


def _split_words(passes: int, rows: int) -> str:
    return (
        f"the loss ran {passes} times for a chunk of {rows} rows, as they disagree on a length or a branch; a"
        " loop over rows may be as fast. torch.where in place of the branch, a mask in place of an unpacked"
        " sequence, or rows of equal length let it run once"
    )


class RowComputation:
    """Computes gradients of rows that fit in memory together.

    The arguments are those of Stream, but for `ragged`: the buckets of rows that differ in length.

    Attributes:
        retries: how often memory ran out.
        at_need: called when it does, to give back what others keep.
        draws: whether reading rows draws random numbers from the generators that the model draws from.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: dict[str, torch.Tensor],
        rows: Rows,
        *,
        ragged: RaggedChunks,
        randomness: str,
        counts: ReplayCounts,
        say: Callable[[str], None],
    ) -> None:
        self.loss, self.params, self.randomness, self.say = loss, params, randomness, say
        self.ragged, self.counts = ragged, counts
        reference = next(iter(params.values()))
        self.device, self.dtype = reference.device, reference.dtype
        self.retries = 0
        self.at_need: list[Callable[[], None]] = []
        self._said_split = False
        self.rows, self._reading = rows, threading.Lock()
        self.draws = bool(getattr(rows, "draws", False))

    def take(self, rows: Sequence[int]) -> Block:
        """These rows as they are read, one call at a time."""
        with self._reading:
            return self.rows.take(rows)

    def load(self, rows: Sequence[int]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The inputs and the target of these rows, on the device and in the dtype of the parameters. Rows
        that differ in length are padded.
        """
        block = self.load_block(rows)
        return block.inputs, block.target

    def load_block(self, rows: Sequence[int]) -> Block:
        """The rows of `load` as a block, with their lengths, for `computed`."""
        return self._to_device(self.take(rows))

    def _to_device(self, block: Block) -> Block:
        return to_device(block, self.device, self.dtype)

    def computed(
        self, how: Callable[..., Any], block: Block, replay: Callable[[Block], Any] | None = None
    ) -> Any:
        """What `how` (see `run`) finds of rows on the device: of all at once, or bucket by bucket where they
        differ in length. replay: see `RaggedChunks.computed`.
        """
        if block.ragged is None:
            self.counts.chunks += 1
            return self.pass_of(how)(self.params, block.inputs, block.target)
        of_rows = getattr(how, "of_rows", None)  # a way that adds rows up needs to know which are copies

        def run(some: Block, rows: int) -> Any:
            self.counts.chunks += 1
            compute = how if of_rows is None else of_rows(rows)
            return self.pass_of(compute)(self.params, some.inputs, some.target)

        def replayed(some: Block, rows: int) -> Any:
            assert replay is not None
            return first_rows(replay(some), rows, len(some))

        few_shapes = None if replay is None else replayed
        if getattr(how, "few_shapes", False):
            few_shapes = run
        return self.ragged.computed(block, run, keeps_factors(how), self.give_back, few_shapes)

    def pass_of(self, how: Callable[..., Any]) -> Callable[..., Any]:
        """per_sample_gradients or per_sample_square_norms, as a function of the parameters and a chunk."""

        def found(
            params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
        ) -> Any:
            in_dims = (0, None if target is None else 0)
            passes = 0

            def loss(*args: Any) -> Any:
                nonlocal passes
                passes += 1
                return self.loss(*args)

            result = how(
                loss, params, inputs, target, in_dims=in_dims, has_aux=True, randomness=self.randomness
            )
            many = passes > max(_MANY_PASSES, len(inputs[0]) / _MANY_PASSES)
            if many and runs_the_loss_once(how) and not self._said_split:
                self._said_split = True
                self.say(_split_words(passes, len(inputs[0])))
            return result

        return found

    def memory_of_chunks(self, how: Callable[..., Any], block: Block, budget: int, count: int) -> ChunkMemory:
        """What chunks of a run over `count` rows take, where `how` (see `run`) is computed. By two chunks of
        these rows, which are repeated for the larger one. Of rows that differ in length the longest counts.

        block: rows on the device.
        """
        places = list(range(len(block)))
        if block.ragged is not None and block.lengths is not None:
            places = [int(positions_of(block.lengths.numpy(), block.ragged).argmax())]
        compute = self.pass_of(how)

        def takes(rows: int) -> int:
            some = block.at([places[row % len(places)] for row in range(rows)])
            given = [*some.inputs, *([] if some.target is None else [some.target])]
            return peak_bytes(compute, self.params, some.inputs, some.target) + sum(x.nbytes for x in given)

        most = min(LARGEST_AUTO_CHUNK, count // SHARE_OF_ROWS)
        return measured_memory(takes, len(places), budget, most)

    def give_back(self) -> None:
        """Free the memory that is not needed, as memory ran out."""
        self.retries += 1
        for give_back in self.at_need:
            give_back()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _failure(self, error: Exception, chunk: Chunk) -> PsgradError:
        """The model, the loss or the memory failed on these rows together: find the first row that does by
        itself, and say so.
        """
        if is_lost_gpu(error):
            return failure_of_gpu(error, chunk.rows)
        if len(chunk) == 1:
            return self._failure_alone(error, chunk)
        for place in range(len(chunk)):
            alone = chunk.part(place, place + 1)
            try:
                self.computed(per_sample_gradients, self._to_device(alone.block))
            except Exception as single:
                return self._failure_alone(single, alone)
        return failure_together(error, chunk.rows)

    def _failure_alone(self, error: Exception, chunk: Chunk) -> PsgradError:
        inputs = self._to_device(chunk.block).inputs[: getattr(self.rows, "inputs_of_model", None)]
        return failure_alone(error, chunk.rows[0], inputs)


def runs_the_loss_once(how: Callable[..., Any]) -> bool:
    """Whether `how` runs the loss once for rows that agree; other ways may run it for several models."""
    return getattr(how, "func", how) in (per_sample_gradients, per_sample_square_norms)


def keeps_factors(how: Callable[..., Any]) -> bool:
    """Whether what is found of a chunk takes memory for each of its rows; where it does not say so, it
    does, but for norms.
    """
    return bool(getattr(how, "keeps_factors", how is not per_sample_square_norms))


def is_lost_gpu(error: Exception) -> bool:
    """Whether a kernel has stopped the GPU for this process, as one does that meets an index out of range."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_GPU)


_LOST_GPU = ("device-side assert", "illegal memory access", "unspecified launch failure")


def failure_of_gpu(error: Exception, rows: Sequence[int]) -> PsgradError:
    """The error for rows on which the GPU stopped. It answers no more calls, so the row is not known."""
    which = f"row {rows[0]}" if len(rows) == 1 else f"one of the rows {rows[0]} to {rows[-1]}"
    return ModelError(
        f"the GPU stopped on {which}: {_first_line(error)}; expected labels and tokens within the model's"
        " classes and vocabulary",
        hint=(
            "an index out of range: a label that is not a class, or a token beyond the vocabulary; run"
            " again with engine.device: cpu, which names the row"
        ),
    )


def failure_together(error: Exception, rows: Sequence[int]) -> PsgradError:
    """The error for rows that fail together, though none of them fails alone."""
    return ModelError(
        f"the model or the loss raised {type(error).__name__} on rows {rows[0]} to {rows[-1]} together,"
        f" though on none of them alone: {_first_line(error)}",
        hint=one_line(
            "memory that is just enough for one sample"
            if is_out_of_memory(error)
            else "a program that depends on the batch's size",
            "set engine.chunk_size: 1 and engine.verify: 1",
        ),
    )


def failure_alone(error: Exception, row: int, inputs: Sequence[torch.Tensor]) -> PsgradError:
    """The error for one row. inputs: of the row, on the device, [1, ...] each."""
    if isinstance(error, PsgradError):
        return error
    if is_out_of_memory(error):
        return too_large(row, error)
    given = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in inputs)
    cause = (
        "an input of another shape, type or range than the model takes (a token beyond the vocabulary,"
        " another image size)"
    )
    if any(x.dtype == torch.int64 for x in inputs):
        cause = (
            "a token beyond the vocabulary; or whole numbers, such as pixels or the columns of a CSV file,"
            " where the model takes floats as it was trained on (save them as 1.0, or call .float() in the"
            " model's forward)"
        )
    return ModelError(
        f"the model or the loss raised {type(error).__name__} on row {row}: {_first_line(error)}; expected"
        f" a forward pass that works for one row of the columns that the config names: {given}",
        hint=one_line(cause, "check data.inputs and data.target; --debug shows the line of the model"),
    )


def too_large(row: int, error: Exception) -> PsgradError:
    """The error for one row for which memory runs out."""
    return ModelError(
        f"memory ran out on row {row} alone: {_first_line(error)}; expected room for one sample's forward"
        " and backward pass",
        hint="use a device with more memory, or engine.dtype: bfloat16",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
