"""What stays factored: weights used in every way, the kinds of terms that arrive, and every query beside the
one-sample loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients, per_sample_square_norms
from psgrad.engine.gradients.batch_pass import BatchPass
from psgrad.engine.gradients.deferral import DeferredGradient
from psgrad.engine.gradients.terms import BLOCK_BYTES
from psgrad.engine.transforms import functional_call, jvp
from psgrad.errors import TransformError
from tests.engine.gradients.agreement import LargestTensor

N = 3
Params = dict[str, Tensor]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def tokens(*shape: int, count: int) -> Tensor:
    return torch.randint(count, shape)


@dataclass(frozen=True)
class Program:
    """A loss of one sample, how its parameters and samples are drawn, and the kinds of terms expected of each
    parameter.
    """

    loss: Callable[..., Tensor]
    draw: Callable[[], tuple[Params, tuple[Any, ...]]]
    kinds: dict[str, str]


Kinds = dict[str, str] | str
SHAPE = (5, 4)  # of a parameter w


def of(
    forward: Callable[..., Tensor], kinds: Kinds, *inputs: tuple[int, ...], **shapes: tuple[int, ...]
) -> Program:
    """`forward(x, ..., **parameters)`, with inputs of one sample of these shapes, else one of four numbers,
    and parameters of those, else one w. kinds: of each parameter, or of w.
    """
    given = shapes or {"w": SHAPE}

    def draw() -> tuple[Params, tuple[Any, ...]]:
        params = {name: randn(*shape) for name, shape in given.items()}
        return params, tuple(randn(N, *shape) for shape in inputs or ((4,),))

    expected = {"w": kinds} if isinstance(kinds, str) else kinds
    return Program(lambda params, *x: scalar(forward(*x, **params)), draw, expected)


def looking_up(
    forward: Callable[..., Tensor], kinds: Kinds, *shape: int, **shapes: tuple[int, ...]
) -> Program:
    """As `of`, with one input of indices below 5, three of them unless another shape is given."""
    plain = of(forward, kinds, **shapes)
    return replace(plain, draw=lambda: (plain.draw()[0], (tokens(N, *(shape or (3,)), count=5),)))


def module(make: Callable[[], nn.Module], *inputs: tuple[int, ...], kinds: dict[str, str]) -> Program:
    """A module, called with inputs of these shapes, a batch of one; `kinds` may leave parameters out."""
    made: list[nn.Module] = []

    def draw() -> tuple[Params, tuple[Any, ...]]:
        made[:] = [make().double().eval()]
        params = {name: torch.randn_like(value) for name, value in made[0].named_parameters()}
        return params, tuple(randn(N, *shape) for shape in inputs)

    def loss(params: Params, *x: Tensor) -> Tensor:
        return scalar(functional_call(made[0], params, tuple(value.unsqueeze(0) for value in x)))

    return Program(loss, draw, kinds)


def scalar(output: Any) -> Tensor:
    while isinstance(output, tuple):
        output = output[0]
    return torch.tanh(output / 3).square().sum()


class Attention(nn.Module):
    """Multi-head attention to something else than what asks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        return self.attention(query, memory, memory, need_weights=False)[0]


class SelfAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


