"""Retrained models' measurements: trained in batches, and kept as they are finished, so that what was stopped goes on where it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from psgrad.engine.influence.evaluation.ensemble import Trainer
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.members import Members

Array = np.ndarray[Any, Any]


class Store(Protocol):
    """Where finished numbers are kept from one run to the next."""

    def load(self, name: str) -> Array | None:
        """The array that was saved under this name; None where there is none, or it is damaged."""

    def save(self, name: str, values: Array) -> None:
        """Keep an array, durably."""


def measured(
    jobs: Sequence[Job],
    train: Trainer,
    measure: Callable[[Members], Array],
    store: Store,
    fingerprint: str,
    together: int,
    tell: Callable[[int], None] = lambda _: None,
) -> Array:
    """[jobs, m]: what `measure` says of each trained model, [K, m] of K.

    Args:
        fingerprint: of all else that the numbers depend on: model, data, recipe, measurement. What was kept under another is not used.
        together: models to a batch, which is what an interruption can cost.
        tell: called with the number of models that are done.
    """
    parts = []
    # Models of one size come together, whatever their order: a batch is trained at once.
    order = sorted(range(len(jobs)), key=lambda number: len(jobs[number].rows))
    for start in range(0, len(jobs), together):
        batch = [jobs[number] for number in order[start : start + together]]
        name = _name(batch, fingerprint)
        kept = store.load(name)
        if kept is None or len(kept) != len(batch):
            kept = measure(train(batch))
            store.save(name, kept)
        parts.append(kept)
        tell(start + len(batch))
    found: Array = np.concatenate(parts)[np.argsort(order)]
    return found


def _name(jobs: Sequence[Job], fingerprint: str) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    for job in jobs:
        digest.update(f"{job.seed} {len(job.rows)} ".encode())
        digest.update(np.ascontiguousarray(job.rows, dtype=np.int64).tobytes())
        if job.target is not None:
            digest.update(job.target.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:24]


def seed_of(base: int, *place: int) -> int:
    """A seed for each place (subset, repetition), all different ones for other bases."""
    return int(np.random.SeedSequence([base, *place]).generate_state(1)[0])
