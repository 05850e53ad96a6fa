"""Measures of input attribution: input gradient, gradient x input, integrated gradients. Each
says which part of a sample's loss, or of one of its logits, belongs to which part of its input.

Their base has the pass, the columns, and the maps of the samples that are shown.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.loading import to_device
from psgrad.engine.measures.attribution_points import InputPlace, Inputs, Of, Point, Scalar, Values, places_of
from psgrad.engine.measures.measure import (
    Arrays,
    Gathered,
    Measure,
    OwnPass,
    Setting,
    require_classes,
    shown_rows,
)
from psgrad.engine.measures.passes import plain_objective, refusing, row_pass
from psgrad.errors import MeasureError
from psgrad.ragged import padded_and_joined

_AT_ONCE = 8


class Attribution(Measure):
    """A number for each part of each sample's input; a subclass says which, and is a dataclass with the
    option `of`.

    Attribution is in floating-point inputs as they are, and in what embeddings look up for inputs of ids; a
    weight that the head shares with an embedding adds nothing through the head. Inputs of whole numbers
    that no embedding takes are held fixed.

    Arrays of what is gathered, for m samples of the largest gradient norms, where inputs may be kept: `rows`
    [m]; for each input i `map_<i>` [m, *its shape], an embedding's entries put together into one number an
    id; for inputs of ids `ids_<i>` [m, *its shape]. Rows that differ in length are padded, ids with -1 and
    maps with 0.

    Class attributes:
        additive: whether the numbers are shares of a whole, which add up, or slopes, whose size is the root
        of the sum of squares. draws: whether a model that draws at random (dropout in training) may be used:
        what is compared along a path must be one function.
    """

    of: Of
    additive: ClassVar[bool] = True
    draws: ClassVar[bool] = False

    @abstractmethod
    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        """(for each place the numbers, shaped like its values; further columns, name -> [k])."""

    def prepare(self, setting: Setting) -> None:
        if self.of != "loss":
            require_classes(self, setting)
        self._setting = setting
        examples = setting.examples
        inputs, _ = examples.stream.load([0])
        try:
            places = places_of(examples.objective, inputs)
        except Exception:  # the model fails, and again in the first pass, whose error names the row
            places = []
        else:
            self._require(examples.objective.forward.of_model(inputs), places)
        randomness = examples.stream.randomness if self.draws else "error"
        self._scalar = Scalar(plain_objective(examples), places, self.of, randomness)
        self._several = len({place.input for place in places}) > 1

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass(self.name.replace("_", "-"), self._run)]

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        numbers: dict[str, Any] = {"of": self.of, "places": [place.name for place in self._scalar.places]}
        if padding := self._padding():
            numbers["padding_ids"] = padding
        shown = shown_rows(rows)
        if not self._setting.shows_inputs or not len(shown):
            return Gathered(numbers=numbers)
        ragged = self._setting.examples.stream.take([0]).ragged is not None
        found = [self._maps(part) for part in shown.split(1 if ragged else _AT_ONCE)]
        return Gathered(
            numbers=numbers,
            arrays={"rows": shown}
            | {
                name: padded_and_joined([each[name] for each in found], -1 if name.startswith("ids_") else 0)
                for name in found[0]
            },
        )

    def _padding(self) -> dict[str, int]:
        """input -> the id that its embedding takes for padding, where it has one."""
        model = self._setting.examples.objective.model
        looked_up = {
            place.input: model.get_submodule(place.module)
            for place in self._scalar.places
            if place.module is not None
        }
        return {
            str(each): module.padding_idx
            for each, module in looked_up.items()
            if isinstance(module.padding_idx, int)
        }

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        return refusing(
            self,
            row_pass(self._setting.examples, self._columns, chunk_size, rows),
            "derivatives in the input",
        )

    def _columns(self, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Arrays:
        point = Point.of(self._scalar, inputs, target, rows)
        values, columns = self.attributed(point)
        maps = self._of_inputs(values, inputs)
        whole = {self.name: self._size(list(maps.values()))}
        if self.additive:
            whole[f"{self.name}_l1"] = sum_of([part.abs() for part in maps.values()])
        if self._several:
            whole |= {f"{self.name}_{number}": self._size([part]) for number, part in maps.items()}
        bad = ~torch.isfinite(torch.stack(list((whole | columns).values()))).all(0)
        if point.classes is not None:
            bad |= point.classes == self._setting.ignore_index  # an ignored label has no output of its own
        return {name: column.masked_fill(bad, torch.nan) for name, column in (whole | columns).items()}

    def _maps(self, rows: torch.Tensor) -> Arrays:
        """The maps of these rows, on the CPU."""
        stream = self._setting.examples.stream
        batch = stream.take(rows.tolist())
        there = to_device(batch, stream.device, stream.dtype)
        inputs, target = there.inputs, there.target
        values, _ = self.attributed(Point.of(self._scalar, inputs, target, rows.to(stream.device)))
        arrays = {
            f"map_{number}": part.float().cpu() for number, part in self._of_inputs(values, inputs).items()
        }
        ids = {place.input for place in self._scalar.places if place.module is not None}
        return arrays | {f"ids_{number}": batch.inputs[number] for number in sorted(ids)}

    def _of_inputs(self, values: Values, inputs: Inputs) -> dict[int, torch.Tensor]:
        """input -> [k, *its shape] float64: the values of its places, combined."""
        maps: dict[int, torch.Tensor] = {}
        for place, each in zip(self._scalar.places, values, strict=True):
            part = each.double()
            if place.module is not None:
                part = part.sum(-1) if self.additive else torch.linalg.vector_norm(part, dim=-1)
            part = part.reshape(inputs[place.input].shape)
            before = maps.get(place.input)
            maps[place.input] = (
                part if before is None else before + part if self.additive else torch.hypot(before, part)
            )
        return maps

    def _size(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return sum_of(parts) if self.additive else sum_of([part.square() for part in parts]).sqrt()

    def _require(self, inputs: Inputs, places: list[InputPlace]) -> None:
        fixed = sorted(set(range(len(inputs))) - {place.input for place in places})
        if not places:
            raise MeasureError(
                f"the measure {self.name} found no input of this model to attribute to; expected an input"
                " of floats, or one of ids that an nn.Embedding looks up, all of them and as they are",
                hint=(
                    "the ids are shifted, clipped or cut before they are looked up, or looked up"
                    f" without an nn.Embedding; take {self.name} out of analyze.measures, or look the"
                    " ids up by an nn.Embedding"
                ),
            )
        if fixed:
            listed = ", ".join(map(str, fixed))
            self._setting.say(
                f"{self.name}: held fixed, as no embedding takes their whole numbers: input {listed} of the"
                " model"
            )


def sum_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[k]: all entries of each sample, added up; parts [k, ...] each."""
    return torch.stack([part.flatten(1).sum(1) if part.dim() > 1 else part for part in parts]).sum(0)