class Cells(nn.Module):
    """A recurrent cell in a loop of the user's."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.cell = kind(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        for time in range(1, x.shape[1]):
            state = self.cell(x[:, time], state)
        return state[0] if isinstance(state, tuple) else state


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x.argsort(-1))))


def spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval()


def qkv(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (F.linear(x, part) for part in w.chunk(3))
    return F.scaled_dot_product_attention(q, k, v)


MASK = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).round().double()
COLUMN = torch.linspace(-1, 2, 5, dtype=torch.float64)
SHARED = torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(4, 5)
RECURRENT = dict.fromkeys(("weight_ih_l0", "weight_hh_l0"), "Product")

PROGRAMS: dict[str, Program] = {
    # -- parts of a weight
    "rows": of(lambda x, w: F.linear(x, w[1:4]), "Product", w=(6, 4)),
    "one matrix of a stack": of(lambda x, w: F.linear(x, w[1]), "Product", w=(3, 5, 4)),
    "columns": of(lambda x, w: F.linear(x, w[:, 1:5]), "Product", w=(5, 8)),
    "rows of a transpose": of(lambda x, w: F.linear(x, w.t()[1:4]), "Product", w=(4, 6)),
    "rows, reshaped": of(lambda x, w: F.linear(x, w.view(2, 3, 4)[1]), "Image", w=(6, 4)),
    "overlapping rows": of(
        lambda x, w: F.linear(x, w[:4]) + F.linear(x.tanh(), w[2:]), "Product + Product", (2, 4), w=(6, 4)
    ),
    "a part and the whole": of(
        lambda x, w: F.linear(x, w[2:]).sum(-1) + F.linear(x.tanh(), w).sum(-1),
        "Product + Product",
        (2, 4),
        w=(6, 4),
    ),
    "chunks": of(qkv, "Product + Product + Product", (3, 4), w=(12, 4)),
    "split": of(
        lambda x, w: torch.stack([F.linear(x, p) for p in w.split(3, 1)]).prod(0),
        "Product + Product",
        (2, 3),
        w=(5, 6),
    ),
    "unbind": of(
        lambda x, w: torch.stack([F.linear(x, p) for p in w.unbind()]).prod(0),
        "Product + Product",
        w=(2, 5, 4),
    ),
    "heads of a projection": of(
        lambda x, w: F.linear(x, w.view(2, 3, 4)[:, :2].flatten(0, 1)), "Image", w=(6, 4)
    ),
    # -- joined weights
    "concatenated": of(
        lambda x, v, w: F.linear(x, torch.cat([v, w])), {"v": "Product", "w": "Product"}, v=(2, 4), w=(3, 4)
    ),
    "stacked": of(
        lambda x, v, w: torch.einsum("i,hoi->ho", x, torch.stack([v, w])),
        {"v": "Image", "w": "Image"},
        v=(5, 4),
        w=(5, 4),
    ),
    "padded": of(lambda x, w: F.linear(x, F.pad(w, (1, 0, 0, 2))), "Dense", w=(3, 3)),
    # -- relabelled
    "transpose": of(lambda x, w: x @ w, "Product", (2, 4), w=(4, 5)),
    "from a vector": of(lambda x, w: F.linear(x, w.view(5, 4)), "Product", w=(20,)),
    "repeated": of(lambda x, w: F.linear(x, w.repeat(2, 1)), "Dense", (3, 4), w=(3, 4)),
    "flipped": of(lambda x, w: F.linear(x, w.flip(0)), "Image"),
    "flipped table": looking_up(lambda i, w: F.embedding(i, w.flip(0)), "Image"),
    # -- sums and products with what is shared
    "sum of two": of(
        lambda x, v, w: F.linear(x, v + w), {"v": "Product", "w": "Product"}, v=(5, 4), w=(5, 4)
    ),
    "sum with its transpose": of(lambda x, w: F.linear(x, w + w.t()), "Product", w=(4, 4)),
    "sum with a row": of(
        lambda x, v, w: F.linear(x, v + w), {"v": "Product", "w": "Dense"}, v=(5, 4), w=(4,)
    ),
    "times a number": of(lambda x, w: F.linear(x, w * 0.5), "Product"),
    "times a column": of(lambda x, w: F.linear(x, w * COLUMN[:, None]), "Product"),
    "times a column of parameters": of(
        lambda x, w, s: F.linear(x, s * w), {"w": "Product", "s": "Dense"}, w=(5, 4), s=(5, 1)
    ),
    "times a scalar parameter": of(
        lambda x, w, s: F.linear(x, s * w), {"w": "Product", "s": "Dense"}, (3, 4), w=(5, 4), s=()
    ),
    "times a mask": of(lambda x, w: F.linear(x, w * MASK), "Image"),
    "times a mask, and whole": of(
        lambda x, w: F.linear(x, w * MASK) * F.linear(x, w), "Image + Product", (2, 4)
    ),
    "masked fill": of(lambda x, w: F.linear(x, w.masked_fill(MASK.bool(), 0.0)), "Image"),
    "lower triangle": of(lambda x, w: F.linear(x, w.tril()), "Image", w=(4, 4)),
    "Hadamard product of two": of(
        lambda x, v, w: F.linear(x, v * w), {"v": "Image", "w": "Image"}, v=(5, 4), w=(5, 4)
    ),
    "through tanh": of(lambda x, w: F.linear(x, w.tanh()), "Dense", (3, 4)),
    "times a matrix": of(lambda x, w: F.linear(x, SHARED @ w), "Product"),
    "times a batch of matrices": of(
        lambda x, w: torch.einsum("hi,hoi->ho", x, w @ SHARED.view(2, 2, 5)), "Dense", (2, 5), w=(2, 3, 2)
    ),
    "times two more": of(
        lambda x, u, v, w: F.linear(x, u @ v @ w),
        {"u": "Product", "v": "Product", "w": "Product"},
        u=(5, 2),
        v=(2, 3),
        w=(3, 4),
    ),
    "times its transpose": of(lambda x, w: F.linear(x, w.t() @ w), "Product", w=(3, 4)),
    "times a vector": of(lambda x, w: x * (w @ SHARED[0]), "Product", (3, 4), w=(4, 5)),
    "low-rank adapter": of(
        lambda x, a, b: F.linear(x, SHARED.t() + b @ a),
        {"a": "Product", "b": "Product"},
        (3, 4),
        a=(2, 4),
        b=(5, 2),
    ),
    "weight norm": of(
        lambda x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)),
        {"v": "Image + Product", "g": "Dense"},
        (3, 4),
        v=(5, 4),
        g=(5, 1),
    ),
    "centred rows": of(lambda x, w: F.linear(x, w - w.mean(1, keepdim=True)), "Image + Product", (3, 4)),
    "softmax of a weight": of(lambda x, w: F.linear(x, w.softmax(1)), "Image"),
    "penalty": of(lambda x, w: F.linear(x, w).sum() + w.square().sum(), "Image + Product"),
    "sum of the weight": of(lambda x, w: F.linear(x, w).sum() + w.sum(), "Image + Product"),
    "nothing but the weight": of(lambda x, w: w.square(), "Image"),
    "by broadcasting": of(lambda x, w: (w * x).sum(-1), "Product"),
    # -- other contractions
    "experts": of(lambda x, w: torch.bmm(x, w), "Product", (2, 3, 4), w=(2, 4, 5)),
    "batched matrices by einsum": of(lambda x, w: torch.einsum("i,hio->ho", x, w), "Product", w=(2, 4, 3)),
    "bilinear form": of(lambda x, w: torch.einsum("i,ij,j->", x, w, x), "Product", w=(4, 4)),
    "bilinear": of(lambda x, y, w: F.bilinear(x, y, w), "Product", (4,), (3,), w=(5, 4, 3)),
    "matrix and kernel": of(
        lambda x, w: F.conv2d(x, w.view(5, 4, 1, 1)).flatten(1).sum(1) + F.linear(x.mean((1, 2)), w),
        "Convolution + Product",
        (4, 2, 2),
    ),
    "one kernel, two geometries": of(
        lambda x, w: F.conv1d(x, w).sum() * F.conv1d(x, w, stride=2, padding=1).sum(),
        "Convolution + Convolution",
        (2, 6),
        w=(3, 2, 3),
    ),
    "channels of a kernel": of(lambda x, w: F.conv1d(x, w[:3, 1:]), "Convolution", (2, 6), w=(5, 3, 3)),
    "kernel times a mask": of(lambda x, w: F.conv1d(x, w * MASK[:4, None, :3]), "Dense", (2, 6), w=(4, 2, 3)),
    "kernel times a column": of(
        lambda x, w: F.conv1d(x, w * COLUMN[:, None, None]), "Convolution", (2, 6), w=(5, 2, 3)
    ),
    "kernel times a column, grouped": of(
        lambda x, w: F.conv1d(x, w * COLUMN[:4, None, None], groups=2), "Convolution", (2, 6), w=(4, 1, 3)
    ),
    "transposed kernel times a row": of(
        lambda x, w: F.conv_transpose1d(x, w * COLUMN[:3, None]), "Convolution", (2, 6), w=(2, 3, 3)
    ),
    "transposed kernel, some channels": of(
        lambda x, w: F.conv_transpose1d(x, w[1:, :2]), "Convolution", (2, 6), w=(3, 3, 3)
    ),
    "kernel's low-rank adapter": of(
        lambda x, w, a, b: F.conv2d(x, w + (b @ a).view(5, 2, 3, 3), padding=1),
        {"w": "Convolution", "a": "Dense", "b": "Dense"},
        (2, 4, 4),
        w=(5, 2, 3, 3),
        a=(2, 18),
        b=(5, 2),
    ),
    "kernel's mean taken off": of(
        lambda x, w: F.conv1d(x, w - w.mean((1, 2), keepdim=True)), "Convolution + Image", (2, 6), w=(4, 2, 3)
    ),
    "kernel's norm": of(
        lambda x, v, g: F.conv1d(x, g * v / v.norm(dim=(1, 2), keepdim=True)),
        {"v": "Convolution + Image", "g": "Dense"},
        (2, 6),
        v=(4, 2, 3),
        g=(4, 1, 1),
    ),
    "kernel standardised": of(
        lambda x, w: F.conv1d(x, (w - w.mean((1, 2), keepdim=True)) / w.std((1, 2), keepdim=True)),
        "Convolution + Image + Image",
        (2, 6),
        w=(4, 2, 3),
    ),
    "convolution's bias": of(
        lambda x, w, b: F.conv1d(x, w, b), {"w": "Convolution", "b": "Dense"}, (2, 6), w=(3, 2, 3), b=(3,)
    ),
    # -- tables
    "rows by a shared index": of(lambda x, w: F.linear(x, w[torch.tensor([2, 0, 0, 5])]), "Image", w=(6, 4)),
    "table": looking_up(lambda i, w: F.embedding(i, w), "Lookup"),
    "table by indexing": looking_up(lambda i, w: w[i], "Lookup"),
    "columns by the sample's index": looking_up(lambda i, w: w[:, i], "Lookup", w=(4, 5)),
    "table behind a matrix": looking_up(
        lambda i, w, v: F.embedding(i, w @ v), {"w": "Lookup", "v": "Product"}, w=(5, 2), v=(2, 3)
    ),
    "scaled table": looking_up(
        lambda i, w, s: F.embedding(i, 2 * w * s), {"w": "Lookup", "s": "Dense"}, w=(5, 4), s=()
    ),
    "masked table": looking_up(lambda i, w: F.embedding(i, w * MASK), "Lookup"),
    "part of a table": looking_up(lambda i, w: F.embedding(i, w[2:]), "Lookup", w=(7, 4)),
    "table of positions": looking_up(
        lambda i, w, p: F.embedding(i, w) + p[:3], {"w": "Lookup", "p": "Dense"}, w=(5, 4), p=(9, 4)
    ),
    "tied": looking_up(lambda i, w: F.linear(F.embedding(i, w).tanh(), w), "Lookup + Product"),
    "partly tied": looking_up(lambda i, w: F.linear(F.embedding(i, w).tanh(), w[1:4]), "Lookup + Product"),
    "tied by columns": looking_up(
        lambda i, w: F.linear(F.embedding(i, w).tanh()[..., :3], w[:, :3]), "Lookup + Product"
    ),
    "tied transpose": looking_up(lambda i, w: F.embedding(i, w).tanh() @ w.t(), "Lookup + Product"),
    "bags": looking_up(lambda i, w: F.embedding_bag(i, w, mode="sum"), "Lookup", 2, 3),
    "bags, max": looking_up(lambda i, w: F.embedding_bag(i, w, mode="max"), "Lookup", 2, 3),
    "bags by offsets": looking_up(
        lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 1, 1]), mode="mean"), "Lookup", 5
    ),
    "weighted bags": looking_up(
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        {"w": "Lookup", "s": "Dense"},
        2,
        3,
        w=(5, 4),
        s=(2, 3),
    ),
    # -- precision
    "tied, the head in float32": looking_up(
        lambda i, w: F.linear(F.embedding(i, w).tanh().float(), w.float()).double(), "Lookup + Product"
    ),
    "two precisions": of(
        lambda x, w: F.linear(x, w).sum() * F.linear(x.float(), w.float()).double().sum(), "Product", (3, 4)
    ),
    "masked in float32": of(
        lambda x, w: F.linear(x.float(), w.float() * MASK.float()).double() + F.linear(x, w),
        "Dense + Product",
        (3, 4),
    ),
    "cast down": of(lambda x, w: F.linear(x.float(), w.float()), "Product", (3, 4)),
    # -- modules
    "attention, packed": module(
        SelfAttention,
        (3, 4),
        kinds={"attention.in_proj_weight": "Product", "attention.out_proj.weight": "Product"},
    ),
    "attention across": module(
        Attention, (3, 4), (2, 4), kinds={"attention.in_proj_weight": "Product + Product"}
    ),
    "attention, own widths": module(
        lambda: Attention(kdim=3, vdim=3),
        (2, 4),
        (5, 3),
        kinds={f"attention.{name}_proj_weight": "Product" for name in "qkv"},
    ),
    "attention with learned keys": module(
        lambda: Attention(add_bias_kv=True), (3, 4), (2, 4), kinds={"attention.bias_k": "Dense"}
    ),
    "encoder layer": module(
        lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
        (3, 4),
        kinds={"self_attn.in_proj_weight": "Product", "linear1.weight": "Product", "norm1.weight": "Dense"},
    ),
    "LSTM": module(lambda: nn.LSTM(3, 2, batch_first=True), (4, 3), kinds=RECURRENT),
    "LSTM cells": module(
        lambda: Cells(nn.LSTMCell), (3, 3), kinds={"cell.weight_ih": "Product", "cell.weight_hh": "Product"}
    ),
    "torch's weight norm": module(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (2, 4),
        kinds={
            "parametrizations.weight.original0": "Dense",
            "parametrizations.weight.original1": "Image + Product",
            "bias": "Dense",
        },
    ),
    "spectral norm": module(
        spectral_norm, (2, 4), kinds={"parametrizations.weight.original": "Image + Product"}
    ),
    "tied model": module(TiedModel, (5,), kinds={"embedding.weight": "Lookup + Product"}),
}


def gradients_of(program: Program, params: Params, batch: tuple[Any, ...]) -> PerSampleGradients:
    """The gradients after the backward pass, before small ones are materialised."""
    result: dict[str, DeferredGradient] = {}
    losses, _ = BatchPass(program.loss, params, batch, 0, False, "error").run(result.__setitem__)
    return PerSampleGradients.of({name: result[name] for name in params}, losses)


IN_FLOAT32 = [
    "cast down",
    *(name for name in PROGRAMS if "float32" in name),
    "two precisions",
]  # whose products are float32's


def kinds_of(grads: PerSampleGradients) -> dict[str, str]:
    """name -> the kinds of its terms, in alphabetical order."""
    return {
        name: " + ".join(sorted(type(p.term).__name__ for p in gradient.terms))
        for name, gradient in grads.parts[0].gradients.items()
    }


def one_by_one(program: Program, params: Params, batch: tuple[Any, ...]) -> Params:
    """name -> [n, *shape], by one backward pass a sample."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    rows = [
        torch.autograd.grad(
            program.loss(leaves, *(x[sample] for x in batch)), list(leaves.values()), materialize_grads=True
        )
        for sample in range(N)
    ]
    return {name: torch.stack(column) for name, column in zip(leaves, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_deferral_kinds_of_terms_and_queries_of_the_loop(name: str) -> None:
    program = PROGRAMS[name]
    params, batch = program.draw()
    grads = gradients_of(program, params, batch)
    kinds = kinds_of(grads)
    assert {key: kinds[key] for key in program.kinds} == program.kinds
    assert grads.unfactored == []
    assert_queries_agree(program, params, batch, grads, single=name in IN_FLOAT32)


def assert_queries_agree(
    program: Program, params: Params, batch: tuple[Any, ...], grads: PerSampleGradients, single: bool = False
) -> None:
    expected = one_by_one(program, params, batch)
    weights = torch.rand(N, dtype=torch.float64)
    vector = {key: torch.randn_like(value) for key, value in params.items()}
    every = torch.cat([value.reshape(N, -1) for value in expected.values()], 1)
    close(grads.gram(), every @ every.T, single)
    close(grads.inner(grads), every @ every.T, single)
    result, sums = grads.materialise(), grads.weighted_sum(weights)
    norms = grads.square_norms(per="parameter")
    for key, value in expected.items():
        close(result[key], value, single)
        close(sums[key], torch.einsum("n,n...->...", weights, value), single)
        close(norms[key], value.flatten(1).square().sum(1) if value.dim() > 1 else value.square(), single)
        close(grads.second_moment()[key], value.square().mean(0), single)
        close(grads.dot({key: vector[key]}), (value * vector[key]).reshape(N, -1).sum(1), single)


LOST: dict[str, Callable[..., Tensor]] = {
    "every other column": lambda x, w: F.linear(x[:, :2], w[:, ::2]),
    "rows of different steps": lambda x, w: (
        F.linear(x, w[::2]).sum() * F.linear(x.tanh(), w[::3]).sum() + F.linear(x, w[1:][::2])
    ).mean(),
    "running sums": lambda x, w: F.linear(x, w.cumsum(0)),
    "a transform of rows": lambda x, w: F.linear(x, torch.fft.fft(w).real),
    "largest so far": lambda x, w: F.linear(x, w.cummax(0)[0]),
    "rows in order": lambda x, w: F.linear(x, 2 * w.sort(0)[0].t()),
}


@pytest.mark.parametrize("name", LOST)
def test_deferral_unfactored_parameters_listed(name: str) -> None:
    """Where an operator needs the value, it is made for each sample, and the run can say so; a bias, which
    has no factors, is left out.
    """
    program = of(
        lambda x, w, v, b: LOST[name](x, w) * F.linear(x, v, b), {}, (2, 4), w=(4, 4), v=(4, 4), b=(4,)
    )
    params, batch = program.draw()
    grads = gradients_of(program, params, batch)
    assert grads.unfactored == ["w"]
    assert grads.describe()["w"].startswith("materialise after ")
    assert per_sample_square_norms(program.loss, params, *batch).unfactored == ["w"]
    assert_queries_agree(program, params, batch, grads)


def close(actual: Tensor, expected: Tensor, single: bool = False) -> None:
    scale = expected.abs().max().item() or 1.0
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max().item() <= (1e-5 if single else 1e-10) * scale


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("option", "said"),
    [({"max_norm": 1.0}, "max_norm=1"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True")],
)
def test_deferral_embedding_option_refused(kind: type, option: dict[str, Any], said: str) -> None:
    model = kind(5, 4, **option)
    params = {name: value.detach() for name, value in model.named_parameters()}
    before = params["weight"].clone()
    with pytest.raises(TransformError, match=said) as error:
        per_sample_gradients(
            lambda params, i: functional_call(model, params, (i,)).square().sum(),
            params,
            tokens(N, 2, 3, count=5),
        )
    hints = {"max_norm": "build it with max_norm=None", "scale_grad_by_freq": "scale_grad_by_freq=False"}
    assert hints[next(iter(option))] in str(error.value.hint)
    assert torch.equal(params["weight"], before)


# -- Memory --------------------------------------------------------------------------------------------------


WIDE, TALL, MANY = 48, 64, 60  # a weight's sizes, and samples: their product is what must not be made
COUNT = 3000  # rows of a table
WIDE_MASK = torch.rand(TALL, WIDE, generator=torch.Generator().manual_seed(0)).round().double()

NEVER_WRITTEN_OUT: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "chunks": (
        lambda x, w: torch.stack([F.linear(x, part) for part in w.chunk(4)]).prod(0),
        {"w": (4 * TALL, WIDE)},
    ),
    "one matrix of a stack": (lambda x, w: F.linear(x, w[3]), {"w": (5, TALL, WIDE)}),
    "concatenated": (lambda x, v, w: F.linear(x, torch.cat([v, w])), {"v": (TALL, WIDE), "w": (TALL, WIDE)}),
    "rows by a shared index": (lambda x, w: F.linear(x, w[torch.arange(0, TALL, 3)]), {"w": (TALL, WIDE)}),
    "weight norm": (
        lambda x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)),
        {"v": (TALL, WIDE), "g": (TALL, 1)},
    ),
    "times a scalar parameter": (lambda x, w, s: F.linear(x, s * w), {"w": (TALL, WIDE), "s": ()}),
    "times a mask": (lambda x, w: F.linear(x, w * WIDE_MASK), {"w": (TALL, WIDE)}),
    "through tanh": (lambda x, w: F.linear(x, w.tanh()), {"w": (TALL, WIDE)}),
    "low-rank adapter": (lambda x, a, b: F.linear(x, WIDE_MASK + b @ a), {"a": (2, WIDE), "b": (TALL, 2)}),
    "centred rows": (lambda x, w: F.linear(x, w - w.mean(1, keepdim=True)), {"w": (TALL, WIDE)}),
    "softmax of a weight": (lambda x, w: F.linear(x, w.softmax(1)), {"w": (TALL, WIDE)}),
    "penalty": (lambda x, w: F.linear(x, w).sum() + w.square().sum(), {"w": (TALL, WIDE)}),
    "penalty of the weight alone": (lambda x, w: F.linear(x, w).sum() + w.sum(), {"w": (TALL, WIDE)}),
    "spectral norm": (
        lambda x, w: F.linear(x, w / (WIDE_MASK[:, 0] @ (w @ WIDE_MASK[0]))),
        {"w": (TALL, WIDE)},
    ),
    "table": (lambda x, w: F.embedding(places(x), w), {"w": (COUNT, WIDE)}),
    "table by indexing": (lambda x, w: w[places(x)], {"w": (COUNT, WIDE)}),
    "table of numbers": (lambda x, w: w[places(x)] * x, {"w": (COUNT * WIDE,)}),
    "columns by indexing": (lambda x, w: w[:, places(x)], {"w": (WIDE, COUNT)}),
    "bags": (lambda x, w: F.embedding_bag(places(x).view(4, -1), w, mode="mean"), {"w": (COUNT, WIDE)}),
    "bags, max": (lambda x, w: F.embedding_bag(places(x).view(4, -1), w, mode="max"), {"w": (COUNT, WIDE)}),
    "bags by offsets": (
        lambda x, w: F.embedding_bag(places(x), w, torch.tensor([0, 7]), mode="sum"),
        {"w": (COUNT, WIDE)},
    ),
    "weighted bags": (
        lambda x, w: F.embedding_bag(places(x).view(4, -1), w, mode="sum", per_sample_weights=x.view(4, -1)),
        {"w": (COUNT, WIDE)},
    ),
    "scaled table": (lambda x, w, s: F.embedding(places(x), s * w), {"w": (COUNT, WIDE), "s": ()}),
    "table of positions": (lambda x, w: x + w[: len(x)], {"w": (COUNT, WIDE)}),
}


