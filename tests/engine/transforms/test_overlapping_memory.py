"""Writes into tensors of which several elements are one place in memory.

What is left of several writes to one place goes by the order of a kernel, and PyTorch's own kernels differ
among themselves: there is no right number. PyTorch refuses where a stride is zero, and lets the rest pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.engine.transforms.refused_writes import overlaps_itself
from psgrad.errors import TransformError

Write = Callable[[Tensor], object]

OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda t: t.unfold(1, 3, 1)[..., 0:2, :].flatten(0, 0)[0],
    "unfold, transposed": lambda t: t.unfold(0, 2, 1)[:, 1].t(),
    "as_strided": lambda t: t.as_strided((3, 3), (2, 1)),
    "expand": lambda t: t[:, :1].expand(3, 4),
    "expand of a scalar": lambda t: t[0, 0].expand(2, 2),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "one window": lambda t: t.unfold(1, 4, 1)[:, 0],
    "windows side by side": lambda t: t.unfold(1, 2, 2)[1],
    "diagonal of windows": lambda t: t.unfold(1, 2, 1)[:, ::2, 0],
    "as_strided": lambda t: t.as_strided((2, 3), (3, 2)),
    "expand to the same shape": lambda t: t.expand(3, 4),
}
ZEROS = torch.zeros(2, 2, dtype=torch.int64)
WRITES: dict[str, Write] = {
    "sin_": lambda v: v.sin_(),
    "hypot_": lambda v: v.hypot_(torch.tensor(1.0)),
    "add_ of a number": lambda v: v.add_(1),
    "lerp_": lambda v: v.lerp_(torch.ones(v.shape), 0.5),
    "addcmul_": lambda v: v.addcmul_(torch.tensor(2.0), torch.tensor(1.5)),
    "copy_": lambda v: v.copy_(torch.arange(float(v.numel())).view(v.shape)),
    "setitem": lambda v: v.__setitem__(..., torch.arange(float(v.numel())).view(v.shape)),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones(v.shape).tril() > 0, 2.0),
    "masked_scatter_": lambda v: v.masked_scatter_(torch.ones(v.shape) > 0, torch.ones(v.shape)),
    "cumsum_": lambda v: v.cumsum_(0),
    "tril_": lambda v: v.tril_(),
    "renorm_": lambda v: v.renorm_(2, 0, 1.0),
    "addr_": lambda v: v.addr_(torch.ones(v.shape[0]), torch.ones(v.shape[1])),
    "index_add_": lambda v: v.index_add_(0, ZEROS[0], torch.ones(2, v.shape[1])),
    "index_put_": lambda v: v.index_put_((ZEROS[0],), torch.tensor(1.0)),
    "scatter_add_": lambda v: v.scatter_add_(0, ZEROS, torch.ones(2, 2)),
    "scatter_reduce_": lambda v: v.scatter_reduce_(0, ZEROS, torch.ones(2, 2), "prod"),
    "relu_": lambda v: F.relu_(v),
    "hardswish": lambda v: F.hardswish(v, inplace=True),
    "bernoulli_": lambda v: v.bernoulli_(0.5),
    "normal_": lambda v: v.normal_(),
}
REFUSED = r"writes in place into .*|as_strided with strides .*, to be written to"


def written(view: Callable[[Tensor], Tensor], write: Write) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        t = x.clone()
        write(view(t))
        return t

    return f


@pytest.mark.parametrize("view", OVERLAPPING)
@pytest.mark.parametrize("write", WRITES)
def test_write_into_overlapping_memory_refused(view: str, write: str) -> None:
    f, x = written(OVERLAPPING[view], WRITES[write]), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    with pytest.raises(TransformError, match="has one place in memory for several elements"):
        vmap(f, randomness="different")(x)
    for refused in (
        lambda: grad(lambda x: vmap(f, randomness="different")(x).sum())(x),
        lambda: vmap(grad(lambda x: f(x).sum()), randomness="different")(x),
        lambda: jvp(f, (x[0],), (x[0],)),
    ):
        with pytest.raises(TransformError, match=REFUSED):
            refused()


@pytest.mark.parametrize("view", APART)
@pytest.mark.parametrize("write", [name for name in WRITES if name not in ("bernoulli_", "normal_")])
def test_write_through_window_that_does_not_overlap(view: str, write: str) -> None:
    f, x = written(APART[view], WRITES[write]), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    torch.testing.assert_close(vmap(f)(x), torch.stack([f(one) for one in x]))


@pytest.mark.parametrize("view", OVERLAPPING)
@pytest.mark.parametrize("write", [lambda v: v.zero_(), lambda v: v.fill_(2.0)], ids=["zero_", "fill_"])
def test_write_of_one_number_into_overlapping_memory(view: str, write: Write) -> None:
    """Whatever the order of the writes, the number is there."""
    f, x = written(OVERLAPPING[view], write), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    assert torch.equal(vmap(f)(x), torch.stack([f(one) for one in x]))


def test_overlaps_itself_as_counted() -> None:
    found = set()
    for shape in itertools.product((0, 1, 2, 3), repeat=3):
        for strides in itertools.product((0, 1, 2, 3, 5), repeat=3):
            places = [
                sum(i * s for i, s in zip(place, strides, strict=True))
                for place in itertools.product(*map(range, shape))
            ]
            expected = len(set(places)) < len(places)
            found.add(expected)
            assert overlaps_itself(torch.Size(shape), strides) == expected, (shape, strides)
    assert found == {True, False}


READS_ELSEWHERE: dict[str, Write] = {
    "its diagonal": lambda t: t[:, 1:].addcmul_(torch.ones(2, 3), t[:, 1:].diagonal(1), value=0.5),
    "a shifted view": lambda t: t[:, 1:].add_(t[:, :-1]),
    "its transpose": lambda t: t[:, :3].mul_(t[:, :3].t()),
    "one of its columns": lambda t: t.sub_(t[:, 2:3]),
    "reversed by a copy into a part": lambda t: t[:2, 1:].copy_(t[1:, :3]),
}
READS_THE_SAME: dict[str, Write] = {
    "itself": lambda t: t.mul_(t),
    "the same view taken twice": lambda t: t[:, 1:].addcmul_(t[:, 1:], t[:, 1:]),
    "another half": lambda t: t[:, :2].add_(t[:, 2:]),
    "every second column": lambda t: t[:, ::2].mul_(t[:, 1::2]),
}


@pytest.mark.parametrize("write", READS_ELSEWHERE)
def test_write_that_reads_what_it_writes_refused(write: str) -> None:
    """PyTorch refuses some of them, and for the rest returns a number that depends on its kernel's order."""
    f, x = written(lambda t: t, READS_ELSEWHERE[write]), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    for refused in (
        lambda: vmap(f)(x),
        lambda: vmap(grad(lambda x: f(x).sum()))(x),
        lambda: grad(lambda x: vmap(f)(x).sum())(x),
        lambda: jvp(f, (x[0],), (x[0],)),
    ):
        with pytest.raises(TransformError, match="memory that another argument reads as other elements"):
            refused()


@pytest.mark.parametrize("write", READS_THE_SAME)
def test_write_that_reads_the_same_elements_or_others_apart(write: str) -> None:
    f, x = written(lambda t: t, READS_THE_SAME[write]), torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    torch.testing.assert_close(vmap(f)(x), torch.stack([f(one) for one in x]))
    expected = []
    for one in x:
        leaf = one.clone().requires_grad_()
        # autograd keeps what it needs as it was before the write
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            expected += torch.autograd.grad(f(leaf).sum(), leaf)
    torch.testing.assert_close(vmap(grad(lambda x: f(x).sum()))(x), torch.stack(expected))
