"""The scores of a method as one matrix, for evaluations, which need all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from psgrad.engine.influence.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method
from psgrad.errors import InfluenceError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """One checkpoint: the training examples and the queries as its model sees them."""

    training: Examples
    queries: Examples
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Contender:
    """A method under the name that it has in tables."""

    name: str
    method: Method


def fitted_to(method: Method, places: Sequence[Place]) -> list[Fitted]:
    """The method at each checkpoint."""
    return [method.fit(place.training, place.checkpoint) for place in places]


def score_matrix(method: Method, fitted: Sequence[Fitted], queries: Sequence[Examples]) -> Array:
    """[n, m] float64, positive where an example helps a query: over the checkpoints, as the method takes them together."""
    passes = [one.scores(asked) for one, asked in zip(fitted, queries, strict=True)]
    blocks = [method.across(list(found))[""] for found in zip(*passes, strict=True)]
    found: Array = torch.cat(blocks).double().cpu().numpy()
    return found


def self_influences(fitted: Sequence[Fitted]) -> Array:
    """[n] float64: the mean over the checkpoints."""
    each = [torch.cat([block.self_influence for block in one.self_influence()]) for one in fitted]
    found: Array = torch.stack(each).double().mean(0).cpu().numpy()
    return found


def has_damping(method: Method) -> bool:
    """Whether a method has a damping that can be tuned."""
    return hasattr(method, "relative_damping")


def damped(method: Method, fitted: Sequence[Fitted], places: Sequence[Place], relative: float) -> tuple[Method, list[Fitted]]:
    """The method with another damping, relative to the curvature's mean eigenvalue: by the factorisation at hand where it allows that,
    else fitted anew. Raises InfluenceError where the method has no damping."""
    if not has_damping(method):
        raise InfluenceError(f"the method {method.name} has no damping to tune")
    changed: Any = method
    changed = replace(changed, damping=None, relative_damping=relative)
    if all(hasattr(one, "with_damping") for one in fitted):
        known: Sequence[Any] = fitted
        return changed, [one.with_damping(relative=relative) for one in known]
    return changed, fitted_to(changed, places)
