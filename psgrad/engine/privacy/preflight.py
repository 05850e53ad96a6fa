"""A check of a model before its first private step: no record may influence the output or loss of another.

It runs on stand-ins, made of the shapes of rows alone, so that nothing of the records decides its outcome;
or, where the user says so, on a few rows. Its messages are for the owner of the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from psgrad import random_state
from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.engine.transforms.private_torch import BatchNormBase, NormBase, tree_leaves, tree_map
from psgrad.errors import ModelError, PsgradError

# As a share of an output's largest entry: kernels for batches of other sizes round differently, layers that
# mix records change it by much more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_HALVES = 5e-2


class NotRun(ModelError):
    """The model or the loss does not run on the rows that it is checked with."""


def stand_ins(
    inputs: Sequence[Tensor], target: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(inputs, target) of these shapes and types with other content, which does not depend on theirs: normal
    numbers, whole numbers 0 and 1, and True.
    """
    generator = torch.Generator().manual_seed(0)

    def like(x: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex():
            return torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
        if x.dtype == torch.bool:
            return torch.ones_like(x)
        return torch.randint(0, 2, x.shape, dtype=x.dtype, generator=generator).to(x.device)

    return tuple(map(like, inputs)), None if target is None else like(target)


def warm_up(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run the model on stand-ins, so that what it sets up on its first run does not come from a record. A
    model that does not run on them is told of by `why_not_checked`.

    Raises ModelError for layers that read or keep statistics of a batch, and where the run changes a
    parameter or a buffer.
    """
    require_no_batch_statistics(model)
    state, names = Unchanged(model), _names(model)
    with torch.no_grad(), random_state.restored(), contextlib.suppress(Exception):
        run()
    _require_no_update(model, state, names)


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def _require_no_update(model: nn.Module, state: Unchanged, names: set[str] | None = None) -> None:
    """Raises ModelError where a forward pass has changed something of these names; of any for None."""
    changed = [name for name in state.changes(by_bits=True) if names is None or name in names]
    if changed:
        modules, parts = dict(model.named_modules()), changed[0].split(".")
        prefixes = [".".join(parts[:count]) for count in reversed(range(len(parts)))]
        owner = next(prefix for prefix in prefixes if prefix in modules)
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise _updates(
            f"a forward pass changes {changed[0]}{more} of the layer {_of(owner, modules[owner])}",
            modules[owner],
        )


def why_not_checked(
    objective: Objective, state: Unchanged, inputs: Sequence[Tensor], target: Tensor | None
) -> str | None:
    """Why `require_separate_records` can't look at stand-ins of the shapes of these rows; None where it has.

    state: of the model and the loss, unchanged until now. What they set up on stand-ins is public, and part
    of the state to compare with from here on.
    """
    state.require(by_bits=True)
    try:
        require_separate_records(objective, *stand_ins(inputs, target))
        return None
    except NotRun as error:
        return error.message
    finally:
        state.renew()


def require_separate_records(objective: Objective, inputs: Sequence[Tensor], target: Tensor | None) -> None:
    """Raises ModelError if the model's output or the loss of a record depends on other records.

    Args:
        inputs, target: a few stand-ins or rows, [n, ...] each, on the model's device; at least two; four or
            more find more.

    In plain forward passes, one row at a time and all together: no buffer and no parameter may change (batch
    normalisation in train mode, running statistics, power iteration); a row's loss must be the same again
    after other rows (a memory bank, a running average); and a row's output must be the same beside any other
    rows, because psgrad computes each alone and the model would silently be another one (a loss over the
    batch, an axis of samples that is not the first). Effects that begin after many rows, such as a memory
    bank that has to fill up first, are not found here. All global random generators are restored; what a
    model sets up on its first run (a cache) remains.
    """
    rows = _FewRows(objective, tuple(inputs), target)
    require_no_batch_statistics(objective.model)
    rows.require_no_update()
    rows.require_no_memory()
    rows.require_no_mixing()


def require_no_batch_statistics(model: nn.Module) -> None:
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
                f"the layer {_of(name, layer)} takes its statistics from the batch, on which every"
                " record's output then depends; expected an output for each record that depends on no"
                " other record",
                hint=(
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
        loss: Tensor = self.objective.criterion(output, target)
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
                raise NotRun(
                    f"the model or the loss raised {type(error).__name__} on {what}: {first_line}",
                    hint="call the model on one row, with a batch axis of one, to see why",
                ) from error

    def require_no_update(self) -> None:
        """No parameter and no buffer changes in a forward pass, and after the first one, no attribute."""
        model = self.objective.model
        state, names = Unchanged(model), _names(model)
        for row in range(len(self)):
            self.alone(row)
            _require_no_update(model, state, None if row else names)
            state.renew()

    def require_no_memory(self) -> None:
        """A row's loss is the same again, after the others and in another order."""
        first = [self.alone(row)[0] for row in range(len(self))]
        again = [self.alone(row)[0] for row in reversed(range(len(self)))][::-1]
        for row, (before, after) in enumerate(zip(first, again, strict=True)):
            if self._apart(after, before) > self._tolerance():
                raise ModelError(
                    f"the loss of row {row} of the rows looked at is {before.item():.6g}, and"
                    f" {after.item():.6g} once others have passed; expected a loss of each record that"
                    " depends on no other record",
                    hint=(
                        "keep nothing in the model or the loss from one call to the next (a memory bank, a"
                        " running average), and draw random numbers with torch"
                    ),
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
            f" size{f', first in the layer {layer}' if layer else ''}; expected an output for each record"
            " that depends on no other record",
            hint=(
                "use layers that look at one sample, such as nn.GroupNorm, a loss that is a mean over"
                " samples, and samples on the first axis (batch_first=True)"
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


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _of(name: str, layer: nn.Module) -> str:
    return f"{name or '(the model itself)'} ({type(layer).__name__})"


def _updates(arrived: str, layer: nn.Module) -> ModelError:
    steps = "set model.mode: eval, or compute it from what is public"
    if isinstance(layer, NormBase):
        steps = "set model.mode: eval, build it with track_running_stats=False, or replace it by nn.GroupNorm"
    return ModelError(
        f"{arrived}; expected parameters and buffers that a forward pass leaves alone: what the data writes"
        " into them is published without noise",
        hint=steps,
    )
