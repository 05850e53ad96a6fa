"""Measures of single tokens: each one's loss, and its share of the squared norm of its sample's gradient."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.gradients.per_sample import per_sample_gradients
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import blocks
from psgrad.engine.measures.attribution_points import places_of
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting, shown_rows
from psgrad.engine.measures.passes import Inputs, plain_objective, refusing, row_pass
from psgrad.engine.transforms import vmap
from psgrad.errors import MeasureError

_IDS = ("input_ids", "decoder_input_ids")
"""The keywords by which models of the transformers library take their tokens."""


class _TokenMeasure(Measure):
    """A number for each token of each sample.

    Tokens are an input of whole numbers that an embedding looks up. Arrays of what is gathered, for m samples
    of the largest gradient norms, where inputs may be kept: `rows` [m]; for the input i `ids_<i>` [m, t]
    int64, -1 behind a sample's last token, `map_<i>` [m, t] with 0 there, and `counted_<i>` [m, t] bool,
    whether a position has a target that counts.
    """

    @abstractmethod
    def of_tokens(self, number: int, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor:
        """[k, t] float64 for the tokens of input `number`; NaN for samples that have none."""

    def prepare(self, setting: Setting) -> None:
        self._setting = setting
        self._objective = plain_objective(setting.examples)
        self._tokens: list[int] = []
        inputs, _ = setting.examples.stream.load(0, 1)
        try:
            places = {place.input for place in places_of(self._objective, inputs) if place.module is not None}
        except Exception:  # the model fails, and again in the first pass, whose error names the row
            return
        names = self._objective.forward.names
        self._tokens = [number for number in sorted(places) if not names or names[number] in _IDS]
        self._tokens = self._tokens if names else self._tokens[:1]
        if not self._tokens:
            raise MeasureError(
                f"the measure {self.name} found no tokens among the inputs of this model; expected an"
                " input of ids that an nn.Embedding looks up",
                hint=f"take {self.name} out of analyze.measures",
            )

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass(self.name.replace("_", "-"), self._run)]

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        shown = shown_rows(rows)
        if not self._setting.shows_inputs or not len(shown):
            return Gathered()
        each = [self._maps(int(row)) for row in shown]
        filled = {
            name: torch.nn.utils.rnn.pad_sequence(
                [arrays[name] for arrays in each], True, -1 if name.startswith("ids_") else 0
            )
            for name in each[0]
        }
        return Gathered(arrays={"rows": shown} | filled)

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        return refusing(
            self,
            row_pass(self._setting.examples, self._columns, chunk_size, rows),
            "gradients whose factors are kept by position",
        )

    def _columns(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        each = torch.cat([self.of_tokens(number, inputs, target) for number in self._tokens], 1)
        return {f"{self.name}_max": each.amax(1)}

    def _maps(self, row: int) -> Arrays:
        """The maps of one row, on the CPU."""
        inputs, target = self._setting.examples.stream.load(row, row + 1)
        arrays: Arrays = {}
        for number in self._tokens:
            ids = inputs[number][0]
            arrays[f"ids_{number}"] = ids.cpu()
            arrays[f"map_{number}"] = self.of_tokens(number, inputs, target)[0].float().cpu()
            counted = self._counted(ids.unsqueeze(0), target)
            arrays[f"counted_{number}"] = (
                torch.ones_like(ids, dtype=torch.bool).cpu() if counted is None else (counted[0].cpu())
            )
        return arrays

    def _counted(self, ids: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor | None:
        """[k, t]: which tokens have a loss of their own; None where the loss is not one of positions."""
        if self._setting.kind != "token" or target is None or target.shape != ids.shape:
            return None
        return self._moved(target != self._setting.ignore_index, ids, target)

    def _moved(self, values: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Values [k, t] of targets as values of the tokens that these are: the next token's where each target
        is the next token, as in language models.
        """
        counted = target[:, :-1] != self._setting.ignore_index
        is_next = ((target[:, :-1] == ids[:, 1:]) | ~counted).all(1) & counted.any(1)
        later = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)
        return torch.where(is_next.unsqueeze(1), later, values)


