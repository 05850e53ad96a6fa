"""A check of a model before its first private step: no record may influence the output or loss of another.

It reads a few rows of the private data, and can only stop a run that has released nothing yet. Its messages
are for the owner of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgrad import random_state
from psgrad.engine.execution.objective import Objective
from psgrad.engine.transforms.private_torch import (
    BatchNormBase,
    NormBase,
    buffer_store,
    parameter_store,
    tree_leaves,
    tree_map,
)
from psgrad.errors import ModelError, PsgradError

# As a share of an output's largest entry: kernels for batches of other sizes round differently, layers that
# mix records change it by much more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_HALVES = 5e-2


def require_separate_records(objective: Objective, inputs: Sequence[Tensor], target: Tensor | None) -> None:
    """Raises ModelError if the model's output or the loss of a record depends on other records.

    Args:
        inputs, target: a few rows of the dataset, [n, ...] each, on the model's device; at least two; four or
            more find more.

    In plain forward passes, one row at a time and all together: no buffer and no parameter may change (batch
    normalisation in train mode, running statistics, power iteration); a row's loss must be the same again
    after other rows (a memory bank, a running average); and a row's output must be the same beside any other
    rows, because psgrad computes each alone and the model would silently be another one (a loss over the
    batch, an axis of samples that is not the first). Effects that begin after many rows, such as a memory
    bank that has to fill up first, are not found. The model, and all global random generators, are restored.
    """
    rows = _FewRows(objective, tuple(inputs), target)
    _require_no_batch_statistics(objective.model)
    with _put_back(objective.model) as state:
        rows.require_no_update(state)
        rows.require_no_memory(state)
        rows.require_no_mixing()


def _require_no_batch_statistics(model: nn.Module) -> None:
    """Refuses layers that are known to read a batch or to keep statistics of it, whether or not the few rows
    use them.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, NormBase) and layer.training and layer.running_mean is not None:
            raise _updates(
                f"the layer {_of(name, layer)} is in train mode, and its running statistics follow the data",
                layer,
            )
        if isinstance(layer, BatchNormBase) and (layer.training or layer.running_mean is None):
            raise ModelError(
                f"the layer {_of(name, layer)} takes its statistics from the batch, on which every record's"
                " output then depends",
                expected="an output for each record that depends on no other record",
                next_step=(
                    "replace it by nn.GroupNorm, or build it with track_running_stats=True and set"
                    " model.mode: eval"
                ),
            )


