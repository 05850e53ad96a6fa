"""A dataset of any size, chunk by chunk: each chunk's deferred gradients go to the measures, and their columns come out.

The numbers do not depend on the chunk size. When memory runs out, the chunk that failed is halved and tried again; chunks that
are done stay done.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from psgrad.engine.gradients.per_sample import per_sample_gradients, per_sample_square_norms
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.replay import Replay
from psgrad.engine.transforms.program import Compiler
from psgrad.errors import ModelError, PsgradError

# Without a better estimate: what activations and intermediates take, as a multiple of the factors that are kept.
_ROOM_PER_FACTOR_BYTE = 4
_PROBE = 8
_LARGEST_AUTO_CHUNK = 1024


class Batch(Protocol):
    """Neighbouring rows of a dataset, stacked on the CPU, sample axis first."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...

    @property
    def target(self) -> torch.Tensor | None: ...


class Measure(Protocol):
    """Something that is computed from deferred gradients, sample by sample.

    A chunk may be tried more than once, so what a measure gathers over the whole dataset counts from `keep` on.

    needs_factors: whether it asks for more than norms, losses and aux. Where no measure does, the factors of one parameter's
    gradient are dropped before the next one's are complete.
    """

    needs_factors: bool

    def columns(self, gradients: Any) -> dict[str, torch.Tensor]:
        """name -> [n], for the samples of one chunk, which come in dataset order."""

    def keep(self) -> None:
        """The chunk that `columns` was last asked about is done."""


@dataclass(frozen=True)
class Columns:
    """What the measures said of the rows start, ..., stop - 1."""

    start: int
    stop: int
    values: dict[str, torch.Tensor]


