"""VoG: how much a sample's input gradient changes from checkpoint to checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.measures.attribution_points import Inputs, Point, Scalar, places_of
from psgrad.engine.measures.checkpoint_history import Resident, require_checkpoints
from psgrad.engine.measures.measure import Arrays, Gathered, Measure, OwnPass, Setting, require_classes
from psgrad.engine.measures.passes import refusing, row_pass
from psgrad.errors import MeasureError


@dataclass
class VoG(Measure):
    """Variance of gradients over the checkpoints of one training run.

    The gradient is that in the inputs of floats, and, for inputs of ids, in the embeddings that are looked
    up. Inputs of integers that no embedding uses are held fixed.

    Options:
        of: the output that is differentiated: of the label's class (target), or of the class that each
            checkpoint predicts (prediction).
    """

    of: Literal["target", "prediction"] = "target"

    name: ClassVar[str] = "vog"
    title: ClassVar[str] = "Variance of gradients"
    formula: ClassVar[str] = (
        "mean_j sqrt(mean_t (S_tj - mean_t S_tj)^2), S_t = d z_y / d x at checkpoint t, z_y the output of the"
        " class before the softmax, j the entries of the input; vog_z = (vog - mean) / std within the class"
        " of the label"
    )
    unit: ClassVar[str] = "logit per unit of input"
    source: ClassVar[str] = (
        "Agarwal, D'souza, Hooker: Estimating Example Difficulty using Variance of Gradients (CVPR 2022),"
        " section 2"
    )
    cost: ClassVar[str] = (
        "one pass for each checkpoint, forward and backward to the input, without gradients of parameters"
    )
    meanings: ClassVar[dict[str, str]] = {
        "vog": (
            "standard deviation of the input gradient over the checkpoints, mean over the input's entries"
            " (logit per unit of input)"
        ),
        "vog_z": (
            "the same in standard deviations from the mean of its class (n in the denominator); NaN in a"
            " class without spread"
        ),
    }

    def prepare(self, setting: Setting) -> None:
        require_classes(self, setting)
        require_checkpoints(self, setting, 3, "two gradients have a difference, and no spread to speak of")
        self._setting = setting
        examples = setting.examples
        inputs, _ = examples.stream.load([0])
        try:
            self._places = places_of(examples.objective, inputs)
        except Exception:  # the model fails, and again in the first pass, whose error names the row
            self._places = []
            return
        if not self._places:
            raise MeasureError(
                f"the measure {self.name} found no input of this model to differentiate in; expected an"
                " input of floats, or one of ids that an nn.Embedding looks up, all of them and as they"
                " are",
                hint=f"take {self.name} out of analyze.measures",
            )

    def passes(self) -> Sequence[OwnPass]:
        return [OwnPass("vog", self._run)]

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        spread, label = rows["vog.spread_and_label"].unbind(1)
        names = self._setting.checkpoint_names
        numbers = {"checkpoints": names, "of": self.of, "places": [place.name for place in self._places]}
        return Gathered({"vog": spread, "vog_z": standardised(spread, label.long())}, numbers)

    def _run(self, rows: range, chunk_size: int) -> Iterator[Columns]:
        examples = self._setting.examples
        models = Resident(self._setting.checkpoints, examples)
        columns = row_pass(examples, partial(self._columns, models), chunk_size, rows)
        return refusing(self, columns, "derivatives in the input")

    def _columns(
        self, models: Resident, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor
    ) -> Arrays:
        assert target is not None, "a loss over classes without targets"
        steps = (
            self._gradient(models, t, inputs, target, rows) for t in range(len(self._setting.checkpoints))
        )
        spread = deviation(steps).mean(1)
        counted = target != self._setting.ignore_index  # an ignored label has no output of its own
        return {"vog.spread_and_label": torch.stack([spread.where(counted, torch.nan), target.double()], 1)}

    def _gradient(
        self, models: Resident, t: int, inputs: Inputs, target: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """[k, entries] float64: the gradient of the class's output in all inputs, at one checkpoint."""
        stream = self._setting.examples.stream
        point = Point.of(Scalar(models.at(t), self._places, self.of, stream.randomness), inputs, target, rows)
        return torch.cat([part.reshape(len(rows), -1).double() for part in point.gradient()], 1)


def deviation(steps: Iterator[torch.Tensor]) -> torch.Tensor:
    """[k, d]: the standard deviation, entry by entry, of a sequence of tensors [k, d] (Welford's recurrence;
    divided by the count).
    """
    mean = next(steps)
    squares, count = torch.zeros_like(mean), 1
    for step in steps:
        count += 1
        change = step - mean
        mean = mean + change / count
        squares = squares + change * (step - mean)
    return (squares / count).sqrt()


# A smaller spread, relative to the values, is rounding.
_ALIKE = 1e-12


def standardised(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[n]: how many standard deviations [n] values lie from the mean of their group [n], computed without
    those that are not finite.
    """
    result = torch.full_like(values, torch.nan)
    for group in groups.unique().tolist():
        some = (groups == group) & torch.isfinite(values)
        own = values[some]
        spread = own.std(correction=0) if len(own) else own.new_zeros(())
        if spread > _ALIKE * own.abs().sum():
            result[some] = (own - own.mean()) / spread
    return result