@dataclass(frozen=True)
class _FewRows:
    """Some rows of a dataset, and the model and loss that are checked with them."""

    objective: Objective
    inputs: tuple[Tensor, ...]
    target: Tensor | None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def alone(self, row: int) -> tuple[Tensor, Any, bool]:
        """(loss, output, whether random numbers were drawn) of one row by itself."""
        with self._call(f"row {row} of the rows looked at") as drew:
            output = self.objective.output(*[x[row : row + 1] for x in self.inputs])
            loss = self._loss(output, row)
            return torch.as_tensor(loss), output, drew()

    def _loss(self, output: Any, row: int) -> Tensor:
        target = None if self.target is None else self.target[row]
        loss: Tensor = self.objective.loss_of(output, [x[row] for x in self.inputs], target)
        return loss

    def together(self, rows: Sequence[int]) -> Any | None:
        """The model's output for a batch; None where it takes no batches."""
        try:
            with self._call("a batch"):
                return self.objective.forward(self.objective.model, *[x[list(rows)] for x in self.inputs])
        except PsgradError:
            return None

    @contextmanager
    def _call(self, what: str) -> Iterator[Callable[[], bool]]:
        """Runs the model and the loss as they are, with the same random numbers each time: the generators are
        set back afterwards.
        """
        with torch.no_grad(), self.objective.precision(), random_state.restored():
            before = random_state.all_states()
            try:
                yield lambda: random_state.all_states() != before
            except PsgradError:
                raise
            except Exception as error:
                first_line = next(iter(str(error).splitlines()), "")
                raise ModelError(
                    f"the model or the loss raised {type(error).__name__} on {what}: {first_line}",
                    next_step="call the model on one row, with a batch axis of one, to see why",
                ) from error

    def require_no_update(self, state: _FormerState) -> None:
        """No parameter and no buffer changes in a forward pass; what is new (a cache) is the same after any
        row.
        """
        added: dict[str, Tensor] | None = None
        for row in range(len(self)):
            self.alone(row)
            changed, new = state.changes()
            state.restore()
            if added is not None:
                changed += [name for name in new if name in added and not _same(new[name], added[name])]
            added = new if added is None else added
            if changed:
                name = changed[0]
                layer = self.objective.model.get_submodule(name.rpartition(".")[0])
                more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
                what = "buffer" if state.is_buffer(name) else "parameter"
                raise _updates(
                    f"a forward pass changes the {what} {name}{more} of the layer"
                    f" {_of(name.rpartition('.')[0], layer)}",
                    layer,
                )

    def require_no_memory(self, state: _FormerState) -> None:
        """A row's loss is the same again, after the others and in another order."""
        first = [self.alone(row)[0] for row in range(len(self))]
        again = [self.alone(row)[0] for row in reversed(range(len(self)))][::-1]
        state.restore()
        for row, (before, after) in enumerate(zip(first, again, strict=True)):
            if self._apart(after, before) > self._tolerance():
                raise ModelError(
                    f"the loss of row {row} of the rows looked at is {before.item():.6g}, and"
                    f" {after.item():.6g} once others have passed",
                    expected="a loss of each record that depends on no other record",
                    cause=(
                        "the model or the loss keeps something of what it has seen (a memory bank, a running"
                        " average), or draws from a generator of random numbers of its own"
                    ),
                    next_step="keep nothing from one call to the next; draw random numbers with torch",
                )

    def require_no_mixing(self) -> None:
        """The output and loss of the first and of the last row are the same among others, among copies of
        itself, and alone.
        """
        count = len(self)
        among_others = self.together(range(count))
        for row in dict.fromkeys((0, count - 1)):
            loss, output, random = self.alone(row)
            others = self._of_row(among_others, row, output)
            copies = self._of_row(self.together([row] * count), row, output)
            if others is None or copies is None:
                continue
            apart = self._apart(others, copies)
            if not random:  # a draw for a batch is not a draw for one
                apart = max(apart, self._apart(others, (loss, output)))
            if apart > self._tolerance():
                raise self._mixes(row, apart)

    def _mixes(self, row: int, apart: float) -> ModelError:
        layer = self._first_that_mixes(row)
        return ModelError(
            f"what the model makes of a row changes with the other rows of its batch, by {apart:.1g} of its"
            " size" + (f", first in the layer {layer}" if layer else ""),
            expected="an output for each record that depends on no other record",
            cause=(
                "a layer or a loss that looks across the batch (batch normalisation, a contrastive or balance"
                " loss), or samples on another axis than the first (batch_first=False)"
            ),
            next_step=(
                "use layers that look at one sample, such as nn.GroupNorm, and a loss that is a mean over"
                " samples"
            ),
        )

    def _first_that_mixes(self, row: int) -> str | None:
        """The first layer without layers of its own whose output for this row depends on the others."""
        seen: list[tuple[str, Any]] = []
        layers = [
            (name, layer)
            for name, layer in self.objective.model.named_modules()
            if not list(layer.children())
        ]

        def noting(name: str, layer: nn.Module) -> Callable[..., None]:
            return lambda _, __, output: seen.append((_of(name, layer), output))

        hooks = [layer.register_forward_hook(noting(name, layer)) for name, layer in layers]
        try:
            self.together(range(len(self)))
            others, seen = seen, []
            self.together([row] * len(self))
        finally:
            for hook in hooks:
                hook.remove()
        for (name, among_others), (_, among_copies) in zip(others, seen, strict=False):
            pair = [self._sliced(output, row) for output in (among_others, among_copies)]
            if self._apart(*pair) > self._tolerance():
                return name
        return None

    def _of_row(self, output: Any | None, row: int, alone: Any) -> tuple[Tensor, Any] | None:
        """(loss, output) of a row out of a batch; None if the batch's output does not look like several of
        the row's.
        """
        if output is None:
            return None
        mine = self._sliced(output, row)
        shapes = [x.shape for x in _tensors(mine)]
        if not shapes or shapes != [x.shape for x in _tensors(alone)]:
            return None
        try:
            with self._call("a batch"):
                loss = self._loss(mine, row)
        except PsgradError:
            return None
        # An output without an axis of samples (a statistic of the batch, for display) matters only if the
        # loss uses it.
        return torch.as_tensor(loss), tree_map(lambda x: x[row] if self._has_samples(x) else None, output)

    def _sliced(self, output: Any, row: int) -> Any:
        return tree_map(lambda x: x[row] if self._has_samples(x) else x, output)

    def _has_samples(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == len(self)

    def _tolerance(self) -> float:
        if self.objective.autocast is not None:
            return _TOLERANCE_OF_HALVES
        return _TOLERANCE.get(next(iter(self.objective.params.values())).dtype, _TOLERANCE_OF_HALVES)

    @staticmethod
    def _apart(output: Any, expected: Any) -> float:
        """The largest difference between two outputs, as a share of the largest entry; NaN equals NaN."""
        worst = 0.0
        for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=False):
            if (
                isinstance(a, Tensor)
                and isinstance(b, Tensor)
                and a.shape == b.shape
                and a.numel()
                and not a.is_complex()
            ):
                a, b = a.double(), b.double()
                difference = (
                    torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
                    .nan_to_num(nan=torch.inf)
                    .max()
                )
                size = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else torch.tensor(0.0)
                worst = max(worst, float(difference / size) if size > 0 else float(difference))
        return worst


