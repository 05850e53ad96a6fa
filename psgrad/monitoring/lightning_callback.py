"""The monitor as a callback of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from psgrad.monitoring.batch_gradients import ComputeLoss
from psgrad.monitoring.monitor import Log, Monitor, monitor


class LightningMonitor(Callback):  # type: ignore[misc]  # not installed where types are checked
    """Measures the gradients of single rows in a training of Lightning's Trainer.

        trainer = Trainer(callbacks=[LightningMonitor(compute_loss, every=20, log=True)])

    Args:
        compute_loss: (module, batch) to a scalar; it gets batches of one row. It is what the module's
            training_step computes, without its logging.
        every: optimiser steps between two that are measured.
        log: True gives the numbers to the Trainer's logger; or a function of (numbers, step).
        output: the folder of the run; by default `monitor` in the Trainer's root folder.
        overwrite: whether an earlier run in that folder is replaced.
    """

    def __init__(
        self,
        compute_loss: ComputeLoss,
        every: int = 20,
        log: bool | Log = False,
        *,
        output: Path | str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.compute_loss, self.every, self.logs = compute_loss, every, log
        self.output, self.overwrite = output, overwrite
        self.monitor: Monitor | None = None
        self._batches: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return

        def to_logger(numbers: dict[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)

        self.monitor = monitor(
            pl_module,
            compute_loss=self.compute_loss,
            output=self.output or Path(trainer.default_root_dir) / "monitor",
            every=self.every,
            log=to_logger if self.logs is True else self.logs or None,
            autocast=torch.bfloat16 if trainer.precision == "bf16-mixed" else None,
            overwrite=self.overwrite,
        )
        self.monitor.steps = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is not None and self.monitor.due:
            self._batches.append(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(*self._batches)
        self._batches = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
