"""The checkpoints of a training run by a pattern, such as `run/*.safetensors` or `run/checkpoint-*`, in the
order of its steps, and the learning rates that their files name.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationInfo


def listed_paths(value: object, info: ValidationInfo) -> object:
    """A list of paths, with each pattern replaced by what it matches; one path or pattern is a list of it."""
    base = _base_of(info)
    if not isinstance(value, str | list):
        return value
    entries = value if isinstance(value, list) else [value]
    return [
        each for entry in entries for each in (_matched(entry, base) if isinstance(entry, str) else [entry])
    ]


def listed_checkpoints(value: object, info: ValidationInfo) -> object:
    """The checkpoints that a list of paths and patterns names, with learning rates. Rates that are left
    out come from trainer_state.json in the checkpoint's folder or from the metadata of a
    safetensors file.
    """
    base = _base_of(info)
    if not isinstance(value, str | list):
        return value
    found: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        group = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(group, dict) or not isinstance(group.get("path"), str):
            found.append(entry)
            continue
        paths = _matched(group["path"], base)
        for path, own in zip(paths, _one_each(group, len(paths)), strict=True):
            rate = _learning_rate(base / path) if own.get("learning_rate") is None else None
            found.append({**own, "path": path, **({} if rate is None else {"learning_rate": rate})})
    return found


def _one_each(group: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """The group once for each of the checkpoints that its pattern matches, with its own learning rate."""
    rates = group.get("learning_rate")
    if not isinstance(rates, list):
        return [group] * count
    if len(rates) != count:
        raise ValueError(
            f"{group['path']!r} matches {count} checkpoint{'' if count == 1 else 's'}, and learning_rate"
            f" lists {len(rates)} numbers; give one for each checkpoint, in the order of the steps"
        )
    return [{**group, "learning_rate": rate} for rate in rates]


def _base_of(info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("base", Path()))


def _matched(pattern: str, base: Path) -> list[str]:
    """The paths that a pattern matches, in the order of training steps; a path that is not a pattern by
    itself.
    """
    if not glob.has_magic(pattern) or (base / pattern).exists():
        return [pattern]
    found = sorted(glob.glob(pattern, root_dir=base, recursive=True))  # noqa: PTH207 (relative names stay so)
    if not found:
        raise ValueError(
            f"no checkpoint matches {pattern!r}; patterns are relative to this config, and quoted in YAML"
        )
    steps = {path: step_of(base / path) for path in found}
    ordered = sorted(found, key=lambda path: steps[path])
    for one, following in pairwise(ordered):
        if steps[one] == steps[following]:
            raise ValueError(
                f"{pattern!r} matches {one} and {following}, and their names do not tell which step came"
                " first; list the checkpoints in order in its place"
            )
    return ordered


def step_of(path: Path) -> tuple[int, ...]:
    """The step of a checkpoint: what its trainer_state.json says, else the numbers in its name."""
    known = [each for each in (_whole(path, "step"), _whole(path, "epoch")) if each is not None]
    return tuple(known[:1]) or tuple(int(each) for each in re.findall(r"\d+", path.name))


def _whole(path: Path, unit: str) -> int | None:
    """The step or epoch that the files of a checkpoint name; None where they name none."""
    if unit == "step":
        step = (_trainer_state(path) or _trainer_state(path.parent)).get("global_step")
        if type(step) is int:
            return step
    text = _metadata(path).get(unit, "")
    return int(text) if re.fullmatch(r"\d{1,18}", text) else None


def _learning_rate(path: Path) -> float | None:
    """The last learning rate that a Trainer logged up to this checkpoint, or that of the file's metadata."""
    log = _trainer_state(path).get("log_history")
    rates = (
        [each.get("learning_rate") for each in log if isinstance(each, dict)] if isinstance(log, list) else []
    )
    given = [float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0]
    if given:
        return given[-1]
    try:
        rate = float(_metadata(path).get("learning_rate", ""))
    except ValueError:
        return None
    return rate if 0 < rate < float("inf") else None


# The header of a safetensors file: its size in eight bytes, and JSON. Larger ones are not read for a number.
_LARGEST_HEADER = 1 << 26


def _metadata(path: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file; empty for another or a damaged file."""
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            content = json.loads(file.read(size)) if size <= _LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = content.get("__metadata__") if isinstance(content, dict) else None
    texts = found if isinstance(found, dict) else {}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def _trainer_state(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
