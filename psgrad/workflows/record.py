"""What manifest.json says of a run: what was asked, what was used, how it went."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from psgrad.engine.verify import SelfCheck
from psgrad.inputs.imports import module_of
from psgrad.storage import RunFolder
from psgrad.workflows.identity import hashes_of
from psgrad.workflows.origin import now, origin
from psgrad.workflows.setup import Setup


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


def describe_run(command: str, run: Setup, check: SelfCheck | None, specs: Iterable[str | None] = ()) -> dict[str, Any]:
    """What manifest.json says of a run before it starts. `specs` name code that it runs besides its model's, loss's and data's."""
    config, loaded = run.config, run.loaded
    parameters = list(loaded.model.parameters())
    return {
        "version": 1,
        "command": command,
        **origin(config.base),
        "config": config.model_dump(mode="json"),
        "config_folder": str(config.base),  # what the paths in it are relative to
        "versions": {"psgrad": version("psgrad"), "torch": torch.__version__, "python": platform.python_version()},
        "model": {
            "factory": config.model.factory,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "checkpoint": config.model.checkpoint,
            "sha256": loaded.sha256,
            "notes": loaded.notes,
            "modules_imported": [
                *loaded.modules_imported,
                *run.criterion.modules_imported,
                *([module_of(config.data.factory)] if config.data.factory else []),
            ],
        },
        "data": {"source": config.data.path or config.data.factory, "fingerprint": run.samples.fingerprint},
        "hashes": hashes_of(run, specs),
        "engine": {
            "device": str(run.device) if run.device.type == "cpu" else f"{run.device} ({torch.cuda.get_device_name(run.device)})",
            "dtype": config.engine.dtype,
            "threads": torch.get_num_threads(),
        },
        "self_check": {"samples": 0, "reason": "the model draws at random in train mode"}
        if check is None
        else {"samples": len(check.rows), "rows": check.rows, "worst_relative_error": check.worst}
        | ({"worst_error_of_autocast": check.worst_rounding} if check.rounding else {}),
        "contains_private_statistics": True,
    }


@contextmanager
def recorded(folder: RunFolder, facts: dict[str, Any], clock: Clock) -> Iterator[None]:
    """Keeps manifest.json true to what has happened: running, finished, failed or interrupted.

    `created` is when the run began, whichever process goes on with it, and `finished` when it came to its end.
    """
    facts["created"] = folder.manifest().get("created") or facts["created"]
    folder.write_manifest({**facts, "state": "running"})
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            counts = {"finished_samples": folder.rows}
            folder.write_manifest({**facts, "state": state, "error": str(error), "counts": counts, "timings": clock.seconds})
        except Exception:
            pass  # the disk may be full, and what has gone wrong first is what the user must hear
        raise
    folder.write_manifest({**facts, "state": "finished", "finished": now(), "timings": clock.seconds})
