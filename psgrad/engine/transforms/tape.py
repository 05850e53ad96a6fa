"""The tape of a reverse-mode level, and the backward pass over it.

The entry of an operator is a `Node`. For each input that needs a cotangent, it holds one closure from the
output's cotangent to the input's. A closure holds only the values that its rule needs. These are values one
level below, so the backward pass is an ordinary program that outer transforms handle. Nesting needs nothing
else.

The values that a stored tape (`vjp`) needs must not be written to before its backward pass. PyTorch counts
the writes to a tensor and shares the count with its views. But it does not share it with views that are taken
below its autograd, which all views inside a transform are; and a write to a traced value may write no memory.
So a tape stores the places of each value that it needs, and is called at each write while transforms run.
Writes outside of transforms are found by PyTorch's counts of writes to all tensors of the tape.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms.derivatives import DerivativeTracer
from psgrad.engine.transforms.interpreter import below_autograd, cast, recorded_outside, rules_only, run
from psgrad.engine.transforms.operators import Op, aten, written_by
from psgrad.engine.transforms.private_torch import write_count
from psgrad.engine.transforms.refused_writes import memory_of
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer, innermost
from psgrad.errors import TransformError

_sequence = itertools.count()
Closure = Callable[[Any], Any]


class Node:
    """One recorded operator (or, without inputs, one leaf)."""

    __slots__ = ("edges", "joint", "outputs", "sequence")

    def __init__(self, outputs: int | None = None) -> None:
        self.sequence = next(_sequence)
        self.outputs = outputs  # the number of results; None for a result that is not in a tuple
        self.edges: list[Edge] = []
        # one closure for all edges: cotangent(s) -> cotangents of the inputs, by position
        self.joint: Callable[..., Any] | None = None


class Edge:
    """From an operator to one of its inputs."""

    __slots__ = ("closure", "dtype", "output", "position", "shared", "source")

    def __init__(
        self, tracer: Any, position: Any, closure: Closure | None = None, *, shared: bool = False
    ) -> None:
        self.source: Node = tracer.node  # the operator that made the input
        self.output: int = tracer.output  # the number of the input among its results
        self.dtype = tracer.dtype
        self.position = position  # argument number, or (argument number, place in the list)
        self.closure = closure
        self.shared = shared  # no sample axis below: this input is the same for all samples


class TapePosition(NamedTuple):
    """Where a value is on the tape: the node that made it, None for a constant, and its number among the
    results.
    """

    node: Node | None
    output: int

    @classmethod
    def of(cls, tracer: Any) -> TapePosition:
        return cls(tracer.node, tracer.output)


def pull_back(
    seeds: Sequence[tuple[Any, torch.Tensor | None]],
    leaves: Sequence[Node | None],
    *,
    keep: bool,
    attached: bool = False,
    of_shared: Callable[..., Any] | None = None,
    consume: Callable[[int, torch.Tensor | None], None] | None = None,
) -> list[torch.Tensor | None]:
    """The cotangents of `leaves`, given those of some results. None stands for zero.

    seeds: tape positions, or tracers, which have `node` and `output` too; each with its cotangent.
    keep: whether the tape is needed again; otherwise its closures are deleted during the pass, to free
        memory.
    attached: whether PyTorch's autograd records the pass, if it records outside.
    of_shared: called with the closure of an input that all samples share, and with the closure's argument:
        returns the input's cotangent.
    consume: called with the index and the cotangent of each leaf as soon as this is complete; nothing is
        returned then. So the cotangents never all exist at the same time.
    """
    pending: dict[Node, list[torch.Tensor | None]] = {}
    heap: list[tuple[int, Node]] = []  # the latest first

    def add(node: Node, output: int, cotangent: torch.Tensor | None) -> None:
        if cotangent is None:
            return
        slots = pending.get(node)
        if slots is None:
            slots = pending[node] = [None] * (node.outputs or 1)
            heapq.heappush(heap, (-node.sequence, node))
        before = slots[output]
        slots[output] = cotangent if before is None else run(aten.add.Tensor, before, cotangent)

    def add_along(edge: Edge, cotangent: torch.Tensor | None) -> None:
        """Add a cotangent in the dtype of the input. An operator of several dtypes may have promoted it."""
        if cotangent is not None and cotangent.dtype != edge.dtype:
            cotangent = cast(cotangent, edge.dtype)
        add(edge.source, edge.output, cotangent)

    def finish_use(node: Node) -> None:
        if node in uses:
            uses[node] -= 1
            if not uses[node]:
                slots = pending.pop(node, None)
                assert consume is not None
                consume(numbers[node], slots[0] if slots is not None else None)

    finished: dict[Node, torch.Tensor | None] = {}
    leaf_nodes = {node for node in leaves if node is not None}
    numbers = {node: number for number, node in enumerate(leaves) if node is not None}
    uses = _count_uses([position.node for position, _ in seeds], leaf_nodes) if consume is not None else {}
    with (
        (
            recorded_outside()
            if attached or state.attached or any(c is not None and c.requires_grad for _, c in seeds)
            else below_autograd()
        ),
        rules_only(),
    ):
        for position, cotangent in seeds:
            if position.node is not None:
                add(position.node, position.output, cotangent)
        while heap:
            node = heapq.heappop(heap)[1]
            slots = pending.pop(node, None)
            if slots is None:  # consumed already
                continue
            if node in leaf_nodes:
                finished[node] = slots[0]
            if not node.edges:
                continue
            arrived: Any = slots[0] if node.outputs is None else slots
            if node.joint is not None:
                results = node.joint(arrived, [edge.position for edge in node.edges])
                for edge in node.edges:
                    cotangent = results.get(edge.position)
                    if callable(cotangent):
                        cotangent = of_shared(cotangent) if edge.shared and of_shared else cotangent()
                    add_along(edge, cotangent)
                    finish_use(edge.source)
                del results, cotangent
            else:
                for edge in node.edges:
                    closure = edge.closure
                    assert closure is not None
                    add_along(
                        edge, of_shared(closure, arrived) if edge.shared and of_shared else closure(arrived)
                    )
                    finish_use(edge.source)
            if not keep:
                node.edges, node.joint = [], None
    if consume is not None:
        for number, leaf in enumerate(leaves):
            if leaf is not None and uses.get(leaf) != 0:  # never reached, or reached as the result itself
                consume(number, finished.get(leaf))
        return []
    return [finished.get(node) if node is not None else None for node in leaves]


def _count_uses(ends: Sequence[Node | None], leaves: set[Node]) -> dict[Node, int]:
    """For each leaf, the number of times it is an input of a recorded operator on which the ends depend."""
    uses: dict[Node, int] = {}
    seen: set[Node] = set()
    waiting = [end for end in ends if end is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in node.edges:
            if edge.source in leaves:
                uses[edge.source] = uses.get(edge.source, 0) + 1
            else:
                waiting.append(edge.source)
    return uses


class SavedValues:
    """The values that one tape needs."""

    def __init__(self) -> None:
        self._needed: dict[int, list[weakref.ref[Any]]] = {}  # by place
        self._seen: list[
            tuple[weakref.ref[torch.Tensor], int]
        ] = []  # plain tensors, and their counts of writes so far
        self._others: set[SavedValues] = set()  # tapes whose backward pass this one has recorded
        self._changed: list[weakref.ref[Any]] = []
        state.saved.add(weakref.ref(self, state.saved.discard))

    def need(self, values: Iterable[Any]) -> None:
        values = list(values)
        for value in values:
            reference = weakref.ref(value)
            for place in _places(value):
                self._needed.setdefault(place, []).append(reference)
        self.follow(values)

    def follow(self, values: Iterable[Any]) -> None:
        """Watch tensors that share memory with a needed value, such as the base of a view or a returned
        value.
        """
        for tensor in map(innermost, values):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                self._seen.append((weakref.ref(tensor), write_count(tensor)))

    def depend_on(self, other: SavedValues) -> None:
        self._others.add(other)

    def watch(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Called with each operator while transforms run."""
        if op is not aten.detach_.default:  # torch.tensor(..) ends with it, and it doesn't change the values
            for target in written_by(op, args, kwargs):
                self.written(target)

    def written(self, value: Any) -> None:
        """Called with each tensor that an operator writes to while transforms run."""
        for place in _places(value, written=True):
            # after a value is deleted, its place may belong to another value
            self._changed += [
                reference for reference in self._needed.get(place, ()) if reference() is not None
            ]

    def check(self) -> None:
        for reference, version in self._seen:
            tensor = reference()
            if tensor is not None and write_count(tensor) != version:
                self.written(tensor)
        changed = next((value for reference in self._changed if (value := reference()) is not None), None)
        if changed is not None:
            raise TransformError(
                f"a tensor of shape {tuple(changed.shape)} that vjp's function used was changed in place"
                " before vjp_fn was called",
                hint="call vjp_fn before the change (an optimiser's step?), or give the function a clone",
            )
        for other in self._others:
            other.check()


def _places(value: Any, *, written: bool = False) -> Iterator[int]:
    """The keys of a value: at each level the id of the tracer of which it is a view, and below all levels the
    key of the memory.

    written: whether the value is written to. Then only the levels that the write reaches count: the tracer of
        a derivative gets another value, and the old one does not change.
    """
    while isinstance(value, Tracer):
        while (view_of := getattr(value, "view_of", None)) is not None:
            value = view_of[0]
        yield id(value)
        if written and isinstance(value, DerivativeTracer):
            return
        value = value.value
    if isinstance(value, torch.Tensor):
        yield memory_of(value)
