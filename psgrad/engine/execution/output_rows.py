"""The Gauss-Newton matrix of a training set as a sum over rows: sum_i J_i' L_i J_i = sum_r j_r j_r'.

J_i [C, p] is the Jacobian of sample i's output, L_i [C, C] the second derivatives of its loss in that output.
With L_i = S_i S_i' (output_derivatives.py) the rows are those of S_i' J_i. Each is a gradient: that of the
product of the output with one column of S_i. So they come as deferred gradients, as those of the losses do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch

from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.loading import numbered
from psgrad.engine.execution.memory import chunk_budget
from psgrad.engine.execution.output_derivatives import OutputDerivatives
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.errors import InfluenceError

Kind = TypeVar("Kind", bound="OutputRows")
# The largest output whose exact rows are computed: they take a backward pass for each of its numbers.
LARGEST_OUTPUT = 128
_COMPARED = 64  # rows whose outputs are compared in size


@dataclass(frozen=True)
class OutputRows(Examples):
    """Examples whose gradients are `per_sample` rows for each sample, next to one another: row i * per_sample
    + r is sample i's r-th.

    `len` counts rows, `count` samples. Passes go over rows in place of samples, but for `outputs`. settle: as
    for per_sample_gradients.
    """

    per_sample: int = 1
    settle: bool = True

    def __len__(self) -> int:
        return self.count * self.per_sample

    @abstractmethod
    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """[k, R, C]: what the output [k, *shape] is multiplied with, for the samples of numbers
        `rows` [k]. weights: [k], of their losses; None for ones.
        """

    @cached_property
    def row_stream(self) -> Stream:
        """A stream of the samples, in chunks whose rows fit in memory. The last input of each sample is its
        number.
        """
        options = dict(self.options)
        device = next(iter(self.params.values())).device
        size = options.get("chunk_size", "auto")
        if options.get("tokens") is not None:
            options["tokens"] = max(1, options["tokens"] // self.per_sample)
        if size == "auto":
            options["memory"] = max(1, chunk_budget(device, options.get("memory")) // self.per_sample)
        else:
            options["chunk_size"] = max(1, size // self.per_sample)
        return Stream(self.objective.loss_of_numbered, self.params, numbered(self.rows), **options)

    def gradients(self, samples: Sequence[int]) -> PerSampleGradients:
        stream = self.row_stream
        return stream.found(self._rows_of, stream.load_block(samples))  # type: ignore[no-any-return]

    def _pass(self, compute: Callable[..., Any] | None) -> tuple[Stream, Callable[..., Any] | None, int]:
        return (
            super()._pass(compute)
            if compute is not None
            else (self.row_stream, self._rows_of, self.per_sample)
        )

    @replayable("rows")
    def _rows_of(
        self,
        loss: Any,
        params: Vectors,
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor | None,
        **options: Any,
    ) -> PerSampleGradients:
        *given, numbers = inputs
        randomness = options["randomness"]
        outputs = vmap(self.objective.predict, in_dims=(None, 0), randomness=randomness)(params, tuple(given))
        _assert_one_tensor(outputs)
        cotangents = self.cotangents(outputs, target, numbers, self.objective.weights(given))
        if tuple(cotangents.shape[1:]) != (self.per_sample, outputs[0].numel()):
            raise _differing()
        cotangents = cotangents.reshape(-1, *outputs.shape[1:]).to(outputs.dtype)
        repeated = tuple(x.repeat_interleave(self.per_sample, 0) for x in given)

        def along(params: Vectors, inputs: tuple[torch.Tensor, ...], cotangent: torch.Tensor) -> Any:
            return (self.objective.predict(params, inputs) * cotangent).sum(), {}

        how: dict[str, Any] = {
            "in_dims": (0, 0),
            "has_aux": True,
            "randomness": randomness,
            "settle": self.settle,
        }
        return per_sample_gradients(along, params, repeated, cotangents, **how)


@dataclass(frozen=True)
class GaussNewtonRows(OutputRows):
    """All rows of S_i' J_i: their sum of j_r j_r' is the Gauss-Newton matrix of the sum of the losses."""

    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        derivatives = OutputDerivatives.of(self.objective.criterion, outputs, target, weights)
        return derivatives.root(self.numbers_of(rows))[0].transpose(1, 2)


@dataclass(frozen=True)
class JacobianRows(OutputRows):
    """The rows of J_i: the gradients of the output's numbers, one by one."""

    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch.eye(self.per_sample, dtype=outputs.dtype, device=outputs.device).expand(
            len(outputs), -1, -1
        )