# -- The model's state ---------------------------------------------------------------------------------------


class _FormerState:
    """A model's parameters and buffers, with their former values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept = {name: (tensor, tensor.detach().clone()) for name, tensor in self._now().items()}
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def _now(self) -> dict[str, Tensor]:
        named = [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]
        return dict(named)

    def is_buffer(self, name: str) -> bool:
        return name in self._buffers or name not in self._kept

    def changes(self) -> tuple[list[str], dict[str, Tensor]]:
        """(names of changed values, new values)."""
        now = self._now()
        changed = [
            name
            for name, (_, before) in self._kept.items()
            if name not in now or not _same(now[name], before)
        ]
        return changed, {
            name: tensor.detach().clone() for name, tensor in now.items() if name not in self._kept
        }

    def restore(self) -> None:
        now = self._now()
        for name in now.keys() - self._kept.keys():
            owner, _, leaf = name.rpartition(".")
            delattr(self._model.get_submodule(owner), leaf)
        with torch.no_grad():
            for name, (tensor, before) in self._kept.items():
                if name in now and now[name] is tensor and _same(tensor, before):
                    continue
                owner, _, leaf = name.rpartition(".")
                tensor.copy_(before)
                module = self._model.get_submodule(owner)
                store = buffer_store if name in self._buffers else parameter_store
                store(module)[leaf] = tensor


@contextmanager
def _put_back(model: nn.Module) -> Iterator[_FormerState]:
    state = _FormerState(model)
    try:
        yield state
    finally:
        state.restore()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _of(name: str, layer: nn.Module) -> str:
    return f"{name or '(the model itself)'} ({type(layer).__name__})"


def _updates(arrived: str, layer: nn.Module) -> ModelError:
    steps = "set model.mode: eval, or compute it from what is public"
    if isinstance(layer, NormBase):
        steps = "set model.mode: eval, build it with track_running_stats=False, or replace it by nn.GroupNorm"
    return ModelError(
        arrived,
        expected=(
            "parameters and buffers that a forward pass leaves alone: what the data writes into them is"
            " published without noise"
        ),
        cause=(
            "running statistics, power iteration (spectral norm) in train mode, or a first pass that sets"
            " itself up from the data"
        ),
        next_step=steps,
    )
