"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from psgrad.monitoring.batch_gradients import ComputeLoss
from psgrad.monitoring.monitor import Log, Monitor, monitor

_NOT_OF_A_ROW = ("num_items_in_batch",)  # what a Trainer gives beside the batch


class GradientMonitor(TrainerCallback):
    """Measures the gradients of single rows in a training of transformers' Trainer.

        trainer.add_callback(psgrad.GradientMonitor(every=20, log=True))

    Args:
        every: optimiser steps between two that are measured. Those between cost nothing.
        log: True adds the numbers to the Trainer's log history, and gives them to TensorBoard, MLflow and
            Weights & Biases as far as the Trainer reports to them; or a function of (numbers, step).
        output: the folder of the run; by default `monitor` in the Trainer's output folder.
        data: the training data before the Trainer removed columns: rows are named by their column `id`, and
            the noise scale is estimated for each value of their column `source`. Without it rows are named by
            their number in the Trainer's dataset.
        compute_loss: (model, batch) to a scalar, for a Trainer whose model does not return its loss.
        overwrite: whether an earlier run in that folder is replaced.

    A step's rows are all rows of its batches, also where gradients are accumulated; with several processes,
    those of the first one. Each row's loss is its own mean, whatever the Trainer averages over.
    """

    def __init__(
        self,
        every: int = 20,
        log: bool | Log = False,
        *,
        output: Path | str | None = None,
        data: Any = None,
        id: str | None = None,
        source: str | None = None,
        compute_loss: ComputeLoss | None = None,
        overwrite: bool = False,
    ) -> None:
        self.every, self.log, self.output, self.data = every, log, output, data
        self.id, self.source, self.compute_loss, self.overwrite = id, source, compute_loss, overwrite
        self.monitor: Monitor | None = None
        self._batches: list[dict[str, Any]] = []
        self._hook: Any = None
        self._drawn: _DrawnRows | None = None
        self._numbers: list[int] = []  # of the rows of this step

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not state.is_world_process_zero:
            return
        output = self.output or Path(args.output_dir) / "monitor"
        log = _logger(args, state) if self.log is True else self.log or None
        self.monitor = monitor(
            given["model"],
            compute_loss=self.compute_loss,
            output=output,
            every=self.every,
            log=log,
            overwrite=self.overwrite,
        )
        self.monitor.steps = state.global_step
        self._drawn = _DrawnRows.of(given.get("train_dataloader"), state.global_step > 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.monitor is not None and self.monitor.due:
            self._batches = []
            self._hook = given["model"].register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: Any, args: tuple[Any, ...], batch: Mapping[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self._batches.append({name: x for name, x in batch.items() if name not in _NOT_OF_A_ROW})

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._take_numbers()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._take_numbers()
        drawn, self._numbers = self._numbers, []
        if self.monitor is None:
            return
        if self._hook is None:
            self.monitor.step()  # counts it
            return
        self._hook.remove()
        self._hook = None
        try:
            ids, sources = self._names(drawn)
        except Exception as error:
            self.monitor.stop(error)
        else:
            self.monitor.step(*self._batches, ids=ids, sources=sources)
        self._batches = []

    def _take_numbers(self) -> None:
        if self._drawn is not None:
            self._numbers += self._drawn.next()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
        if self._drawn is not None:
            self._drawn.restore()

    def _names(self, drawn: list[int]) -> tuple[list[Any] | None, list[str] | None]:
        """The ids and the sources of the rows of the step's batches; None where they are not known."""
        rows = sum(len(next(iter(batch.values()))) for batch in self._batches)
        if len(drawn) != rows:
            return None, None
        if self.data is None:
            return drawn, None
        found = [self.data[number] for number in drawn]
        ids = drawn if self.id is None else [row[self.id] for row in found]
        return ids, None if self.source is None else [str(row[self.source]) for row in found]


class _DrawnRows:
    """The numbers of the rows that a loader's batch sampler draws, batch by batch, as the loop takes them."""

    def __init__(self, loader: Any) -> None:
        # accelerate puts a loader into another one, whose batches it moves to the device.
        self._loader = getattr(loader, "base_dataloader", loader)
        self._sampler = self._loader.batch_sampler
        self._waiting: deque[list[int]] = deque()
        self._known = True
        object.__setattr__(self._loader, "batch_sampler", self)  # a loader refuses to be given another one

    @classmethod
    def of(cls, loader: Any, resumed: bool) -> _DrawnRows | None:
        """None for a loader that draws no rows by number."""
        drawn = None if getattr(loader, "batch_sampler", None) is None else cls(loader)
        if drawn is not None and resumed:
            drawn._known = False  # the loop leaves out batches of this epoch, which are drawn all the same
        return drawn

    def __iter__(self) -> Iterator[list[int]]:
        self._waiting.clear()
        known, self._known = self._known, True
        for numbers in self._sampler:
            self._waiting.append(list(numbers) if known else [])
            yield numbers

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def next(self) -> list[int]:
        """Of the batch that the loop has just taken; empty where it is not known."""
        return self._waiting.popleft() if self._waiting else []

    def restore(self) -> None:
        object.__setattr__(self._loader, "batch_sampler", self._sampler)


def _logger(args: Any, state: Any) -> Log:
    """Into the Trainer's log history, and to the trackers that it reports to."""
    writers: list[Log] = []
    if "tensorboard" in args.report_to:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(getattr(args, "logging_dir", None) or Path(args.output_dir) / "runs")

        def to_board(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                board.add_scalar(name, value, step)

        writers.append(to_board)
    if "wandb" in args.report_to:
        import wandb

        writers.append(lambda numbers, step: wandb.log({**numbers, "train/global_step": step}))
    if "mlflow" in args.report_to:
        import mlflow

        writers.append(lambda numbers, step: mlflow.log_metrics(numbers, step=step))

    def log(numbers: dict[str, float], step: int) -> None:
        state.log_history.append({**numbers, "step": step})
        for write in writers:
            write(numbers, step)

    return log
