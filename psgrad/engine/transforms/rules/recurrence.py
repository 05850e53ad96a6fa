"""The steps of a recurrent layer as one operator: from the projected inputs of all times to the states.

PyTorch's kernels for whole layers keep to themselves what a per-sample gradient needs. A program of single
operators keeps it, and costs the interpreter dozens of calls for each time. This operator keeps it, and costs
one call: forward it returns the sums before the activations beside the states, and backward the cotangents of
those sums. The weights' gradients are products of these with inputs and states.

Rows are packed: for each time those of the sequences that still run, the longest first. Under vmap the rows
of one packed row of all samples stand together, so that they are packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import JointVJP, Op, define, replace

LSTM, GRU, TANH, RELU = "lstm", "gru", "tanh", "relu"

_library = torch.library.Library("psgrad", "FRAGMENT")
_STATES = "Tensor hidden, Tensor memory, Tensor outer, Tensor? bias"
_HOW = "int[] sizes, Tensor? lengths, str cell"
_library.define(f"recurrence(Tensor projected, {_STATES}, {_HOW}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"recurrence_backward(Tensor? g_states, Tensor? g_memories, Tensor? g_sums,"
    f" Tensor states, Tensor memories, Tensor sums, {_STATES}, {_HOW}) -> (Tensor, Tensor, Tensor)"
)
recurrence = torch.ops.psgrad.recurrence.default
recurrence_backward = torch.ops.psgrad.recurrence_backward.default


# -- the steps -----------------------------------------------------------------------------------------------


def _packed(sizes: Sequence[int], lengths: Tensor, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """The order of the rows, longest first; where the rows that run stand among those of all times; how many
    run at each time.
    """
    order = lengths.argsort(descending=True, stable=True)
    running = torch.arange(len(sizes), device=lengths.device).unsqueeze(1) < lengths[order]
    rows = [count for count in running.sum(1).tolist() if count]
    places = torch.cat([order[:count] + time * sizes[0] for time, count in enumerate(rows)])
    return order.to(device), places.to(device), rows


def _run(
    projected: Tensor,
    hidden: Tensor,
    memory: Tensor,
    outer: Tensor,
    bias: Tensor | None,
    sizes: Sequence[int],
    lengths: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The states and memories after each time and the sums before the activations, all packed as `projected`
    [p, k].

    hidden, memory: [b, width], the states to begin with; memory is empty but for an LSTM. outer: the
    recurrent weight; bias: that of a GRU beside it. sizes: how many rows each time has. lengths: [b], where
    rows end before their last time; what is behind is zero.
    """
    if lengths is not None:
        order, places, rows = _packed(sizes, lengths, outer.device)
        found = _run(projected[places], hidden[order], memory[order], outer, bias, rows, None, cell)
        behind = [x.new_zeros(projected.shape[0], x.shape[1]) for x in found]
        states, memories, sums = (x.index_copy(0, places, y) for x, y in zip(behind, found, strict=True))
        return states, memories, sums
    weight, steps = outer.t(), []
    for piece in projected.split(list(sizes)):
        hidden, memory = hidden[: len(piece)], memory[: len(piece)]
        hidden, memory, sums = _STEPS[cell](piece, hidden, memory, weight, bias)
        steps.append((hidden, memory, sums))
    states, memories, sums = (torch.cat(parts) for parts in zip(*steps, strict=True))
    return states, memories, sums


