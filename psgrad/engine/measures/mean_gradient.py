"""The mean gradient of all samples, and that of each class: one measure sums the gradients, for all measures
of a run that compare a sample with a mean.

The mean is the mean of the classes' sums, so both cost one pass over the gradients of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.gradients.terms import Dense, accumulating, accumulating_dtype
from psgrad.engine.measures.measure import Arrays, Measure, Setting, finite_rows, require_classes
from psgrad.errors import MeasureError

# Columns of the second pass, [k, 1] or [k, 2], for the measures that ask for them.
DOT, CLASS_DOT = "mean_gradient.dot", "mean_gradient.class_dot"
_TARGET = "mean_gradient.target"
# Numbers of a parameter up to which the sums of all classes are one matrix product.
_FEW = 1024


@dataclass
class MeanGradient(Measure):
    """The sum of the gradients in float64 over the samples with finite numbers, for the measures that need
    it; not stored afterwards.

    Attributes:
        groups: how many sums there are: C and one for samples of no class, or 1 if no measure needs
            classes.
        counts: [groups] int64, samples with finite numbers.
        squares: [parameters] float64, the sums of their squared norms.
    """

    name: ClassVar[str] = "mean_gradient"
    title: ClassVar[str] = "Mean gradient"
    formula: ClassVar[str] = "gbar = (1/n) sum_j g_j, and the same over the samples of each class"
    unit: ClassVar[str] = "{loss} per unit of parameter"
    source: ClassVar[str] = "none: cosine_to_mean, noise_scale and others use it"
    cost: ClassVar[str] = "a sum, a tenth of the pass; with inner products a second pass over the gradients"
    needs_factors = True
    is_shown: ClassVar[bool] = False

    def prepare(self, setting: Setting) -> None:
        examples = setting.examples
        self.flat, self.device, self.params = examples.flat, examples.device, examples.params
        self.groups = 1
        self.counts = torch.zeros(1, dtype=torch.int64)
        self.squares = torch.zeros(len(self.flat.shapes), dtype=torch.float64)
        self._sums: torch.Tensor | None = None  # [groups, p]
        self._pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._class_means: list[Vectors] = []
        self._asked: set[str] = set()
        self.needs_second_pass = False
        setting.shared[self.name] = self

    def ask(self, measure: Measure, setting: Setting, columns: Sequence[str]) -> None:
        """Called by each measure that needs this one, when it is prepared, with the columns of the second
        pass that it reads. Raises MeasureError if there are no classes, or not enough memory.
        """
        self._asked.update(columns)
        self.needs_second_pass = bool(self._asked)
        if CLASS_DOT not in columns:
            return
        require_classes(measure, setting)
        assert setting.classes is not None
        needed, free = 2 * setting.classes * self.flat.size * 8, free_memory(self.device)
        if needed > free // 2:
            raise MeasureError(
                f"the measure {measure.name} keeps a mean gradient for each of {setting.classes} classes:"
                f" {needed / 2**30:.1f} GiB for {self.flat.size:,} parameters, and {free / 2**30:.1f} GiB"
                " are free",
                hint=f"take {measure.name} out of analyze.measures, or freeze parameters",
            )
        self.groups = setting.classes + 1
        self.counts = torch.zeros(self.groups, dtype=torch.int64)

    def summary(self, output: Any, target: Any) -> Arrays:
        return {_TARGET: target} if self.groups > 1 else {}

    # -- the first pass --------------------------------------------------------------------------------------

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        total = torch.zeros(self.groups, self.flat.size, dtype=torch.float64, device=self.device)
        counts = torch.zeros(self.groups, dtype=torch.int64)
        values = [
            name
            for name in gradients.shapes
            if self.groups > 1 and all(is_value(part.gradients[name]) for part in gradients.parts)
        ]
        sorted_gradients, order, groups = self._sorted(gradients, values)
        if values:
            classes, stored = self._classes_of(gradients), gradients.select(values)
            if len(order) < len(gradients):
                classes, stored = classes[order], stored.at(order)
            for part in stored.parts:
                for name, gradient in part.gradients.items():
                    sums = sums_of_values(gradient, classes[part.places], self.groups)
                    total[:, self.flat.columns[name]] += sums.double()
        for group, samples in groups:
            counts[group] = samples.stop - samples.start
            some = sorted_gradients.at(samples)
            for name, summed in some.weighted_sum(torch.ones_like(some.losses)).items():
                total[group, self.flat.columns[name]] = summed.reshape(-1).double()
        finite = finite_rows(gradients)
        squares = torch.stack(
            [each[finite].sum() for each in gradients.square_norms(per="parameter").values()]
        )
        self._pending = total, counts, squares
        return {}

    def keep(self) -> None:
        if self._pending is not None:
            sums, counts, squares = self._pending
            self._sums = sums if self._sums is None else self._sums.add_(sums)
            self.counts = self.counts + counts
            self.squares = self.squares + squares.cpu()
        self._pending = None

    def state(self) -> Arrays:
        if self._sums is None:
            return {}
        return {"sums": self._sums.cpu(), "counts": self.counts, "squares": self.squares}

    def restore(self, state: Arrays) -> None:
        self._sums = state["sums"].clone().to(self.device)
        self.counts, self.squares = state["counts"].clone(), state["squares"].clone()

    def merge(self, state: Arrays) -> None:
        sums = state["sums"].to(self.device)
        self._sums = sums.clone() if self._sums is None else self._sums + sums
        self.counts, self.squares = self.counts + state["counts"], self.squares + state["squares"]

    # -- means over all samples ------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Samples with finite numbers."""
        return int(self.counts.sum())

    @property
    def mean(self) -> torch.Tensor:
        """[p] float64, in the order of `flat`: the mean gradient; NaN where there is no sample."""
        if self._sums is None:
            return torch.full((self.flat.size,), torch.nan, dtype=torch.float64, device=self.device)
        return self._sums.sum(0) / (self.count or torch.nan)

    def square_mean(self) -> float:
        """The squared norm of the mean gradient."""
        return float(self.mean.square().sum())

    def class_norms(self) -> torch.Tensor:
        """[groups] float64: the norm of each class's mean gradient; NaN for a class without samples."""
        assert self._sums is not None
        counts = self.counts.where(self.counts > 0, torch.nan)
        return torch.linalg.vector_norm(self._sums, dim=1).cpu() / counts

    # -- the second pass -------------------------------------------------------------------------------------

    def between(self) -> None:
        mean = self.mean
        self._mean = self._vectors(mean)
        if self.groups > 1:
            assert self._sums is not None
            self._class_means = [
                self._vectors(one / max(int(count), 1))
                for one, count in zip(self._sums, self.counts, strict=True)
            ]
            self._class_norms = self.class_norms().to(self.device)

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        found: Arrays = {}
        if DOT in self._asked:
            found[DOT] = gradients.dot(self._mean).double().unsqueeze(1)
        if CLASS_DOT in self._asked:
            norms = self._class_norms[self._classes_of(gradients)]
            found[CLASS_DOT] = torch.stack([self._class_dots(gradients), norms], 1)
        return found

    def _class_dots(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[k] float64: the inner product of each sample's gradient with the mean gradient of its class; NaN
        if it is not finite, or of no class.
        """
        sorted_gradients, order, groups = self._sorted(gradients, ())
        products = torch.full((len(gradients),), torch.nan, dtype=torch.float64, device=self.device)
        for group, samples in groups:
            if group == self.groups - 1:
                continue
            products[order[samples]] = sorted_gradients.at(samples).dot(self._class_means[group]).double()
        return products

    def _classes_of(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[k] int64: the samples' classes; C for a target that is not a class (the ignored one)."""
        targets: torch.Tensor = gradients.aux[_TARGET].long()
        return targets.where((targets >= 0) & (targets < self.groups - 1), self.groups - 1)

    def _vectors(self, flat: torch.Tensor) -> Vectors:
        """The same in the type that the parameters' products are computed in."""
        split = self.flat.split(flat.unsqueeze(0)).items()
        return {name: part[0].to(accumulating_dtype(self.params[name].dtype)) for name, part in split}

    def _sorted(
        self, gradients: PerSampleGradients, without: Sequence[str]
    ) -> tuple[PerSampleGradients, torch.Tensor, list[tuple[int, slice]]]:
        """(the gradients in the order of the samples' classes, that order [k], each class there with its
        samples); without samples that are not finite, and without the parameters `without`.
        """
        finite = finite_rows(gradients)
        some = gradients.select([name for name in gradients.shapes if name not in without])
        if self.groups == 1:
            order = torch.nonzero(finite).squeeze(1)
            groups = [(0, slice(0, len(order)))] if len(order) else []
            if len(order) == len(gradients):
                return some, order, groups
        else:
            classes = self._classes_of(gradients)
            order = classes.where(finite, self.groups).argsort(stable=True)[: int(finite.sum())]
            groups = list(_runs(classes[order].cpu()))
        return some.at(order), order, groups


class OfMeanGradient(Measure):
    """A measure of the mean gradient, or that of each class, which `self._sums` has.

    Class attributes:
        asks: the columns of the mean gradient's second pass that its `gather` reads.
    """

    needs: ClassVar[tuple[str, ...]] = (MeanGradient.name,)
    asks: tuple[str, ...] = ()

    def prepare(self, setting: Setting) -> None:
        self._sums: MeanGradient = setting.shared[MeanGradient.name]
        self._sums.ask(self, setting, self.asks)

    def cosines(
        self, rows: Mapping[str, torch.Tensor], dots: torch.Tensor, norms: torch.Tensor
    ) -> torch.Tensor:
        """[n]: inner products [n] over the gradients' norms and `norms`; NaN where either is zero, or a
        sample is not finite.
        """
        lengths = rows["grad_norm"] * norms
        return (dots / lengths).clamp(-1, 1).where(rows["ok"] & (lengths > 0), torch.nan)


def is_value(gradient: DeferredGradient) -> bool:
    """Whether a gradient is materialised."""
    return len(gradient.terms) == 1 and isinstance(gradient.terms[0].term, Dense)


def sums_of_values(gradient: DeferredGradient, classes: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, numel]: the class sums of a materialised gradient of samples that are finite, with their
    classes [n] below `groups`.
    """
    value = accumulating(_value(gradient))
    # row by row; on a GPU the order of additions would be random
    if value.shape[1] > _FEW and value.device.type == "cpu":
        return torch.zeros(groups, value.shape[1], dtype=value.dtype).index_add_(0, classes, value)
    one_hot = classes.unsqueeze(0) == torch.arange(groups, device=classes.device).unsqueeze(1)
    return one_hot.to(value.dtype) @ value


def _value(gradient: DeferredGradient) -> torch.Tensor:
    """[n, numel]"""
    (placed,) = gradient.terms
    value = placed.layout.apply(placed.term.materialise(), lead=1)
    return value.reshape(len(value), gradient.shape.numel())


def _runs(classes: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each class of sorted ones [k], with its places."""
    values, counts = torch.unique_consecutive(classes, return_counts=True)
    start = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        yield value, slice(start, start + count)
        start += count