@dataclass(frozen=True)
class TraceRows(OutputRows):
    """Pairs of rows of each sample: square norms of the first ones less those of the second ones estimate
    tr(J_i' L_i J_i) without bias.

    With random signs w and a = L_i w a pair is (a / s + s w) / 2 and (a / s - s w) / 2, times J_i, with s^2 =
    |a| / |w|: the difference is a' J_i J_i' w, whose mean over signs is the trace of L_i J_i J_i'. A sample's
    signs depend on its number and `seed` alone, not on what is computed beside it.
    """

    seed: int = 0

    def cotangents(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor | None,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        signs = _random_signs(self.numbers_of(rows), self.per_sample // 2, outputs[0].numel(), self.seed)

        def curved(output: torch.Tensor, signs: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
            slope = grad(lambda output: self.objective.criterion(output, target))

            def along(sign: torch.Tensor) -> torch.Tensor:
                product = jvp(slope, (output,), (sign.reshape(output.shape).to(output.dtype),))[1]
                return product.reshape(-1).double()  # type: ignore[no-any-return]

            return vmap(along)(signs)  # type: ignore[no-any-return]

        found = vmap(curved, in_dims=(0, 0, None if target is None else 0))(outputs, signs, target)
        if weights is not None:
            found = found * weights.double().reshape(-1, 1, 1)
        of_curved, of_signs = (torch.linalg.vector_norm(each, dim=2, keepdim=True) for each in (found, signs))
        scale = (of_curved / of_signs).sqrt()
        found, signs = found / torch.where(scale > 0, scale, 1.0), signs * scale
        return torch.cat([(found + signs) / 2, (found - signs) / 2], 1)


def _random_signs(rows: torch.Tensor, probes: int, count: int, seed: int) -> torch.Tensor:
    """[k, probes, count] float64 of -1 and 1, by arithmetic on the numbers of the rows [k]: the same on every
    device, and in every chunk.
    """
    places = torch.arange(count, device=rows.device)
    numbers = _mixed(rows.unsqueeze(1) * probes + torch.arange(probes, device=rows.device))
    numbers = _mixed(numbers + _mixed(torch.full_like(rows[:1], seed)))
    return 1.0 - 2.0 * ((_mixed(numbers.unsqueeze(2) + places) >> 33) & 1).double()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The generator SplitMix64 at these int64 numbers."""
    numbers = numbers * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)


# Pairs of rows behind an estimated trace, of all samples together, at least; and of each sample, which tell
# the error by how much they differ.
_PAIRS, _PAIRS_EACH = 512, 2


def gauss_newton_trace(training: Examples, seed: int = 0) -> tuple[float, float]:
    """The trace of the Gauss-Newton matrix of the sum of the losses, and its standard error, by one pass, for
    outputs of any size. Raises InfluenceError where the output is not a tensor.
    """
    pairs = max(_PAIRS_EACH, -(-_PAIRS // len(training)))
    rows = rows_like(TraceRows, training, per_sample=2 * pairs, settle=False, seed=seed)
    norms = torch.cat([norms["square_norm"] for _, norms in rows.norms()]).reshape(-1, 2, pairs)
    each = norms[:, 0] - norms[:, 1]  # [n, pairs]
    return float(each.mean(1).sum()), float((each.var(1) / pairs).sum().sqrt())


def gauss_newton_rows(training: Examples) -> GaussNewtonRows:
    """Rows j_r with sum_r j_r j_r' = the Gauss-Newton matrix of the sum of the losses of `training`.

    Raises InfluenceError where the output is not a tensor, or has more than LARGEST_OUTPUT numbers; and, as a
    pass goes on, where the loss is not convex in the output.
    """
    return _of(GaussNewtonRows, training, output_size(training))


def jacobian_rows(training: Examples) -> JacobianRows:
    """The Jacobian of each sample's output, row by row."""
    return _of(JacobianRows, training, output_size(training))


def outputs_alike(training: Examples) -> bool:
    """Whether the outputs of rows that differ in length have one size, by the shortest and the longest of the
    first rows.
    """
    block = training.stream.take(range(min(_COMPARED, len(training))))
    lengths = getattr(block, "lengths", None)
    if lengths is None:
        return True
    total = lengths.sum(1)
    return output_size(training, int(total.argmin())) == output_size(training, int(total.argmax()))


def output_size(training: Examples, row: int = 0) -> int:
    """How many numbers the output for one row has. Raises InfluenceError where it is not one tensor."""
    inputs, _ = training.stream.load([row])
    output = vmap(training.objective.predict, in_dims=(None, 0), randomness=training.stream.randomness)(
        training.params, inputs
    )
    _assert_one_tensor(output)
    return int(output[0].numel())


def output_factors(training: Examples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(S [n, C, C], c [n, C], r [n, C]) float64 on the CPU: the root of each output's curvature, the
    coefficients that S c = r is solved by as far as it can be, and the gradient r of each loss in its output.
    """
    parts = []
    for rows, found in training.outputs():
        inputs, target = training.stream.load(range(rows.start, rows.stop))
        derivatives = OutputDerivatives.of(
            training.objective.criterion,
            found["output"].to(training.device),
            target,
            training.objective.weights(inputs),
        )
        root, coefficients = derivatives.root(
            training.numbers_of(torch.arange(rows.start, rows.stop, device=training.device))
        )
        parts.append((root.cpu(), coefficients.cpu(), derivatives.gradient.cpu()))
    root, coefficients, gradient = (torch.cat(column) for column in zip(*parts, strict=True))
    return root, coefficients, gradient


def _of(kind: Any, training: Examples, size: int) -> Any:
    if size > LARGEST_OUTPUT:
        raise InfluenceError(
            f"the model's output has {size} numbers for one sample, and the Gauss-Newton matrix as many"
            f" rows; expected at most {LARGEST_OUTPUT}, for a solver that has to have them one by one",
            hint=(
                "set solver: conjugate_gradient, which needs none; or curvature: fisher, which has one row a"
                " sample"
            ),
        )
    if not outputs_alike(training):
        raise _differing()
    return rows_like(kind, training, per_sample=size)


def rows_like(kind: type[Kind], examples: Examples, **own: Any) -> Kind:
    """Rows of these examples. own: what the kind has of its own."""
    return kind(**{each.name: getattr(examples, each.name) for each in fields(Examples)}, **own)


def _differing() -> InfluenceError:
    return InfluenceError(
        "the model's output has more numbers for long samples than for short ones, and its Jacobian as"
        " many rows; expected outputs of one size, whatever the length of a row",
        hint=(
            "set solver: conjugate_gradient, which needs none; or curvature: fisher, which has one row"
            " a sample"
        ),
    )


def _assert_one_tensor(output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise InfluenceError(
            f"the model's output is a {type(output).__name__}, and the Gauss-Newton curvature is made of"
            " the output's Jacobian; expected a model that returns one tensor",
            hint=(
                "let the model return the tensor that the loss reads alone; or set curvature: fisher (of"
                " ekfac, fisher: empirical)"
            ),
        )
