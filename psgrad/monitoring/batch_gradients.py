"""The per-row gradients of one batch of a training loop, measured without a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad import random_state
from psgrad.engine.execution.chunk_replay import ChunkReplay
from psgrad.engine.execution.chunker import in_pieces
from psgrad.engine.execution.objective import require_number
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms.functional import swapped, tied_slots
from psgrad.engine.transforms.private_torch import tree_flatten, tree_unflatten
from psgrad.errors import DataError, ModelError

ComputeLoss = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch) to the loss of the batch; it is called with batches of one row."""
Tensors = dict[str, torch.Tensor]
Found = dict[str, np.ndarray]
# Chunks that are still to come, as far as the price of a program is concerned: a training is long.
_TO_COME = 1000


@dataclass(frozen=True)
class SourceSums:
    """What the gradient noise of one source is estimated from: rows whose gradients are finite, the sum of
    their squared norms, and the squared norm of their sum.
    """

    rows: int
    sum_of_squares: float
    square_of_sum: float


@dataclass(frozen=True)
class RowsMeasured:
    """What was measured of the k rows of a batch; NaN where a row's loss or gradient is not finite.

    Attributes:
        losses, norms: [k] float64, of each row's own loss, and of its gradient.
        cosines: [k] float64, of each row's gradient with the sum over the rows of the batch.
        squares: module -> sum over the rows of the squared norms of its parameters' gradients.
        sums: for the noise, of chunks of the batch that were computed at once. None stands for all rows.
    """

    losses: np.ndarray
    norms: np.ndarray
    cosines: np.ndarray
    squares: dict[str, float]
    sums: list[dict[str | None, SourceSums]]


class BatchGradients:
    """Measures batches of a model that is being trained.

    The model runs in evaluation mode, without dropout, on copies of its buffers. Weights, buffers, modes,
    gradients and random generators stay as they are. Batches of one shape are replayed as a program.

    Args:
        model: the gradients are those of its parameters that require one.
        compute_loss: of a batch of one row.
        autocast: the type of mixed precision that the loop trains in; None for none.
    """

    def __init__(
        self, model: nn.Module, compute_loss: ComputeLoss, autocast: torch.dtype | None = None
    ) -> None:
        self.model, self.compute_loss, self.autocast = model, compute_loss, autocast
        self._replays: dict[str, ChunkReplay] = {}

    def measure(self, batch: Any, sources: Sequence[str] | None = None) -> RowsMeasured:
        """Of the rows of a batch: a tensor, or a tuple, list or mapping of tensors with the axis of rows in
        front. sources: of each row.

        Raises LossError, ModelError and DataError where the batch or the loss can't be taken row by row.
        """
        leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors or any(not x.dim() or len(x) != len(tensors[0]) for x in tensors):
            shapes = ", ".join(str(list(x.shape)) for x in tensors)
            raise DataError(
                f"the batch has tensors of shapes {shapes or 'of none'}; expected the axis of rows in front"
            )
        rows, names = len(tensors[0]), sorted(set(sources or []))
        if sources is not None and len(sources) != rows:
            raise DataError(f"the batch has {rows} rows, and sources of {len(sources)} were given")
        of_source = [[source == name for source in sources or []] for name in names]
        weights = torch.tensor(of_source, dtype=torch.float32).reshape(len(names), rows)
        with _evaluating(self.model), random_state.torch_restored(), torch.no_grad():
            params = {name: x.detach() for name, x in self.model.named_parameters() if x.requires_grad}
            if not params:
                raise ModelError("the model has no parameter that requires a gradient")
            buffers = {name: x.detach().clone() for name, x in self.model.named_buffers()}
            chunk = _Chunk(tensors, weights, params, buffers)
            plain = [None if isinstance(x, torch.Tensor) else x for x in leaves]
            parts = self._computed(self._replay_of(plain, structure, chunk), chunk, np.arange(rows))
        return _joined(parts, names, weights.numpy(), _modules(params))

    def _computed(
        self, replay: ChunkReplay, chunk: _Chunk, rows: np.ndarray
    ) -> list[tuple[np.ndarray, Found]]:
        """(rows, what was found of them) of all at once, or of halves where memory runs out, and of the
        finite rows again where some are not.
        """

        def compute(rows: np.ndarray) -> Found:
            values = replay(chunk.inputs(rows), None, _TO_COME, chunk.given(rows))
            return {name: x.double().cpu().numpy() for name, x in values.items()}

        def halves(rows: np.ndarray) -> list[np.ndarray]:
            replay.drop_program()
            return np.array_split(rows, 2)

        parts: list[tuple[np.ndarray, Found]] = []
        for some, found in in_pieces([rows], compute, halves):
            finite = np.isfinite(found["losses"]) & np.isfinite(found["squares"].sum(0))
            if finite.all():
                parts.append((some, found))
                continue
            # A row that is not finite spoils the sums of its chunk.
            left_out = np.full((~finite).sum(), np.nan)
            squares = np.tile(left_out, (len(found["squares"]), 1))
            spoilt = {"losses": found["losses"][~finite], "squares": squares, "along": left_out}
            parts += self._computed(replay, chunk, some[finite]) if finite.any() else []
            parts.append((some[~finite], spoilt))
        return parts

    def _replay_of(self, plain: list[Any], structure: Any, chunk: _Chunk) -> ChunkReplay:
        """The function of the chunks of batches of one structure, with its programs."""
        modules = _modules(chunk.params)
        key = repr((plain, structure, [*chunk.params]))
        if key in self._replays:
            return self._replays[key]
        slots = tied_slots(self.model, [*chunk.params, *chunk.buffers])

        def loss_of_row(params: Tensors, buffers: Tensors, *row: torch.Tensor) -> torch.Tensor:
            own = iter(row)
            leaves = [next(own).unsqueeze(0) if x is None else x for x in plain]
            with swapped(slots, {**params, **buffers}), self._precision(row):
                value = self.compute_loss(self.model, tree_unflatten(leaves, structure))
            require_number(value, "the loss", "row", hint="end it with .mean() or .sum()")
            return value.float() if self.autocast is not None else value

        def measured(
            _: Tensors, inputs: tuple[torch.Tensor, ...], __: None, weights: torch.Tensor, params: Tensors,
            buffers: Tensors,
        ) -> Tensors:  # fmt: skip
            in_dims = (None, *[0] * len(inputs))
            with random_state.restored():  # here, as a program runs none of the model's Python
                gradients = per_sample_gradients(loss_of_row, params, buffers, *inputs, in_dims=in_dims)
            whole = gradients.weighted_sum(torch.ones_like(gradients.losses))
            squares, along = gradients.square_norms(per="module"), gradients.dot(whole)
            sums = [_square(gradients.weighted_sum(weight)) for weight in weights.to(along.dtype)]
            return {
                "losses": gradients.losses,
                "squares": torch.stack([squares[name] for name in modules]),
                "along": along,
                "sums": torch.stack([_square(whole), *sums]),
            }

        self._replays[key] = ChunkReplay(measured, chunk.params)
        return self._replays[key]

    def _precision(self, row: Sequence[torch.Tensor]) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(row[0].device.type, dtype=self.autocast, cache_enabled=False)


