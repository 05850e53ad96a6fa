"""Clipping: the groups of parameters, the bound of each, and the factor that each record's gradient is
multiplied by.

The norm of what a record adds in a group is at most the group's bound. `Clipping.sensitivity` is the one
place where bounds become the unit of the noise.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.privacy.records import Relation
from psgrad.errors import ConfigError

Rule = Literal["clip", "automatic"]

# The relative margin of a clipped norm below its bound; `clipped_sums.Clipper` describes what it covers.
MARGIN = 2.0**-21
# What the automatic rule adds to each norm, as in the paper.
_STABILITY = 0.01
# Bounds outside of this range would overflow or underflow float32 in the sum over a batch, or in its noise.
_SMALLEST, _LARGEST = 1e-20, 1e20


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped together: the norm of a record's gradient in all of them is at most
    `bound`.
    """

    name: str
    parameters: tuple[str, ...]
    bound: float


@dataclass(frozen=True)
class Clipping:
    """How each record's gradient is clipped before it is summed.

    Attributes:
        groups: the parameters of each, no parameter in two.
        rule: 'clip' multiplies by min(1, bound / norm) (Abadi et al., "Deep Learning with Differential
            Privacy", 2016); 'automatic' by bound / (norm + 0.01), for any norm (Bu, Wang, Zha and
            Karypis, "Automatic Clipping", 2023, AUTO-S).

    Raises ConfigError for bounds that are not positive numbers, and for a parameter in two groups.
    """

    groups: tuple[Group, ...]
    rule: Rule = "clip"

    def __post_init__(self) -> None:
        if self.rule not in ("clip", "automatic"):
            raise ConfigError(f"the clipping rule is {self.rule!r}; expected clip or automatic")
        if not any(group.parameters for group in self.groups):
            raise ConfigError(
                "there is no parameter to clip",
                hint="a model whose parameters are all frozen",
            )
        for group in self.groups:
            if not _SMALLEST <= group.bound <= _LARGEST:
                raise ConfigError(
                    f"the clipping norm of {group.name!r} is {group.bound!r}; expected a positive number from"
                    f" {_SMALLEST:g} to {_LARGEST:g}"
                )
        seen: dict[str, str] = {}
        for group in self.groups:
            for name in group.parameters:
                if name in seen:
                    raise ConfigError(
                        f"the parameter {name!r} is in two clipping groups, {seen[name]!r} and"
                        f" {group.name!r}; expected each parameter in one group",
                    )
                seen[name] = group.name

    @classmethod
    def flat(cls, parameters: Iterable[str], bound: float, **options: Any) -> Clipping:
        """One group of all parameters (their names)."""
        return cls((Group("all", tuple(parameters), bound),), **options)

    @classmethod
    def per_layer(cls, parameters: Iterable[str], bound: float, **options: Any) -> Clipping:
        """A group for each module that owns parameters, each with the bound / sqrt(groups): the whole
        gradient keeps to `bound`.
        """
        owners: dict[str, list[str]] = {}
        for name in parameters:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        return cls._even(owners, bound, **options)

    @classmethod
    def per_parameter(cls, parameters: Iterable[str], bound: float, **options: Any) -> Clipping:
        """A group for each parameter, each with the bound / sqrt(groups): the whole gradient keeps to
        `bound`.
        """
        return cls._even({name: [name] for name in parameters}, bound, **options)

    @classmethod
    def _even(cls, groups: Mapping[str, list[str]], bound: float, **options: Any) -> Clipping:
        each = bound / math.sqrt(max(len(groups), 1))
        return cls(tuple(Group(name, tuple(members), each) for name, members in groups.items()), **options)

    @classmethod
    def by_pattern(cls, parameters: Iterable[str], bounds: Mapping[str, float], **options: Any) -> Clipping:
        """A group for each pattern ("encoder.*", as for file names) with its bound; a parameter belongs to
        the first that matches.

        Raises ConfigError for a parameter without a matching pattern, and for a pattern without parameters.
        """
        members: dict[str, list[str]] = {pattern: [] for pattern in bounds}
        names = list(parameters)
        for name in names:
            fitting = next((pattern for pattern in bounds if fnmatch.fnmatchcase(name, pattern)), None)
            if fitting is None:
                raise ConfigError(
                    f"no clipping group takes the parameter {name!r}; the patterns are {list(bounds)}",
                    hint="end the groups with the pattern '*'",
                )
            members[fitting].append(name)
        for pattern, matched in members.items():
            if not matched:
                raise ConfigError(
                    f"the clipping group {pattern!r} has no parameter of {names[:8]}",
                    hint="correct the name, or put the pattern before one that takes all",
                )
        return cls(
            tuple(Group(pattern, tuple(matched), bounds[pattern]) for pattern, matched in members.items()),
            **options,
        )

    def sensitivity(self, relation: Relation) -> float:
        """How far the sum over a batch may move, in Euclidean distance, between neighbouring datasets.

        A record adds at most its group's bound in each group, so the root of the sum of their squares in all.
        Where a record is replaced by another, one such vector goes and another comes: twice as much.
        """
        each = math.sqrt(math.fsum(group.bound**2 for group in self.groups))
        return 2 * each if relation == "replace_one" else each

    def group_norms(self, square_norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[groups, n] float64: the norm of each record's gradient in each group, from name -> [n], the
        squared norms.

        Raises ConfigError where these are of other parameters than the groups'.
        """
        grouped = set(self.parameters)
        if grouped != square_norms.keys():
            kinds = {
                "in no group": square_norms.keys() - grouped,
                "without gradient": grouped - square_norms.keys(),
            }
            found = "; ".join(
                f"{kind}: {', '.join(sorted(names)[:8])}" for kind, names in kinds.items() if names
            )
            raise ConfigError(
                f"the clipping groups are not of the parameters that have gradients; {found}",
                hint="make the groups after parameters were frozen, of every parameter that is trained",
            )
        return self.group_sums(square_norms).sqrt_()

    def group_sums(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[groups, n] float64: the sums over the parameters of each group, from name -> [n]."""
        each = torch.stack([value.double() for value in values.values()])  # [parameters, n]
        if len(self.groups) == 1:
            return each.sum(0, keepdim=True)
        places = {name: place for place, group in enumerate(self.groups) for name in group.parameters}
        index = torch.tensor([places[name] for name in values], device=each.device)
        return each.new_zeros(len(self.groups), each.shape[1]).index_add_(0, index, each)

    def bounds(self, device: torch.device) -> torch.Tensor:
        """[groups, 1] float64: the bound of each group."""
        return torch.tensor([[group.bound] for group in self.groups], dtype=torch.float64, device=device)

    def factors(self, group_norms: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
        """[groups, n] float64: the factor of each record in each group, from the norms [groups, n]; 0 in all
        groups for a record whose norm is not finite in any. bounds: as `bounds` gives them.
        """
        bounds = (self.bounds(group_norms.device) if bounds is None else bounds) * (1 - MARGIN)
        factors = (
            bounds / (group_norms + _STABILITY)
            if self.rule == "automatic"
            else (bounds / group_norms).clamp_(max=1)
        )
        # A quotient below the normal numbers has few digits: its rounding may exceed the margin.
        factors = torch.where(factors < torch.finfo(torch.float64).tiny, 0, factors)
        finite = torch.isfinite(group_norms).all(0)
        return torch.where(finite, factors, 0.0)

    def by_parameter(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """name -> [n], from the factors [groups, n]. The parameters of a group have one tensor together."""
        return {
            name: row for group, row in zip(self.groups, factors, strict=True) for name in group.parameters
        }

    @property
    def parameters(self) -> list[str]:
        """The names of all parameters, group by group."""
        return [name for group in self.groups for name in group.parameters]

    def describe(self) -> dict[str, Any]:
        """The clipping as plain JSON."""
        groups = [
            {"name": group.name, "parameters": list(group.parameters), "bound": group.bound}
            for group in self.groups
        ]
        described: dict[str, Any] = {"groups": groups, "rule": self.rule}
        if self.rule == "automatic":
            described["stability"] = _STABILITY
        return described

    def hash(self) -> str:
        """The SHA-256 of the description, for a ledger."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()