def places(x: Tensor) -> Tensor:
    """Some index for each element."""
    return (x * 1000).long().abs() % COUNT


@pytest.mark.parametrize("name", NEVER_WRITTEN_OUT)
def test_deferral_never_materialises_all_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 1 << 18)
    forward, shapes = NEVER_WRITTEN_OUT[name]
    program = of(forward, {}, (WIDE,), **shapes)
    params = {key: randn(*shape) for key, shape in shapes.items()}
    batch = (randn(MANY, WIDE),)
    vector = {key: torch.randn_like(value) for key, value in params.items()}
    with LargestTensor() as seen:
        grads = per_sample_gradients(program.loss, params, *batch)
        grads.square_norms()
        grads.weighted_sum(torch.rand(MANY, dtype=torch.float64))
        grads.dot(vector)
        per_sample_square_norms(program.loss, params, *batch)
    weight = max(TALL * WIDE, *(value.numel() for value in params.values()))
    assert seen.elements < MANY * weight / 4


def test_deferral_empty_slice_of_weight() -> None:
    weight, rows = {"w": torch.randn(4, 3, dtype=torch.float64)}, torch.randn(5, 2, 3, dtype=torch.float64)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"][4:].t()).sum() + (x @ params["w"].t()).square().sum()

    result = per_sample_gradients(loss, weight, rows).materialise()["w"]
    torch.testing.assert_close(
        result, torch.einsum("nta,ntb->nab", 2 * rows @ weight["w"].t(), rows), rtol=1e-10, atol=1e-10
    )


