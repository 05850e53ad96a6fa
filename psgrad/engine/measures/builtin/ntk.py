"""The empirical neural tangent kernel: inner products of the outputs' gradients, of some samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import JacobianRows
from psgrad.engine.execution.row_grams import gram_matrix
from psgrad.engine.measures.builtin.projected_gradients import chosen_rows
from psgrad.engine.measures.measure import Gathered, Measure, Setting
from psgrad.engine.transforms import vmap
from psgrad.errors import MeasureError, one_line

# Rows of the kernel, samples x outputs: its eigenvalues take a minute or so on two cores, and its copies 2
# GB.
LARGEST = 8192


@dataclass
class NTK(Measure):
    """The kernel of a linearised model: J_i the gradients of sample i's outputs (logits), a row for each
    of its C numbers.

    It is of some samples, equally many of each class, drawn with the run's seed. The trace kernel is
    the mean over outputs; the spectrum, the blocks by class and the alignment with the labels are of
    it, the condition numbers of both, and the table `outputs` has each output's own kernel. A condition
    number is empty if the kernel has not full rank.

    Options:
        samples: the largest number of samples.
        save: whether the kernel of all outputs is stored beside the trace kernel, as `kernel` [samples, C,
            samples, C].
    """

    samples: int = 256
    save: bool = False

    name: ClassVar[str] = "ntk"
    title: ClassVar[str] = "Empirical neural tangent kernel"
    formula: ClassVar[str] = (
        "K[ic, jd] = <dz_ic/dw, dz_jd/dw>; trace kernel: mean_c K[ic, jc]; alignment: <HKH, HYY'H>_F /"
        " (|HKH|_F |HYY'H|_F), Y the labels one-hot, H = 1 - 11'/n; condition number: largest by smallest"
        " eigenvalue"
    )
    unit: ClassVar[str] = "squared output per squared unit of parameter"
    source: ClassVar[str] = (
        "Jacot, Gabriel, Hongler: Neural Tangent Kernel (2018), section 4; alignment: Cortes, Mohri,"
        " Rostamizadeh (2012), definition 4"
    )
    cost: ClassVar[str] = (
        "C backward passes for each of `samples` samples, (samples x C)^2 inner products, and their"
        " eigenvalues"
    )

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"got {self.samples} samples, expected at least 1")

    def prepare(self, setting: Setting) -> None:
        self._setting, self._outputs = setting, _outputs_of(setting.examples)
        rows = min(self.samples, len(setting)) * self._outputs
        if rows > LARGEST:
            most = LARGEST // self._outputs
            raise MeasureError(
                f"ntk: {min(self.samples, len(setting)):,} samples of {self._outputs:,} outputs make a"
                f" kernel of {rows:,} rows; expected at most {LARGEST:,}",
                hint=one_line(
                    "an output for every position and word" if setting.kind == "token" else None,
                    f"set samples: {most} or less of ntk" if most else "leave ntk out of analyze.measures",
                ),
            )

    def gather(self, rows: Mapping[str, torch.Tensor]) -> Gathered:
        setting = self._setting
        labels = setting.targets if setting.targets is not None and setting.targets.dim() == 1 else None
        usable = rows["ok"] if labels is None else rows["ok"] & (labels != setting.ignore_index)
        chosen = chosen_rows(usable, self.samples, setting.seed, labels)
        n, outputs = len(chosen), self._outputs
        if not n:
            return Gathered(numbers={"samples": 0, "outputs": outputs})
        if n < int(usable.sum()):
            by_class = ", as many of each class as there are" if labels is not None else ""
            setting.say(f"ntk: of {n:,} of {int(rows['ok'].sum()):,} samples, drawn at random{by_class}")
        some = setting.examples.at(chosen)
        jacobians = JacobianRows(some.objective, some.rows, some.options, some.numbers, per_sample=outputs)
        whole = gram_matrix(jacobians).cpu()
        whole = (whole + whole.t()) / 2
        blocks = whole.reshape(n, outputs, n, outputs)
        trace_kernel = blocks.diagonal(dim1=1, dim2=3).mean(2)
        epsilon = torch.finfo(next(iter(some.params.values())).dtype).eps
        values, condition, rank = _spectrum(trace_kernel, epsilon)
        _, whole_condition, whole_rank = (
            _spectrum(whole, epsilon) if outputs > 1 else (values, condition, rank)
        )
        targets = _classes(setting, some)
        encoded = None if targets is None else F.one_hot(targets - targets.min()).double()
        total = float(values.sum())
        numbers: dict[str, Any] = {
            "samples": n,
            "outputs": outputs,
            "trace": float(whole.trace()),
            "largest_eigenvalue": float(values[0]),
            "condition_number": condition,
            "rank": rank,
            "condition_number_of_all_outputs": whole_condition,
            "rank_of_all_outputs": whole_rank,
            "alignment": None if encoded is None else _alignment(trace_kernel, encoded),
        }
        tables: dict[str, dict[str, Any]] = {
            "spectrum": {
                "rank": list(range(1, n + 1)),
                "eigenvalue": values,
                "share": values / total if total else values * torch.nan,
            },
            "outputs": _by_output(blocks, targets, epsilon),
        }
        if targets is not None:
            tables["classes"] = _by_class(trace_kernel, targets)
        arrays = {"trace_kernel": trace_kernel, "rows": chosen} | ({"kernel": blocks} if self.save else {})
        return Gathered(numbers=numbers, tables=tables, arrays=arrays)


def _outputs_of(examples: Examples) -> int:
    """C, numbers in the model's output for one sample. Raises MeasureError where it is not one tensor of real
    numbers.
    """
    inputs, _ = examples.stream.load([0])
    output = vmap(examples.objective.predict, in_dims=(None, 0), randomness=examples.stream.randomness)(
        examples.params, inputs
    )
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
        what = (
            f"a tensor of {output.dtype}"
            if isinstance(output, torch.Tensor)
            else f"a {type(output).__name__}"
        )
        raise MeasureError(
            f"ntk: the model's output is {what}, and the kernel is made of the output's gradients;"
            " expected a model that returns one tensor of real numbers",
            hint=(
                "let the model return the tensor that the loss reads alone; or leave ntk out of"
                " analyze.measures"
            ),
        )
    return int(output[0].numel())


def _classes(setting: Setting, some: Examples) -> torch.Tensor | None:
    """[n] int64: the classes of the chosen samples; None where they have none, one each."""
    if setting.kind not in ("class", "binary"):
        return None
    target = some.rows.take(range(some.count)).target
    if target is None or target[0].numel() != 1:
        return None
    target = target.reshape(-1)
    whole = target.long()
    return whole if bool((whole == target).all()) and bool((whole >= 0).all()) else None


def _spectrum(matrix: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, float | None, int]:
    """(eigenvalues, descending, the ratio of the largest and the smallest, how many are more than rounding);
    None as ratio if the smallest is not.
    """
    values = torch.linalg.eigvalsh(matrix).flip(0)
    rank = int((values > len(values) * epsilon * values[0].clamp_min(0)).sum())
    return values, float(values[0] / values[-1]) if rank == len(values) else None, rank


def _alignment(matrix: torch.Tensor, encoded: torch.Tensor) -> float | None:
    """Centred kernel alignment with labels [n, C]; None where either is constant."""
    centred = encoded - encoded.mean(0)
    each = matrix.mean(1, keepdim=True)
    matrix = matrix - each - each.t() + matrix.mean()
    labels = centred @ centred.t()
    size = float(torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(labels))
    return float((matrix * labels).sum()) / size if size else None


def _by_output(blocks: torch.Tensor, targets: torch.Tensor | None, epsilon: float) -> dict[str, Any]:
    """A row an output: statistics of its own kernel [n, n]."""
    result: dict[str, list[Any]] = {
        name: []
        for name in ("output", "trace", "largest_eigenvalue", "condition_number", "rank", "alignment")
    }
    for output in range(blocks.shape[1]):
        own = blocks[:, output, :, output]
        values, condition, rank = _spectrum(own, epsilon)
        alignment = None
        if targets is not None:
            # a single output is that of class 1
            belongs = targets == output if blocks.shape[1] > 1 else targets
            alignment = _alignment(own, belongs.double().unsqueeze(1))
        row = (output, float(own.trace()), float(values[0]), condition, rank, alignment)
        for name, value in zip(result, row, strict=True):
            result[name].append(value)
    return result


def _by_class(matrix: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """A row for each two classes: the mean of the trace kernel between their samples, and of its cosines."""
    sizes = matrix.diagonal().clamp_min(0).sqrt()
    cosines = matrix / (sizes.unsqueeze(1) * sizes)
    classes = torch.unique(targets).tolist()
    pairs = [(one, other) for one in classes for other in classes if one <= other]
    result: dict[str, list[Any]] = {
        "class": [],
        "other_class": [],
        "pairs": [],
        "mean": [],
        "mean_cosine": [],
    }
    for one, other in pairs:
        first, second = torch.nonzero(targets == one).squeeze(1), torch.nonzero(targets == other).squeeze(1)
        apart = first.unsqueeze(1) != second  # the diagonal is the same in every class
        kernels, angles = (each[first][:, second][apart] for each in (matrix, cosines))
        for name, value in zip(
            result, (one, other, int(apart.sum()), float(kernels.mean()), float(angles.mean())), strict=True
        ):
            result[name].append(value)
    return result
