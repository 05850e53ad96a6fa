"""A program: what a function does to tensors of one signature, as a list of kernels, and the ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from psgrad.engine.transforms.levels import map_tracers
from psgrad.engine.transforms.watch import (
    NoReads,
    NotCapturable,
    RandomStates,
    Watch,
    draws,
    generators,
    looks,
    modules_unchanged,
    python_random_states,
    writes,
)

Compiler = Literal["none", "inductor"]
Run = Callable[..., list[torch.Tensor]]

# What a function may take and return besides tensors: values that say all that there is to them.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Program:
    """A record: what to run, and how its results stand in the function's."""

    run: Run
    how: str  # it is run, in words
    results: list[Any]  # the function's results, flat; `_TENSOR` where the next tensor goes
    spec: Any
    outside: list[torch.Tensor]  # what the function takes from outside: further arguments
    relied_on: list[Any]  # in those, beside their values

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        found = iter(self.run(*tensors, *self.outside))
        return tree_unflatten([next(found) if item is _TENSOR else item for item in self.results], self.spec)

    def fits(self) -> bool:
        """Whether the tensors from outside are what they were, apart from their values."""
        return all(_address_and_looks(x) == before for x, before in zip(self.outside, self.relied_on, strict=True))


_TENSOR = object()


def _address_and_looks(x: torch.Tensor) -> Any:
    return x.data_ptr(), x.requires_grad, looks(x)


def record(function: Callable[..., Any], leaves: list[Any], spec: Any, compile: Compiler) -> Program:
    """Run the function twice on tensors without values: to find what it takes from outside, and to record it with that as arguments."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(given: Sequence[torch.Tensor], watch: Watch) -> tuple[list[Any], Any]:
        values = iter(given)
        args, kwargs = tree_unflatten([next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        with watch, reads:
            out, spec_out = tree_flatten(function(*args, **kwargs))
        for item in out:
            if not isinstance(item, (torch.Tensor, *PLAIN)):
                raise NotCapturable(f"it returns a {type(item).__name__}")
        return map_tracers(watch.inside, out), spec_out

    reads = NoReads()
    with modules_unchanged(), python_random_states(), RandomStates() as random_states:
        without_values = FakeTensorMode()
        first = Watch(random_states, without_values.from_tensor)
        with without_values:
            call([without_values.from_tensor(x) for x in tensors], first)
        first.insist()
        reads.insist()
        first.expect_nothing_kept()
        outside = list(first.outside.values())
        results: list[Any] = []
        spec_out: Any = None
        second = first

        def flat(*given: torch.Tensor) -> list[torch.Tensor]:
            nonlocal results, spec_out, second
            known = {id(x): placed for x, placed in zip(outside, given[len(tensors) :], strict=True)}
            second = Watch(random_states, lambda x: known[id(x)])
            results, spec_out = call(given, second)
            return [item for item in results if isinstance(item, torch.Tensor)]

        module = make_fx(flat, tracing_mode="fake")(*tensors, *outside)
    second.insist()
    random_states.insist()
    if first.course != second.course:
        raise NotCapturable("its course changes from one call to the next")
    if torch.is_grad_enabled() and any(x.requires_grad for x in outside):
        raise NotCapturable("a tensor from outside requires a gradient, and PyTorch's autograd may follow it; call under torch.no_grad()")
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or writes(node.target) or draws(node.target))
    obstacle = obstacle_to_cuda_graph(graph)
    for node in graph.nodes:
        node.meta.clear()  # tensors without values
    graph.set_codegen(torch.fx.graph.CodeGen())  # flat in, flat out
    module.recompile()
    run, how = _run_by(module, [*tensors, *outside], compile, obstacle)
    pattern = [_TENSOR if isinstance(item, torch.Tensor) else item for item in results]
    return Program(run, how, pattern, spec_out, outside, [_address_and_looks(x) for x in outside])


def _run_by(module: torch.fx.GraphModule, tensors: list[torch.Tensor], compile: Compiler, obstacle: str | None) -> tuple[Run, str]:
    if compile == "inductor":
        return _compiled(module, tensors), "inductor"
    if obstacle is None:
        return CudaGraph(module.forward), "CUDA graph"
    return module.forward, "kernel by kernel" if all(x.device.type == "cpu" for x in tensors) else f"kernel by kernel ({obstacle})"


# -- other ways to run a record -------------------------------------------------------------------------------------------------------


def obstacle_to_cuda_graph(graph: torch.fx.Graph) -> str | None:
    """Why a record can't be a CUDA graph, in words; None where it can."""
    devices = {node.meta["val"].device for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return "not all of it is on one GPU"
    arguments = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    written = {_memory(a) for node in graph.nodes if writes(node.target) for a in node.args[:1] if isinstance(a, torch.fx.Node)}
    if arguments & written:
        return "it writes into its arguments"
    if arguments & {_memory(node) for node in graph.output_node().all_input_nodes}:
        return "a result is a view of an argument"
    return None


def _memory(node: torch.fx.Node) -> Any:
    """Equal for values that share their memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


class CudaGraph:
    """A record as a CUDA graph: one launch for all its kernels.

    A graph reads fixed addresses. An argument that comes at the same address each time (a weight) is read where it is; one that
    was met at another is copied into a buffer from then on. The results are copies: the next replay writes over the graph's own.
    PyTorch sees to it that its generators go on with each replay.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.graph: torch.cuda.CUDAGraph | None = None
        self.moving: set[int] = set()  # arguments that have a buffer, by position
        self.addresses: list[int] = []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        addresses = [x.data_ptr() for x in tensors]
        moved = {i for i, (now, then) in enumerate(zip(addresses, self.addresses, strict=False)) if now != then} - self.moving
        if self.graph is None or moved:
            self.moving |= moved
            self._record(tensors, addresses)
        assert self.graph is not None
        for i in self.moving:
            self.given[i].copy_(tensors[i])
        self.graph.replay()
        return [x.clone() for x in self.results]

    def _record(self, tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> None:
        self.addresses = addresses
        self.given = [x.clone() if i in self.moving else x for i, x in enumerate(tensors)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        states = [generator.get_state() for generator in generators()]
        with torch.cuda.stream(stream):  # libraries make their handles and workspaces at the first call
            self.run(*self.given)
        torch.cuda.current_stream().wait_stream(stream)
        for generator, before in zip(generators(), states, strict=True):
            generator.set_state(before)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.run(*self.given)


def _compiled(module: torch.fx.GraphModule, tensors: list[Any]) -> Run:
    from torch._inductor import compile as inductor  # takes seconds to import

    return inductor(module, tensors, options={"fallback_random": True})  # draws what PyTorch's own kernels draw
