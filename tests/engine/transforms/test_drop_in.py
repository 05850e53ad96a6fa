"""Programs written for torch.func, with the import replaced: equal results, and errors where torch.func has
errors.

Each is a small function of the namespace `tf`, torch.func or psgrad.engine.transforms. Where the two differ
on purpose, the table says why. What test_semantics.py and test_forward.py hold is not here again.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass, tree_flatten

from psgrad.engine import transforms
from psgrad.errors import PsgradError

Program = Callable[[Any], Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own loops and deprecated operators

X = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)
T = torch.tensor([1.0, -2.0, 0.7], dtype=torch.float64)
M = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).cos()
Z = torch.complex(X, T)
Pair = namedtuple("Pair", "a b")


@dataclass
class Two:
    a: Any
    b: Any


register_dataclass(Two)


def same(ours: Any, theirs: Any) -> None:
    """One structure; tensors of the same dtype, numbers, and relation to PyTorch's autograd."""
    (result, spec), (expected, expected_spec) = tree_flatten(ours), tree_flatten(theirs)
    assert spec == expected_spec
    for x, y in zip(result, expected, strict=True):
        if not isinstance(y, Tensor):
            assert x == y
            continue
        assert type(x) is Tensor
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert x.requires_grad == y.requires_grad


def run(program: Program, tf: Any) -> Any:
    """The program after a fixed seed, on tensors that no other program has written to."""
    torch.manual_seed(7)
    return program(tf)


def under_no_grad(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(function)


def wants(x: Tensor) -> Tensor:
    """A copy that PyTorch's autograd differentiates in."""
    return x.clone().requires_grad_()


# -- functions of all kinds ----------------------------------------------------------------------------------


class Energy:
    def __call__(self, x: Tensor) -> Tensor:
        return x.sin().sum()

    def of(self, x: Tensor, factor: float = 2.0) -> Tensor:
        """A method."""
        return (x**2 * factor).sum()

    @staticmethod
    def still(x: Tensor) -> Tensor:
        return x.cos().sum()

    @classmethod
    def common(cls, x: Tensor) -> Tensor:
        return x.cos().sum()


def product(x: Tensor, y: Tensor = T, *others: Any, **options: Any) -> Tensor:
    return (x * y * y).sum()


LAYER = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double().requires_grad_(False)
CALLABLES: dict[str, Callable[..., Any]] = {
    "a lambda": lambda x: x.sin().sum(),
    "a partial object": functools.partial(Energy().of, factor=3.0),
    "a bound method": Energy().of,
    "a static method": Energy.still,
    "a class method": Energy.common,
    "an object that can be called": Energy(),
    "an operator": torch.sum,
    "a method of tensors": Tensor.sum,
    "a layer": LAYER,
}
TAKES_A_VECTOR: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda tf, f: tf.vmap(f)(M),
    "vjp": lambda tf, f: tf.vjp(f, X)[0],
    "jvp": lambda tf, f: tf.jvp(f, (X,), (T,)),
    "jacrev": lambda tf, f: tf.jacrev(f)(X),
    "jacfwd": lambda tf, f: tf.jacfwd(f)(X),
}
PROGRAMS: dict[str, Program] = {
    f"{name} of {kind}": lambda tf, transform=transform, f=f: transform(tf, f)
    for name, transform in TAKES_A_VECTOR.items()
    for kind, f in CALLABLES.items()
}
PROGRAMS |= {
    f"{name} keeps name and words": lambda tf, name=name: [
        getattr(getattr(tf, name)(Energy.of), a) for a in ("__name__", "__doc__", "__wrapped__")
    ]
    for name in ("grad", "grad_and_value", "vmap", "jacrev", "jacfwd")
}

# -- arguments to differentiate ------------------------------------------------------------------------------

GRADIENTS = ("grad", "grad_and_value")
JACOBIANS = ("jacrev", "jacfwd", "hessian")
TREES: dict[str, Any] = {
    "a named tuple": Pair(X, T),
    "a dataclass": Two(X, T),
    "an ordered dict": OrderedDict(a=X, b=T),
    "a default dict": defaultdict(list, a=X, b=T),
    "a deque": deque([X, T]),
    "a tuple in a list": [(X,), T],
}


def of_leaves(tree: Any) -> Tensor:
    a, b = tree_flatten(tree)[0]
    return (a**2 * b).sum()


