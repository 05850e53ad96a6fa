"""The monitor of a training loop: it measures the rows of some batches, names those of spikes, and writes
what it found beside the run.
"""

from __future__ import annotations

import io
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save
from torch import nn

from psgrad.errors import ConfigError, DataError
from psgrad.monitoring.batch_gradients import BatchGradients, ComputeLoss, RowsMeasured, SourceSums
from psgrad.monitoring.input_properties import InputProperties
from psgrad.monitoring.padding import padded
from psgrad.monitoring.spikes import SpikeDetector
from psgrad.run.folders import RunFolder

_SECONDS = 30.0  # tables are written at most so often, and with each spike
_NOISE_BATCHES = 50  # measured batches that the noise scale is estimated from
# Columns that may have no value in a whole file.
_TEXTS = ("id", "source", "reason")
_MAYBE = ("loss_mean", "grad_norm_median", "grad_norm_max", "loss_max", "cosine_min", "noise_scale")
Log = Callable[[dict[str, float], int], None]
"""Gets the numbers of a measured step by name, and the step."""


@dataclass(frozen=True)
class SpikeRow:
    """A row that is unlike those before. id: as it was given, else the row's place in its step."""

    id: Any
    place: int
    reason: str
    loss: float
    norm: float


@dataclass(frozen=True)
class StepMeasured:
    """What was measured of one step's rows, in their order. noise_scale: in rows, over the last batches; None
    where it has no estimate.
    """

    step: int
    losses: np.ndarray
    norms: np.ndarray
    cosines: np.ndarray
    shares: dict[str, float]
    noise_scale: float | None
    spike: list[SpikeRow]


class Monitor:
    """Made by `psgrad.monitor`."""

    def __init__(
        self, gradients: BatchGradients, folder: RunFolder | None, every: int, log: Log | None
    ) -> None:
        self.every, self.log, self.stopped = every, log, ""
        self.steps = 0
        self._gradients, self._folder = gradients, folder
        self._detector, self._properties = SpikeDetector(), InputProperties()
        self._sums: dict[str | None, list[SourceSums]] = defaultdict(list)
        self._tables = _Tables(folder)
        self._finalizer = weakref.finalize(self, _Tables.flush, self._tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return not self.stopped and (self.steps + 1) % self.every == 0

    def step(
        self, *batches: Any, ids: Sequence[Any] | None = None, sources: Sequence[str] | None = None
    ) -> StepMeasured | None:
        """Measures one step of the optimiser, if it is due: call it before the weights change.

        Args:
            batches: as the loss takes them; several where the loop accumulates gradients.
            ids: of the rows of all batches, one after another.
            sources: of the rows, such as the dataset that each is from: the noise is estimated for each, too.

        Where something fails, it warns once, and measures no more: training goes on.
        """
        due = self.due
        self.steps += 1
        if not due:
            return None
        try:
            return self._measured(self.steps, batches, ids, sources)
        except Exception as error:
            self.stop(error)
            return None

    def stop(self, error: Exception) -> None:
        """Warn, and measure no more."""
        self.stopped = f"{type(error).__name__}: {error}"
        warnings.warn(f"psgrad's monitor has stopped, training goes on: {self.stopped}", stacklevel=3)
        self.close()

    def close(self) -> None:
        """Write what has not been written, and the end of the run."""
        try:
            self._tables.close(self.steps, self.stopped)
        except Exception as error:
            if not self.stopped:
                self.stopped = str(error)
                warnings.warn(f"psgrad's monitor can't write: {error}", stacklevel=3)

    def _measured(
        self, step: int, batches: Sequence[Any], ids: Sequence[Any] | None, sources: Sequence[str] | None
    ) -> StepMeasured:
        start, began = 0, time.perf_counter()
        found: list[RowsMeasured] = []
        spike: list[SpikeRow] = []
        kept: list[tuple[Any, list[int]]] = []
        for batch in batches:
            rows = _rows_of(batch)
            own = None if sources is None else sources[start : start + rows]
            measured = self._gradients.measure(padded(batch, self._gradients.model), own)
            named = self._detector.named_in(measured.losses, measured.norms, self._properties.of(batch))
            for row in named:
                place = start + row.place
                loss, norm = float(measured.losses[row.place]), float(measured.norms[row.place])
                spike.append(SpikeRow(place if ids is None else ids[place], place, row.reason, loss, norm))
            if named:
                kept.append((batch, [row.place for row in named]))
            found.append(measured)
            start += rows
        if ids is not None and len(ids) != start:
            raise DataError(f"the step has {start} rows, and {len(ids)} ids were given")
        result = self._result(step, found, spike)
        self._tables.add(result, ids, sources, self._noise_by_source(), time.perf_counter() - began)
        if spike:
            self._tables.keep_inputs(step, kept)
        if self.log is not None:
            self.log(_numbers(result), step)
        return result

    def _result(self, step: int, found: list[RowsMeasured], spike: list[SpikeRow]) -> StepMeasured:
        squares: dict[str, float] = defaultdict(float)
        for measured in found:
            for name, value in measured.squares.items():
                squares[name] += value
            for sums in measured.sums:
                for source, each in sums.items():
                    self._sums[source] = [*self._sums[source], each][-_NOISE_BATCHES:]
        total = sum(squares.values())
        losses, norms, cosines = (
            np.concatenate([getattr(each, name) for each in found]) for name in ("losses", "norms", "cosines")
        )
        return StepMeasured(
            step,
            losses,
            norms,
            cosines,
            shares={name: value / total if total else 0.0 for name, value in squares.items()},
            noise_scale=noise_scale(self._sums[None]),
            spike=spike,
        )

    def _noise_by_source(self) -> dict[str, float | None]:
        return {source: noise_scale(sums) for source, sums in self._sums.items() if source is not None}


def noise_scale(sums: Sequence[SourceSums]) -> float | None:
    """tr(Sigma) / |G|^2 in rows: both are estimated without bias from pairs of rows of one chunk, averaged
    over the chunks, then divided. None where the estimate of |G|^2 is not above zero.

    McCandlish, Kaplan, Amodei: An Empirical Model of Large-Batch Training (2018), appendix A.1.
    """
    pairs = sum(each.rows * (each.rows - 1) for each in sums)
    rows = sum(each.rows for each in sums if each.rows > 1)
    if not pairs:
        return None
    square_mean = sum(each.square_of_sum - each.sum_of_squares for each in sums if each.rows > 1) / pairs
    noise = sum(each.sum_of_squares for each in sums if each.rows > 1) / rows - square_mean
    return noise / square_mean if square_mean > 0 else None


def _rows_of(batch: Any) -> int:
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else [batch]
        if isinstance(batch, torch.Tensor)
        else batch
    )
    return next((len(x) for x in values if isinstance(x, torch.Tensor) and x.dim()), 0)


