"""What each part of a sample's input adds to its loss, or to a logit, to first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psgrad.engine.measures.attribution import Attribution, Point
from psgrad.engine.measures.attribution.points import Of, Values
from psgrad.engine.measures.measure import Arrays


@dataclass
class GradientXInput(Attribution):
    """The gradient in the input times the input, entry by entry; for inputs of ids, of the embeddings that are looked up.

    Options:
        of: what is attributed: loss, or the output for the class of the label (target) or of the model's own prediction (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "gradient_x_input"
    title: ClassVar[str] = "Gradient x input"
    formula: ClassVar[str] = "sum_i x_i d l / d x_i"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = (
        "Shrikumar et al.: Not Just a Black Box: Learning Important Features Through Propagating Activation Differences (2016), section 2.1"
    )
    cost: ClassVar[str] = "a pass of its own, forward and backward, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "gradient_x_input": "rise of the loss (or logit) per relative growth of the whole input: the sum over its parts ({loss} or logit)",
        "gradient_x_input_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "gradient_x_input_<i>": "the sum over the parts of input i alone, if the model has several inputs",
    }
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return tuple(x * g for x, g in zip(point.values, point.gradient(), strict=True)), {}