def test_deferral_expanded_number_times_number() -> None:
    """A column's cotangents arrive summed over both axes; then they are multiplied by a tensor
    without axes.
    """
    scale, x = torch.tensor(0.7, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    loss = lambda params, x: torch.addcdiv(
        torch.ones(3, 1, dtype=torch.float64), x, params["scale"].square() + 1
    ).sum()
    expected = -3 * x * 2 * scale / (scale.square() + 1).square()
    torch.testing.assert_close(
        per_sample_gradients(loss, {"scale": scale}, x).materialise()["scale"], expected
    )


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_deferral_expanded_cotangent_of_a_number(shape: tuple[int, ...]) -> None:
    """A Hessian-vector product of a loss that adds an axis to a mean: the mean's cotangent is expanded."""
    weight, vector, x = randn(4, 3), randn(4, 3), randn(N, *shape)
    inner = lambda w, x: (F.linear(x, w).mean() - torch.ones(1, dtype=torch.float64)).pow(2).sum()

    def slope(params: Params, x: Tensor) -> Tensor:
        return jvp(lambda w: inner(w, x), (params["w"],), (vector,))[1]

    grads = per_sample_gradients(slope, {"w": weight}, x)
    expected = torch.stack(
        [torch.autograd.functional.hvp(lambda w, one=one: inner(w, one), weight, vector)[1] for one in x]
    )
    torch.testing.assert_close(grads.materialise()["w"], expected)
    torch.testing.assert_close(grads.square_norms(), expected.square().sum((1, 2)))
