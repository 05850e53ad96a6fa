"""Several checkpoints in one pass: their weights stacked, and the per-sample norms mapped over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.gradients.doubts import noting
from psgrad.engine.measures.measure import Arrays
from psgrad.engine.objective import Objective
from psgrad.engine.transforms import stack_module_state, vmap
from psgrad.engine.transforms.functional import swapped, tied_slots

Vectors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Models of one architecture, which differ in their weights alone.

    Attributes:
        objective: of any one of them, in whose model weights are swapped; its summary is what is kept of an output.
        params: name -> [T, *shape], those that gradients are taken in.
        fixed: name -> [T, *shape], frozen parameters and buffers.
    """

    objective: Objective
    params: Vectors
    fixed: Vectors

    @classmethod
    def of(cls, objective: Objective, models: Sequence[nn.Module]) -> Ensemble:
        """From models on one device, `objective` being that of a model like them."""
        stacked = [{name: value.detach() for name, value in part.items()} for part in stack_module_state(models)]
        return cls(objective, *_parted({**stacked[0], **stacked[1]}, objective))

    @classmethod
    def like(cls, objective: Objective, count: int) -> Ensemble:
        """The shape of an ensemble of `count` models, for a forecast: each has the weights of the one at hand, which are not copied."""
        own = {**dict(objective.model.named_parameters()), **dict(objective.model.named_buffers())}
        return cls(objective, *_parted({name: value.detach().expand(count, *value.shape) for name, value in own.items()}, objective))

    def __call__(self, loss: Any, params: Any, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, **options: Any) -> Arrays:
        """`loss`, `grad_norm` and what the summary says of a chunk of k rows, name -> [T, k]: a way for Stream.run.

        Where rounding may have spoilt a norm, the models pass one by one instead: which samples are to be taken again depends on
        data, and no two models need agree on it.
        """
        found, doubt = self.all_at_once(self.params, self.fixed, inputs, target)
        if not bool(doubt.any()):
            return found
        one_by_one = [
            self._one({name: value[t] for name, value in self.params.items()}, self._fixed_of(t), inputs, target) for t in range(len(doubt))
        ]
        return {name: torch.stack([each[name] for each in one_by_one]) for name in one_by_one[0]}

    @torch.no_grad()
    def all_at_once(
        self, params: Vectors, fixed: Vectors, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None
    ) -> tuple[Arrays, torch.Tensor]:
        """(name -> [T, k], [T] bool: whose numbers are in doubt)."""

        def one(params: Vectors, fixed: Vectors, inputs: Any, target: Any) -> tuple[Arrays, torch.Tensor]:
            with noting() as doubts:
                found = self._one(params, fixed, inputs, target)
            return found, torch.stack(doubts).any() if doubts else torch.zeros((), dtype=torch.bool, device=found["loss"].device)

        mapped: tuple[Arrays, torch.Tensor] = vmap(one, in_dims=(0, 0 if fixed else None, None, None))(params, fixed, inputs, target)
        return mapped

    def _one(self, params: Vectors, fixed: Vectors, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> Arrays:
        """name -> [k], of one model."""
        in_dims = (0, None if target is None else 0)
        with swapped(tied_slots(self.objective.model, fixed), fixed):
            norms = per_sample_square_norms(self.objective.loss, params, inputs, target, in_dims=in_dims, has_aux=True)
        return {"loss": norms.losses.double(), "grad_norm": norms.square_norms().sqrt(), **norms.aux}

    def _fixed_of(self, t: int) -> Vectors:
        return {name: value[t] for name, value in self.fixed.items()}


def _parted(stacked: Vectors, objective: Objective) -> tuple[Vectors, Vectors]:
    """(those that gradients are taken in, the others)."""
    params = {name: stacked[name] for name in objective.params}
    return params, {name: value for name, value in stacked.items() if name not in params}
