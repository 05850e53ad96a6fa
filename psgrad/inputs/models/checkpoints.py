"""State dicts out of checkpoint files, which are never code, and into models, which they must fit exactly."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from psgrad.config import nearest
from psgrad.errors import CheckpointError, ConfigError
from psgrad.inputs.models.checkpoint_headers import (
    SAVE_SAFELY,
    checkpoint_kind,
    damaged,
    damaged_safetensors,
    first_line,
    require_plain_archive,
    weight_map,
)
from psgrad.inputs.sources.files import require_file

_PREFIXES = ("module.", "_orig_mod.", "model.")  # put there by DataParallel, torch.compile and Lightning
_SHOWN = 10
# CVE-2025-32434 and CVE-2026-24747: before this version a file could run code or corrupt memory in spite of
# weights_only.
_SAFE_TORCH = (2, 10)

# -- Reading -------------------------------------------------------------------------------------------------


def read_state_dict(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the CPU; nothing in the file is ever executed.

    `.safetensors`, `.safetensors.index.json` (sharded), and `.pt`, `.pth`, `.ckpt` as torch.save writes them,
    where `key` names the state dict inside a larger object. Raises ConfigError for a path that is no
    checkpoint, CheckpointError for a file that can't be read, or only by running it.
    """
    kind = checkpoint_kind(path, key)
    if kind == "torch":
        return state_dict_in(read_torch(path), key, path)
    return _read_sharded(path) if kind == "index" else _read_safetensors(path)


def _read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except Exception as error:  # the library raises a dozen types for a damaged file
        raise damaged_safetensors(path, error) from error


def _read_sharded(index: Path) -> dict[str, Tensor]:
    names_of: dict[str, list[str]] = {}
    for name, shard in weight_map(index).items():
        names_of.setdefault(shard, []).append(name)
    paths = {shard: require_file(index.parent / shard, "shard", CheckpointError) for shard in names_of}
    state_dict: dict[str, Tensor] = {}
    for shard, names in names_of.items():
        state_dict |= _read_safetensors(paths[shard], names)
    return state_dict