def _lstm(
    projected: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor, bias: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sums = torch.addmm(projected, hidden, weight)
    write, keep, _, show = sums.sigmoid().chunk(4, 1)
    memory = torch.addcmul(keep * memory, write, sums.chunk(4, 1)[2].tanh())
    return show * memory.tanh(), memory, sums


def _gru(
    projected: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of reset and update, then apart for the value: what the input adds, and what the state
    does.
    """
    width = hidden.shape[1]
    outer = torch.mm(hidden, weight) if bias is None else torch.addmm(bias, hidden, weight)
    gates, own = projected[:, : 2 * width] + outer[:, : 2 * width], outer[:, 2 * width :]
    inner = projected[:, 2 * width :]
    reset, update = gates.sigmoid().chunk(2, 1)
    value = torch.addcmul(inner, reset, own).tanh()
    return torch.lerp(value, hidden, update), memory, torch.cat([gates, inner, own], 1)


def _elman(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def step(
        projected: Tensor, hidden: Tensor, memory: Tensor, weight: Tensor, bias: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = torch.addmm(projected, hidden, weight)
        return activation(sums), memory, sums

    return step


_STEPS = {LSTM: _lstm, GRU: _gru, TANH: _elman(torch.tanh), RELU: _elman(torch.relu)}


# -- and back ------------------------------------------------------------------------------------------------


def _back(
    g_states: Tensor | None,
    g_memories: Tensor | None,
    g_sums: Tensor | None,
    states: Tensor,
    memories: Tensor,
    sums: Tensor,
    hidden: Tensor,
    memory: Tensor,
    outer: Tensor,
    bias: Tensor | None,
    sizes: Sequence[int],
    lengths: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of the sums, and of the states to begin with."""
    if lengths is not None:
        order, places, rows = _packed(sizes, lengths, outer.device)
        given = (g_states, g_memories, g_sums, states, memories, sums)
        picked = [None if x is None else x[places] for x in given]
        d, *starts = _back(*picked, hidden[order], memory[order], outer, bias, rows, None, cell)  # type: ignore[call-arg, arg-type]
        whole = d.new_zeros(sum(sizes), d.shape[1]).index_copy(0, places, d)
        to_starts = [torch.zeros_like(x).index_copy(0, order, x) for x in starts]
        return whole, to_starts[0], to_starts[1]
    sizes = list(sizes)
    factors = _FACTORS[cell](sums, before(states, hidden, sizes), memories, before(memories, memory, sizes))
    by_time = [
        [None] * len(sizes) if x is None else x.split(sizes) for x in (g_states, g_memories, g_sums, *factors)
    ]
    found: list[Tensor] = []
    to_hidden: Any = None
    to_memory: Any = None
    for rows, g, g_memory, g_sum, *now in reversed(list(zip(sizes, *by_time, strict=True))):
        to_hidden, to_memory = _plus(g, to_hidden, rows), _plus(g_memory, to_memory, rows)
        to_hidden = now[0].new_zeros(rows, hidden.shape[1]) if to_hidden is None else to_hidden
        d, kept, to_memory = _BACK[cell](now, to_hidden, to_memory)
        found.append(d if g_sum is None else d + g_sum)
        through = outer_part(found[-1], cell)
        to_hidden = torch.mm(through, outer) if kept is None else torch.addmm(kept, through, outer)
    return torch.cat(found[::-1]), to_hidden, torch.zeros_like(memory) if to_memory is None else to_memory


def _plus(g: Tensor | None, carried: Tensor | None, rows: int) -> Tensor | None:
    """The sum of a cotangent [rows, k] and of what the next time has carried back for its rows."""
    if carried is not None and carried.shape[0] < rows:
        carried = torch.cat([carried, carried.new_zeros(rows - carried.shape[0], carried.shape[1])])
    return carried if g is None else g if carried is None else g + carried


def before(states: Tensor, first: Tensor, sizes: Sequence[int]) -> Tensor:
    """[p, width]: for each packed row the state before it."""
    if sizes[0] == sizes[-1]:
        return torch.cat([first, states[: len(states) - sizes[0]]])
    pieces = states.split(list(sizes))
    return torch.cat([first[: sizes[0]], *[x[:rows] for x, rows in zip(pieces, sizes[1:], strict=False)]])


def outer_part(sums: Tensor, cell: str) -> Tensor:
    """The cotangents of what the recurrent weight adds to the sums; to a GRU's value, a sum by itself."""
    if cell != GRU:
        return sums
    width = sums.shape[1] // 4
    return torch.cat([sums[:, : 2 * width], sums[:, 3 * width :]], 1)


def _lstm_factors(
    sums: Tensor, hidden: Tensor, memories: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    write, keep, _, show = sums.sigmoid().chunk(4, 1)
    value, shown = sums.chunk(4, 1)[2].tanh(), memories.tanh()
    gates = [value * write * (1 - write), memory * keep * (1 - keep), write * (1 - value * value)]
    return show * (1 - shown * shown), torch.stack(gates, 1), shown * show * (1 - show), keep


def _lstm_back(
    now: Sequence[Tensor], to_hidden: Tensor, to_memory: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    into, gates, show, keep = now
    to_memory = to_hidden * into if to_memory is None else torch.addcmul(to_memory, to_hidden, into)
    through = (gates * to_memory.unsqueeze(1)).flatten(1)
    return torch.cat([through, show * to_hidden], 1), None, to_memory * keep


def _gru_factors(sums: Tensor, hidden: Tensor, memories: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    reset, update = sums[:, : sums.shape[1] // 2].sigmoid().chunk(2, 1)
    inner, own = sums.chunk(4, 1)[2:]
    value = torch.addcmul(inner, reset, own).tanh()
    through = (1 - update) * (1 - value * value)
    gates = [through * own * reset * (1 - reset), (hidden - value) * update * (1 - update)]
    return torch.stack([*gates, through, through * reset], 1), update


def _gru_back(
    now: Sequence[Tensor], to_hidden: Tensor, to_memory: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    gates, update = now
    return (gates * to_hidden.unsqueeze(1)).flatten(1), to_hidden * update, None


_FACTORS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    LSTM: _lstm_factors,
    GRU: _gru_factors,
    TANH: lambda sums, *_: (1 - sums.tanh().square(),),
    RELU: lambda sums, *_: (sums,),
}
_BACK: dict[str, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    LSTM: _lstm_back,
    GRU: _gru_back,
    TANH: lambda now, to_hidden, _: (now[0] * to_hidden, None, None),
    RELU: lambda now, to_hidden, _: (aten.threshold_backward.default(to_hidden, now[0], 0), None, None),
}


# -- rules ---------------------------------------------------------------------------------------------------

for _name, _kernel in (("recurrence", _run), ("recurrence_backward", _back)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
replace(recurrence)(_run)
replace(recurrence_backward)(_back)
torch.library.register_fake(
    "psgrad::recurrence",
    lambda projected, hidden, memory, outer, bias, sizes, lengths, cell: (
        projected.new_empty(projected.shape[0], hidden.shape[1]),
        projected.new_empty(projected.shape[0], memory.shape[1]),
        projected.new_empty(
            projected.shape[0], (4 if cell == GRU else len(outer) // hidden.shape[1]) * hidden.shape[1]
        ),
    ),
    lib=_library,
)
torch.library.register_fake(
    "psgrad::recurrence_backward",
    lambda g, h, i, states, memories, sums, hidden, memory, *how: tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (sums, hidden, memory)
    ),
    lib=_library,
)


def _pull(
    out: Any,
    projected: Tensor,
    hidden: Tensor,
    memory: Tensor,
    outer: Tensor,
    bias: Any,
    sizes: Any,
    lengths: Any,
    cell: str,
) -> Callable[..., dict[int, Any]]:
    """The weight's cotangent is a product over all times, which stays un-run where the weight is shared."""
    states = out[0]

    def back(gs: Sequence[Any], positions: Sequence[int]) -> dict[int, Any]:
        if all(g is None for g in gs):
            return {}
        d, to_hidden, to_memory = run(
            recurrence_backward, *gs, *out, hidden, memory, outer, bias, sizes, lengths, cell
        )
        through = outer_part(d, cell)
        return {
            0: d if cell != GRU else d[:, : 3 * hidden.shape[1]],
            1: to_hidden,
            2: to_memory,
            3: lambda: run(aten.mm.default, through.t(), before(states, hidden, sizes)),
            4: lambda: through.sum(0),
        }

    return back


def _fold(batch: Any, x: Any) -> Any:
    """[p * n, k]: the rows of all samples beside each other, so that those which end first stay last."""
    return None if x is None else batch.physical(x).transpose(0, 1).flatten(0, 1)


def _batched(*alike: int) -> Callable[..., Any]:
    """The batching of an operator whose first arguments are rows.

    alike: for each result the position of the argument that has as many rows.
    """

    def rule(batch: Any, op: Op, *args: Any) -> Any:
        *some, outer, bias, sizes, lengths, cell = args
        if batch.is_mapped(outer) or batch.is_mapped(bias):
            program = _run if op is recurrence else _back
            return tuple(batch.physical(x) for x in program(*args))
        n = batch.size
        folded = [_fold(batch, x) for x in (*some, lengths)]
        found = op(*folded[:-1], outer, bias, [n * size for size in sizes], folded[-1], cell)
        return tuple(
            x.reshape(args[i].shape[0], n, *x.shape[1:]).transpose(0, 1)
            for x, i in zip(found, alike, strict=True)
        )

    return rule


define(recurrence, vjp=JointVJP(_pull), batch=_batched(0, 0, 0))
define(recurrence_backward, batch=_batched(5, 6, 7))
