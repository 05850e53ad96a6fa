"""What is recorded of a run: when and by which command it was made, how long its phases take, which processes
shared it, and its state in manifest.json. And when Ctrl-C may end it.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from psgrad.config import Config
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.self_check import SelfCheck
from psgrad.engine.gradients.machine import device_name
from psgrad.inputs.images.folder import folder_rows
from psgrad.inputs.rows import Samples
from psgrad.inputs.sources.files import sha256_of
from psgrad.inputs.sources.library_datasets import library_dataset, library_hashes
from psgrad.inputs.sources.source import data_files
from psgrad.results import Progress, Say
from psgrad.results.manifest import Counts, DataFacts, EngineFacts, ModelFacts, RunManifest, SelfCheckFacts
from psgrad.storage.folders import RunFolder
from psgrad.user_code import module_of
from psgrad.workflows.identity import hashes_of
from psgrad.workflows.setup import Setup

LOADING = Progress(0, 0, "load")
"""The first progress of a run: a bar without an end, while the model and the first rows are loaded."""
_SECONDS_BETWEEN = 0.1  # two messages of progress
_SECONDS_OF_SILENCE = 2.0  # of a phase that has no count of its own
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def now() -> str:
    """The time as ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_ahead(samples: Samples, count: int, say: Say) -> None:
    """Read the first `count` rows of a dataset that code makes, with progress; they are kept for all passes.

    What a run may go on with later is compared with all rows, so they are read before the first of them is
    computed.
    """
    last = 0.0
    for done, of in samples.read_ahead(range(count)):
        if done in (1, of) or time.monotonic() - last > _SECONDS_BETWEEN:
            last = time.monotonic()
            say(Progress(done, of, "rows", unit="row"))


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad,
    whose arguments may be secret.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def revision_of(folder: Path) -> str | None:
    """The commit that is checked out where a folder lies; None outside of a git repository.

    Git's files are read and git is not run, which would run programs that a repository's settings name. So
    changes that are not committed are not seen.
    """
    try:
        for above in (folder.resolve(), *folder.resolve().parents):
            if (above / ".git").exists():
                return _checked_out(above / ".git")
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _checked_out(git: Path) -> str | None:
    if git.is_file():  # of a worktree or a submodule: "gitdir: <path>"
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    for where in (git, shared):
        if (where / name).is_file():
            return _commit((where / name).read_text())
    packed = (shared / "packed-refs").read_text().splitlines() if (shared / "packed-refs").exists() else []
    return next((_commit(line.split()[0]) for line in packed if line.endswith(f" {name}")), None)


def _commit(text: str) -> str | None:
    found = _COMMIT.fullmatch(text.strip())
    return found and found[0]


class Clock:
    """Seconds spent in each phase. phase, began: the present one, and since when."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase, self.began = "", time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.phase, self.began = phase, start
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


class PassProgress:
    """How far the present phase has come, where it lasts: its passes over rows, counted, and the row of the
    present one. Called as `Examples.watch` is.
    """

    def __init__(self, clock: Clock, say: Say) -> None:
        self._clock, self._say = clock, say
        self._phase_began = self._said = self._done = 0.0
        self._passes = 0

    def __call__(self, done: int, of: int) -> None:
        if self._clock.began != self._phase_began:
            self._phase_began, self._passes, self._done = self._clock.began, 0, 0
        if done == 0 or done < self._done:
            self._passes += 1
        self._done = done
        now = time.perf_counter()
        if now - self._phase_began < _SECONDS_OF_SILENCE or now - self._said < _SECONDS_BETWEEN:
            return
        self._said = now
        where = f"pass {self._passes:,}, row {done:,} of {of:,}"
        self._say(Progress(0, 0, self._clock.phase, detail=where))


def describe_run(
    command: str, run: Setup, check: SelfCheck | None, specs: Iterable[str | None] = ()
) -> RunManifest:
    """What manifest.json says of a run before it starts. `specs` name code that it runs besides its model's,
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
        revision=revision_of(config.base),
        config=config.model_dump(mode="json"),
        config_folder=str(config.base),
        versions={
            "psgrad": version("psgrad"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        model=ModelFacts(
            factory=config.model.factory,
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            checkpoint=config.model.checkpoint,
            sha256=loaded.sha256,
            notes=[*loaded.notes, *run.samples.notes],
            modules_imported=[
                *loaded.modules_imported,
                *run.criterion.modules_imported,
                *([] if made is None else [made]),
            ],
            origin=loaded.origin,
        ),
        data=DataFacts(config.data.source, run.samples.fingerprint, _hashes_of_files(config)),
        hashes=hashes_of(run, specs),
        engine=EngineFacts(
            device,
            config.engine.dtype,
            torch.get_num_threads(),
            None if run.supply is None else run.residence.where,
            run.residence.shard_ranks if run.residence.shard_ranks > 1 else None,
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
            )
        ),
    )


