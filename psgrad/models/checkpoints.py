"""The tensors of a state dict put into a model, which they must fit exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgrad.config import nearest
from psgrad.errors import CheckpointError
from psgrad.models.in_files import fill_from_files
from psgrad.wording import first_of

_PREFIXES = ("module.", "_orig_mod.", "model.")  # put there by DataParallel, torch.compile and Lightning
_SHOWN = 10
_DEEPEST = 4  # wrappers around one another


def load_into(
    model: nn.Module, state_dict: Mapping[str, Tensor], source: str, *, as_saved: bool = False
) -> str | None:
    """Copies `state_dict` into the model's parameters and buffers; `source` is its name in messages. A
    parameter without memory becomes the tensor itself, which stays where it is.

    The match must be exact, but for two things: of the names of a tied tensor one is enough, and a wrapper's
    prefix is stripped where that, and only that, makes the match exact for the names that have it.
    `as_saved`: a parameter takes the checkpoint's type where that is wider, so that nothing is rounded. The
    returned note says what was stripped or left out. Raises CheckpointError.
    """
    fit, note = _fit(model, state_dict), None
    for prefix in [] if fit.exact else _wrappings(state_dict):
        below = _below(state_dict, prefix)
        if _fit(model, below).exact:
            rest = [name for name in state_dict if not name.startswith(prefix)]
            note = f"stripped the prefix {prefix!r} from the {len(below)} names of {source}"
            note += f"; left out {len(rest)} others: {first_of(rest, _SHOWN)}" if rest else ""
            state_dict, fit = below, _fit(model, below)
            break
    if not fit.exact:
        raise CheckpointError(
            f"the checkpoint {source} does not fit the model: {fit.describe()}", hint=fit.hint()
        )
    if as_saved:
        _widen(model, state_dict)
    _copy(model, state_dict, source)
    return note


def _below(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in state_dict.items() if name.startswith(prefix)}


def _wrappings(state_dict: Mapping[str, Tensor], outer: str = "") -> list[str]:
    """The prefixes that wrappers may have put before names, the shorter ones first."""
    found = [outer + each for each in _PREFIXES if any(name.startswith(outer + each) for name in state_dict)]
    for prefix in list(found):
        if prefix.count(".") < _DEEPEST:
            found += _wrappings(state_dict, prefix)
    return sorted(found, key=len)


@dataclass(frozen=True)
class _Fit:
    """How the names of a checkpoint compare with those of a model.

    missing: the model's, with the nearest unexpected ones. unexpected: the checkpoint's, with the nearest
    missing ones. mismatched: of another shape or type. matched: how many names are in both.
    """

    missing: list[str]
    unexpected: list[str]
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

    def hint(self) -> str:
        if not self.matched:
            return "the checkpoint belongs to another model, or its names carry another prefix"
        if self.missing or self.mismatched:
            return "the factory's kwargs differ from those that the model was trained with"
        return "save the model's own state dict alone"


def _group(name: str, lines: list[str]) -> list[str]:
    more = [f"      and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [f"    {name}:", *(f"      {line}" for line in lines[:_SHOWN]), *more]


def _fit(model: nn.Module, state_dict: Mapping[str, Tensor]) -> _Fit:
    wanted = _persistent(model)
    present = {id(tensor) for name, tensor in wanted.items() if name in state_dict}
    absent = (name for name in wanted if name not in state_dict)
    missing = [name for name in absent if id(wanted[name]) not in present]
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
    """What the model's state dict holds, by every name: the very tensors, so that tied ones are the same."""
    tensors: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensors.get(name, value) for name, value in model.state_dict().items()}


def _mismatch(got: Tensor, wanted: Any) -> str | None:
    if not isinstance(wanted, Tensor):
        return "the model keeps something other than a tensor under this name"
    if got.shape != wanted.shape:
        return f"{list(got.shape)} in the checkpoint, {list(wanted.shape)} in the model"
    if not torch.can_cast(got.dtype, wanted.dtype):
        return f"{got.dtype} in the checkpoint, {wanted.dtype} in the model".replace("torch.", "")
    return None


def _with_nearest(names: list[str], others: list[str]) -> list[str]:
    # Only the first few are shown, and the search is quadratic.
    close = ((name, nearest(name, others)) for name in names[:_SHOWN])
    return [f"{name} (nearest: {other})" if other else name for name, other in close] + names[_SHOWN:]


def _widen(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state_dict and state_dict[name].is_floating_point():
            kind = torch.promote_types(parameter.dtype, state_dict[name].dtype)
            parameter.data = parameter.data.to(kind)


def _copy(model: nn.Module, state_dict: Mapping[str, Tensor], source: str) -> None:
    sources: dict[int, tuple[str, Tensor]] = {}
    wanted = _persistent(model)
    for name, tensor in wanted.items():
        if name not in state_dict:
            continue
        first_name, first = sources.setdefault(id(tensor), (name, state_dict[name]))
        if first is not state_dict[name] and not torch.equal(first, state_dict[name]):
            raise CheckpointError(
                f"the model ties {first_name} and {name}, but the checkpoint {source} holds two different"
                " tensors for them",
                hint="the checkpoint belongs to a model in which they are not tied",
            )
    whole = {name: sources[id(each)][1] for name, each in wanted.items() if id(each) in sources}
    filled = fill_from_files(model, whole)
    model.load_state_dict({name: each for name, each in whole.items() if name not in filled}, strict=False)