def read_torch(path: Path, device: str = "cpu") -> object:
    """What torch.save wrote, if it is tensors and plain values only; on "meta" without memory."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
        raise CheckpointError(
            f"the checkpoint {path} is a pickle inside, and torch {torch.__version__} reads those unsafely",
            expected="torch 2.10 or newer, or a .safetensors file",
        )
    require_plain_archive(path)
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # about pickle protocols, which the error below tells better
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {path} holds more than tensors and plain values; nothing in it was executed",
            expected="a state dict, or a dict that contains one",
            cause=_refused_object(error),
            next_step=SAVE_SAFELY,
        ) from error
    except Exception as error:  # a damaged archive fails in as many ways as it has readers
        raise damaged(path, "torch.save archive", first_line(error)) from error


def _refused_object(error: Exception) -> str:
    # torch's message is a page of advice on how to switch the safety off; the one fact in it is the object's
    # name.
    found = re.search(r"GLOBAL (\S+)", str(error))
    return (
        f"it refers to {found[1]}, which is code"
        if found
        else "a damaged file, or one saved with objects of the training program inside"
    )


def state_dict_in(loaded: object, key: str | None, path: Path) -> dict[str, Tensor]:
    """The state dict in what was read of `path`, at `key` if that is given. Raises ConfigError and
    CheckpointError.
    """
    found = loaded
    if key is not None:
        if not isinstance(loaded, dict) or key not in loaded:
            raise ConfigError(f"the checkpoint {path} has no {key!r}", next_step=_keys_to_name(loaded))
        found = loaded[key]
    if _is_state_dict(found):
        return dict(found)  # type: ignore[call-overload, no-any-return]
    what = f"{key!r} in the checkpoint {path}" if key is not None else f"the checkpoint {path}"
    raise CheckpointError(
        f"{what} is no state dict", expected="tensors by name", next_step=_keys_to_name(loaded)
    )


def _is_state_dict(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _keys_to_name(loaded: object) -> str:
    keys = list(loaded) if isinstance(loaded, dict) else []
    usable = [str(key) for key in keys if _is_state_dict(loaded[key])]  # type: ignore[index]
    if usable:
        return f"set model.state_dict_key to the state dict that you mean: {', '.join(usable[:_SHOWN])}"
    return (
        f"it holds {', '.join(repr(key) for key in keys[:_SHOWN])}"
        if keys
        else f"it holds a {type(loaded).__name__}"
    )


# -- Loading -------------------------------------------------------------------------------------------------


def load_into(model: nn.Module, state_dict: Mapping[str, Tensor], source: str) -> str | None:
    """Copies `state_dict` into the model's parameters and buffers; `source` is its name in messages.

    The match must be exact, but for two things: of the names of a tied tensor one is enough, and a prefix
    that all names share is stripped where that, and only that, makes the match exact; the returned note says
    so. Raises CheckpointError otherwise.
    """
    fit = _fit(model, state_dict)
    prefix = ""
    if not fit.exact:
        prefix, stripped = _strip_prefixes(model, state_dict)
        if not prefix:
            raise CheckpointError(
                f"the checkpoint {source} does not fit the model: {fit.describe()}", cause=fit.likely_cause()
            )
        state_dict = stripped
    _copy(model, state_dict, source)
    return f"stripped the prefix {prefix!r} from the {len(state_dict)} names of {source}" if prefix else None


@dataclass(frozen=True)
class _Fit:
    """How the names of a checkpoint compare with those of a model."""

    missing: list[str]  # the model's, with the nearest unexpected ones
    unexpected: list[str]  # the checkpoint's, with the nearest missing ones
    mismatched: list[str]
    matched: int

    @property
    def exact(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def describe(self) -> str:
        groups = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape or type", self.mismatched),
        )
        counts = ", ".join(f"{len(lines)} {name}" for name, lines in groups if lines)
        details = [line for name, lines in groups if lines for line in _group(name, lines)]
        return "\n".join([counts, *details])

    def likely_cause(self) -> str:
        if self.matched == 0:
            return "the checkpoint belongs to another model, or its names carry another prefix"
        return "the factory's kwargs differ from those that the model was trained with"


def _group(name: str, lines: list[str]) -> list[str]:
    more = [f"      and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"    {name}:", *(f"      {line}" for line in lines[:_SHOWN]), *more]


def _fit(model: nn.Module, state_dict: Mapping[str, Tensor]) -> _Fit:
    wanted = _persistent(model)
    present = {id(tensor) for name, tensor in wanted.items() if name in state_dict}
    missing = [
        name for name, tensor in wanted.items() if name not in state_dict and id(tensor) not in present
    ]
    unexpected = [name for name in state_dict if name not in wanted]
    common = [name for name in wanted if name in state_dict]
    problems = ((name, _mismatch(state_dict[name], wanted[name])) for name in common)
    return _Fit(
        missing=_with_nearest(missing, unexpected),
        unexpected=_with_nearest(unexpected, missing),
        mismatched=[f"{name}: {problem}" for name, problem in problems if problem],
        matched=len(common),
    )


def _persistent(model: nn.Module) -> dict[str, Any]:
    """What the model's state dict holds, by every name: the very tensors, so that tied ones can be told by
    identity.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    return {name: tensors.get(name, value) for name, value in model.state_dict().items()}


def _mismatch(got: Tensor, wanted: Any) -> str | None:
    if not isinstance(wanted, Tensor):
        return "the model keeps something other than a tensor under this name"
    if got.shape != wanted.shape:
        return f"{list(got.shape)} in the checkpoint, {list(wanted.shape)} in the model"
    if not torch.can_cast(got.dtype, wanted.dtype):
        return f"{_short(got.dtype)} in the checkpoint, {_short(wanted.dtype)} in the model"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_nearest(names: list[str], others: list[str]) -> list[str]:
    # Only the first few are shown, and the search is quadratic.
    close = [nearest(name, others) for name in names[:_SHOWN]]
    return [
        f"{name} (nearest: {other})" if other else name for name, other in zip(names, close, strict=False)
    ] + names[_SHOWN:]


def _strip_prefixes(model: nn.Module, state_dict: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
    """The shared prefix without which the match is exact, and the state dict without it; an empty prefix
    where there is none.
    """
    stripped = ""
    while prefix := next(
        (p for p in _PREFIXES if state_dict and all(name.startswith(p) for name in state_dict)), None
    ):
        stripped += prefix
        state_dict = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
        if _fit(model, state_dict).exact:
            return stripped, state_dict
    return "", state_dict


def _copy(model: nn.Module, state_dict: Mapping[str, Tensor], source: str) -> None:
    sources: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _persistent(model).items():
        if name not in state_dict:
            continue
        first_name, first = sources.setdefault(id(tensor), (name, state_dict[name]))
        if first is not state_dict[name] and not torch.equal(first, state_dict[name]):
            raise CheckpointError(
                f"the model ties {first_name} and {name}, but the checkpoint {source} holds two different"
                " tensors for them",
                cause="the checkpoint belongs to a model in which they are not tied",
            )
    whole = {name: sources[id(tensor)][1] for name, tensor in _persistent(model).items()}
    model.load_state_dict(whole)
