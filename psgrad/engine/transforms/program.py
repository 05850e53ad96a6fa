"""Programs: the list of kernels that a function runs on tensors of one signature, and the backends that run
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from psgrad import random_state
from psgrad.engine.transforms.capture_guard import (
    NoReads,
    NotCapturable,
    RandomStates,
    Watch,
    draws,
    modules_unchanged,
    properties,
    python_random_states,
    writes,
)
from psgrad.engine.transforms.private_torch import (
    FakeTensorMode,
    inductor,
    storage_key,
    tree_flatten,
    tree_unflatten,
)
from psgrad.engine.transforms.tracer import map_tracers

Compiler = Literal["none", "inductor"]
Run = Callable[..., list[torch.Tensor]]

# The types of values that a function may take and return besides tensors.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Program:
    """A captured function: the kernels to run, and the structure of the function's results."""

    run: Run
    results: list[Any]  # the function's results, flat; `_TENSOR` where the next tensor goes
    spec: Any
    outside: list[torch.Tensor]  # the tensors that the function reads from outside, passed as arguments
    relied_on: list[Any]  # the properties of those tensors that must not change
    obstacle: str | None = None  # on a GPU: why it is not a CUDA graph

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        results = iter(self.run(*tensors, *self.outside))
        return tree_unflatten(
            [next(results) if item is _TENSOR else item for item in self.results], self.spec
        )

    @property
    def how(self) -> str:
        """The name of the backend, for messages."""
        return getattr(
            self.run, "how", f"kernel by kernel ({self.obstacle})" if self.obstacle else "kernel by kernel"
        )

    def fits(self) -> bool:
        """Whether the tensors from outside are unchanged, apart from their values."""
        return all(
            _address_and_properties(x) == before
            for x, before in zip(self.outside, self.relied_on, strict=True)
        )


_TENSOR = object()


def _address_and_properties(x: torch.Tensor) -> Any:
    return x.data_ptr(), x.requires_grad, properties(x)


def capture_program(function: Callable[..., Any], leaves: list[Any], spec: Any, compile: Compiler) -> Program:
    """The program of a function, which runs twice on tensors without values: once to find the tensors from
    outside, once to capture the kernels with these as arguments. Raises NotCapturable.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def call(given: Sequence[torch.Tensor], watch: Watch) -> tuple[list[Any], Any]:
        values = iter(given)
        args, kwargs = tree_unflatten(
            [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
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
        first.raise_if_refused()
        reads.raise_if_refused()
        first.require_nothing_kept()
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
    second.raise_if_refused()
    random_states.raise_if_refused()
    if first.kernels != second.kernels:
        raise NotCapturable("its operators change from one call to the next")
    if torch.is_grad_enabled() and any(x.requires_grad for x in outside):
        raise NotCapturable(
            "a tensor from outside requires a gradient, and PyTorch's autograd may follow it; call under"
            " torch.no_grad()"
        )
    graph = module.graph
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or writes(node.target) or draws(node.target)
    )
    obstacle = obstacle_to_cuda_graph(graph)
    for node in graph.nodes:
        node.meta.clear()  # tensors without values
    graph.set_codegen(torch.fx.graph.CodeGen())  # flat in, flat out
    module.recompile()
    run = _run_by(module, [*tensors, *outside], compile, obstacle)
    pattern = [_TENSOR if isinstance(item, torch.Tensor) else item for item in results]
    on_gpu = any(x.device.type == "cuda" for x in tensors)
    return Program(
        run,
        pattern,
        spec_out,
        outside,
        [_address_and_properties(x) for x in outside],
        obstacle if on_gpu else None,
    )


def _run_by(
    module: torch.fx.GraphModule, tensors: list[torch.Tensor], compile: Compiler, obstacle: str | None
) -> Run:
    if compile == "inductor":
        return Compiled(module, tensors)
    return CudaGraph(module.forward) if obstacle is None else module.forward


# -- other backends ------------------------------------------------------------------------------------------


def obstacle_to_cuda_graph(graph: torch.fx.Graph) -> str | None:
    """The reason why a program can't be a CUDA graph; None if it can."""
    devices = {
        node.meta["val"].device for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)
    }
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return "not all of it is on one GPU"
    arguments = {_memory(node) for node in graph.nodes if node.op == "placeholder"}
    written = {
        _memory(a)
        for node in graph.nodes
        if writes(node.target)
        for a in node.args[:1]
        if isinstance(a, torch.fx.Node)
    }
    if arguments & written:
        return "it writes into its arguments"
    if arguments & {_memory(node) for node in graph.output_node().all_input_nodes}:
        return "a result is a view of an argument"
    return None


def _memory(node: torch.fx.Node) -> Any:
    """A key that is equal for values that share memory."""
    value = node.meta.get("val")
    return storage_key(value.untyped_storage()) if isinstance(value, torch.Tensor) else node


class CudaGraph:
    """A program as a CUDA graph: one launch for all its kernels.

    A graph reads fixed addresses. An argument with the same address at each call (a weight) is read there. If
    the address of an argument changes, the argument is copied into a buffer from then on. The results are
    copies, because the next replay overwrites the graph's own. PyTorch advances its generators at each
    replay. If the graph can't be made (a library waits for the GPU), the kernels run one by one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.how = "CUDA graph"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.moving: set[int] = set()  # arguments that have a buffer, by position
        self.addresses: list[int] = []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self.how != "CUDA graph":
            return self.run(*tensors)
        addresses = [x.data_ptr() for x in tensors]
        moved = {
            i for i, (now, then) in enumerate(zip(addresses, self.addresses, strict=False)) if now != then
        } - self.moving
        if self.graph is None or moved:
            self.moving |= moved
            try:
                self._capture_graph(tensors, addresses)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.how = (
                    f"kernel by kernel, as no CUDA graph could be made: {str(error).partition(chr(10))[0]}"
                )
                return self.run(*tensors)
        assert self.graph is not None
        for i in self.moving:
            self.given[i].copy_(tensors[i])
        self.graph.replay()
        return [x.clone() for x in self.results]

    def _capture_graph(self, tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> None:
        self.addresses = addresses
        self.given = [x.clone() if i in self.moving else x for i, x in enumerate(tensors)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        before = random_state.states()
        with torch.cuda.stream(stream):  # libraries make their handles and workspaces at the first call
            self.run(*self.given)
        torch.cuda.current_stream().wait_stream(stream)
        random_state.restore(before)
        self.graph = torch.cuda.CUDAGraph()
        # Only this thread is checked for operations that a graph can't hold: another thread may copy the next
        # chunk to the GPU.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = self.run(*self.given)


class Compiled:
    """A program as compiled by PyTorch's compiler."""

    how = "inductor"

    def __init__(self, module: torch.fx.GraphModule, tensors: list[Any]) -> None:
        self.run: Run = inductor(module, tensors)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return self.run(*tensors)
