"""Loss, gradient norm and prediction of all samples at all checkpoints, and statistics of them: how far
checkpoints agree on the order of the samples, and the slope of a number over the checkpoints.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.objective import Objective, Summary
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.measure import Arrays, CheckpointModel, Measure, Setting
from psgrad.errors import MeasureError

_PREFIX = "moments"


def column(name: str, checkpoint: int) -> str:
    """The column of the pass at a checkpoint, counted from 0."""
    return f"{_PREFIX}.{name}.{checkpoint}"


@dataclass(frozen=True)
class History:
    """names: of the T checkpoints, in the order of training. values: name -> [n, T]: `loss` and `grad_norm`
    always; `confidence`, `right`, `el2n` and `prediction` where the loss has them (see checkpoint_summary).
    """

    names: Sequence[str]
    values: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, names: Sequence[str], rows: Mapping[str, torch.Tensor]) -> History:
        """From the columns [n, 1] of the passes at all checkpoints."""
        found = {key.split(".")[1] for key in rows if key.startswith(f"{_PREFIX}.")}
        return cls(
            names,
            {
                name: torch.cat([rows[column(name, t)] for t in range(len(names))], 1)
                for name in sorted(found)
            },
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        """[n, T] float64."""
        return self.values[name].double()

    def __contains__(self, name: str) -> bool:
        return name in self.values

    @property
    def finite(self) -> torch.Tensor:
        """[n, T] bool: where loss and gradient norm are finite."""
        return torch.isfinite(self.values["loss"]) & torch.isfinite(self.values["grad_norm"])

    def whole(self, name: str) -> torch.Tensor:
        """[n, T] float64: NaN throughout for a sample that is not finite at each checkpoint, because a mean
        over fewer would not be comparable.
        """
        values = self[name]
        return values.where((self.finite & torch.isfinite(values)).all(1, keepdim=True), torch.nan)

    def nonfinite(self) -> dict[str, int]:
        """checkpoint -> how many samples are not finite there, of those where some are."""
        counts = (~self.finite).sum(0).tolist()
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}


# Below it, the ranks have less than a quarter of their variance in common.
_HARDLY = 0.5


def rank_correlation(values: torch.Tensor) -> list[list[float]]:
    """[T][T]: Spearman's rank correlation between the columns of [n, T], over the rows without NaN; NaN where
    it has none.

    How far two checkpoints agree on which samples stand out.
    """
    from scipy.stats import rankdata

    finite = values[torch.isfinite(values).all(1)].numpy()
    if len(finite) < 2:
        return np.full((values.shape[1],) * 2, np.nan).tolist()  # type: ignore[no-any-return]
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # equal values at a checkpoint have no ranking: NaN
        correlations: list[list[float]] = np.corrcoef(
            np.stack([rankdata(each) for each in finite.T])
        ).tolist()
    return correlations


def disagreement(correlation: list[list[float]], names: Sequence[str], what: str) -> str | None:
    """A sentence where two checkpoints hardly agree on the order of the samples; None where all do."""
    pairs = [
        (correlation[i][j], names[i], names[j])
        for i in range(len(names))
        for j in range(i)
        if not np.isnan(correlation[i][j])
    ]
    if not pairs or min(pairs)[0] >= _HARDLY:
        return None
    least, later, earlier = min(pairs)
    return (
        f"{what}: the checkpoints {earlier} and {later} rank the samples differently (Spearman's rank"
        f" correlation {least:.2f}); a mean over both is dominated by whichever has the larger numbers"
    )


def slope(values: torch.Tensor) -> torch.Tensor:
    """[n]: the least-squares slope of [n, T] over 0, ..., T - 1."""
    steps = torch.arange(values.shape[1], dtype=values.dtype)
    steps = steps - steps.mean()
    return (values - values.mean(1, keepdim=True)) @ steps / steps.square().sum()


def checkpoint_summary(kind: str, ignore_index: int = -100) -> Summary:
    """The summary for a kind of loss; what the loss does not have is left out.

    confidence: the probability of the label, 0 to 1. right: 1 where the most likely class is the label, else
    0. el2n: the distance
    |softmax(z) - onehot(y)| of the probabilities. All three are means over the positions where a sample has
    several, those that do not count left out; NaN where none counts, or the output is not finite. prediction:
    the most likely class, the probability (binary) or the value, for outputs of one number or one vector of
    classes.
    """

    def summary(output: Any, target: Any) -> Arrays:
        if not isinstance(output, torch.Tensor):
            return {}
        output = accumulating(output.detach())
        if (
            kind == "class"
            and output.dim()
            and isinstance(target, torch.Tensor)
            and output.shape[1:] == target.shape
        ):
            return _of_classes(output.movedim(0, -1), target, ignore_index)
        if kind == "token" and isinstance(target, torch.Tensor) and output.shape[:-1] == target.shape:
            return _of_classes(output, target, ignore_index)
        if kind == "binary" and output.numel() == 1 and isinstance(target, torch.Tensor):
            return _of_one_probability(output.reshape(()), target.reshape(()))
        return {"prediction": output.reshape(())} if kind == "value" and output.numel() == 1 else {}

    return summary


def _of_classes(output: torch.Tensor, target: torch.Tensor, ignore_index: int) -> Arrays:
    """output: [*positions, c] logits or log-probabilities. target: [*positions], whole numbers."""
    if target.is_floating_point():
        return {}
    probabilities = torch.softmax(output, -1)
    counted = target != ignore_index
    label = torch.where(counted, target, 0).long()
    kind = probabilities.dtype
    of_label = probabilities.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    finite = torch.isfinite(probabilities).all(-1)
    right = torch.where(finite, (probabilities.argmax(-1) == label).to(kind), math.nan)
    # Not F.one_hot, which reads the values: a pass with it could be neither captured nor planned.
    onehot = torch.arange(output.shape[-1], device=output.device) == label.unsqueeze(-1)
    distance = torch.linalg.vector_norm(probabilities - onehot.to(kind), dim=-1)
    result = {
        name: _mean(x, counted)
        for name, x in (("confidence", of_label), ("right", right), ("el2n", distance))
    }
    if not target.dim():
        result["prediction"] = torch.where(finite, probabilities.argmax(-1).to(kind), math.nan)
    return result


def _mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """(): of values [*positions], over those that count; NaN where none does."""
    return torch.where(counted, values, 0).sum() / counted.sum()


def _of_one_probability(output: torch.Tensor, target: torch.Tensor) -> Arrays:
    probability, target = torch.sigmoid(output), target.to(output.dtype)
    right = torch.where(torch.isfinite(output), ((output > 0) == (target > 0.5)).to(output.dtype), math.nan)
    return {
        "confidence": probability * target + (1 - probability) * (1 - target),
        "right": right,
        "prediction": probability,
    }


class Resident:
    """The checkpoints' objectives; loaded once if all of them fit the memory budget of a chunk, else at each
    use.

    Attributes:
        stay: whether they stay in memory.
    """

    def __init__(self, checkpoints: Sequence[CheckpointModel], examples: Examples) -> None:
        self._checkpoints = checkpoints
        model = examples.objective.model
        size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
        self.stay = size * len(checkpoints) <= chunk_budget(examples.device, examples.options.get("memory"))
        self._loaded: dict[int, Objective] = {}

    def at(self, t: int) -> Objective:
        """The model and loss at checkpoint t, counted from 0."""
        if t not in self._loaded:
            if not self.stay:
                self._loaded.clear()
            self._loaded[t] = self._checkpoints[t].objective()
        return self._loaded[t]


def require_checkpoints(measure: Measure, setting: Setting, least: int, why: str) -> None:
    """Raises MeasureError where there are fewer than `least` checkpoints; `why` says what is wrong with
    fewer.
    """
    count = len(setting.checkpoints)
    if count < least:
        raise MeasureError(
            f"the measure {measure.name} takes at least {least} checkpoints ({why}), and analyze.checkpoints"
            f" lists {count or 'none'}",
            hint=f"list files of a training run in analyze.checkpoints; or take {measure.name} out of"
            " analyze.measures",
        )


def require_labels(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError where a prediction can't be right or wrong: the loss has no labels."""
    if setting.kind in ("class", "token", "binary"):
        targets = setting.targets
        if targets is None:  # they come with the rows, and the first one shows their kind
            targets = setting.examples.stream.take([0]).target
        if setting.kind == "binary" or targets is None or not targets.is_floating_point():
            return
    words = {"value": "a value to come near to", "custom": "a form of its own"}
    raise MeasureError(
        f"the measure {measure.name} asks whether a prediction is right, and this loss has"
        f" {words.get(setting.kind, 'soft labels')}, and no labels",
        hint=f"take {measure.name} out of analyze.measures; trajectory follows any loss",
    )
