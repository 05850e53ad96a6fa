"""Programs written for torch.func, with the import replaced: equal results, and errors where torch.func has errors.

What test_semantics.py, test_forward.py and test_worked_examples.py hold is not here again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from psgrad.engine import transforms

Program = Callable[[Any], Any]

X = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
T = torch.tensor([1.0, -2.0, 0.7], dtype=torch.float64)
M = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).cos()


def same(ours: Any, theirs: Any) -> None:
    """One structure; tensors of the same dtype, numbers, and relation to PyTorch's autograd."""
    (found, spec), (expected, expected_spec) = tree_flatten(ours), tree_flatten(theirs)
    assert spec == expected_spec
    for x, y in zip(found, expected, strict=True):
        if not isinstance(y, Tensor):
            assert x == y
            continue
        assert type(x) is Tensor
        torch.testing.assert_close(x, y.detach() if type(y) is not Tensor else y, rtol=1e-11, atol=1e-12, equal_nan=True)
        assert x.requires_grad == y.requires_grad


def under_no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


SWITCHES: dict[str, Program] = {
    "vmap under no_grad inside grad": lambda tf: tf.grad(lambda x: (under_no_grad(tf.vmap(torch.sin))(x) * x).sum())(X),
    "jvp under no_grad inside grad": lambda tf: tf.grad(lambda x: (under_no_grad(tf.jvp)(torch.sin, (x,), (T,))[0] * x).sum())(X),
    "what vmap's function sees": lambda tf: under_no_grad(tf.vmap(lambda x: torch.tensor(torch.is_grad_enabled())))(M),
    "a gradient wanted for the tangent": lambda tf: tf.jvp(torch.sin, (X,), (T.clone().requires_grad_(),)),
    "a whole number's tangent": lambda tf: tf.jvp(lambda x: ((5 * x).long(), (5 * x).long() * x), (X,), (T,)),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_as_torch_func(name: str) -> None:
    same(SWITCHES[name](transforms), SWITCHES[name](torch.func))
