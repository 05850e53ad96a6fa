"""How steeply each sample's loss, or a logit, rises along its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psgrad.engine.measures.attribution import Attribution, Point
from psgrad.engine.measures.attribution.points import Of, Values
from psgrad.engine.measures.measure import Arrays


@dataclass
class InputGradient(Attribution):
    """The gradient in the input; for inputs of ids, in the embeddings that are looked up.

    A map shows the gradient with its sign; for ids, its norm over the entries of the embedding.

    Options:
        of: what is differentiated: loss, or the output for the class of the label (target) or of the model's own prediction (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "input_gradient"
    title: ClassVar[str] = "Input gradient"
    formula: ClassVar[str] = "|d l / d x|_2"
    unit: ClassVar[str] = "{loss} (or logit) per unit of input"
    source: ClassVar[str] = (
        "Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks: Visualising Image Classification Models and Saliency Maps "
        "(2013), section 3"
    )
    cost: ClassVar[str] = "a pass of its own, forward and backward, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "input_gradient": "L2 norm of the gradient in the sample's inputs ({loss} or logit per unit of input)",
        "input_gradient_<i>": "the same of input i alone, if the model has several inputs",
    }
    additive: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return point.gradient(), {}