class Stream:
    """The gradients of rows of a dataset, in chunks that fit in memory.

    Args:
        loss: (params, inputs, target) of one sample to (loss, aux); see Objective.
        params: name -> parameter, on the device to compute on.
        read: (start, stop) to the rows in between.
        chunk_size: samples at a time; 'auto' takes a small chunk first and sizes the next ones by it.
        randomness: as for vmap.
        capture: whether chunks of one size may be replayed from a record of the first ones, where there are many to come; 'off'
            runs each by itself.
        compile: 'inductor' has the record compiled.
        say: told about each retry, and why chunks are not replayed, in a sentence.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: dict[str, torch.Tensor],
        read: Callable[[int, int], Batch],
        *,
        chunk_size: int | Literal["auto"] = "auto",
        randomness: str = "error",
        capture: Literal["auto", "off"] = "auto",
        compile: Compiler = "none",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.loss, self.params, self.read, self.randomness, self.say = loss, params, read, randomness, say
        reference = next(iter(params.values()))
        self.device, self.dtype = reference.device, reference.dtype
        self.automatic = chunk_size == "auto"
        self.chunk_size = _PROBE if chunk_size == "auto" else int(chunk_size)
        self.retries = 0
        replays = {how: Replay(self._bound(how), params, compile, self.say) for how in (per_sample_gradients, per_sample_square_norms)}
        self.replays: dict[Callable[..., Any], Replay] = replays if capture == "auto" else {}

    def gradients(self, start: int, stop: int) -> PerSampleGradients:
        """The deferred gradients of the rows start, ..., stop - 1, all at once."""
        return self._gradients_of(*self.load(start, stop))

    def gradients_at(self, rows: Sequence[int]) -> PerSampleGradients:
        """The deferred gradients of a few rows from anywhere, all at once.

        Raises ModelError, with the row, where the model or the loss fails or memory runs out.
        """
        loaded = [self.load(row, row + 1) for row in rows]
        inputs = tuple(torch.cat(column) for column in zip(*(inputs for inputs, _ in loaded), strict=True))
        targets = [target for _, target in loaded if target is not None]
        try:
            return self._gradients_of(inputs, torch.cat(targets) if targets else None)
        except PsgradError:
            raise
        except Exception as error:
            raise self._failure(error, rows) from error

    def load(self, start: int, stop: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The inputs and the target of the rows start, ..., stop - 1, on the device and in the dtype of the parameters."""
        batch = self.read(start, stop)
        return tuple(self._placed(x) for x in batch.inputs), None if batch.target is None else self._placed(batch.target)

    def _gradients_of(self, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> PerSampleGradients:
        found: PerSampleGradients = self._bound(per_sample_gradients)(self.params, inputs, target)
        return found

    def _bound(self, how: Callable[..., Any]) -> Callable[..., Any]:
        """per_sample_gradients or per_sample_square_norms, as a function of the parameters and a chunk."""

        def found(params: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> Any:
            in_dims = (0, None if target is None else 0)
            return how(self.loss, params, inputs, target, in_dims=in_dims, has_aux=True, randomness=self.randomness)

        return found

    @property
    def replayed(self) -> dict[str, Any]:
        """How chunks were replayed, in the words of a manifest."""
        used = [replay for replay in self.replays.values() if replay.chunks]
        return {"chunks_replayed": sum(r.chunks for r in used), "replayed_by": ", ".join(sorted({r.how for r in used})) or None}

    def run(self, count: int, measures: Sequence[Measure]) -> Iterator[Columns]:
        """The measures' columns for the rows 0, ..., count - 1, in order."""
        start = 0
        while start < count:
            stop = min(start + self.chunk_size, count)
            values = self._attempt(start, stop, measures, (count - start) // (stop - start))
            if values is None:
                self.chunk_size = max(1, (stop - start) // 2)
                self.automatic = False
                self.retries += 1
                self.say(f"out of memory on rows {start} to {stop - 1}; going on with {self.chunk_size} at a time")
                continue
            yield Columns(start, stop, values)
            start = stop

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype if x.is_floating_point() else None)

    def _attempt(self, start: int, stop: int, measures: Sequence[Measure], to_come: int) -> dict[str, torch.Tensor] | None:
        """The columns of one chunk; None where memory ran out. The failed attempt's memory is free again on return.

        to_come: chunks of this size, this one included.
        """
        try:
            factors = self.automatic or any(measure.needs_factors for measure in measures)
            how = per_sample_gradients if factors else per_sample_square_norms
            inputs, target = self.load(start, stop)
            if how in self.replays:
                gradients: Any = self.replays[how](inputs, target, to_come)
            else:
                gradients = self._bound(how)(self.params, inputs, target)
            if self.automatic:
                self._size_chunks(gradients)
            values: dict[str, torch.Tensor] = {}
            for measure in measures:
                values.update({name: column.detach().cpu() for name, column in measure.columns(gradients).items()})
        except PsgradError:
            raise
        except Exception as error:
            if not is_out_of_memory(error) or stop - start == 1:
                raise self._failure(error, range(start, stop)) from error
        else:
            for measure in measures:
                measure.keep()
            return values
        # Outside the handler: the traceback, and with it every tensor of the attempt, is gone.
        for replay in self.replays.values():
            replay.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _size_chunks(self, gradients: PerSampleGradients) -> None:
        """The chunk size that a quarter of the free memory allows, by what the first chunk's factors took."""
        self.automatic = False
        kept = sum(f.numel() * f.element_size() for g in gradients.gradients.values() for p in g.terms for f in p.term.factors)
        each = max(1, kept // max(len(gradients), 1)) * _ROOM_PER_FACTOR_BYTE
        self.chunk_size = max(1, min(_LARGEST_AUTO_CHUNK, free_memory(self.device) // 4 // each))
        if self.device.type == "cpu":
            # past the caches' size larger chunks only cost memory
            self.chunk_size = max(1, min(self.chunk_size, max(_PROBE, _CPU_CHUNK_BYTES // each)))

    def _failure(self, error: Exception, rows: Sequence[int]) -> PsgradError:
        """The model, the loss or the memory failed on these rows together: find the first row that does by itself, and say so."""
        if len(rows) == 1:
            return self._failure_alone(error, rows[0])
        for row in rows:
            try:
                self.gradients(row, row + 1)
            except Exception as single:
                return self._failure_alone(single, row)
        together = f"rows {rows[0]} to {rows[-1]} together, though on none of them alone"
        return ModelError(
            f"the model or the loss raised {type(error).__name__} on {together}: {_first_line(error)}",
            cause="memory that is just enough for one sample" if is_out_of_memory(error) else "a program that depends on the batch's size",
            next_step="set engine.chunk_size: 1 and engine.verify: 1",
        )

    def _failure_alone(self, error: Exception, row: int) -> PsgradError:
        if isinstance(error, PsgradError):
            return error
        if is_out_of_memory(error):
            return _too_large(row, error)
        inputs, _ = self.load(row, row + 1)
        given = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in inputs)
        cause = "an input of another shape, type or range than the model takes (a token beyond the vocabulary, another image size)"
        if any(x.dtype == torch.int64 for x in inputs):
            cause = "a token beyond the vocabulary; or pixels saved as whole numbers, where the model takes floats as it was trained on"
        return ModelError(
            f"the model or the loss raised {type(error).__name__} on row {row}: {_first_line(error)}",
            expected=f"a forward pass that works for one row of the columns that the config names: {given}",
            cause=cause,
            next_step="check data.inputs and data.target; --debug shows the line of the model",
        )


_CPU_CHUNK_BYTES = 256 << 20


# What the CPU's allocator and the libraries of CUDA say in plain RuntimeErrors.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2 << 30


def _too_large(row: int, error: Exception) -> PsgradError:
    return ModelError(
        f"memory ran out on row {row} alone: {_first_line(error)}",
        expected="room for one sample's forward and backward pass",
        next_step="use a device with more memory, or engine.dtype: bfloat16",
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
