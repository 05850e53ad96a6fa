"""The interface of a measure: it queries deferred gradients of samples, and returns columns, one number for
each sample, and what it gathered over all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import PerSampleGradients, SquareNorms
from psgrad.errors import MeasureError

Arrays = dict[str, torch.Tensor]


@dataclass(frozen=True)
class CheckpointModel:
    """One checkpoint of a training run: its name, and the model and loss there, which are loaded on use."""

    name: str
    objective: Callable[[], Objective]


@dataclass(frozen=True)
class Setting:
    """The samples, the model, and the facts about them that are known before the first pass.

    Attributes:
        examples: n samples as the model sees them, with the training loss.
        kind: of the loss: 'class' (one of C classes a sample), 'token' (a class a position), 'binary',
            'value', 'custom'.
        targets: [n] int64, the classes of the samples if they are available; None if they come with the rows
            only, or are not classes.
        classes: C; None if the loss has none.
        ignore_index: the target of positions that do not count.
        checkpoints: those of `analyze.checkpoints`, in the order of training; empty if there are none.
        seed: of all random draws of a measure.
        shows_inputs: whether inputs of samples, and pictures over them, may be kept
            (`report.include_inputs`).
        say: called with messages, one sentence each.
        shared: objects that measures of one run share (a mean gradient), by a name of their own.
    """

    examples: Examples
    kind: str = "custom"
    targets: torch.Tensor | None = None
    classes: int | None = None
    ignore_index: int = -100
    checkpoints: Sequence[CheckpointModel] = ()
    seed: int = 0
    shows_inputs: bool = True
    say: Callable[[str], None] = lambda _: None
    shared: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def checkpoint_names(self) -> list[str]:
        """The names of the T checkpoints."""
        return [checkpoint.name for checkpoint in self.checkpoints]


@dataclass(frozen=True)
class Gathered:
    """The results of a measure after all samples have passed.

    Attributes:
        columns: name -> [n]: further columns of the table of samples.
        numbers: of the whole dataset, by name: plain numbers, texts, lists and dicts of them; NaN and None
            are written as null. They go into measures.json under the measure's name.
        tables: name -> column -> values: measures/<name>.parquet.
        arrays: name -> tensor: measures/<name>.safetensors, one file a measure.
    """

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnPass:
    """A pass of one measure over the samples.

    Attributes:
        name: of the pass, unlike those of all others; lower-case letters, digits and dashes.
        run: (rows, chunk_size) -> the columns of these rows, a `range`, chunk by chunk, in order. chunk_size
            is how many rows the first pass took at a time; a pass that needs more memory a row takes fewer
            (`Examples.sized`). It is called for one range after another, by several processes, and again by a
            resumed run: its columns of a row may not depend on other rows.
    """

    name: str
    run: Callable[[range, int], Iterator[Columns]]


class Measure:
    """One measure. A subclass is a dataclass whose fields are its options; a file each in
    `psgrad/engine/measures/builtin`.

    The samples pass once for all measures together, chunk by chunk in the order of the dataset, and `columns`
    of each is called. For those with `needs_second_pass`, `columns_again` is called in a second pass, when
    the sums over all samples are known; nothing is gathered there. A column is [n], one number a sample, and
    becomes a column of samples.parquet; or [n, ...], which is kept for `gather` (and for measures that `need`
    this one) and dropped. A sample whose numbers are not finite gets NaN, and adds nothing to what is
    gathered.

    A chunk may be tried more than once (memory may run out): what is gathered counts from `keep` on, and
    `state` has all of it, as tensors, so that a killed run can be resumed.

    Class attributes, from which the documentation is made (docs/reference/measures.md):
        name: as in the config. title: for headings. formula, unit, source (paper, page), cost: a line each,
        formula in plain text. meanings: column -> its description, with its unit. In these and in `unit`,
        {loss} stands for the unit of the loss that is used. needs: names of measures whose columns this
        one's `gather` reads. needs_factors: whether it uses more than norms, losses and aux of a chunk.
        needs_second_pass: whether it takes part in the second pass. is_shown: whether results and pages have
        it; False for one that only serves the measures that need it.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    source: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    meanings: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    needs_factors: bool = False
    needs_second_pass: bool = False
    is_shown: ClassVar[bool] = True

    def prepare(self, setting: Setting) -> None:
        """Called first. Raises MeasureError if the measure is not defined here (a measure of classes, and the
        loss has none).
        """

    def summary(self, output: Any, target: Any) -> Arrays:
        """The part of one sample's output that is kept: name -> small tensor [...] of one shape for all
        samples, differentiable or not; it arrives in `gradients.aux`. The names are this measure's own: begin
        them with its name.
        """
        return {}

    def columns(self, gradients: PerSampleGradients) -> Arrays:
        """The columns of one chunk: name -> [k] or [k, ...]."""
        return {}

    def keep(self) -> None:
        """The last chunk of `columns` is done."""

    def between(self) -> None:
        """Called between the first and the second pass, and also when a run is resumed inside the second
        pass.
        """

    def columns_again(self, gradients: PerSampleGradients) -> Arrays:
        """The columns of one chunk in the second pass: name -> [k] or [k, ...]."""
        return {}

    def passes(self) -> Sequence[OwnPass]:
        """Passes of its own, after those for all."""
        return ()

    def state(self) -> Arrays:
        """All that was gathered, name -> tensor of any shape on the CPU."""
        return {}

    def restore(self, state: Arrays) -> None:
        """Continue from a result of `state`."""

    def merge(self, state: Arrays) -> None:
        """Add what another process gathered of other samples: a result of its `state`. Needed where several
        processes share the samples. Raises MeasureError if a measure that gathers does not define it.
        """
        if state:
            raise self.without_merge()

    def without_merge(self) -> MeasureError:
        """The error for a measure that gathers and defines no `merge`, where several processes share the
        samples.
        """
        return MeasureError(
            f"the measure {self.name} gathers over all samples, and has no method merge; expected"
            " merge(state), which adds what another process gathered, a result of `state`",
            hint="add the method, or run the measure in one process",
        )

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        """The results, after all passes; rows: every column of every measure, name -> [n, ...], those of this
        measure and those it needs among them; `loss` [n] and `grad_norm` [n] are always there, and `ok` [n]
        bool, which samples are finite.
        """
        return Gathered()


