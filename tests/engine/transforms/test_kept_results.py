"""Results that checkpoint keeps from its first run: the same numbers, from fewer products."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from psgrad.engine import transforms
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import checkpoint, grad, vmap
from psgrad.engine.transforms.kept_results import Room
from psgrad.engine.transforms.private_torch import DispatchMode, count_write, make_wrapper, without_modes
from psgrad.engine.transforms.scratch_file import ScratchFile, ScratchFolder
from psgrad.engine.transforms.tracer import Tracer, innermost
from tests.engine.transforms.nests import NESTS, agree, plain

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, ROWS, SAMPLES = 32, 3, 4
MUCH = 1 << 24


class Kernels(DispatchMode):
    """Counts the kernels that run on plain tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented
        self.counts[op.name().removeprefix("aten::").partition(".")[0]] += 1
        return op(*args, **(kwargs or {}))


def weights(outputs: int = WIDTH) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(outputs, WIDTH) / 6, torch.randn(WIDTH, outputs) / 6, torch.randn(WIDTH)]


def samples() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, ROWS, WIDTH)


def layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(x @ a.t()), b, c)


def writing(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Writes into results of products, and into views of them."""
    hidden = F.linear(x, a)
    hidden.mul_(1.5)
    hidden[:, :4].add_(hidden[:, 4:8].clone())
    out = torch.addmm(c, hidden.sin(), b.t())
    view = out.view(-1)
    view.tanh_()
    return out


def composed(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, torch.addmm(c, x, a.t()).tanh(), b.t())


def drawing(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.dropout(F.linear(F.dropout(F.linear(x, a), 0.3).sin(), b, c), 0.4)


def batched_products(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    left = torch.bmm(x.unsqueeze(0), a.t().unsqueeze(0))
    return torch.baddbmm(c.expand(1, ROWS, WIDTH), left.cos(), b.t().unsqueeze(0)).squeeze(0)


def twice_the_same(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.linear(x, a).sin() @ b.t() + F.linear(x, a).cos() @ b.t() + F.linear(x * 1, a)[:, :1] * c


def frozen(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.linear(x, a.detach()).sin(), b, c)


def convolved(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    kernel = a.reshape(-1)[: WIDTH * 3 * 3].view(3, 3, WIDTH // 1)[:, :, :31]
    return F.conv1d(x.unsqueeze(0), kernel, padding=15).sin().squeeze(0)[:, :WIDTH] @ b[:, :WIDTH].t() + c


def parallel(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    left, right = F.linear(x.sin(), a), F.linear(x.cos(), b, c)
    return (x - right.view(-1).neg().view(ROWS, WIDTH)).clone() + left.float().double().t().t()


BLOCKS: dict[str, Callable[..., Tensor]] = {
    each.__name__: each
    for each in (
        layers,
        writing,
        composed,
        drawing,
        batched_products,
        twice_the_same,
        frozen,
        convolved,
        parallel,
    )
}


def loss_of(block: Callable[..., Tensor], room: Room | None) -> Callable[..., Tensor]:
    """Of three blocks, one after another, with the same weights."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, x, *params.values(), room=room)
        return x.square().sum()

    return loss


def gradients_of(block: Callable[..., Tensor], room: Room | None, randomness: str = "error") -> Any:
    params = dict(zip("abc", weights(), strict=True))
    torch.manual_seed(2)
    return per_sample_gradients(loss_of(block, room), params, samples(), randomness=randomness).materialise()


@pytest.mark.parametrize("block", BLOCKS)
def test_kept_results_equal_recomputed_ones(block: str) -> None:
    randomness = "different" if block == "drawing" else "error"
    expected = gradients_of(BLOCKS[block], None, randomness)
    for size in (1000, 3 * SAMPLES * ROWS * WIDTH * 8, MUCH):
        found = gradients_of(BLOCKS[block], Room(size), randomness)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each != "drawing"])