def _hashes_of_files(config: Config) -> list[str] | None:
    """The SHA-256 of each file of the dataset, of a folder of images that of its listing; None where the
    dataset is not in files. Of a dataset of the datasets library that of the columns that are named.
    """
    if config.data.dataset is not None and not config.data.streaming:
        return library_hashes(config.data, library_dataset(config.data, config.base, config.allow_download))
    if config.data.images is not None:
        return [folder_rows(config.data, config.base).fingerprint]
    if config.data.path is None:
        return None
    return [sha256_of(file) for file in data_files(config.data, config.base)]


class Record:
    """The manifest of a run that is going on; `add` has more of it said when the run ends."""

    def __init__(self, manifest: RunManifest) -> None:
        self.manifest = manifest

    def add(self, **parts: Any) -> dict[str, Any]:
        """Say these parts of the manifest, too; returns what the file will hold."""
        self.manifest = replace(self.manifest, **parts)
        return self.manifest.content()


@contextmanager
def recorded(folder: RunFolder, manifest: RunManifest, clock: Clock) -> Iterator[Record]:
    """Keeps manifest.json true to what has happened: running, finished, failed or interrupted.

    `created` is when the run began, whichever process continues it, and `finished` when it came to its end.
    """
    before = folder.manifest()
    record = Record(
        replace(
            manifest,
            created=before.get("created") or manifest.created,
            run=before.get("run") or manifest.run,
        )
    )
    folder.write_manifest(replace(record.manifest, state="running").content())
    try:
        yield record
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        counts = Counts(finished_samples=folder.rows)
        record.add(state=state, error=str(error), counts=counts, timings=clock.seconds)
        with suppress(Exception):  # the disk may be full, and the user must read what went wrong first
            folder.write_manifest(record.manifest.content())
        raise
    ended = replace(record.manifest, state="finished", finished=now(), timings=clock.seconds)
    folder.write_manifest(ended.content())


@contextmanager
def held(heard: Callable[[], None] = lambda: None) -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block is done, and are then handled as they would have been. Of each
    the second waits no longer. heard: called when one arrives.

    Outside of the main thread, which alone hears signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}

    def wait(signum: int, frame: FrameType | None) -> None:
        waiting.append((signum, frame))
        signal.signal(signum, before[signum])
        heard()

    for signum in (int(signal.SIGINT), int(signal.SIGTERM)):
        before[signum] = signal.getsignal(signum)
        if callable(before[signum]):
            signal.signal(signum, wait)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if callable(handler):
                signal.signal(signum, handler)
    for arrived, frame in waiting:
        before[arrived](arrived, frame)


@dataclass
class RankWork:
    """What one process did.

    seconds: computing. waited: seconds at the end of passes, for the others. rows: that it computed, in all
    passes; None where they are not counted.
    """

    seconds: float = 0.0
    waited: float = 0.0
    rows: int | None = None


def rank_facts(processes: Processes, name: str, own: RankWork) -> dict[str, Any] | None:
    """The work of all processes, on the first of several.

    balance: the mean of their seconds over the largest, 1 where all took as long.
    """
    if processes.size == 1:
        return None
    said = {"rank": processes.rank, "host": socket.gethostname(), **asdict(own)}
    each = [json.loads(text) for text in processes.texts(f"{name}ranks", json.dumps(said))]
    if not each:
        return None
    seconds = [rank["seconds"] for rank in each]
    for rank in each:
        rank |= {key: round(rank[key], 3) for key in ("seconds", "waited")}
    balance = sum(seconds) / len(seconds) / max(*seconds, 1e-9)
    return {
        "processes": processes.size,
        "backend": processes.backend,
        "balance": round(balance, 3),
        "each": each,
    }


def words_for(ranks: dict[str, Any]) -> list[str]:
    """A line for each process, for `-v`."""
    return [
        f"rank {each['rank']} on {each['host']}: {each['rows']:,} rows in {each['seconds']:.1f} s, waited"
        f" {each['waited']:.1f} s"
        for each in ranks["each"]
    ]
