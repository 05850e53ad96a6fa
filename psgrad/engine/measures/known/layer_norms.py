"""The norm of each sample's gradient, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.measures.finite import finite_rows, nan_elsewhere
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, Setting

OF_THE_MODEL = "(model)"
"""What parameters of the model itself are said to belong to."""


@dataclass
class LayerNorms(Measure):
    """A column for each layer, or for each parameter; an array [n, layers] float32 if the model has more of them.

    Options:
        per: module (the parameters of one layer together) or parameter.
        columns_up_to: the largest number of layers that get a column each.
    """

    per: Literal["module", "parameter"] = "module"
    columns_up_to: int = 32

    name: ClassVar[str] = "layer_norms"
    title: ClassVar[str] = "Norms by layer"
    formula: ClassVar[str] = "|g_i,m|_2, g_i,m the part of g_i in the parameters of layer m"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = "the definition; the squares over all layers add up to grad_norm squared"
    cost: ClassVar[str] = "nothing beyond the pass: the norms are computed anyway"
    meanings: ClassVar[dict[str, str]] = {
        "layer_norm.<layer>": "norm of the sample's gradient in the parameters of this layer ({loss} per unit of parameter)"
    }

    def __post_init__(self) -> None:
        if self.columns_up_to < 0:
            raise ValueError("columns_up_to is a number of layers, 0 or more")

    def prepare(self, setting: Setting) -> None:
        self._layers = layers_of(setting, self.per)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        finite = finite_rows(gradients)
        norms = {layer: nan_elsewhere(squares.sqrt(), finite) for layer, squares in gradients.square_norms(per=self.per).items()}
        if len(norms) <= self.columns_up_to:
            return {f"layer_norm.{layer or OF_THE_MODEL}": column for layer, column in norms.items()}
        return {"layer_norms": torch.stack(list(norms.values()), 1).float()}

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        arrays = {"layer_norms": rows["layer_norms"]} if "layer_norms" in rows else {}
        return Gathered(numbers={"layers": self._layers}, arrays=arrays)


def layers_of(setting: Setting, per: str) -> list[str]:
    """The names of the layers, or of the parameters, in the order of `square_norms`."""
    names = list(setting.examples.params)
    return names if per == "parameter" else list(dict.fromkeys(name.rpartition(".")[0] or OF_THE_MODEL for name in names))