PROGRAMS |= {
    f"{name} in {kind}": lambda tf, name=name, tree=tree: getattr(tf, name)(of_leaves)(tree)
    for name in (*GRADIENTS, *JACOBIANS)
    for kind, tree in TREES.items()
}
PROGRAMS |= {
    f"{name} with argnums {argnums}": lambda tf, name=name, argnums=argnums: getattr(tf, name)(
        product, argnums
    )(X, T)
    for name in (*GRADIENTS, *JACOBIANS)
    for argnums in (0, 1, (0,), (1,), (1, 0))
}
PROGRAMS |= {
    "grad of what has a default": lambda tf: tf.grad(product)(X),
    "grad beside what is no tensor": lambda tf: tf.grad(
        lambda x, s, n, w: (x * s).sum() if n is None else x.sum()
    )(X, 2.0, None, "w"),
    "grad beside a tree by keyword": lambda tf: tf.grad(lambda x, o: (x * o["a"][0]).sum() + o["b"])(
        X, o={"a": [T], "b": 2.0}
    ),
    "grad in two precisions": lambda tf: tf.grad(lambda x, y: (x * y).sum(), (0, 1))(X.float(), T),
    "grad in complex values": lambda tf: tf.grad(lambda z: (z * z.conj()).abs().sum())(Z),
    "grad in nothing": lambda tf: tf.grad(lambda tree, x: x.sum())({}, X),
    "grad of the argument itself": lambda tf: tf.grad(lambda x: x)(X[0]),
    "jacrev beside whole numbers": lambda tf: tf.jacrev(lambda x, i: x[i])(X, torch.tensor([0, 2])),
    "jacrev to a tree": lambda tf: tf.jacrev(lambda x: Pair(x * 2, {"k": x.sum()}))(X),
    "jacfwd to a tree": lambda tf: tf.jacfwd(lambda x: Pair(x * 2, {"k": x.sum()}))(X),
    "jacrev in two precisions": lambda tf: tf.jacrev(lambda x, y: x.double() * y, (0, 1))(X.float(), T),
    "hessian of a tree": lambda tf: tf.hessian(lambda d: (d["a"] ** 2 * d["b"]).sum())({"a": X, "b": T}),
}
PROGRAMS |= {
    f"jacrev by {size}{' in place' * ahead}": lambda tf, size=size, ahead=ahead: tf.jacrev(
        lambda x: (x * 2, {"a": x.sum()}), chunk_size=size, _preallocate_and_copy=ahead
    )(X)
    for size in (None, 1, 2, 3, 4, 100)
    for ahead in (False, True)
}
AUX: dict[str, Callable[[Tensor], Any]] = {
    "a tree": lambda x: {"a": [x, x * 2], "b": (T,)},
    "the argument": lambda x: x,
    "what was captured": lambda x: T,
    "whole numbers": lambda x: (x > 0).long(),
    "a named tuple": lambda x: Pair(x, T),
    "nothing": lambda x: (),
}
PROGRAMS |= {
    f"{name} with {kind} beside": lambda tf, name=name, aux=aux: getattr(tf, name)(
        lambda x: (x.square().sum(), aux(x)), has_aux=True
    )(X)
    for name in (*GRADIENTS, "jacrev", "jacfwd")
    for kind, aux in AUX.items()
}

# -- pulling back and pushing forward ------------------------------------------------------------------------

PROGRAMS |= {
    "vjp of a named tuple": lambda tf: tf.vjp(lambda x: Pair(x, 2 * x), X)[1](Pair(X, T)),
    "vjp of no primals": lambda tf: tf.vjp(lambda: X)[1](X),
    "vjp of an unused argument": lambda tf: tf.vjp(lambda x, y: x.sin(), X, T)[1](X),
    "vjp with a tree beside": lambda tf: [
        f(T) if callable(f) else f for f in tf.vjp(lambda x: (x.sin(), {"a": x}), X, has_aux=True)
    ],
    "vjp_fn in vmap": lambda tf: tf.vmap(tf.vjp(lambda x: x.sin(), X)[1])(M),
    "vjp_fn in grad": lambda tf: tf.grad(lambda c: tf.vjp(lambda x: x.sin(), X)[1](c)[0].square().sum())(T),
    "the argument as vjp's value is no copy": lambda tf: tf.vjp(lambda x: x, X)[0].data_ptr() == X.data_ptr(),
    "create_graph under no_grad": lambda tf: under_no_grad(tf.vjp(torch.sin, wants(X))[1])(
        X, create_graph=True
    ),
    "create_graph=False inside grad": lambda tf: tf.grad(
        lambda x: (tf.vjp(torch.sin, x)[1](x, create_graph=False)[0] * x).sum()
    )(X),
    "jvp of a tree": lambda tf: tf.jvp(
        lambda d: Pair(d["a"] * d["b"][0], d["a"]), ({"a": X, "b": [T]},), ({"a": T, "b": [X]},)
    ),
    "jvp of what has no derivative": lambda tf: tf.jvp(lambda x: (x.detach(), x > 0), (X,), (T,)),
    "jvp to whole numbers": lambda tf: tf.jvp(lambda x: ((5 * x).long(), (5 * x).long() * x), (X,), (T,)),
    "jvp along another precision": lambda tf: tf.jvp(torch.sin, (X,), (T.float(),)),
    "strict jvp": lambda tf: tf.jvp(lambda x: (x, x * 0), (X,), (T,), strict=True),
    "linearize to a tree": lambda tf: tf.linearize(lambda x, y: {"a": x * y, "b": (x.sin(),)}, X, T)[1](T, X),
}