def _numbers(result: StepMeasured) -> dict[str, float]:
    """In the words of a logger."""
    finite = result.norms[np.isfinite(result.norms)]
    numbers: dict[str, float] = {"psgrad/spike_rows": len(result.spike)}
    if len(finite):
        numbers |= {
            "psgrad/grad_norm_median": float(np.median(finite)),
            "psgrad/grad_norm_max": float(finite.max()),
        }
        numbers |= {
            "psgrad/loss_max": float(np.nanmax(result.losses)),
            "psgrad/cosine_min": float(np.nanmin(result.cosines)),
        }
    if result.noise_scale is not None:
        numbers["psgrad/noise_scale"] = result.noise_scale
    return numbers


class _Tables:
    """The tables of a run, each a folder of parquet files; and the inputs of the rows of spikes."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder, self._parts = folder, 0
        self._waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._written = time.monotonic()

    def add(
        self,
        result: StepMeasured,
        ids: Sequence[Any] | None,
        sources: Sequence[str] | None,
        noise: Mapping[str, float | None],
        seconds: float,
    ) -> None:
        if self._folder is None:
            return
        step = {"step": result.step}
        rows = len(result.losses)
        numbers = {name.removeprefix("psgrad/"): value for name, value in _numbers(result).items()}
        known = {name: numbers.get(name) for name in ("spike_rows", *_MAYBE[1:])}
        finite = result.losses[np.isfinite(result.losses)]
        loss = float(finite.mean()) if len(finite) else None
        self._waiting["steps"].append(step | {"rows": rows, "loss_mean": loss, **known, "seconds": seconds})
        named = {row.place: row.reason for row in result.spike}
        for place in range(rows):
            row = {"place": place, "id": None if ids is None else str(ids[place])}
            row |= {"source": None if sources is None else sources[place], "loss": result.losses[place]}
            row |= {
                "grad_norm": result.norms[place],
                "cosine": result.cosines[place],
                "reason": named.get(place),
            }
            self._waiting["rows"].append(step | row)
        self._waiting["layers"] += [step | {"module": name, "share": x} for name, x in result.shares.items()]
        self._waiting["sources"] += [step | {"source": name, "noise_scale": x} for name, x in noise.items()]
        if named or time.monotonic() - self._written > _SECONDS:
            self.flush()

    def keep_inputs(self, step: int, batches: Sequence[tuple[Any, list[int]]]) -> None:
        """The inputs of the rows that are named, of each batch of the step."""
        if self._folder is None:
            return
        for number, (batch, places) in enumerate(batches):
            items = (
                batch.items()
                if isinstance(batch, Mapping)
                else enumerate([batch] if isinstance(batch, torch.Tensor) else batch)
            )
            kept = {
                str(name): x.detach()[places].cpu().contiguous()
                for name, x in items
                if isinstance(x, torch.Tensor)
            }
            self._folder.write_bytes(f"spikes/step-{step:08d}-{number}.safetensors", save(kept))

    def flush(self) -> None:
        """Write the rows that wait."""
        if self._folder is None or not self._waiting:
            return
        for name, rows in self._waiting.items():
            buffer = io.BytesIO()
            frame = pd.DataFrame(rows)
            kinds = dict.fromkeys(_TEXTS, "string") | dict.fromkeys(_MAYBE, "float64")
            known = {column: kind for column, kind in kinds.items() if column in frame}
            frame.astype(known).to_parquet(buffer, index=False)
            self._folder.write_bytes(f"{name}/part-{self._parts:05d}.parquet", buffer.getvalue())
        self._waiting.clear()
        self._parts += 1
        self._written = time.monotonic()

    def close(self, steps: int, stopped: str) -> None:
        if self._folder is None:
            return
        self.flush()
        state = {"state": "failed", "error": stopped} if stopped else {"state": "finished"}
        self._folder.write_manifest({"command": "monitor", **state, "counts": {"steps": steps}})
        self._folder.let_go()
        self._folder = None


def monitor(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    compute_loss: ComputeLoss | None = None,
    output: Path | str | None = "runs/monitor",
    every: int = 1,
    log: Log | None = None,
    autocast: torch.dtype | None = None,
    overwrite: bool = False,
) -> Monitor:
    """Measures the gradients of single rows in your own training loop.

        monitor = psgrad.monitor(model, nn.CrossEntropyLoss())
        for inputs, target in loader:
            monitor.step((inputs, target), ids=...)  # before the weights change
            ...

    Args:
        model: as it is trained.
        loss: (output, target) to a scalar, for batches (inputs, target), and for mappings with the target
            under "labels". None for a model that returns its own loss, as those of transformers do.
        compute_loss: (model, batch) to a scalar, for anything else. It gets batches of one row.
        output: the folder of the run; None keeps nothing.
        every: steps between two that are measured; the others cost nothing.
        log: gets (numbers by name, step) of each measured step.
        autocast: torch.bfloat16 for a loop that trains in mixed precision.
        overwrite: whether an earlier run in that folder is replaced.

    Weights, buffers, modes, gradients and random generators stay bit for bit as they are. Dropout is off.
    Raises ConfigError for arguments that do not go together, OutputExistsError for a folder that is taken.
    """
    if loss is not None and compute_loss is not None:
        raise ConfigError("both loss and compute_loss were given", hint="give one of them")
    if every < 1:
        raise ConfigError(f"every is {every}; expected 1 or more")
    own = getattr(model, "_orig_mod", model)  # of torch.compile
    own = own.module if isinstance(own, nn.parallel.DistributedDataParallel) else own
    folder = None if output is None else RunFolder.create(Path(output), overwrite)
    if folder is not None:
        folder.write_manifest({"command": "monitor", "state": "running"})
    return Monitor(BatchGradients(own, compute_loss or loss_of(loss), autocast), folder, every, log)


def loss_of(loss: Callable[[Any, Any], torch.Tensor] | None) -> ComputeLoss:
    """(model, batch) to the loss, from one of (output, target), or from the model's own."""

    def compute(model: nn.Module, batch: Any) -> Any:
        if loss is None:
            output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
            own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if own is None:
                raise ConfigError(
                    "the model returns no loss", hint="give psgrad.monitor a loss or compute_loss"
                )
            return own
        if isinstance(batch, Mapping):
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            output = model(**inputs)
            return loss(getattr(output, "logits", output), batch["labels"])
        *inputs, target = batch
        return loss(model(*inputs), target)

    return compute
