"""Mechanisms for audits to look at: one that does what it declares, and mistakes to plant in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.accounting import Events, StepEvent
from psgrad.engine.privacy.audit import AuditedRun, Canaries, Played, play
from psgrad.engine.privacy.batches import GradientSource
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import Generator, make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling

PARAMETERS = {
    "first.weight": torch.zeros(80, 60),
    "first.bias": torch.zeros(80),
    "last.weight": torch.zeros(60, 80),
}
EVERY = Sampling("poisson", sample_rate=1.0)


class HalfNoise(Noise):
    """Noise of half the standard deviation that it declares."""

    def add(
        self, sums: dict[str, Tensor], clipping: Clipping, relation: Relation, generator: Generator
    ) -> dict[str, Tensor]:  # type: ignore[override]
        return Noise(self.multiplier / 2).add(sums, clipping, relation, generator)


class Unclipped(Clipping):
    """A bound that is declared and not kept to."""

    def factors(self, group_norms: Tensor, *_: object, **__: object) -> Tensor:
        return torch.ones_like(group_norms)


@dataclass
class Game:
    """An audit of PARAMETERS' mechanism; what it is made of can be replaced by something that is wrong."""

    clipping: Clipping
    multiplier: float = 1.0
    noise: type[Noise] = Noise
    sampling: Sampling = EVERY
    relation: Relation = "add_or_remove_one"
    generator: Callable[[], Generator] | None = None
    steps: int = 1
    canaries: int = 2000
    seed: int = 0

    def events(self) -> Events:
        return [(StepEvent(self.multiplier, self.sampling, self.relation), self.steps)]  # type: ignore[arg-type]

    def play(self, source: Callable[[np.ndarray], GradientSource] | None = None, records: int = 0) -> Played:
        made = iter(range(100))
        mechanism = AuditedRun(
            self.clipping,
            self.noise(self.multiplier),
            self.sampling,
            self.relation,
            self.generator or (lambda: make_generator(seed=self.seed, position=next(made))),
        )
        random = np.random.default_rng(self.seed)
        planted = Canaries.plant(PARAMETERS, self.clipping, self.canaries, random)
        return play(mechanism, planted, self.steps, random, source=source, records=records)


FLAT = Clipping.flat(PARAMETERS, 0.5)