@dataclass
class TokenLoss(_TokenMeasure):
    """The loss of each token by itself, before it is averaged over a sample; of a language model that of
    predicting the token.
    """

    name: ClassVar[str] = "token_loss"
    title: ClassVar[str] = "Token loss"
    formula: ClassVar[str] = "l_t"
    unit: ClassVar[str] = "{loss}"
    source: ClassVar[str] = "the loss itself, before the mean or sum over positions"
    cost: ClassVar[str] = "a pass of its own, forward only"
    meanings: ClassVar[dict[str, str]] = {"token_loss_max": "the largest loss of a token ({loss})"}

    def prepare(self, setting: Setting) -> None:
        if setting.kind != "token":
            raise MeasureError(
                "the measure token_loss needs a loss of positions, and this loss has one value a sample;"
                " expected the loss token_cross_entropy, with a target for each position",
                hint="take token_loss out of analyze.measures",
            )
        super().prepare(setting)

    def of_tokens(self, number: int, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor:
        ids = inputs[number]
        if target is None or target.shape != ids.shape:
            return torch.full(ids.shape, torch.nan, dtype=torch.float64, device=ids.device)
        objective = self._objective

        def losses(inputs: Inputs, target: torch.Tensor) -> torch.Tensor:
            output = objective.predict(objective.params, inputs)
            each = vmap(lambda o, y: objective.criterion(o.unsqueeze(0), y.unsqueeze(0)))
            return each(output, target)

        found: torch.Tensor = vmap(losses)(inputs, target)
        return self._moved(found.double(), ids, target)


@dataclass
class TokenShare(_TokenMeasure):
    """Each token's share of the squared norm of its sample's gradient.

    The gradient of a weight that is applied at every token is a sum over tokens, g = sum_t g_t, and the
    share of a token is <g_t, g> / |g|^2, summed over the weights. A negative share is of a token that
    is against the others. Parameters that are not applied token by token, biases and scales of norms
    have the rest, `token_share_rest`.
    """

    name: ClassVar[str] = "token_share"
    title: ClassVar[str] = "Token's share of the gradient"
    formula: ClassVar[str] = "<g_t, g> / |g|^2"
    unit: ClassVar[str] = "share, 1 for the whole squared norm"
    source: ClassVar[str] = "the sum over positions in the gradient of a linear layer"
    cost: ClassVar[str] = "a pass of its own; gradients are materialised for a few samples at a time"
    meanings: ClassVar[dict[str, str]] = {
        "token_share_max": "the largest share of a token in the squared gradient norm",
        "token_share_rest": "the share of the parameters that no single token has a part in",
    }

    def of_tokens(self, number: int, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor:
        lengths = [inputs[other].shape[1] for other in self._tokens]
        if lengths.count(inputs[number].shape[1]) > 1:  # whose positions they are is not known
            return torch.full(
                inputs[number].shape, torch.nan, dtype=torch.float64, device=inputs[number].device
            )
        gradients = per_sample_gradients(
            self._objective.loss,
            self._objective.params,
            inputs,
            target,
            in_dims=(0, None if target is None else 0),
            has_aux=True,
            settle=False,
        )
        return position_products(gradients, inputs[number].shape[1]) / gradients.square_norms().unsqueeze(1)

    def _columns(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        each = torch.cat([self.of_tokens(number, inputs, target) for number in self._tokens], 1)
        return {"token_share_max": each.amax(1), "token_share_rest": 1 - each.sum(1)}


def position_products(gradients: PerSampleGradients, positions: int) -> torch.Tensor:
    """[n, t] float64: the inner product of each position's contribution to a gradient with the whole
    gradient, summed over the parameters.

    If a weight is applied at `positions` positions of a sample, its gradient is a sum over them,
    g = sum over t of g_t. The inner products <g_t, g> of all positions sum to the squared norm |g|^2. The
    inner product is negative for a position that points against the others. Two kinds of parameters are left
    out, and their squared norm is missing from the sum: those with another number of positions (a head on one
    pooled vector), and those without factors (biases, scales of norms).

    Args:
        gradients: of n samples, from `per_sample_gradients(..., settle=False)`, which stores all factors.
        positions: t, the number of positions of a sample.

    A parameter's gradient is materialised for a few samples at a time.
    """
    products = torch.zeros(len(gradients), positions, dtype=torch.float64, device=gradients.losses.device)
    for gradient in gradients.gradients.values():
        if not any(placed.term.positions == positions for placed in gradient.terms):
            continue
        for block in blocks(len(gradients), 2 * math.prod(gradient.shape) * 8, gradient.device):
            some = gradient.at(block)
            whole = some.materialise().double()
            for placed in some.terms:
                if placed.term.positions == positions:
                    value = placed.layout.invert(whole, placed.term.shape, lead=1)
                    products[block] += placed.term.at(slice(None), torch.float64).position_products(value)
    return products