def test_kept_results_one_sample_autograd(block: str) -> None:
    found = gradients_of(BLOCKS[block], Room(MUCH))
    for sample, x in enumerate(samples()):
        leaves = [w.requires_grad_() for w in weights()]
        for _ in range(3):
            x = BLOCKS[block](x, *leaves)
        expected = torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True)
        for name, value in zip("abc", expected, strict=True):
            torch.testing.assert_close(found[name][sample], value, rtol=1e-10, atol=1e-10)


def products_of(block: Callable[..., Tensor], room: Room | None) -> int:
    with Kernels() as kernels:
        gradients_of(block, room)
    return sum(kernels.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul"))


def read_at_the_end(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(x @ a.t()), b, c).sin()


def two_parts(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """As a transformer's block: what is read of the first part is added to the second one."""
    x = x + F.linear(x.sin(), a)
    return x + F.linear(x.tanh(), b, c)


@pytest.mark.parametrize(
    ("block", "left_out"), [(read_at_the_end, 0), (layers, 3), (composed, 3), (two_parts, 3)]
)
def test_kept_results_are_not_computed_again(block: Callable[..., Tensor], left_out: int) -> None:
    """Three blocks have two products each, which run once where all are kept. Nothing reads a last one
    that is only added to others: it runs once in any case.
    """
    none = products_of(block, None)
    assert products_of(block, Room(MUCH)) == none - 6
    assert products_of(block, Room(2 * SAMPLES * ROWS * WIDTH * 8)) == none - 2 - left_out
    assert products_of(block, Room(0)) == none - left_out


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [0, 2 * SAMPLES * ROWS * WIDTH * 8])
def test_results_from_a_scratch_file_equal_recomputed_ones(block: str, size: int, tmp_path: Path) -> None:
    randomness = "different" if block == "drawing" else "error"
    expected = gradients_of(BLOCKS[block], None, randomness)
    found = gradients_of(BLOCKS[block], Room(size, ScratchFolder(tmp_path)), randomness)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 2 * SAMPLES * ROWS * WIDTH * 8, MUCH])
def test_results_from_a_scratch_file_are_not_computed_again(size: int, tmp_path: Path) -> None:
    assert products_of(layers, Room(size, ScratchFolder(tmp_path))) == products_of(layers, Room(MUCH))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["no folder", "a full disk", "a write that ends early", "a failing read"])
def test_a_scratch_file_that_fails_costs_products_alone(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, numbers: memoryview, place: int) -> int:
        if fault == "a full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(numbers) - (fault == "a write that ends early")

    def read(file: int, numbers: list[memoryview], place: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "folder").mkdir()
    scratch = ScratchFolder(tmp_path / "folder")
    if fault == "no folder":
        (tmp_path / "folder").rmdir()
    else:
        monkeypatch.setattr(os, "pwrite", write)
        monkeypatch.setattr(os, "preadv", read)
    assert products_of(layers, Room(0, scratch)) == products_of(layers, Room(0))
    found = gradients_of(layers, Room(0, scratch))
    for name, value in gradients_of(layers, None).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5)])
