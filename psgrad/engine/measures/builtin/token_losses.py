"""The loss of each single token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.measures.attribution_points import places_of
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting, shown_rows
from psgrad.engine.measures.passes import Inputs, plain_objective, refusing, row_pass
from psgrad.engine.transforms import vmap
from psgrad.errors import MeasureError

_IDS = ("input_ids", "decoder_input_ids")
"""The keywords by which models of the transformers library take their tokens."""


@dataclass
class TokenLoss(Measure):
    """The loss of each token by itself, before it is averaged over a sample; of a language model that of
    predicting the token.

    Tokens are an input of whole numbers that an embedding looks up. Arrays, for samples of the largest
    gradient norms, where inputs may be kept: for the input i `ids_<i>`, -1 behind a sample's last token,
    `map_<i>` with 0 there, and `counted_<i>`, whether a position has a target that counts.
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
                "the measure token_loss needs a loss of positions, such as token_cross_entropy, and this loss"
                " has one value a sample",
                hint="take token_loss out of analyze.measures",
            )
        self._setting = setting
        self._objective = plain_objective(setting.examples)
        self._tokens: list[int] = []
        inputs, _ = setting.examples.stream.load([0])
        try:
            places = {place.input for place in places_of(self._objective, inputs) if place.module is not None}
        except Exception:  # the model fails, and again in the first pass, whose error names the row
            return
        names = self._objective.forward.names
        self._tokens = [number for number in sorted(places) if not names or names[number] in _IDS]
        self._tokens = self._tokens if names else self._tokens[:1]
        if not self._tokens:
            raise MeasureError(
                f"the measure {self.name} found no tokens among the inputs of this model: ids that an"
                " nn.Embedding looks up",
                hint=f"take {self.name} out of analyze.measures",
            )

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("token-loss", self._run)]

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
        columns = row_pass(self._setting.examples, self._columns, chunk_size, rows)
        return refusing(self, columns, "the loss of each position")

    def _columns(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        each = torch.cat([self._of_tokens(inputs[number], inputs, target) for number in self._tokens], 1)
        return {"token_loss_max": each.amax(1)}

    def _maps(self, row: int) -> Arrays:
        """The maps of one row, on the CPU."""
        inputs, target = self._setting.examples.stream.load([row])
        arrays: Arrays = {}
        for number in self._tokens:
            ids = inputs[number]
            counted = torch.ones_like(ids, dtype=torch.bool)
            if target is not None and target.shape == ids.shape:
                counted = self._moved(target != self._setting.ignore_index, ids, target)
            arrays[f"ids_{number}"] = ids[0].cpu()
            arrays[f"map_{number}"] = self._of_tokens(ids, inputs, target)[0].float().cpu()
            arrays[f"counted_{number}"] = counted[0].cpu()
        return arrays

    def _of_tokens(self, ids: torch.Tensor, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor:
        """[k, t] float64 for the tokens `ids` [k, t] of an input; NaN for samples that have none."""
        if target is None or target.shape != ids.shape:
            return torch.full(ids.shape, torch.nan, dtype=torch.float64, device=ids.device)
        objective = self._objective

        def losses(inputs: Inputs, target: torch.Tensor) -> torch.Tensor:
            output = objective.predict(objective.params, inputs)
            each = vmap(lambda o, y: objective.criterion(o.unsqueeze(0), y.unsqueeze(0)))
            return each(output, target)

        found: torch.Tensor = vmap(losses)(inputs, target)
        return self._moved(found.double(), ids, target)

    def _moved(self, values: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Values [k, t] of targets as values of the tokens that these are: the next token's where each target
        is the next token, as in language models.
        """
        counted = target[:, :-1] != self._setting.ignore_index
        is_next = ((target[:, :-1] == ids[:, 1:]) | ~counted).all(1) & counted.any(1)
        later = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)
        return torch.where(is_next.unsqueeze(1), later, values)
