"""The scores of a method as one matrix, for evaluations, which need all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Checkpoint, Fitted, Method
from psgrad.engine.influence.scoring import Normalize, divisor, joined_scores
from psgrad.errors import InfluenceError

Array = np.ndarray[Any, Any]
Place = tuple[Examples, Checkpoint]


def fitted_to(method: Method, places: Sequence[Place]) -> list[Fitted]:
    """The method at each checkpoint, to the training examples as its model sees them."""
    return [method.fit(training, checkpoint) for training, checkpoint in places]


def score_matrix(method: Method, fitted: Sequence[Fitted], queries: Sequence[Examples], normalize: Normalize | None = None) -> Array:
    """[n, m] float64, positive where an example helps a query: of the checkpoints together.

    normalize: scores are divided as `divisor` says; None leaves them as they are.
    """
    divisors = None if normalize is None else [divisor(each.self_influence(), normalize) for each in fitted]
    blocks = [block.scores[""] for block in joined_scores(method, fitted, queries, divisors=divisors)]
    found: Array = torch.cat(blocks).double().cpu().numpy()
    return found


def self_influences(method: Method, fitted: Sequence[Fitted]) -> Array:
    """[n] float64: each example's influence on itself, of the checkpoints together."""
    each = [torch.cat([block.self_influence for block in one.self_influence()]) for one in fitted]
    found: Array = method.across_self(each).double().cpu().numpy()
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
