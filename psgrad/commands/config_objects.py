"""Configs with objects of this process in place of names of code."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from psgrad.config import Config, config_from, load_config
from psgrad.config.data import SOURCE_KEYS
from psgrad.errors import ConfigError
from psgrad.user_code import LIVE, live_objects


class Live(TypedDict, total=False):
    """Objects in place of sections of a config.

    model: an nn.Module, which is copied and not changed, or a function that returns one. data, queries: a
    torch Dataset of rows, a tuple of arrays (inputs, ..., target), a path, or a section as in a config. loss:
    a function (output, target) of one sample, or a name or section as in a config.
    """

    model: Any
    data: Any
    loss: Any
    queries: Any


class Objects(Live, total=False):
    """`Live` with a run folder. output: its path; by default a new temporary one, which the result names."""

    output: str | PathLike[str] | None


@contextmanager
def config_of(
    config: Config | Mapping[str, Any] | str | PathLike[str] | None,
    objects: Objects | Live,
    *,
    resume: bool = False,
) -> Iterator[Config]:
    """The config with the objects in place of its sections, for as long as the block runs."""
    content, base = _content(config)
    made: dict[str, Callable[..., Any]] = {}
    given: dict[str, Any] = {key: each for key, each in objects.items() if each is not None}
    if "model" in given:
        content["model"] = _model(given["model"], content.get("model"), made)
    if "loss" in given:
        content["loss"] = _loss(given["loss"], made)
    if "data" in given:
        content["data"] = _dataset("data", given["data"], content.get("data"), made)
    if "queries" in given:
        influence = dict(content.get("influence") or {})
        before = {"inputs": None, "target": None, "id": None, **(influence.get("queries") or {})}
        influence["queries"] = _dataset("queries", given["queries"], before, made)
        content["influence"] = influence
    if made and resume:
        raise ConfigError(
            "resume was given together with objects; expected a config of names and paths: objects can't"
            " be compared with those of the earlier run",
        )
    if not given and config is not None and not isinstance(config, Mapping):
        yield config if isinstance(config, Config) else load_config(Path(config))
        return
    output = given.get("output") or content.get("output")
    content["output"] = str(output or Path(tempfile.mkdtemp(prefix="psgrad-")) / "run")
    with live_objects(made) if made else nullcontext():
        yield config_from({"version": 1, **content}, base=base)


def _content(config: Config | Mapping[str, Any] | str | PathLike[str] | None) -> tuple[dict[str, Any], Path]:
    """(the plain values of a config, what its paths are relative to)."""
    if config is None:
        return {}, Path()
    if isinstance(config, Mapping):
        return dict(config), Path()
    whole = config if isinstance(config, Config) else load_config(Path(config))
    return whole.model_dump(mode="json"), whole.base


def _model(model: Any, section: Any, made: dict[str, Callable[..., Any]]) -> Any:
    if isinstance(model, str | Mapping):
        return {"factory": model} if isinstance(model, str) else model
    if hasattr(model, "state_dict") and not isinstance(model, type):
        made["model"] = lambda: copy.deepcopy(model)
    elif callable(model):
        made["model"] = model
    else:
        raise ConfigError(
            f"model is of type {type(model).__name__}; expected an nn.Module, or a function that returns one",
        )
    mode = (section or {}).get("mode", "eval") if isinstance(section, Mapping) else "eval"
    return {"factory": f"{LIVE}:model", "mode": mode}


def _loss(loss: Any, made: dict[str, Callable[..., Any]]) -> Any:
    if isinstance(loss, str | Mapping):
        return loss
    if not callable(loss) or isinstance(loss, type):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else f"of type {type(loss).__name__}"
        raise ConfigError(
            f"loss is {what}; expected a function (output, target) of one sample, or a name: cross_entropy"
        )
    made["loss"] = loss
    return f"{LIVE}:loss"


def _dataset(name: str, data: Any, section: Any, made: dict[str, Callable[..., Any]]) -> Any:
    from torch.utils.data import IterableDataset

    if isinstance(data, Mapping):
        return dict(data)
    kept = dict(section) if isinstance(section, Mapping) else {}
    kept = {
        key: each
        for key, each in kept.items()
        if key not in (*SOURCE_KEYS, "kwargs", "config", "split", "streaming")
    }
    if isinstance(data, str | PathLike):
        return {**kept, "path": str(data)}
    if isinstance(data, tuple):
        rows: Any = _ObjectRows(data)
    elif hasattr(data, "dataset") and hasattr(data, "batch_size"):
        raise ConfigError(
            f"{name} is a {type(data).__name__}; expected its dataset: rows are read one by one, in their"
            " order",
            hint=f"{name}=loader.dataset",
        )
    elif (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, IterableDataset):
        rows = data
    else:
        raise ConfigError(
            f"{name} is of type {type(data).__name__}; expected a torch Dataset with a length, a tuple of"
            " arrays (inputs, ..., target), or a path",
        )
    made[name] = lambda: rows
    return {**kept, "factory": f"{LIVE}:{name}"}


class _ObjectRows:
    """Arrays of equal length as a dataset of their rows."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        lengths = {len(each) for each in arrays}
        if len(lengths) != 1:
            raise ConfigError(
                f"the arrays have {', '.join(str(len(each)) for each in arrays)} rows; expected a tuple of"
                " arrays (inputs, ..., target) with one row a sample in each",
            )
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(each[row] for each in self._arrays)