SHOWN = 24
"""The number of samples whose maps over their inputs are kept."""


def shown_rows(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[m] int64: the finite samples of the largest gradient norms, largest first; rows as for `gather`."""
    norms = torch.where(rows["ok"], rows["grad_norm"], -1.0)
    return norms.argsort(descending=True, stable=True)[: min(SHOWN, int(rows["ok"].sum()))]


def require_classes(measure: Measure, setting: Setting) -> None:
    """Raises MeasureError unless each sample has one class."""
    if setting.kind != "class" or setting.classes is None:
        raise MeasureError(
            f"the measure {measure.name} looks at the class of each sample, and this loss has"
            f" {_what(setting)}; expected a loss over classes (cross_entropy, nll) whose output is one"
            " vector of classes a sample",
            hint=f"take {measure.name} out of analyze.measures",
        )
    if setting.targets is None and not _is_whole(setting.examples.rows.take([0]).target):
        raise MeasureError(
            f"the measure {measure.name} looks at the class of each sample, and the targets are"
            " probabilities of classes; expected targets that are whole numbers, one class a sample",
            hint=f"take {measure.name} out of analyze.measures, or give the likeliest class as the target",
        )


def _is_whole(target: torch.Tensor | None) -> bool:
    return target is not None and target.dim() == 1 and not target.is_floating_point()


def _what(setting: Setting) -> str:
    return {
        "token": "a class for each position",
        "binary": "one probability",
        "value": "a value",
        "class": "outputs with positions",
    }.get(setting.kind, "a form of its own")


def finite_rows(gradients: PerSampleGradients | SquareNorms) -> torch.Tensor:
    """[n] bool: the samples whose loss and gradient are finite."""
    return torch.isfinite(gradients.square_norms()) & torch.isfinite(gradients.losses)


def nan_elsewhere(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n] float64: the values of these rows [n] bool, NaN in the others."""
    return values.double().where(rows, torch.nan)