# -- vmap ----------------------------------------------------------------------------------------------------


def columns(x: Tensor, y: Any) -> Tensor:
    return x.sum() * 2 + tree_flatten(y)[0][0].sum()


PROGRAMS |= {
    f"in_dims={dims!r}": lambda tf, dims=dims, other=other: tf.vmap(columns, dims)(M, other)
    for dims, other in [
        ((0, 1), M.T),
        ((0, (1,)), (M.T,)),
        ((0, [1]), [M.T]),
        ((0, {"a": 1}), {"a": M.T}),
        ((0, None), M),
        ((-2, (None,)), (M,)),
        ((0, None), "w" and M[0]),
        ((0, Pair(1, None)), Pair(M.T, T)),
        ((0, OrderedDict(a=1, b=None)), OrderedDict(a=M.T, b=T)),
        ((0, Two(1, 0)), Two(M.T, M)),
    ]
}
PROGRAMS |= {
    f"out_dims={dims!r} of {kind}": lambda tf, dims=dims, f=f: tf.vmap(f, out_dims=dims)(M)
    for kind, f, several in [
        ("one", lambda x: x * 2, [0, 1, -1, -2, (0,), (1,)]),
        ("a list", lambda x: [x * 2], [0, -1, [1]]),
        ("a pair", lambda x: (x * 2, x.sum()), [0, -1, (1, 0)]),
        ("a dict", lambda x: {"a": x, "b": x.sum()}, [0, {"a": 1, "b": 0}]),
        ("a tree", lambda x: (x * 2, [x]), [0, (1, [0]), (0, 1)]),
        ("a named tuple", lambda x: Pair(x, 2 * x), [0, Pair(0, 1)]),
        ("a dataclass", lambda x: Two(x, 2 * x), [0]),
        ("a default dict", lambda x: defaultdict(list, a=x), [0]),
        ("a maximum and its place", lambda x: x.max(0), [0]),
        ("nothing", lambda x: (), [0]),
        ("no tensors", lambda x: (x, None, "w", 3), [(0, None, None, None)]),
        ("what was captured", lambda x: T, [0, None]),
    ]
    for dims in several
}
PROGRAMS |= {
    "vmap beside what is no tensor": lambda tf: tf.vmap(
        lambda x, y, z: x if y is None else z, (0, None, None)
    )(M, None, "w"),
    "vmap of no samples": lambda tf: tf.vmap(lambda x: (x * 2, x.sum(), T))(M[:0]),
    "the argument is no copy": lambda tf: (lambda y: (y.data_ptr() == M.data_ptr(), y.stride()))(
        tf.vmap(lambda x: x, 0, 1)(M)
    ),
    "a captured tensor is no copy": lambda tf: (lambda y: (y.data_ptr() == T.data_ptr(), y.stride()))(
        tf.vmap(lambda x: T)(M)
    ),
    "an argument written to is no copy": lambda tf: (
        lambda m: tf.vmap(lambda x: x.mul_(2))(m).data_ptr() == m.data_ptr()
    )(M.clone()),
    "an argument that is not mapped, written to": lambda tf: (
        lambda t: (tf.vmap(lambda x, y: x + y.add_(1), (0, None))(M, t), t)
    )(T.clone()),
    "a captured tensor, written to": lambda tf: (lambda t: (tf.vmap(lambda x: x + t.add_(1))(M), t))(
        T.clone()
    ),
    "chunks, keywords and other axes": lambda tf: tf.vmap(
        lambda x, y: (x, x * y.sum()), 1, (1, 0), chunk_size=2
    )(M, y=M),
    "a gradient wanted": lambda tf: tf.vmap(lambda x: (x * 2, T, x > 0))(wants(M)),
    "a gradient wanted for what was captured": lambda tf: (lambda w: tf.vmap(lambda x: x * w)(M))(wants(T)),
    "a gradient not wanted": lambda tf: under_no_grad(lambda: tf.vmap(lambda x: x * 2)(wants(M)))(),
}

# -- draws: of the same seed the same numbers, and the same seed for what follows ----------------------------

DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3),
    "randint": lambda x: torch.randint(10, (3,)),
    "randperm": lambda x: torch.randperm(5),
    "like": lambda x: (
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randint_like(x, 7),
        torch.randint_like(x, 2, 7),
    ),
    "bernoulli_": lambda x: (x.clone().bernoulli_(0.3), x.clone().bernoulli_(T.abs() / 2)),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, (3,)),
    "in place": lambda x: (
        x.clone().normal_(),
        x.clone().uniform_(),
        x.clone().exponential_(),
        x.clone().geometric_(0.5),
    ),
    "multinomial of a captured one": lambda x: torch.multinomial(T.abs(), 2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of a captured one": lambda x: F.dropout(T, 0.5),
    "dropout of nothing and of all": lambda x: (
        F.dropout(x, 0.0),
        F.dropout(x, 0.5, training=False),
        F.dropout(x, 1.0),
    ),
    "dropout of channels": lambda x: (
        F.dropout1d(x.expand(2, 4, 3), 0.5),
        F.dropout3d(x.expand(2, 2, 2, 4, 3), 0.5),
    ),
    "a seed inside": lambda x: (torch.manual_seed(5), torch.rand(3))[1],
    "none": lambda x: x * 2,
}
DRAWS_OF_THEIR_OWN: dict[str, Callable[[Tensor], Any]] = {
    "bernoulli": lambda x: (
        torch.bernoulli(x.abs() / 2),
        torch.bernoulli(x, 0.3),
        x.clone().bernoulli_(x.abs() / 2),
    ),
    "normal": lambda x: (torch.normal(x, 1.0), torch.normal(0.0, x.abs()), torch.normal(x, x.abs())),
    "multinomial": lambda x: (torch.multinomial(x.abs(), 2), torch.multinomial(x.abs(), 5, True)),
    "poisson and binomial": lambda x: (
        torch.poisson(x.abs()),
        torch.binomial(torch.full_like(x, 5.0), x.abs() / 2),
    ),
    "gamma": lambda x: torch._standard_gamma(x.abs()),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(
        *[x.expand(2, 4, 3)] * 3, dropout_p=0.5
    ),
}


def drawn(tf: Any, draw: Callable[[Tensor], Any], randomness: str, **options: Any) -> Any:
    return tf.vmap(draw, randomness=randomness, **options)(M), torch.get_rng_state()


PROGRAMS |= {
    f"{draw}, {randomness} for all": lambda tf, f=f, randomness=randomness: drawn(tf, f, randomness)
    for randomness, several in (("same", DRAWS), ("different", DRAWS | DRAWS_OF_THEIR_OWN))
    for draw, f in several.items()
    if not (draw == "a seed inside" and randomness == "different")
}
PROGRAMS |= {
    "different draws in chunks": lambda tf: drawn(
        tf, lambda x: x * torch.rand(()), "different", chunk_size=2
    ),
    "the same draw in chunks": lambda tf: tf.vmap(
        lambda x: x * torch.rand(()), randomness="same", chunk_size=2
    )(M),
    "no draw where none is allowed": lambda tf: drawn(
        tf, lambda x: F.dropout(F.dropout(x, 0.0), 1.0), "error"
    ),
    "draws under grad": lambda tf: (tf.grad(lambda x: F.dropout(x, 0.5).sum())(M), torch.get_rng_state()),
    "draws under jvp": lambda tf: (tf.jvp(lambda x: F.dropout(x, 0.5), (M,), (M,)), torch.get_rng_state()),
    "draws under jacrev": lambda tf: tf.jacrev(lambda x: x * torch.rand(3))(X),
    "draws under jacfwd": lambda tf: tf.jacfwd(lambda x: x * torch.rand(3), randomness="different")(X),
    "one draw under jacfwd": lambda tf: tf.jacfwd(lambda x: x * torch.rand(3), randomness="same")(X),
}

# -- what is switched on and off, and what is written to -----------------------------------------------------


def statistics(tf: Any) -> Any:
    """A batch norm whose buffers are an argument, as one trains with gradients of functions."""
    norm = nn.BatchNorm1d(3).double()
    params, buffers = (
        {k: v.detach() for k, v in norm.named_parameters()},
        {k: v.clone() for k, v in norm.named_buffers()},
    )
    loss = lambda params, buffers, x: tf.functional_call(norm, (params, buffers), (x,)).pow(3).sum()
    return tf.grad(loss)(params, buffers, M), buffers, dict(norm.named_buffers())


def cubic(x: Tensor) -> Tensor:
    return (x**3).sum() + (x[0] * x[1]).exp()


def times_a_gradient_without_record(tf: Any, x: Tensor) -> Tensor:
    return (under_no_grad(tf.grad(cubic))(x) * x).sum()


def kept(tf: Any) -> list[Tensor]:
    """Values that outlive their transforms. (Of vmap's torch.func's can't be used.)"""
    values: list[Tensor] = []
    tf.grad(lambda x: (values.append(x * 2), x.sum())[1])(X)
    tf.jvp(lambda x: (values.append(x * 3), x.sum())[1], (X,), (T,))
    return values