@dataclass(frozen=True)
class _Chunk:
    """The rows of a batch, and the weights and buffers of the model as they are now."""

    tensors: list[torch.Tensor]
    weights: torch.Tensor
    params: Tensors
    buffers: Tensors

    def inputs(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        if len(rows) == len(self.tensors[0]):
            return tuple(self.tensors)
        return tuple(x[torch.from_numpy(rows).to(x.device)] for x in self.tensors)

    def given(self, rows: np.ndarray) -> tuple[torch.Tensor, Tensors, Tensors]:
        device = next(iter(self.params.values())).device
        return self.weights[:, torch.from_numpy(rows)].to(device), self.params, self.buffers


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards each module in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _modules(params: Tensors) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in params))


def _square(vector: Tensors) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in vector.values()]).double().square().sum()


def _joined(
    parts: list[tuple[np.ndarray, Found]], names: list[str], weights: np.ndarray, modules: list[str]
) -> RowsMeasured:
    """The rows of all chunks, in the order of the batch. weights: [sources, rows], 1 for a source's rows."""
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    losses = np.concatenate([found["losses"] for _, found in parts])[order]
    squares = np.concatenate([found["squares"] for _, found in parts], axis=1)[:, order]
    cosines, sums = [], []
    for rows, found in parts:
        own = found["squares"].sum(0)
        if "sums" not in found:
            cosines.append(found["along"])
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines.append(found["along"] / np.sqrt(own * found["sums"][0]))
        of_sources: list[tuple[str | None, np.ndarray]] = [(None, np.ones(len(rows)))]
        of_sources += zip(names, weights[:, rows], strict=True)
        sums.append(
            {
                name: SourceSums(int(mask.sum()), float(own @ mask), float(found["sums"][place]))
                for place, (name, mask) in enumerate(of_sources)
            }
        )
    return RowsMeasured(
        losses,
        np.sqrt(squares.sum(0)),
        np.concatenate(cosines)[order],
        dict(zip(modules, np.nansum(squares, axis=1).tolist(), strict=True)),
        sums,
    )