@dataclass
class InputGradient(Attribution):
    """The gradient in the input; for inputs of ids, in the embeddings that are looked up.

    A map shows the gradient with its sign; for ids, its norm over the entries of the embedding.

    Options:
        of: loss, or the output of the label's class (target), or of the predicted one (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "input_gradient"
    title: ClassVar[str] = "Input gradient"
    formula: ClassVar[str] = "|d l / d x|_2"
    unit: ClassVar[str] = "{loss} (or logit) per unit of input"
    source: ClassVar[str] = (
        "Simonyan, Vedaldi, Zisserman: Deep Inside Convolutional Networks: Visualising Image Classification"
        " Models and Saliency Maps (2013), section 3"
    )
    cost: ClassVar[str] = "a pass of its own, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "input_gradient": (
            "L2 norm of the gradient in the sample's inputs ({loss} or logit per unit of input)"
        ),
        "input_gradient_<i>": "the same of input i alone, if the model has several inputs",
    }
    additive: ClassVar[bool] = False
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return point.gradient(), {}


@dataclass
class GradientXInput(Attribution):
    """The gradient in the input times the input, entry by entry; for inputs of ids, of the embeddings that
    are looked up.

    Options:
        of: loss, or the output of the label's class (target), or of the predicted one (prediction).
    """

    of: Of = "loss"

    name: ClassVar[str] = "gradient_x_input"
    title: ClassVar[str] = "Gradient x input"
    formula: ClassVar[str] = "sum_i x_i d l / d x_i"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = (
        "Shrikumar et al.: Not Just a Black Box: Learning Important Features Through Propagating Activation"
        " Differences (2016), section 2.1"
    )
    cost: ClassVar[str] = "a pass of its own, without gradients of parameters"
    meanings: ClassVar[dict[str, str]] = {
        "gradient_x_input": (
            "rise of the loss (or logit) per relative growth of the whole input: the sum over its parts"
            " ({loss} or logit)"
        ),
        "gradient_x_input_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "gradient_x_input_<i>": "the sum over the parts of input i alone, if the model has several inputs",
    }
    draws: ClassVar[bool] = True

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        return tuple(x * g for x, g in zip(point.values, point.gradient(), strict=True)), {}


@dataclass
class IntegratedGradients(Attribution):
    """The mean gradient along the line from the baseline to the input, times their difference. The sum of
    all parts is the rise of the loss (or logit); the gap is the error of this sum. If it is large, use
    more steps: kinks (ReLU) and steep paths need them.

    Options:
        of: loss, or the output of the label's class (target), or of the predicted one (prediction).
        steps: points of the Gauss-Legendre rule along the line, at least 1.
        baseline: the value of every entry of an input at the start of the line, and of every entry of
            embeddings.
        baseline_token: for inputs of ids, the id whose embedding is the start of the line, in place of
            `baseline` (a padding token).
    """

    of: Of = "loss"
    steps: int = 32
    baseline: float = 0.0
    baseline_token: int | None = None

    name: ClassVar[str] = "integrated_gradients"
    title: ClassVar[str] = "Integrated gradients"
    formula: ClassVar[str] = "sum_i (x_i - b_i) integral_0^1 d l / d x_i at b + t (x - b) dt"
    unit: ClassVar[str] = "{loss} (or logit)"
    source: ClassVar[str] = (
        "Sundararajan, Taly, Yan: Axiomatic Attribution for Deep Networks (2017), section 3, equation 1"
    )
    cost: ClassVar[str] = (
        "a pass of its own; each step is a forward and backward pass, without gradients of parameters"
    )
    meanings: ClassVar[dict[str, str]] = {
        "integrated_gradients": (
            "the sum over the parts: the rise of the loss (or logit) from the baseline to the input ({loss}"
            " or logit)"
        ),
        "integrated_gradients_l1": "the sum over the parts of their absolute values ({loss} or logit)",
        "integrated_gradients_gap": "the sum minus the rise, 0 if the integral is exact ({loss} or logit)",
        "integrated_gradients_<i>": (
            "the sum over the parts of input i alone, if the model has several inputs"
        ),
    }

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"got {self.steps} steps, expected at least 1")

    def attributed(self, point: Point) -> tuple[Values, Arrays]:
        begin = self._baseline(point)
        nodes, weights = np.polynomial.legendre.leggauss(self.steps)
        mean: Values = tuple(torch.zeros_like(x, dtype=torch.float64) for x in point.values)
        for node, weight in zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True):
            here = tuple(torch.lerp(b, x, node) for b, x in zip(begin, point.values, strict=True))
            mean = tuple(total + weight * g for total, g in zip(mean, point.gradient(here), strict=True))
        result = tuple((x - b) * g for x, b, g in zip(point.values, begin, mean, strict=True))
        rise = point.at(point.values) - point.at(begin)
        return result, {"integrated_gradients_gap": sum_of(result) - rise}

    def _baseline(self, point: Point) -> Values:
        plain = tuple(torch.full_like(x, self.baseline) for x in point.values)
        if self.baseline_token is None:
            return plain
        places = point.scalar.places
        return tuple(
            b if place.module is None else token
            for place, b, token in zip(places, plain, point.with_token(self.baseline_token), strict=True)
        )