PROGRAMS |= {
    "statistics in an argument": statistics,
    "an argument beside, written to": lambda tf: (
        lambda t: (tf.grad(lambda x, y: (y.mul_(x) * x).sum())(X, t), t)
    )(T.clone()),
    "a keyword, written to": lambda tf: (
        lambda t: (tf.grad(lambda x, y: (y.view(3)[1:].mul_(2).sum() * x).sum())(X, y=t), t)
    )(T.clone()),
    "an argument beside, written to in vmap": lambda tf: (
        lambda m: (tf.vmap(tf.grad(lambda x, y: (y.mul_(x) * x).sum()))(M, m), m)
    )(M.clone()),
    "jvp under no_grad inside grad": lambda tf: tf.grad(
        lambda x: (under_no_grad(tf.jvp)(torch.sin, (x,), (T,))[0] * x).sum()
    )(X),
    "recording inside vmap": lambda tf: under_no_grad(
        tf.vmap(lambda x: torch.tensor(torch.is_grad_enabled()))
    )(M),
    "recording inside grad": lambda tf: under_no_grad(
        tf.grad(lambda x: (x.sum(), torch.tensor(torch.is_grad_enabled())), has_aux=True)
    )(X),
    "inference mode inside vmap": lambda tf: torch.inference_mode()(tf.vmap)(lambda x: x.square().sum())(M),
    "no_grad inside grad": lambda tf: tf.grad(
        lambda x: (under_no_grad(torch.mul)(x, 2) * x + x.detach()).sum()
    )(X),
    "no_grad between two levels": lambda tf: tf.grad(functools.partial(times_a_gradient_without_record, tf))(
        X
    ),
    "two levels under no_grad": lambda tf: under_no_grad(
        tf.grad(lambda x: tf.grad(cubic)(x).sum() + (under_no_grad(torch.mul)(x, 2) * x).sum())
    )(X),
    "vmap(grad) in inference mode": lambda tf: torch.inference_mode()(tf.vmap(tf.grad(cubic)))(M).clone(),
    "no_grad inside jacrev": lambda tf: tf.jacrev(lambda x: under_no_grad(torch.sin)(x) * x)(X),
    "a gradient wanted for the tangent": lambda tf: tf.jvp(torch.sin, (X,), (wants(T),)),
    "a gradient wanted for the primal": lambda tf: tf.jvp(torch.sin, (wants(X),), (T,)),
    "a gradient wanted for a Jacobian": lambda tf: (
        tf.jacrev(torch.sin)(wants(X)),
        tf.jacfwd(torch.sin)(wants(X)),
    ),
    "what is kept can be used": lambda tf: [
        (x * 2, x.sum().item(), x.tolist(), bool((x < 9).all())) for x in kept(tf)
    ],
}
# -- modules -------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(X.clone())
        self.b = self.a
        self.c = nn.Parameter(T.clone())
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.plain = torch.ones(3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.steps = self.steps + 1
        return (
            scale * (x * self.a + self.b * self.c)
            + self.plain
            + (0 if self.nothing is None else self.nothing)
        )


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(X.clone())

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("broken")


def hooked() -> nn.Module:
    model = Shared()
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def reparametrised(tf: Any) -> Any:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, dtype=torch.float64))
    return tf.functional_call(
        layer, {name: 2 * value.detach() for name, value in layer.named_parameters()}, X
    )


def counted(tf: Any, *given: dict[str, Tensor]) -> Any:
    model = Shared()
    return (
        tf.functional_call(model, given[0] if len(given) == 1 else given, X).detach(),
        given,
        model.steps,
        model.a.detach(),
    )


PROGRAMS |= {
    "functional_call by keywords": lambda tf: tf.functional_call(
        Shared(), {"a": T}, None, {"x": X, "scale": 2.0}
    ),
    "functional_call of no dict": lambda tf: tf.functional_call(Shared(), [], X),
    "functional_call of a state dict": lambda tf: tf.functional_call(
        nn.Linear(3, 2).double(), nn.Linear(3, 2).double().state_dict(), X
    ),
    "functional_call with hooks": lambda tf: tf.functional_call(hooked(), {"a": T}, X),
    "functional_call by another name": lambda tf: tf.functional_call(Shared(), {"b": T}, X),
    "functional_call by both names": lambda tf: tf.functional_call(Shared(), {"a": T, "b": T}, X),
    "strict by one name": lambda tf: tf.functional_call(
        Shared(), {"a": T, "c": X, "steps": torch.ones(())}, X, strict=True
    ),
    "a buffer that was None": lambda tf: tf.functional_call(Shared(), {"nothing": T}, X),
    "parametrised": reparametrised,
    "a buffer that the module replaces": lambda tf: counted(tf, {"steps": torch.tensor(5.0), "a": T}),
    "a buffer that the module replaces, in two dicts": lambda tf: counted(
        tf, {"steps": torch.tensor(5.0)}, {"a": T}
    ),
    "stack_module_state of frozen models": lambda tf: tf.stack_module_state(
        [Shared().requires_grad_(False) for _ in range(2)]
    ),
}


