"""PyTorch's operator database as programs: calls of its operators, in place and through views too, as
functions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.seeds import set_seed

# Samples of one database entry that are looked at.
MOST_SAMPLES = 4

# The first sample of each operator in every run of the tests, all in the sweep.
few_or_all_samples = pytest.mark.parametrize(
    "most",
    [pytest.param(1, id="one sample"), pytest.param(MOST_SAMPLES, id="all", marks=pytest.mark.sweep)],
)

# What is wrong with PyTorch's own jvp of some operators. The oracle is then the Jacobian, row by row, from
# its reverse mode.
WITHOUT_DUALS = {
    "logcumsumexp": "right to 1e-6 only",
    "masked.logaddexp": "nan at masked places",
    "nn.functional.linear_cross_entropy.chunked": "another number than finite differences",
    "nn.functional.linear_cross_entropy.chunked_none": "another number than finite differences",
    "scatter_reduce.prod": "another number than finite differences",
}


def entries(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The database by name; an operator with several variants has one name a variant."""
    return {_name(entry): entry for entry in op_db if dtype in entry.supported_dtypes("cpu")}


def _name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


@dataclass(frozen=True)
class Program:
    """One call of an operator as a function of all tensors among its arguments; it returns all tensors of its
    result.
    """

    name: str
    has_duals: bool
    call: Callable[..., Any]
    arguments: Any
    tensors: tuple[Tensor, ...]
    differentiable: tuple[int, ...]  # which of the tensors have a gradient
    results: tuple[Tensor, ...]
    tracked: tuple[int, ...]  # which of the results have one

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], sample: Any, has_duals: bool) -> Program:
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        leaves = [_widened(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def call(first: Any, rest: Any, kwargs: Any) -> Any:
            out = function(first, *rest, **kwargs)
            return sample.output_process_fn_grad(out) if sample.output_process_fn_grad is not None else out

        set_seed(0)
        # Cloned behind the leaf, as an operator may write in place; the layout stays as it was.
        cloned = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        results = _tensors(call(*tree_unflatten(cloned, spec)))
        return cls(
            name,
            has_duals,
            call,
            tree_unflatten(leaves, spec),
            tuple(tensor.detach() for tensor in given),
            tuple(i for i, tensor in enumerate(given) if tensor.requires_grad),
            tuple(result.detach() for result in results),
            tuple(i for i, result in enumerate(results) if result.requires_grad),
        )

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves, spec = tree_flatten(self.arguments)
        given = iter(tensors)
        return _tensors(
            self.call(
                *tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
            )
        )

    def with_leaves(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, with `leaves` in the places of the differentiable ones."""
        given = list(tensors)
        for i, leaf in zip(self.differentiable, leaves, strict=True):
            given[i] = leaf
        return given

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] for i in self.differentiable]


def _widened(tensor: Tensor) -> Tensor:
    """In float64, where the database has weights in float32 beside it: those would round by more than an
    error may be.
    """
    return (
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.dtype == torch.float32
        else tensor
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def programs(
    entry: Any, dtype: torch.dtype = torch.float64, most: int = MOST_SAMPLES, device: str = "cpu"
) -> Iterator[Program]:
    """The entry's first sample calls, `most` of them; each also in place and written through, where PyTorch
    can differentiate that.

    The database says how to stay where an operator is defined (symmetric matrices, places that no mask
    hides): its wrapper.
    """
    set_seed(0)
    has_duals = _name(entry) not in WITHOUT_DUALS
    samples = entry.sample_inputs(device, dtype, requires_grad=entry.supports_autograd)
    for number, sample in enumerate(list(islice(samples, most))):
        yield Program.of(
            f"call {number}", partial(entry.gradcheck_wrapper, entry.get_op()), sample, has_duals
        )
        for variant, function in (
            ("in place", _in_place(entry)),
            ("written through", _written_through(entry, sample)),
        ):
            if function is not None:
                try:
                    yield Program.of(f"call {number} {variant}", function, sample, has_duals)
                except (
                    RuntimeError,
                    TypeError,
                ):  # another shape or dtype than the target's; not a write that PyTorch allows
                    continue


def _in_place(entry: Any) -> Callable[..., Any] | None:
    """The in-place variant, on a copy of its target."""
    variant = entry.inplace_variant
    if variant is None or (entry.supports_autograd and not entry.supports_inplace_autograd):
        return None
    return lambda x, *args, **kwargs: entry.gradcheck_wrapper(variant, x.clone(), *args, **kwargs)


def _overlaps(view: Tensor) -> bool:
    """Whether several elements lie at one place: a write to such a view is undefined in PyTorch."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.unique().numel() < places.numel()


def _written_through(entry: Any, sample: Any) -> Callable[..., Any] | None:
    """For a view: what its base becomes when the view is written to, and what another view of that base then
    says.
    """
    if not isinstance(sample.input, Tensor) or not entry.supports_autograd:
        return None
    target = sample.input.detach().clone()
    view = entry(target, *sample.args, **sample.kwargs)
    if (
        not isinstance(view, Tensor)
        or view is target
        or not torch._C._is_alias_of(view, target)
        or _overlaps(view)
    ):
        return None

    def written(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        base = x.clone()
        before, view = base.reshape(-1), entry(base, *args, **kwargs)
        view.sin_()
        return base, before, view

    return written
