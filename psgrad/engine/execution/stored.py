"""Weights whose numbers lie elsewhere, or in another type, than operators see them: in half precision, in the
memory of the host, or in a checkpoint's file.

A `Stored` tensor has the shape, the type and the device that operators see. An operator on it brings the
numbers in, runs, and lets them go; a view of it is a view of what is stored. So a level of a transform holds
no numbers of a weight, whatever the model does with it, and no module has to be wrapped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from psgrad.engine.execution.weight_sources import InMemory, Quantised, WeightSource
from psgrad.engine.execution.weight_supply import Supply
from psgrad.engine.transforms.private_torch import (
    make_wrapper,
    no_torch_function,
    schema_of,
    storage_key,
    tree_map,
)
from psgrad.errors import ModelError

_aten = torch.ops.aten
# Operators that only make views. One that is missing here reads the numbers, and its result is as correct.
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.diagonal.default,
    _aten.expand.default,
    _aten.movedim.int,
    _aten.movedim.intlist,
    _aten.narrow.default,
    _aten.numpy_T.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unfold.default,
    _aten.unsqueeze.default,
    _aten.view.default,
}
_PRODUCTS = {_aten.addmm.default, _aten.linear.default, _aten.matmul.default, _aten.mm.default}
# Bytes of a weight that is widened at once, and of the slices of a larger one.
LARGEST_WHOLE, SLICE = 64 << 20, 32 << 20
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Stored(Tensor):
    """A weight whose numbers an operator brings in for as long as it runs.

    Attributes:
        source: where the numbers lie.
        view_of_source: the view of the source's layout that this tensor is.
        supply: brings the numbers to the device; None for those that lie there.
    """

    source: WeightSource
    view_of_source: Tensor
    supply: Supply | None

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        source: WeightSource,
        dtype: torch.dtype,
        supply: Supply | None = None,
        view: Tensor | None = None,
    ) -> Stored:
        seen = source.layout if view is None else view
        device = torch.device("cpu") if seen.is_meta else seen.device
        if isinstance(source, Quantised):
            device = source.device
        if supply is not None:
            device = supply.device
        return make_wrapper(  # type: ignore[no-any-return]
            cls,
            seen.shape,
            strides=seen.stride(),
            storage_offset=seen.storage_offset(),
            dtype=dtype,
            device=device,
        )

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        supply: Supply | None = None,
        view: Tensor | None = None,
    ) -> None:
        self.source, self.supply = source, supply
        self.view_of_source = source.layout if view is None else view

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.source.layout.dtype

    def numbers(self) -> Tensor:
        """A plain tensor with the numbers, on the device and in the type that operators see."""
        found = (
            self.source.read(self.view_of_source)
            if self.supply is None
            else self.supply.bring(self.source, self.view_of_source)
        )
        return found.to(self.dtype)

    def rows(self, rows: Tensor) -> Tensor:
        """[k, ...]: these rows (int64 [k]) as operators see them."""
        if self.supply is None:
            found = self.source.rows(self.view_of_source, rows)
        else:
            found = self.supply.bring_rows(self.source, self.view_of_source, rows)
        return found.to(self.dtype)

    def as_stored(self) -> Tensor:
        """A plain tensor with the numbers where they lie, on the CPU for those in a file, in their type."""
        return self.source.read(self.view_of_source)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if not all(issubclass(each, cls) or each in (Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented  # a traced tensor's level comes first
        kwargs = kwargs or {}
        if op in _VIEWS:
            return tree_map(args[0]._seen_as, op(args[0].view_of_source, *args[1:], **kwargs))
        if op is _aten._to_copy.default and set(kwargs) == {"dtype"} and kwargs["dtype"] in _FLOATS:
            return args[0]._in(kwargs["dtype"])
        if op is _aten.embedding.default and isinstance(args[0], Stored):
            return args[0].rows(args[1].reshape(-1)).reshape(*args[1].shape, *args[0].shape[1:])
        if schema_of(op).is_mutable and any(
            _is_written(op, place, value) for place, value in enumerate(args)
        ):
            raise next(each for each in args if isinstance(each, Stored))._written_by(op)
        if op in _PRODUCTS and not kwargs and (product := _product_by_slices(op, *args)) is not None:
            return product
        return op(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))

    def _seen_as(self, view: Any) -> Any:
        if not isinstance(view, Tensor):
            return view
        if self.supply is None and isinstance(self.source, InMemory):  # nothing else is kept of the source
            return Stored(InMemory(view), self.dtype)
        return Stored(self.source, self.dtype, self.supply, view)

    def _in(self, dtype: torch.dtype) -> Stored:
        return Stored(self.source, dtype, self.supply, self.view_of_source)

    def _written_by(self, op: Any) -> ModelError:
        if isinstance(self.source, Quantised):
            return ModelError(
                f"the model writes into a quantised weight of shape {tuple(self.shape)} ({op})",
                hint="name a model that is not quantised",
            )
        if self.supply is None and isinstance(self.source, InMemory):
            return ModelError(
                f"the model writes into a frozen weight that is stored as {self.stored_dtype} ({op})",
                hint="set model.dtype: float32",
            )
        return ModelError(
            f"the model writes into an offloaded weight of shape {tuple(self.shape)} ({op})",
            hint="set engine.parameters: resident",
        )

    def memory_key(self) -> int:
        """Equal for views of the same numbers: for a program of recorded kernels (recorder.py)."""
        if isinstance(self.source, InMemory):
            return storage_key(self.view_of_source.untyped_storage())
        return id(self.source)

    def data_ptr(self) -> int:
        return self.view_of_source.data_ptr() if isinstance(self.source, InMemory) else id(self.source)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({tuple(self.shape)}, {self.stored_dtype}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        if isinstance(self.source, InMemory):
            return Stored(InMemory(self.view_of_source.clone()), self.dtype, self.supply)
        return self._seen_as(self.view_of_source)  # type: ignore[no-any-return]


def _product_by_slices(op: Any, x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """[..., outputs]: a product with a weight whose numbers are too many to be widened at once; None for
    others. The weights of a head for a large vocabulary are such.
    """
    if op is _aten.addmm.default:
        bias, x, weight = x, weight, bias
    columns = weight.t() if op is _aten.linear.default else weight
    if isinstance(x, Stored) or not isinstance(columns, Stored) or columns.dim() != 2:
        return None
    wide = columns.numel() * columns.dtype.itemsize
    if wide <= LARGEST_WHOLE or columns.stored_dtype == columns.dtype:
        return None
    inputs, outputs = columns.shape
    each = -(-max(inputs, outputs) * SLICE // wide)
    if outputs < inputs:
        parts = zip(x.split(each, -1), columns.split(each), strict=True)
        result = sum(_aten.matmul.default(some, part) for some, part in parts)
    else:
        result = x.new_empty((*x.shape[:-1], outputs))
        for into, part in zip(result.split(each, -1), columns.split(each, 1), strict=True):
            into.copy_(_aten.matmul.default(x, part))
    return result if bias is None else result + bias  # type: ignore[return-value]


def _numbers(value: Any) -> Any:
    return value.numbers() if isinstance(value, Stored) else value


def _is_written(op: Any, place: int, value: Any) -> bool:
    written = schema_of(op).arguments[place].alias_info
    return isinstance(value, Stored) and written is not None and written.is_write


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor in the type that a weight in memory has: halves beside float32 as they are stored, others as
    operators see them; the tensor itself, but for a `Stored` one.
    """
    data = tensor.data
    if not isinstance(data, Stored):
        return tensor
    found = data.as_stored()
    return found if data.dtype == torch.float32 and found.itemsize == 2 else found.to(data.dtype)
