"""What a test makes without a device is made on the device of the run; what psgrad makes stays where psgrad
makes it.

So a test that names no device checks psgrad's placement. PyTorch's own default device would move psgrad's
tensors, too, and hide the mistakes that are looked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, testing

_TESTS = Path(__file__).parents[1]
_OWN = f"{_TESTS.parent / 'psgrad'}/"
_WITH_A_DEVICE = (
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace"),
    *("logspace", "eye", "tensor", "as_tensor", "asarray", "scalar_tensor", "tril_indices", "triu_indices"),
    *("empty_strided", "sparse_coo_tensor"),
)
_OF_THE_HOST = ("from_numpy", "frombuffer")
_TO_NUMPY = ("numpy", "__array__")


@contextmanager
def made_on(device: torch.device) -> Iterator[None]:
    """While it lasts, PyTorch's factories put the tensors of tests on `device`, and tests may read results
    wherever they are: as NumPy arrays, and beside an expected tensor on another device.
    """
    import torch._decomp.decompositions_for_jvp  # torch.func's oracles compile it with the plain factories

    with pytest.MonkeyPatch.context() as patch:
        for name in _WITH_A_DEVICE:
            patch.setattr(torch, name, _with_device(getattr(torch, name), device))
        for name in _OF_THE_HOST:
            patch.setattr(torch, name, _moved(getattr(torch, name), device))
        for name in _TO_NUMPY:
            patch.setattr(Tensor, name, _from_the_host(getattr(Tensor, name)))
        patch.setattr(testing, "assert_close", partial(testing.assert_close, check_device=False))
        yield


def _called_by_a_test() -> bool:
    """Whether the nearest caller that is psgrad's or a test's is a test's: a layer of PyTorch that a test
    makes is the test's.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            return False
        if file.startswith(str(_TESTS)):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _with_device(make: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None or kwargs.get("out") is not None or not _called_by_a_test():
            return make(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != device.type:
            return make(*args, **kwargs).to(device)
        return make(*args, **{**kwargs, "device": device})

    return made


def _moved(make: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        found = make(*args, **kwargs)
        return found.to(device) if _called_by_a_test() else found

    return made


def _from_the_host(convert: Callable[..., Any]) -> Callable[..., Any]:
    def converted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return convert(tensor.cpu() if _called_by_a_test() else tensor, *args, **kwargs)

    return converted
