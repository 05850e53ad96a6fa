"""The manifest of a run: when, where and by which command it was made, what it ran, which processes shared
it, and its state. manifest.json is kept up to date while the run goes on.
"""

from __future__ import annotations

import json
import platform
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from psgrad import __version__
from psgrad.commands.setup import Setup
from psgrad.data.sources.files import hashes_of_files
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.execution.self_check import SelfCheck
from psgrad.engine.gradients.machine import device_name
from psgrad.run.folders import RunFolder
from psgrad.run.progress import Clock
from psgrad.run.results.manifest import DataFacts, EngineFacts, ModelFacts, RunManifest, SelfCheckFacts
from psgrad.run.run import Run, now
from psgrad.user_code import module_of


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad,
    whose arguments may be secret.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def describe_run(
    command: str, run: Setup, check: SelfCheck | None, specs: Iterable[str | None] = ()
) -> RunManifest:
    """The content of manifest.json before a run starts. `specs` name code that it runs besides its model's,
    loss's and data's.
    """
    config, loaded, device = run.config, run.loaded, str(run.device)
    parameters = list(loaded.model.parameters())
    made = module_of(config.data.factory) if config.data.factory else None
    if run.device.type == "cuda":
        device = f"{device} ({device_name(run.device)})"
    return RunManifest(
        command=command,
        created=now(),
        command_line=command_line(),
        config=config.model_dump(mode="json"),
        config_folder=str(config.base),
        versions={
            "psgrad": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        model=ModelFacts(
            factory=config.model.factory,
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            checkpoint=config.model.checkpoint,
            sha256=loaded.sha256,
            notes=loaded.notes,
            modules_imported=[
                *loaded.modules_imported,
                *run.criterion.modules_imported,
                *([] if made is None else [made]),
            ],
            origin=loaded.origin,
        ),
        data=DataFacts(
            config.data.source,
            run.samples.fingerprint,
            hashes_of_files(config.data, config.base),
            list(run.samples.notes),
        ),
        hashes=run.hashes(specs),
        engine=EngineFacts(
            device,
            config.engine.dtype,
            torch.get_num_threads(),
            None if run.supply is None else run.placement.where,
            run.recompute.modules if run.recompute is not None and run.recompute.on else None,
        ),
        self_check=(
            SelfCheckFacts(reason="the model draws at random in train mode")
            if check is None
            else SelfCheckFacts(
                len(check.rows),
                rows=check.rows,
                worst_relative_error=check.worst,
                worst_error_of_autocast=check.worst_rounding if check.rounding else None,
                worst_norm_error_of_autocast=check.worst_norm_rounding if check.norm_rounding else None,
            )
        ),
    )


RunningManifest = Run[OneProcess]


@contextmanager
def running_manifest(folder: RunFolder, manifest: RunManifest, clock: Clock) -> Iterator[RunningManifest]:
    """A run in a folder that is there, with its manifest; see `Run.begin`."""
    run = Run(folder.path, OneProcess(), lambda _: None)
    run.clock = clock
    with run.begin(manifest, folder):
        yield run


@dataclass
class RankReport:
    """What one process did.

    seconds: computing. waited: seconds at the end of passes, for the others. rows: that it computed, in all
    passes; None where they are not counted.
    """

    seconds: float = 0.0
    waited: float = 0.0
    rows: int | None = None


def rank_facts(processes: Processes, name: str, own: RankReport) -> dict[str, Any] | None:
    """The work of all processes, on the first of several."""
    if processes.size == 1:
        return None
    mine = {"rank": processes.rank, "host": socket.gethostname(), **asdict(own)}
    each = [json.loads(text) for text in processes.texts(f"{name}ranks", json.dumps(mine))]
    if not each:
        return None
    return facts_of_all(processes, each, [rank["seconds"] for rank in each])


def rank_facts_of_steps(processes: Processes, name: str) -> dict[str, Any] | None:
    """The `rank_facts` of processes that compute step by step, together."""
    return rank_facts(processes, name, RankReport(*processes.spent()))


def facts_of_all(
    processes: Processes, each: Sequence[dict[str, Any]], seconds: Sequence[float]
) -> dict[str, Any]:
    """Facts about several processes for the manifest. balance: the mean of their seconds over the largest, 1
    where all took as long.
    """
    return {
        "processes": processes.size,
        "backend": processes.backend,
        "balance": round(sum(seconds) / len(seconds) / max(*seconds, 1e-9), 3),
        "each": [
            {key: round(value, 3) if isinstance(value, float) else value for key, value in rank.items()}
            for rank in each
        ],
    }
