"""Where a pretrained model, a tokenizer or an adapter lies on this machine: a folder, or the snapshot of a
hub id in the local cache of huggingface_hub. Libraries of Hugging Face are imported when they are needed.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from psgrad.errors import ConfigError, ModelError

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # no pickles, and no code
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine. commit: of the snapshot of a hub id; None for a folder of a config."""

    folder: Path
    commit: str | None = None


QUANTISED = ("bitsandbytes", "accelerate")
"""The libraries of the extra `quantised`."""


def library(name: str, extra: str = "hugging-face") -> ModuleType:
    """A library that psgrad needs for some configs only. Raises ModelError that names the extra."""
    try:
        with _no_fetched_kernels() if name in ("bitsandbytes", "peft") else nullcontext():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{error.name or name} is not installed, and this config needs it",
            hint=f"install it with psgrad: pip install 'psgrad[{extra}]'",
        ) from error


@contextmanager
def _no_fetched_kernels() -> Iterator[None]:
    """Inside, bitsandbytes, which peft imports too, fetches no kernel from the hub for its own forward on a
    CPU, and does not warn that it has none: it would be code of others, and psgrad does not use it.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    module, level = sys.modules.get("kernels"), log.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        if module is not None:
            sys.modules["kernels"] = module


def is_hub_id(name: str) -> bool:
    """Whether a name may be that of a repository: `name` or `owner/name`."""
    return bool(_ID.fullmatch(name)) and not name.startswith(".")


def located(name: str, base: Path, *, key: str, holds: Sequence[str]) -> LocalFolder:
    """The folder that `name` names: one relative to `base`, or a hub id's snapshot in the local cache.

    `key` is the config's name for it; `holds` are patterns of files of which a snapshot has at least one, or
    it was cached in part. The network is not used. Raises ConfigError.
    """
    folder = base / name
    if folder.is_dir():
        return LocalFolder(folder)
    if folder.exists():
        raise ConfigError(f"{key}: {folder} is a file", hint="name the folder that the file lies in")
    if not is_hub_id(name):
        raise ConfigError(
            f"{key}: there is no folder {folder}",
            hint="check the path; it is relative to the config file's folder",
        )
    hub = library("huggingface_hub")
    cached = _cached(hub, name)
    if cached is not None and any(next(cached.glob(pattern), None) for pattern in holds):
        return LocalFolder(cached, cached.name)
    raise ConfigError(
        f"{key}: there is no folder {folder}, and the hub id {name!r} is not in the local cache"
        f" {hub.constants.HF_HUB_CACHE}",
        hint=f"`hf download {name}` fetches it",
    )


def _cached(hub: ModuleType, name: str) -> Path | None:
    """The snapshot in the local cache, whole or in part; None where there is none."""
    try:
        return Path(hub.snapshot_download(name, local_files_only=True, allow_patterns=_FILES))
    except hub.errors.IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
    except (OSError, ValueError):  # LocalEntryNotFoundError is an OSError
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers writes neither progress bars nor warnings to stderr in here: what matters of them
    becomes a note or an error of psgrad.
    """
    logging: Any = library("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
