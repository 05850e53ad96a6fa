"""Sums of gradients over all samples, computed once for all measures of a run: the mean gradient, that of
each class, and bootstrap resamples of sums.

The mean is the mean of the classes' sums, so both cost one pass over the gradients of a chunk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.flat import Flat, Vectors
from psgrad.engine.gradients.terms import accumulating, accumulating_dtype
from psgrad.engine.measures.measure import Arrays, Measure, Setting, finite_rows, require_classes
from psgrad.errors import MeasureError

# Numbers of a parameter for which all classes are computed at once, each sample's with those of its class
# beside it.
_FEW = 1024


def is_value(gradient: DeferredGradient, small: bool = False) -> bool:
    """Whether a gradient is materialised; with `small`, it must also have few numbers."""
    whole = len(gradient.terms) == 1 and gradient.terms[0].term.stored_value is not None
    return whole and not (small and gradient.shape.numel() > _FEW)


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


def products_of_values(
    gradient: DeferredGradient, classes: torch.Tensor, vectors: torch.Tensor
) -> torch.Tensor:
    """[n]: the inner products of a small materialised gradient with the vectors [groups, numel] of the
    samples' classes [n].
    """
    value = accumulating(_value(gradient))
    return (value * vectors.to(value.dtype)[classes]).sum(1)


def _value(gradient: DeferredGradient) -> torch.Tensor:
    """[n, numel]"""
    (placed,) = gradient.terms
    value = placed.layout.apply(placed.term.materialise(), lead=1)
    return value.reshape(len(value), gradient.shape.numel())


_TARGET = "class_of_sample"


def shared_sums(setting: Setting, measure: Measure, by_class: bool = False) -> GradientSums:
    """The sums of a run, which its measures share; made at the first use.

    by_class: whether the mean gradient of each class is needed. Raises MeasureError if there are no classes,
        or not enough memory.
    """
    sums: GradientSums = setting.shared.setdefault("gradient_sums", GradientSums(setting, measure))
    if by_class:
        require_classes(measure, setting)
        sums.by_class(measure, setting)
    return sums


class MeanGradientMeasure(Measure):
    """A measure of the mean gradient, or that of each class: it passes every chunk to the sums that all such
    measures of a run share, `self._sums`.

    Class attributes:
        by_class: whether it uses the mean gradient of each class.
    """

    needs_factors = True
    by_class: ClassVar[bool] = False

    def prepare(self, setting: Setting) -> None:
        self._sums = shared_sums(setting, self, self.by_class)

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        self._sums.add(gradients)
        return {}

    def keep(self) -> None:
        self._sums.keep()

    def state(self) -> Arrays:
        return self._sums.state(self)

    def restore(self, state: Arrays) -> None:
        self._sums.restore(self, state)

    def merge(self, state: Arrays) -> None:
        self._sums.merge(self, state)


class GradientSums:
    """Sums in float64 over the samples with finite numbers, and inner products with their means.

    Several measures hold one object, and each passes on its calls (a chunk, the end of a chunk, a state);
    only the first call for a chunk counts. The state belongs to the measure that made the object.

    Attributes:
        groups: how many sums there are: C and one for samples of no class, or 1 if no measure needs
            classes.
        counts: [groups] int64, samples with finite numbers.
        squares: [parameters] float64, the sums of their squared norms.
    """

    def __init__(self, setting: Setting, owner: Measure) -> None:
        examples = setting.examples
        self.flat: Flat = examples.flat
        self.device = examples.device
        self.params = examples.params
        self.owner, self.groups = owner, 1
        self._sums: torch.Tensor | None = None  # [groups, p]
        self.counts = torch.zeros(1, dtype=torch.int64)
        self.squares = torch.zeros(len(self.flat.shapes), dtype=torch.float64)
        # the last gradients; memory may be short, so they are not held
        self._chunk: weakref.ref[PerSampleGradients] | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._means: tuple[torch.Tensor, list[Vectors]] | None = None  # [p], and each group's
        self._dots: dict[str, torch.Tensor] = {}

    def by_class(self, measure: Measure, setting: Setting) -> None:
        """Sum each class separately. Raises MeasureError if that takes more than half of the memory."""
        assert setting.classes is not None
        if self.groups > 1:
            return
        needed, free = 2 * setting.classes * self.flat.size * 8, free_memory(self.device)
        if needed > free // 2:
            raise MeasureError(
                f"the measure {measure.name} keeps a mean gradient for each of {setting.classes} classes:"
                f" {needed / 2**30:.1f} GiB for {self.flat.size:,} parameters, and {free / 2**30:.1f} GiB"
                " are free; expected half of the free memory at most",
                hint=(
                    f"take {measure.name} out of analyze.measures, or freeze parameters that need not be"
                    " looked at"
                ),
            )
        self.groups = setting.classes + 1
        self.counts = torch.zeros(self.groups, dtype=torch.int64)

    def summary(self, target: Any) -> Arrays:
        """The kept part of one sample: its target [], so that its class is known with its chunk."""
        return {_TARGET: target} if self.groups > 1 else {}

    # -- the first pass --------------------------------------------------------------------------------------

    def add(self, gradients: PerSampleGradients) -> None:
        """Add a chunk. It counts from `keep` on."""
        if not self._is_new(gradients):
            return
        total = torch.zeros(self.groups, self.flat.size, dtype=torch.float64, device=self.device)
        counts = torch.zeros(self.groups, dtype=torch.int64)
        values = [
            name for name, gradient in gradients.gradients.items() if self.groups > 1 and is_value(gradient)
        ]
        sorted_gradients, order, groups = self._sorted(gradients, values)
        if values:
            classes, whole = self.classes_of(gradients), len(order) == len(gradients)
            for name in values:
                gradient = gradients.gradients[name] if whole else gradients.gradients[name].at(order)
                total[:, self.flat.columns[name]] = sums_of_values(
                    gradient, classes if whole else classes[order], self.groups
                ).double()
        for group, samples in groups:
            counts[group] = samples.stop - samples.start
            for name, gradient in sorted_gradients.items():
                ones = torch.ones(samples.stop - samples.start, dtype=gradient.dtype, device=self.device)
                total[group, self.flat.columns[name]] = (
                    gradient.at(samples).weighted_sum(ones).reshape(-1).double()
                )
        finite = finite_rows(gradients)
        squares = torch.stack(
            [each[finite].sum() for each in gradients.square_norms(per="parameter").values()]
        )
        self._pending = total, counts, squares

    def keep(self) -> None:
        """The chunk of `add` is done."""
        if self._pending is not None:
            sums, counts, squares = self._pending
            self._sums = sums if self._sums is None else self._sums.add_(sums)
            self.counts = self.counts + counts
            self.squares = self.squares + squares.cpu()
        self._drop()

    def state(self, measure: Measure) -> Arrays:
        """`sums` [groups, p], `counts` [groups], `squares` [parameters], for the measure that made this
        object; nothing for others.
        """
        if measure is not self.owner or self._sums is None:
            return {}
        return {"sums": self._sums.cpu(), "counts": self.counts, "squares": self.squares}

    def restore(self, measure: Measure, state: Arrays) -> None:
        """Continue from a result of `state`."""
        if measure is self.owner and "sums" in state:
            self._sums = state["sums"].clone().to(self.device)
            self.counts, self.squares = state["counts"].clone(), state["squares"].clone()
            self._means = None

    def merge(self, measure: Measure, state: Arrays) -> None:
        """Add a result of another process's `state`."""
        if measure is self.owner and "sums" in state:
            sums = state["sums"].to(self.device)
            self._sums = sums.clone() if self._sums is None else self._sums + sums
            self.counts, self.squares = self.counts + state["counts"], self.squares + state["squares"]
            self._means = None

    # -- means over all samples ------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Samples with finite numbers."""
        return int(self.counts.sum())

    @property
    def mean(self) -> torch.Tensor:
        """[p] float64, in the order of `flat`: the mean gradient; NaN where there is no sample."""
        return self._made()[0]

    @property
    def square_means(self) -> torch.Tensor:
        """[parameters] float64, on the CPU: the squared norm of the mean gradient in each parameter."""
        return torch.stack(
            [self.mean[columns].square().sum() for columns in self.flat.columns.values()]
        ).cpu()

    def square_mean(self) -> float:
        """The squared norm of the mean gradient."""
        return float(self.mean.square().sum())

    def class_norms(self) -> torch.Tensor:
        """[groups] float64: the norm of each class's mean gradient; NaN for a class without samples."""
        assert self._sums is not None
        return torch.linalg.vector_norm(self._sums, dim=1).cpu() / self.counts.where(
            self.counts > 0, torch.nan
        )

    def dot(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[n] float64: the inner product of each sample's gradient with the mean gradient."""
        return self._once(gradients, "mean", lambda: gradients.dot(self._vectors(self.mean)).double())

    def class_dot(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[n] float64: the inner product of each sample's gradient with the mean gradient of its class; NaN
        if it is not finite, or of no class.
        """
        return self._once(gradients, "class", lambda: self._class_dot(gradients))

    def square_distances(self, gradients: PerSampleGradients, rows: torch.Tensor) -> torch.Tensor:
        """[k] float64: the squared distances of the gradients of these rows [k] from the mean gradient,
        computed in float64.
        """
        total = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        mean = {name: part[0] for name, part in self.flat.split(self.mean.unsqueeze(0)).items()}
        for name, gradient in gradients.gradients.items():
            wide = DeferredGradient(
                tuple(Placed(each.term.at(rows, torch.float64), each.layout) for each in gradient.terms),
                gradient.shape,
                torch.float64,
                gradient.device,
            )
            part = PerSampleGradients({name: wide}, total)
            total += part.square_norms() - 2 * part.dot({name: mean[name]}) + mean[name].square().sum()
        return total

    def classes_of(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[n] int64: the samples' classes; C for a target that is not a class (the ignored one)."""
        targets: torch.Tensor = gradients.aux[_TARGET].long()
        return targets.where((targets >= 0) & (targets < self.groups - 1), self.groups - 1)

    def _class_dot(self, gradients: PerSampleGradients) -> torch.Tensor:
        small = [name for name, gradient in gradients.gradients.items() if is_value(gradient, small=True)]
        sorted_gradients, order, groups = self._sorted(gradients, small)
        products = torch.full((len(gradients),), torch.nan, dtype=torch.float64, device=self.device)
        for group, samples in groups:
            if group == self.groups - 1:
                continue
            some = {name: gradient.at(samples) for name, gradient in sorted_gradients.items()}
            part = PerSampleGradients(some, gradients.losses[: samples.stop - samples.start])
            vectors = self._made()[1][group]
            products[order[samples]] = part.dot({name: vectors[name] for name in some}).double()
        for name in small:
            vectors_of_all = torch.stack([vectors[name].flatten() for vectors in self._made()[1]])
            products += products_of_values(
                gradients.gradients[name], self.classes_of(gradients), vectors_of_all
            )
        return products

    def _made(self) -> tuple[torch.Tensor, list[Vectors]]:
        if self._means is None:
            sums = self._sums
            if sums is None:
                sums = torch.zeros(self.groups, self.flat.size, dtype=torch.float64, device=self.device)
            mean = sums.sum(0) / (self.count or torch.nan)
            each = (
                [
                    self._vectors(one / max(int(count), 1))
                    for one, count in zip(sums, self.counts, strict=True)
                ]
                if self.groups > 1
                else []
            )
            self._means = mean, each
        return self._means

    def _vectors(self, flat: torch.Tensor) -> Vectors:
        return {
            name: part[0].to(accumulating_dtype(self.params[name].dtype))
            for name, part in self.flat.split(flat.unsqueeze(0)).items()
        }

    def _once(
        self, gradients: PerSampleGradients, what: str, query: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        self._is_new(gradients)
        if what not in self._dots:
            self._dots[what] = query()
        return self._dots[what]

    def _is_new(self, gradients: PerSampleGradients) -> bool:
        """Whether this is another chunk than the last one, whose cached values are dropped then."""
        if self._chunk is not None and self._chunk() is gradients:
            return False
        self._drop()
        self._chunk = weakref.ref(gradients)
        return True

    def _drop(self) -> None:
        self._chunk, self._pending, self._dots = None, None, {}

    def _sorted(
        self, gradients: PerSampleGradients, without: Sequence[str]
    ) -> tuple[dict[str, DeferredGradient], torch.Tensor, list[tuple[int, slice]]]:
        """(name -> gradient with its samples in the order of their classes, that order [k], each class there
        with its samples); without samples that are not finite, and without the parameters `without`.
        """
        finite = finite_rows(gradients)
        if self.groups == 1:
            order = torch.nonzero(finite).squeeze(1)
            groups = [(0, slice(0, len(order)))] if len(order) else []
            if len(order) == len(gradients):
                return gradients.gradients, order, groups
        else:
            classes = self.classes_of(gradients)
            order = classes.where(finite, self.groups).argsort(stable=True)[: int(finite.sum())]
            groups = list(_runs(classes[order].cpu()))
        return (
            {name: each.at(order) for name, each in gradients.gradients.items() if name not in without},
            order,
            groups,
        )


def _runs(classes: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each class of sorted ones [k], with its places."""
    values, counts = torch.unique_consecutive(classes, return_counts=True)
    start = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        yield value, slice(start, start + count)
        start += count
