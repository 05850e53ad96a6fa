"""A run of a command: its folder, its clock, what it shows, the processes that share it, and its manifest,
which is kept true to what has happened.

    run = Run.open(config.output, processes, progress, overwrite=overwrite)
    with run.clock("load"):
        ...
    with run.begin(manifest):
        ...
        manifest = run.add(counts=...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from psgrad.run.folders import RunFolder
from psgrad.run.progress import LOADING, Clock, PassProgress, Progress, ShowProgress
from psgrad.run.results.manifest import RunManifest


def now() -> str:
    """The time as ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Sharing(Protocol):
    """The processes that share a run. size: how many. leads: whether this is the one that writes."""

    size: int
    leads: bool


P = TypeVar("P", bound=Sharing)


class Run(Generic[P]):
    """A run that was opened, and from `begin` on has a folder and a manifest.

    Attributes:
        path: of the folder. folder: the same for writing; another process than the one that leads reads what
            that one has made.
        clock: seconds of each phase.
        progress: shows how far the run has come.
        processes: those that share it.
        manifest: what manifest.json holds at the end, as far as it is known.
        messages: what was said to people, each once.
    """

    def __init__(self, path: Path, processes: P, progress: ShowProgress, overwrite: bool = False) -> None:
        self.path, self.processes, self.progress = path, processes, progress
        self.clock, self.folder, self.manifest = Clock(), RunFolder(path), RunManifest()
        self.messages: list[str] = []
        self._overwrite = overwrite

    @classmethod
    def open(
        cls,
        path: Path,
        processes: P,
        progress: ShowProgress,
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> Self:
        """A run in a folder that is free, or with `resume` in one that may hold the beginning of it. Nothing
        is written yet. Raises OutputExistsError for a folder that may not be taken.
        """
        if processes.leads and not resume:
            RunFolder.require_free(path, overwrite)
        progress(LOADING)
        return cls(path, processes, progress, overwrite or resume)

    def say(self, message: str) -> None:
        """Show a line of text, and keep it in `messages`; the same line is shown once."""
        if message not in self.messages:
            self.messages.append(message)
            self.progress(Progress(0, 0, self.clock.phase, message))

    def passes(self) -> PassProgress:
        """What `Examples.watch` takes: it shows how far the passes of the present phase have come."""
        return PassProgress(self.clock, self.progress, self.processes.size)

    @contextmanager
    def begin(self, manifest: RunManifest, folder: RunFolder | None = None) -> Iterator[Self]:
        """Keeps manifest.json true to what has happened: running, finished, failed or interrupted. No other
        process can replace the run meanwhile.

        manifest: as it is at the beginning. folder: of a run that goes on; None makes a new one.

        `created` is when the run began, whichever process continues it, and `finished` when it came to its
        end. Raises OutputExistsError and OutputError.
        """
        self.folder = RunFolder.create(self.path, self._overwrite) if folder is None else folder
        self.folder.hold()
        before = self.folder.manifest()
        self.manifest = replace(
            manifest,
            created=before.get("created") or manifest.created,
            run=before.get("run") or manifest.run,
        )
        self.write_manifest("running")
        try:
            yield self
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.add(
                error=str(error), counts=replace(self.manifest.counts, finished_samples=self.folder.rows)
            )
            with suppress(Exception):  # the disk may be full, and the user must read what went wrong first
                self.write_manifest(state)
            raise
        else:
            self.add(finished=now())
            self.write_manifest("finished")
        finally:
            self.folder.let_go()

    def add(self, **parts: Any) -> RunManifest:
        """Add these parts to the manifest, and the seconds of the phases; returns it."""
        self.manifest = replace(self.manifest, **{"timings": dict(self.clock.seconds), **parts})
        return self.manifest

    def write_manifest(self, state: str = "running") -> None:
        """Write the manifest as it is now. Raises OutputError."""
        self.folder.write_manifest(replace(self.manifest, state=state).content())
