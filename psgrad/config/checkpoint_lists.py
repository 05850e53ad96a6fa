"""The checkpoints of a training run by a pattern, such as `run/checkpoint-*`, in the order of its steps."""

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
    """The same of checkpoints with learning rates. A rate that is left out is what trainer_state.json in the
    checkpoint's folder says, if it does.
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
        for path in _matched(group["path"], base):
            rate = None if group.get("learning_rate") is not None else _learning_rate(base / path)
            found.append({**group, "path": path, **({} if rate is None else {"learning_rate": rate})})
    return found


def _base_of(info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("base", Path()))


def _matched(pattern: str, base: Path) -> list[str]:
    """What a pattern matches, in the order of training steps; a path that is no pattern alone."""
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
    step = (_trainer_state(path) or _trainer_state(path.parent)).get("global_step")
    return (step,) if type(step) is int else tuple(int(each) for each in re.findall(r"\d+", path.name))


def _learning_rate(path: Path) -> float | None:
    """The last learning rate that a Trainer logged up to this checkpoint."""
    log = _trainer_state(path).get("log_history")
    rates = (
        [each.get("learning_rate") for each in log if isinstance(each, dict)] if isinstance(log, list) else []
    )
    given = [float(rate) for rate in rates if isinstance(rate, int | float) and rate > 0]
    return given[-1] if given else None


def _trainer_state(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