def normed(tf: Any, map_models: bool, **keywords: Any) -> Any:
    """Gradients through a batch norm in training mode, whose batch is the user's: two batches, or two models
    on one batch.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **keywords), nn.Linear(4, 1)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    batches = torch.arange(30.0, dtype=torch.float64).reshape(2, 5, 3).sin()
    gradient = tf.grad(lambda params, x: tf.functional_call(model, params, (x,)).square().sum())
    if map_models:
        return tf.vmap(gradient, (0, None))(
            {name: torch.stack([p, p + 0.1]) for name, p in params.items()}, batches[0]
        )
    return tf.vmap(gradient, (None, 0))(params, batches)


PROGRAMS |= {
    "batch statistics of each of several batches": lambda tf: normed(tf, False, track_running_stats=False),
    "batch statistics in each of several models": lambda tf: normed(tf, True, track_running_stats=False),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_drop_in_program_equals_torch_func(name: str) -> None:
    same(run(PROGRAMS[name], transforms), run(PROGRAMS[name], torch.func))


def test_functional_call_exception_restores_module() -> None:
    model = Broken()
    before = model.a
    with pytest.raises(KeyError, match="broken"):
        transforms.functional_call(model, {"a": T}, X)
    assert model.a is before


# -- mistakes: both refuse -----------------------------------------------------------------------------------

ANY = (*GRADIENTS, *JACOBIANS)
MISTAKES: dict[str, Program] = {
    f"{name} with argnums {argnums!r}": lambda tf, name=name, argnums=argnums: getattr(tf, name)(
        product, argnums
    )(X, T)
    for name in ANY
    for argnums in (2, (0, 0), (), "a", 1.0, (0.0,), (None,), (0, 2))
}
WRONG_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "a number": (2.0,),
    "whole numbers": (torch.arange(3),),
    "None inside": ({"a": X, "b": None},),
}
MISTAKES |= {
    f"{name} in {kind}": lambda tf, name=name, args=args: getattr(tf, name)(
        lambda x: tree_flatten(x)[0][0].sum() * 2.0
    )(*args)
    for name in ANY
    for kind, args in WRONG_ARGUMENTS.items()
}
WRONG_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "a number": lambda x: 2.0,
    "a word": lambda x: (x.sum(), "w"),
}
MISTAKES |= {
    f"{name} of {kind}": lambda tf, name=name, f=f: getattr(tf, name)(f)(X)
    for name in ANY
    for kind, f in WRONG_VALUES.items()
}
MISTAKES |= {
    f"{name} with {kind} for a pair": lambda tf, name=name, f=f: getattr(tf, name)(f, has_aux=True)(X)
    for name in (*GRADIENTS, "jacrev", "jacfwd")
    for kind, f in {
        "a value": lambda x: x.sum(),
        "a list": lambda x: [x.sum(), x],
        "three": lambda x: (x.sum(), x, x),
    }.items()
}
MISTAKES |= {
    "grad of a pair": lambda tf: tf.grad(lambda x: (x.sum(), x))(X),
    "grad of what is no number": lambda tf: tf.grad(lambda x: x[:1])(X),
    "grad of a complex number": lambda tf: tf.grad(lambda x: torch.complex(x, x).sum())(X),
    "grad by keyword alone": lambda tf: tf.grad(lambda x: x.sum())(x=X),
    "jacrev in nothing": lambda tf: tf.jacrev(lambda tree, x: x.sum())({}, X),
    "jacfwd in nothing": lambda tf: tf.jacfwd(lambda tree, x: x.sum())({}, X),
    "jacrev of whole numbers": lambda tf: tf.jacrev(lambda x: x.long())(X),
    "vjp of a number": lambda tf: tf.vjp(lambda x: 3.0, X),
    "vjp without its pair": lambda tf: tf.vjp(torch.sin, X, has_aux=True),
    "a cotangent of another structure": lambda tf: tf.vjp(lambda x: (x, x), X)[1]([X, X]),
    "a cotangent of another shape": lambda tf: tf.vjp(torch.sin, X)[1](T[:1]),
    "a cotangent that is a number": lambda tf: tf.vjp(torch.sum, X)[1](1.0),
    "a real cotangent": lambda tf: tf.vjp(torch.sin, Z)[1](X),
    "primals in a list": lambda tf: tf.jvp(torch.sin, [X], [T]),
    "too many tangents": lambda tf: tf.jvp(torch.sin, (X,), (T, T)),
    "a tangent of another shape": lambda tf: tf.jvp(torch.sin, (X,), (T[:1],)),
    "a tangent that is None": lambda tf: tf.jvp(torch.sin, (X,), (None,)),
    "jvp in whole numbers": lambda tf: tf.jvp(torch.sin, (torch.arange(3),), (torch.arange(3),)),
    "strict jvp of what has no derivative": lambda tf: tf.jvp(
        lambda x: (x, x.detach()), (X,), (T,), strict=True
    ),
    "linearize along another shape": lambda tf: tf.linearize(torch.sin, X)[1](T[:2]),
    "different draws into one tensor": lambda tf: (
        lambda t: tf.vmap(lambda x: t.uniform_(), randomness="different")(M)
    )(T.clone()),
    "a captured tensor written to in grad": lambda tf: (lambda t: tf.grad(lambda x: t.mul_(x).sum())(X))(
        T.clone()
    ),
    "out=": lambda tf: tf.vmap(lambda x: torch.sin(x, out=torch.empty(3)))(M),
    "the memory of a sample": lambda tf: tf.vmap(lambda x: torch.tensor(x.numpy()))(M),
    "backward inside grad": lambda tf: tf.grad(lambda x: (x.sum().backward(), x.sum())[1])(X),
    "backward inside vmap": lambda tf: tf.vmap(lambda x: (x.sum().backward(), x)[1])(wants(M)),
    "requires_grad_(False) inside grad": lambda tf: tf.grad(lambda x: x.requires_grad_(False).square().sum())(
        X
    ),
    "no dict": lambda tf: tf.functional_call(Shared(), 3, X),
    "a list of pairs": lambda tf: tf.functional_call(Shared(), list(Shared().named_parameters()), X),
    "a name in two dicts": lambda tf: tf.functional_call(Shared(), [{"a": T}, {"a": T}], X),
    "two names of one parameter in a state dict": lambda tf: tf.functional_call(
        Shared(), Shared().state_dict(), X
    ),
    "two values of one parameter": lambda tf: tf.functional_call(Shared(), {"a": T, "b": X}, X),
    "strict without one": lambda tf: tf.functional_call(Shared(), {"a": T}, X, strict=True),
    "strict with another": lambda tf: tf.functional_call(nn.Flatten(), {"a": T}, X, strict=True),
    "stack_module_state of different shapes": lambda tf: tf.stack_module_state(
        [nn.Linear(1, 1), nn.Linear(2, 1)]
    ),
    "stack_module_state of frozen and others": lambda tf: tf.stack_module_state([nn.Tanh(), nn.Linear(1, 1)]),
}
MISTAKES |= {
    f"in_dims={dims!r} for {kind}": lambda tf, dims=dims, other=other: tf.vmap(columns, dims)(M, other)
    for kind, dims, other in [
        ("a tensor", (0, (0,)), M),
        ("a dict without the key", (0, {"a": 0}), {"b": M}),
        ("a number", (0, 0), 1.0),
        ("None", 0, None),
        ("anything", "a", M),
        ("anything", 1.0, M),
        ("a tensor", (0, 1.0), M),
    ]
}
MISTAKES |= {
    f"out_dims={dims!r} of {kind}": lambda tf, dims=dims, f=f: tf.vmap(f, out_dims=dims)(M)
    for kind, f, several in [
        ("one", lambda x: x * 2, [2, -3, None, (0, 0), {0: 0}, "a", 1.0, ()]),
        ("a pair", lambda x: (x, x), [None, (0,), (0, 0, 0), "a", {"a": 0}, (0, None)]),
        ("a list", lambda x: [x], [None, (0, 0), "a", {0: 0}]),
        ("no tensor", lambda x: (x, None), [0]),
        ("a number", lambda x: 1.0, [0]),
    ]
    for dims in several
}
MISTAKES |= {
    f"vmap by {size!r}": lambda tf, size=size: tf.vmap(torch.sin, chunk_size=size)(M)
    for size in (0, -1, 2.0, "a", True)
}
MISTAKES |= {
    f"jacrev by {size!r}": lambda tf, size=size: tf.jacrev(torch.sin, chunk_size=size)(X)
    for size in (0, -1, 2.0, "a", True)
}
MISTAKES |= {
    f"randomness={word!r}": lambda tf, word=word: tf.vmap(torch.sin, randomness=word)(M)
    for word in ("", "SAME", None, 1)
}
MISTAKES |= {
    f"{name}, where none is allowed": lambda tf, f=f: drawn(tf, f, "error")
    for name, f in (DRAWS | DRAWS_OF_THEIR_OWN).items()
    if name not in ("none", "dropout of nothing and of all")
}


MISTAKES |= {
    "running statistics of several batches": lambda tf: normed(tf, False),
    "running statistics of several models": lambda tf: normed(tf, True),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_drop_in_program_refused_by_both(name: str) -> None:
    """By an error of psgrad, which programs that catch torch.func's errors on purpose catch too: it has
    ValueErrors and RuntimeErrors.
    """
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        run(MISTAKES[name], torch.func)
    with pytest.raises(PsgradError) as ours:
        run(MISTAKES[name], transforms)
    for kind in (ValueError, RuntimeError):
        assert theirs.type is not kind or isinstance(ours.value, kind)


# -- beyond torch.func: it refuses, or fails -----------------------------------------------------------------

ROWS = torch.stack([X, T])
# What it gives, and why it is given.
BEYOND: dict[str, tuple[Program, Any, str]] = {
    f"{name} with {aux!r} beside": (
        lambda tf, name=name, aux=aux: getattr(tf, name)(lambda x: (x.square().sum(), aux), has_aux=True)(X)[
            1
        ],
        aux,
        "what stands beside is handed through, whatever it is",
    )
    for name in ("grad", "jacrev", "jacfwd")
    for aux in ("w", None, 3)
}
BEYOND |= {
    "whole numbers beside vjp's value": (
        lambda tf: tf.vjp(lambda x: tuple(x.topk(2)), X)[1]((X[:2], torch.tensor([0, 1]))),
        (torch.tensor([-0.8, 0.0, 0.3], dtype=torch.float64),),
        (
            "a function may return places beside values; they have no derivative, and their cotangents are"
            " not looked at"
        ),
    ),
    "keywords through jacrev": (
        lambda tf: tf.jacrev(lambda x, y: x * y)(X, y=T),
        torch.diag(T),
        "grad passes them on, too",
    ),
    "keywords through jacfwd": (
        lambda tf: tf.jacfwd(lambda x, y: x * y)(X, y=T),
        torch.diag(T),
        "grad passes them on, too",
    ),
    "out_dims of another sequence": (
        lambda tf: tf.vmap(lambda x: [x, x], out_dims=(0, 1))(M),
        [M, M.T],
        "lists, tuples and named tuples stand for one another",
    ),
    "chunks of what is not mapped": (
        lambda tf: tf.vmap(lambda x: (x, T), out_dims=(0, None), chunk_size=2)(M),
        (M, T),
        "as without chunks",
    ),
    "chunks of no samples": (
        lambda tf: tf.vmap(lambda x: x, chunk_size=2)(M[:0]),
        M[:0],
        "as without chunks",
    ),
    "a differentiated argument, written to": (
        lambda tf: (lambda t: (tf.grad(lambda x: x.mul_(2).square().sum())(t), t))(X.clone()),
        (8 * X, X),
        "a function may compute in place; the caller's tensor stays as it is",
    ),
    "negative argnums of jacfwd": (
        lambda tf: tf.jacfwd(product, -1)(X, T),
        2 * X * T,
        "they count from the end, as in grad; torch.func takes the slope in another argument for it",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_drop_in_program_beyond_torch_func(name: str) -> None:
    program, expected, _ = BEYOND[name]
    same(run(program, transforms), expected)
    try:
        theirs = run(program, torch.func)
    except Exception:
        return
    with pytest.raises(AssertionError):
        same(theirs, expected)


# -- refused here, though torch.func gives something ---------------------------------------------------------

STRICTER: dict[str, tuple[Program, str]] = {
    "argnums=True": (lambda tf: tf.grad(product, True)(X, T), "Python counts it as 1, which nobody means"),
    "argnums=None": (
        lambda tf: tf.jacfwd(product, None)(X, T),
        "only jacfwd would take it, for all arguments; say which",
    ),
    "out_dims=True": (
        lambda tf: tf.vmap(torch.sin, out_dims=True)(M),
        "Python counts it as 1, which nobody means",
    ),
    "grad of whole numbers": (
        lambda tf: tf.grad(lambda x: (x > 0).sum())(X),
        "a loss that counts has no gradient; zeros look like one",
    ),
    "jacfwd of whole numbers": (lambda tf: tf.jacfwd(lambda x: x.long())(X), "as jacrev"),
    "no cotangent": (
        lambda tf: tf.vjp(torch.sum, X)[1](None),
        "a cotangent that was forgotten, and for any but a number an error",
    ),
    "a complex tangent of a real value": (
        lambda tf: tf.jvp(torch.sin, (X,), (Z,)),
        "the value can't move that way",
    ),
    "linearize of what is no tensor": (lambda tf: tf.linearize(lambda x: (x, 3), X)[0], "as vjp and jvp"),
    "a name that the module does not have": (
        lambda tf: tf.functional_call(Shared(), {"nobody": T}, X),
        "misspelt, it has no gradient",
    ),
    "a name that a parametrization hides": (
        lambda tf: tf.functional_call(
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double()), {"weight": M[:2]}, X
        ),
        "PyTorch writes it back through the parametrization into the module's own parameters",
    ),
    "one draw inside attention": (
        lambda tf: drawn(tf, DRAWS_OF_THEIR_OWN["attention with dropout"], "same"),
        "the fused kernel draws by itself, for each sample",
    ),
    "a hook inside": (
        lambda tf: tf.grad(lambda x: (lambda y: (y.register_hook(lambda g: g * 2), y.sum())[1])(x * 1))(X),
        "PyTorch's autograd would call it, which is not at work; an autograd.Function changes a gradient",
    ),
    "autograd inside": (
        lambda tf: tf.grad(lambda x: torch.autograd.grad(x.square().sum(), x)[0].sum())(X),
        "PyTorch's autograd is not at work; grad is",
    ),
}


@pytest.mark.parametrize("name", STRICTER)
def test_drop_in_program_stricter_than_torch_func(name: str) -> None:
    program, _ = STRICTER[name]
    run(program, torch.func)
    with pytest.raises(PsgradError):
        run(program, transforms)
