"""The folder of a private run: public files, private files, and the ledger of the spent privacy.

manifest.json               public: the command, its state, the config, versions
checkpoint.pt               public: where the run can go on, made of noisy sums alone
public/                     ledger.jsonl, the weights, the epsilon
logs/rank-K.log             of several processes: the numbers of the steps, and nothing of the data
private/NOT_PRIVATE_*       norms, losses, timings, the data's fingerprint: for the owner only
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psgrad.errors import ConfigError, LedgerError, OutputError
from psgrad.run import durable_files
from psgrad.run.folders import (
    CHECKPOINT,
    LEDGER,
    MANIFEST,
    PRIVATE,
    PUBLIC,
    RunFolder,
    ledger_lost,
)
from psgrad.run.ledger_lines import has_begun

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "NOT_PRIVATE_"
WARNING = (
    "NOT PRIVATE: computed from single training records without noise. It is outside the guarantee of this"
    " run; do not publish it."
)

# The keys that manifest.json may have. All other facts of a run go to the private folder: a key that is not
# here is never published.
_PUBLIC_FACTS = {"version", "command", "state", "versions", "config", "model"}


class PrivateRunFolder(RunFolder):
    """A run folder with public and private parts: `create` makes one, `open` takes one to be resumed."""

    after_more_space = "free some space, and go on with --resume"

    @classmethod
    def open(cls, path: Path) -> PrivateRunFolder:
        """The folder of a run that spent something, to go on there. Changes nothing.

        Raises ConfigError where the folder holds no private run, or one that was killed before its first
        step, and LedgerError where it holds a checkpoint without the ledger that paid for it.
        """
        manifest = RunFolder.manifest_of(path)
        if manifest is None:
            raise ConfigError(
                f"there is no run to resume in {path}; expected the folder of an earlier `psgrad dp-step`",
                hint="check --output, or begin a run without --resume",
            )
        if ledger_lost(path):
            raise LedgerError(
                f"the ledger {path / LEDGER} is gone, and {path / CHECKPOINT} is that of a run that had one",
                hint="put the whole ledger back; a run whose ledger is lost has no privacy guarantee",
            )
        if not has_begun(path / LEDGER):
            command = manifest.get("command", "dp-step")
            began = "which is no private run"
            if command == "dp-step":
                began = "which was killed before its first step, so that nothing was spent"
            raise ConfigError(
                f"the run in {path} can't be resumed: it is one of `psgrad {command}`, {began}; expected a"
                f" run with a ledger in {LEDGER}",
                hint="begin a run without --resume, there with --overwrite or with another --output",
            )
        return cls(path)

    @property
    def ledger(self) -> Path:
        """The path of the ledger."""
        return self.path / LEDGER

    @property
    def checkpoint(self) -> Path:
        """The path of the last checkpoint; no file before there is one."""
        return self.path / CHECKPOINT

    def write_checkpoint(self, data: bytes | memoryview) -> None:
        """Put a checkpoint in place of the earlier one, which stays where OutputError is raised."""
        self.write_bytes(CHECKPOINT, data)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        """Write manifest.json with the public keys, and the rest as private/NOT_PRIVATE_manifest.json."""
        super().write_manifest({key: value for key, value in content.items() if key in _PUBLIC_FACTS})
        private = {key: value for key, value in content.items() if key not in _PUBLIC_FACTS}
        if private:
            self.write_private_json(MANIFEST, private)

    def manifest(self) -> dict[str, Any]:
        """The present content of both manifests, the public and the private one."""
        try:
            return {**super().manifest(), **self.private_manifest()}
        except OutputError:  # before the first one is written
            return super().manifest()

    def private_manifest(self) -> dict[str, Any]:
        """The private facts of the run so far, such as the data's fingerprint.

        Raises OutputError if they are gone or damaged: then it is unknown whether the data are the same.
        """
        path = self.path / PRIVATE / f"{PREFIX}{MANIFEST}"
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise OutputError(
                f"{path} can't be read: {getattr(error, 'strerror', None) or error}; it has the hashes of the"
                " data, by which they are known again",
                hint="put the file back, or begin a run of its own with another --output",
            ) from error
        return content

    def write_public_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write public JSON: a release. What it reveals must have been paid for in the ledger."""
        self.write_json(f"{PUBLIC}/{name}", content)

    def write_public_bytes(self, name: str, data: bytes | memoryview) -> None:
        """Write a public file: a release. What it reveals must have been paid for in the ledger."""
        self.write_bytes(f"{PUBLIC}/{name}", data)

    def write_private_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write private/NOT_PRIVATE_{name}, whose first key says that it may not be published."""
        self.write_json(f"{PRIVATE}/{PREFIX}{name}", {"warning": WARNING, **content, **{"warning": WARNING}})

    def write_private_table(self, name: str, frame: pd.DataFrame) -> None:
        """Write private/NOT_PRIVATE_{name} as parquet, which keeps the warning in the frame's `attrs`."""
        marked = frame.copy(deep=False)
        marked.attrs = {**frame.attrs, "warning": WARNING}
        self.write_table(f"{PRIVATE}/{PREFIX}{name}", marked)

    def private_table(self, name: str) -> pd.DataFrame | None:
        """The table that `write_private_table` wrote before; None if there is none, or it can't be read."""
        import pandas as pd

        try:
            return pd.read_parquet(self.path / PRIVATE / f"{PREFIX}{name}")
        except (OSError, ValueError):
            return None

    def write_private_bytes(self, name: str, data: bytes | memoryview) -> None:
        """Write private/NOT_PRIVATE_{name}; a picture should have the warning (`WARNING`) in it, too."""
        self.write_bytes(f"{PRIVATE}/{PREFIX}{name}", data)

    def write_bytes(self, name: str, data: bytes | memoryview, mode: int = 0o666) -> None:
        """As of any run folder. The private folder and its files are for their owner alone, also in a run
        folder that others may enter, and each file's name in it must begin with NOT_PRIVATE_; else
        ValueError.
        """
        if name.startswith(f"{PRIVATE}/"):
            if not name.startswith(f"{PRIVATE}/{PREFIX}") or name.count("/") > 1:
                raise ValueError(f"{name}: a private file's name begins with {PREFIX}")
            try:
                durable_files.make_folder(self.path / PRIVATE, 0o700)
                if (self.path / PRIVATE).stat().st_mode & 0o077:
                    (self.path / PRIVATE).chmod(0o700)
            except OSError as error:
                raise self._explain(error, self.path / PRIVATE, 0) from error
            mode = 0o600
        super().write_bytes(name, data, mode)

    def _kept(self) -> str:
        return "the ledger and the last checkpoint stay"