def test_a_tensor_comes_back_from_a_scratch_file_as_it_was(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = ScratchFile(ScratchFolder(tmp_path))
    first, second = torch.randn(shape, dtype=dtype), torch.randn(4, dtype=torch.float32)
    places = [file.write(first), file.write(second)]
    file.end_writing()
    for place, tensor in zip(places, [first, second], strict=True):
        assert place is not None
        found = file.read(place, torch.device("cpu"))
        assert found is not None
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_results_that_pass_views_and_sums_are_left_out() -> None:
    with Kernels() as kernels:
        found = gradients_of(parallel, Room(0))
    with Kernels() as all_kernels:
        expected = gradients_of(parallel, None)
    assert (
        all_kernels.counts["mm"] + all_kernels.counts["linear"] - 6
        == kernels.counts["mm"] + kernels.counts["linear"]
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def read_by_an_operator(x: Tensor) -> Tensor:
    return x.sin()


def read_by_a_branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x * 3


def read_by_a_call(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin() * y, x)


def read_in_a_nested_call(x: Tensor) -> Tensor:
    return checkpoint(lambda: x.sin() * x)


def read_by_a_bare_except(x: Tensor) -> Tensor:
    try:
        return x.exp()
    except BaseException:
        return x


@pytest.mark.parametrize(
    "read",
    [read_by_an_operator, read_by_a_branch, read_by_a_call, read_in_a_nested_call, read_by_a_bare_except],
)
@pytest.mark.parametrize("always", [True, False])
def test_no_number_of_a_left_out_result_is_read(read: Callable[[Tensor], Tensor], always: bool) -> None:
    """Also where the second run alone reads it: then this run is made once more, with all numbers."""

    def gradient(room: Room | None) -> Tensor:
        runs = 0

        def block(x: Tensor, a: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            hidden = F.linear(x, a)
            return read(hidden) if always or runs > 1 else hidden

        def f(a: Tensor, x: Tensor) -> Tensor:
            return checkpoint(block, x, a, room=room).square().sum()

        if read is read_by_a_branch:  # no two samples have the same number
            return grad(f)(weights()[0], samples()[0])  # type: ignore[no-any-return]
        return vmap(grad(f), (None, 0))(weights()[0], samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(Room(0)), gradient(None), rtol=0, atol=0)


def test_a_result_of_frozen_weights_that_a_nested_call_reads() -> None:
    a, b, _ = weights()

    def gradient(room: Room | None) -> Tensor:
        def block(x: Tensor, b: Tensor) -> Tensor:
            frozen = F.linear(x.detach(), a)
            return checkpoint(lambda y: F.linear(y, b) * frozen, x)

        def f(b: Tensor, x: Tensor) -> Tensor:
            return checkpoint(block, x, b, room=room).square().sum()

        return vmap(grad(f), (None, 0))(b, samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(Room(0)), gradient(None), rtol=0, atol=0)


def test_results_that_take_most_for_a_byte_stay() -> None:
    """[.., 128] of 32 multiplications each make room for [.., 32] of 128 each."""
    params = dict(zip("abc", weights(4 * WIDTH), strict=True))
    room = Room(SAMPLES * ROWS * 4 * WIDTH * 8)

    def shapes(room: Room | None) -> Counter[tuple[int, ...]]:
        found: Counter[tuple[int, ...]] = Counter()

        class Shapes(Kernels):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = super().__torch_dispatch__(op, types, args, kwargs)
                if result is not NotImplemented and op.name() in ("aten::mm", "aten::linear", "aten::matmul"):
                    found[tuple(args[0].shape[-1:]) + tuple(result.shape[-1:])] += 1
                return result

        with Shapes():
            per_sample_gradients(loss_of(read_at_the_end, room), params, samples())
        return found

    fewer = shapes(None) - shapes(room)
    assert sum(fewer.values()) == 3, fewer  # the narrow ones, of all three blocks


@pytest.mark.parametrize("nest", NESTS)
def test_kept_results_in_every_nest(nest: str) -> None:
    weight = weights()[0]

    def wide(x: Tensor, y: Tensor) -> Tensor:
        return plain((x @ weight[: x.shape[-1]] @ weight.t()[:, : x.shape[-1]]).sin(), y)

    agree(
        NESTS[nest](transforms, lambda x, y: checkpoint(wide, x, y, room=Room(MUCH))),
        NESTS[nest](torch.func, wide),
    )


def test_kept_results_under_autocast() -> None:
    a, b, c = (w.float() for w in weights())

    def run(room: Room | None) -> Tensor:
        def f(a: Tensor, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return checkpoint(layers, x, a, b, c, room=room).float().square().sum()

        return vmap(grad(f), (None, 0))(a, samples().float())  # type: ignore[no-any-return]

    torch.testing.assert_close(run(Room(MUCH)), run(None), rtol=0, atol=0)


def test_a_function_that_changes_is_not_given_what_it_had_computed() -> None:
    """The gradient is that of the second run, as without a room."""

    def gradient(room: Room | None) -> Tensor:
        runs = 0

        def block(x: Tensor, a: Tensor) -> Tensor:
            nonlocal runs
            runs += 1
            return F.linear(x.roll(runs, 0), a).sin()

        def f(a: Tensor, x: Tensor) -> Tensor:
            return checkpoint(block, x, a, room=room).square().sum()

        return vmap(grad(f), (None, 0))(weights()[0], samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(Room(MUCH)), gradient(None), rtol=0, atol=0)


def test_a_kept_result_that_was_written_to_is_computed() -> None:
    """Written to as a level below writes: PyTorch counts it, and no rule sees it."""
    seen: list[Tensor] = []

    def gradient(write: bool) -> Tensor:
        def block(x: Tensor, a: Tensor) -> Tensor:
            hidden = F.linear(x, a)
            seen.append(hidden)
            return hidden.sin()

        def f(a: Tensor, x: Tensor) -> Tensor:
            seen.clear()
            out = checkpoint(block, x, a, room=Room(MUCH))
            if write:
                with without_modes():
                    count_write([innermost(seen[0]).zero_()])
            return out.square().sum()

        return vmap(grad(f), (None, 0))(weights()[0], samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


def test_a_result_that_was_written_to_does_not_go_to_the_disk(tmp_path: Path) -> None:
    """A product that takes longer for a byte needs its memory."""
    a, b, _ = weights()

    def gradient(write: bool) -> Tensor:
        runs: list[Tensor] = []

        def block(x: Tensor, a: Tensor) -> Tensor:
            hidden = F.linear(x, a)
            sines = hidden.sin()
            runs.append(hidden)
            if write and len(runs) == 1:
                with without_modes():
                    count_write([innermost(hidden).zero_()])
            return sines * (torch.cat([x, x], -1) @ torch.cat([a, b])).cos()

        room = Room(SAMPLES * ROWS * WIDTH * 8, ScratchFolder(tmp_path))

        def f(a: Tensor, x: Tensor) -> Tensor:
            return checkpoint(block, x, a, room=room).square().sum()  # type: ignore[no-any-return]

        return vmap(grad(f), (None, 0))(a, samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)


class Elsewhere(Tensor):
    """A tensor whose numbers lie in another one, as those of quantised weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        found = make_wrapper(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        found.inner = inner
        return found  # type: ignore[no-any-return]

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = op(*(x.inner if isinstance(x, cls) else x for x in args), **(kwargs or {}))
        return cls(found) if op is torch.ops.aten.detach.default else found


def test_weights_without_memory_are_told_apart() -> None:
    """The second run calls the two products in another order."""
    runs = 0
    first, second = (
        nn.Parameter(Elsewhere(w), requires_grad=False) for w in (weights()[0], weights()[1].clone())
    )

    def block(x: Tensor, a: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        x = F.linear(x, a)
        if runs == 1:
            return F.linear(x, first).sin() + F.linear(x, second).cos()
        other = F.linear(x, second).cos()
        return F.linear(x, first).sin() + other

    def gradient(room: Room | None) -> Tensor:
        nonlocal runs
        runs = 0
        loss = lambda a, x: checkpoint(block, x, a, room=room).square().sum()
        return vmap(grad(loss), (None, 0))(weights()[2].expand(WIDTH, -1) / 6, samples())  # type: ignore[no-any-return]

    torch.testing.assert_close(gradient(Room(MUCH)), gradient(None), rtol=1e-12, atol=1e-12)


@pytest.mark.long
@given(
    sizes=st.lists(st.integers(32, 40), min_size=2, max_size=4),
    rows=st.integers(1, 4),
    room=st.integers(0, 1 << 15),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_kept_results_of_any_stack(sizes: list[int], rows: int, room: int, seed: int) -> None:
    """The oracle: autograd, sample by sample."""
    torch.manual_seed(seed)
    params = {
        str(place): torch.randn(outputs, inputs, dtype=torch.float64) / 6
        for place, (inputs, outputs) in enumerate(pairwise(sizes))
    }
    batch, shared = torch.randn(3, rows, sizes[0], dtype=torch.float64), Room(room)

    def through(params: dict[str, Tensor], x: Tensor, block: Callable[..., Any]) -> Tensor:
        for weight in params.values():
            x = block(lambda x, weight: F.linear(x.sin(), weight), x, weight)
        return x.square().sum()

    found = per_sample_gradients(
        lambda params, x: through(params, x, lambda f, *xs: checkpoint(f, *xs, room=shared)), params, batch
    ).materialise()
    for sample, x in enumerate(batch):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        expected = torch.autograd.grad(through(leaves, x, lambda f, *xs: f(*xs)), list(leaves.values()))
        for name, value in zip(leaves, expected, strict=True):
            torch.testing.assert_close(found[name][sample], value, rtol=1e-10, atol=1e-12)


# -- random blocks -------------------------------------------------------------------------------------------

Again = Callable[..., Tensor]  # checkpoint, or a plain call
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Again], Tensor]] = {
    "product": lambda x, y, w, again: F.linear(x, w),
    "product with a constant": lambda x, y, w, again: F.linear(x.detach(), w.detach()),
    "matrix product": lambda x, y, w, again: torch.addmm(y, x, w),
    "sum": lambda x, y, w, again: x + y,
    "difference": lambda x, y, w, again: x - y,
    "negative": lambda x, y, w, again: -x,
    "view": lambda x, y, w, again: x.view(-1).view(ROWS, WIDTH),
    "reshaped transpose": lambda x, y, w, again: x.t().reshape(ROWS, WIDTH),
    "part": lambda x, y, w, again: torch.cat([x[1:], y[:1]]),
    "sine": lambda x, y, w, again: x.sin(),
    "product of numbers": lambda x, y, w, again: x * y,
    "write": lambda x, y, w, again: x.clone().add_(y),
    "write into a view": lambda x, y, w, again: _with_first_row_written(x, y),
    "nested product": lambda x, y, w, again: again(lambda z: F.linear(z, w) + z, x),
    "nested closure": lambda x, y, w, again: again(lambda: x.cos() - y),
}


def _with_first_row_written(x: Tensor, y: Tensor) -> Tensor:
    whole = x.clone()
    whole[0].copy_(y[1])
    return whole


@pytest.mark.long
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7
    ),
    results=st.integers(1, 3),
    room=st.sampled_from([0, SAMPLES * ROWS * WIDTH * 8, MUCH]),
)
@settings(max_examples=60, deadline=None)
def test_kept_results_of_random_blocks(steps: list[tuple[str, int, int]], results: int, room: int) -> None:
    """The oracle: torch.func without checkpoint."""
    weight, batch = weights()[0], samples()

    def loss(w: Tensor, x: Tensor, again: Again) -> Tensor:
        def block(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            values = [x, x.sin()]
            for name, i, j in steps:
                values.append(STEPS[name](values[i % len(values)], values[j % len(values)], w, again))
            return tuple(values[-results:])

        outputs = again(block, x, w)
        return sum(value.square().sum() for value in again(block, sum(outputs), w))

    kept = Room(room)
    found = vmap(grad(lambda w, x: loss(w, x, lambda f, *xs: checkpoint(f, *xs, room=kept))), (None, 0))(
        weight, batch
    )
    plainly = torch.func.grad(lambda w, x: loss(w, x, lambda f, *xs: f(*xs)))
    expected = torch.func.vmap(plainly, (None, 0))(weight, batch)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()) + 1e-30)
