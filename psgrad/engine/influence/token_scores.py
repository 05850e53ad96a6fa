"""The score of a pair of samples, divided over the tokens of both: which training token moved which token of
the query.

The loss of a sample of text is a sum of one term a token, and so is its gradient, g_i = sum_t g_it. The score
<A g_q, g_i> is therefore a sum over pairs of tokens, <A g_qs, g_it>, and all parameters have their part in
it. The gradients of training tokens are never materialised: <v, g_it> for all t at once is the derivative of
the terms along v, one pass in forward mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.transforms import vjp, vmap
from psgrad.errors import InfluenceError

# The gradients of query tokens that are held at once may take this share of the free memory.
_SHARE = 0.25
# How far a loss may be from the mean, or the sum, of its tokens' losses.
_CLOSE = 1e-3


@dataclass(frozen=True)
class TokenTerms:
    """The terms of one sample's loss, one a position.

    examples: whose sample it is. row: which of them. ignored: the target that does not count. inputs, target
    [t]: the sample's, without a batch axis. scale: of a token's loss in the sample's.
    """

    examples: Examples
    row: int
    ignored: int
    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    scale: float

    @classmethod
    def of(cls, examples: Examples, row: int, ignored: int) -> TokenTerms:
        """The terms of a row. Raises InfluenceError where its loss is not the sum of its tokens' losses."""
        batch, target = examples.stream.load([row])
        inputs = tuple(x[0] for x in batch)
        if target is None or target.dim() != 2:
            raise InfluenceError(
                "influence.level: token needs a loss of positions, such as token_cross_entropy, and this loss"
                " has one value a sample",
                hint="set influence.level: sample",
            )
        bare = cls(examples, row, ignored, inputs, target[0], 1.0)
        each = bare.losses(examples.params)
        whole = examples.objective.loss(examples.params, inputs, target[0])[0].double()
        total, counted = each.double().sum(), int(bare.counted.sum())
        for scale in (1.0 / max(counted, 1), 1.0):
            scaled = scale * float(bare.weight)
            if torch.allclose(total * scaled, whole, rtol=_CLOSE, atol=1e-12):
                return cls(examples, row, ignored, inputs, target[0], scaled)
        raise InfluenceError(
            f"the loss of row {row}, {float(whole):.6g}, is neither the mean nor the sum of the losses of its"
            f" {counted} tokens, which add up to {float(total):.6g}",
            hint="set influence.level: sample",
        )

    @property
    def counted(self) -> torch.Tensor:
        """[t] bool: which positions have a term."""
        return self.target != self.ignored

    @property
    def weight(self) -> torch.Tensor:
        weights = self.examples.objective.weights(self.inputs)
        return torch.ones(()) if weights is None else weights

    def losses(self, params: Vectors) -> torch.Tensor:
        """[t]: the loss of each position by itself; 0 where it does not count."""
        objective = self.examples.objective
        output = objective.predict(params, self.inputs)
        criterion = objective.criterion
        each = vmap(lambda o, y: criterion(o.unsqueeze(0), y.unsqueeze(0)))(output, self.target)
        return torch.where(self.counted, each, torch.zeros_like(each))

    def terms(self, params: Vectors) -> torch.Tensor:
        """[t]: what each position adds to the loss."""
        return self.losses(params) * self.scale

    def gradients(self, places: torch.Tensor) -> Vectors:
        """name -> [k, *shape]: the gradients of the terms at these positions [k]."""
        params = self.examples.params
        terms, back = vjp(self.terms, params)
        chosen = torch.zeros(len(places), len(terms), dtype=terms.dtype, device=terms.device)
        chosen[torch.arange(len(places)), places] = 1
        found: Vectors = vmap(lambda cotangent: back(cotangent)[0])(chosen)
        return found

    def along(self, vectors: Vectors) -> torch.Tensor:
        """[k, t] float64: the inner products of k vectors, name -> [k, *shape], with the gradients of all
        terms.
        """
        params = self.examples.params
        own = {name: value.to(params[name].dtype) for name, value in vectors.items()}
        terms, back = vjp(self.terms, params)
        _, along = vjp(lambda cotangent: back(cotangent)[0], terms)  # as in PassProducts: no tangents
        found: torch.Tensor = vmap(lambda vector: along(vector)[0])(own)
        return found.double()


def token_scores(
    solver: Preconditioned, query: TokenTerms, places: torch.Tensor, training: Sequence[TokenTerms]
) -> list[torch.Tensor]:
    """For each training sample [k, t] float64, on the CPU: the scores of its positions for the positions
    `places` [k] of the query.

    Summed over the positions that count of both, they are the score of the two samples.
    """
    found: list[list[torch.Tensor]] = [[] for _ in training]
    # Positions whose gradients, and what a solver makes of them, fit into memory.
    size = int(query.examples.free_bytes() * _SHARE / (4 * 8 * query.examples.flat.size))
    for part in places.split(max(1, size)):
        prepared = solver.precondition(query.gradients(part))
        for place, terms in enumerate(training):
            found[place].append(terms.along(prepared).cpu())
    return [torch.cat(parts) for parts in found]
