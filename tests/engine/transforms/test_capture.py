"""Capture and replay: the same results as the function's own, and never a number that has gone stale."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.gradients.terms.numerics import Flags
from psgrad.engine.transforms import functional_call, grad, grad_and_value, vmap
from psgrad.engine.transforms.capture import MOST_PROGRAMS, Captured, capture
from psgrad.engine.transforms.program import CudaGraph, obstacle_to_cuda_graph
from psgrad.engine.transforms.recorder import assumed, record
from psgrad.engine.transforms.shortening import shorten


@pytest.fixture(autouse=True)
def _no_word():
    """A function that is said to run uncaptured fails its test, unless the test expects just that."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


TO_RECORD = 2  # calls: one is recorded, the next one compared


def ready(function, *args, **options):
    """The captured function after as many calls as it takes to be replayed."""
    captured = capture(function, **options)
    for _ in range(TO_RECORD):
        captured(*args)
    return captured


class Counted:
    """A function that tells how often it was called: never, at a replay."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def runs_as_it_is(function, *args, words):
    """The captured function, of which it must have been said why it is not replayed."""
    with pytest.warns(UserWarning, match=words):
        return ready(function, *args)


def replays(captured):
    return sum(entry.replays for entry in captured.entries.values())


def perceptron(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
    )


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )


def per_sample(model, **options):
    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(model, parameters, (x[None],))[0], y)

    return vmap(grad_and_value(loss), in_dims=(None, 0, 0), **options)


def batch(*shape, n=5):
    return torch.randn(n, *shape), torch.randint(4, (n,))


def detached(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "shape"), [(perceptron(), (6,)), (convolutional(), (1, 8, 8))], ids=["mlp", "cnn"]
)
def test_capture_replay_equals_the_function(model, shape):
    function = Counted(per_sample(model))
    captured = ready(function, detached(model), *batch(*shape))
    assert function.calls == TO_RECORD
    for _ in range(3):
        given = (detached(model), *batch(*shape))
        same(captured(*given), per_sample(model)(*given))
    assert function.calls == TO_RECORD


def test_capture_random_operators_draw_anew():
    model = perceptron(dropout=0.5)
    x, y = batch(6)
    eager = per_sample(model, randomness="different")
    captured = ready(eager, detached(model), x, y)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = [eager(detached(model), x, y) for _ in range(2)]
        torch.manual_seed(seed)
        replayed = [captured(detached(model), x, y) for _ in range(2)]
        same(replayed, expected)
    assert not torch.equal(replayed[0][1], replayed[1][1])


def test_capture_keeps_unused_draw():
    def function(x):
        torch.rand(3)
        return x + torch.rand(3)

    captured = ready(function, torch.ones(3))
    torch.manual_seed(0)
    expected = function(torch.ones(3))
    torch.manual_seed(0)
    same(captured(torch.ones(3)), expected)


# -- signatures ----------------------------------------------------------------------------------------------


def test_capture_per_shape_dtype_and_number():
    function = Counted(lambda x, power, name=None: (x**power).sum(0) + (1 if name == "one" else 0))
    captured = capture(function)
    x = torch.rand(3, 2)
    for given in [(x, 2), (x, 3), (x, 2.0), (x[:2], 2), (x.double(), 2), (x.t().contiguous().t(), 2)]:
        for _ in range(TO_RECORD + 1):
            same(captured(*given), function.function(*given))
    for _ in range(TO_RECORD + 1):
        captured(x, 2, name="one")
    assert function.calls == 7 * TO_RECORD
    captured(x, 2), captured(x, 3)
    assert function.calls == 7 * TO_RECORD


def test_capture_signature_signed_zero_and_nan():
    function = Counted(lambda x, y: torch.copysign(x, torch.tensor(y)))
    captured = capture(function)
    x = torch.ones(2)
    for _ in range(TO_RECORD + 1):
        same(captured(x, 0.0), x)
        same(captured(x, -0.0), -x)
        captured(x, float("nan"))
    assert function.calls == 3 * TO_RECORD


def test_capture_signature_same_tensor_twice():
    captured = capture(lambda a, b: a + 1 if a is b else a * b)
    x = torch.full((2,), 3.0)
    same(captured(x, x.clone()), x * x)
    same(captured(x, x), x + 1)


def test_capture_keeps_the_programs_used_last():
    function = Counted(lambda x: x * 2)
    captured = capture(function)
    for n in range(MOST_PROGRAMS + 1):
        for _ in range(TO_RECORD):
            captured(torch.ones(n))
    calls = function.calls
    captured(torch.ones(1))
    assert function.calls == calls
    captured(torch.ones(0))  # the one used least recently is gone
    assert function.calls == calls + 1
    assert len(captured.entries) == MOST_PROGRAMS


@pytest.mark.long
def test_capture_autocast():
    model = perceptron()
    x, y = batch(6)
    captured, parameters = capture(per_sample(model)), detached(model)
    same(captured(parameters, x, y), per_sample(model)(parameters, x, y))
    with torch.autocast("cpu", torch.bfloat16):
        expected = per_sample(model)(parameters, x, y)
        same(captured(parameters, x, y), expected)
    assert not torch.equal(expected[1], per_sample(model)(parameters, x, y)[1])


def test_capture_pytrees():
    captured = capture(
        lambda tree, *, scale: {
            "sum": tree["a"] + tree["b"][0],
            "rest": (tree["b"][1], None, "name", 3 * scale),
        }
    )
    a, b, c = torch.randn(3, 2).unbind()
    for _ in range(2):
        result = captured({"a": a, "b": [b, c]}, scale=2)
    same(result["sum"], a + b)
    assert result["rest"][0] is c
    assert result["rest"][1:] == (None, "name", 6)


# -- memory --------------------------------------------------------------------------------------------------


def test_capture_closure_tensor_read_at_each_call():
    scale = torch.ones(2)
    captured = ready(lambda x: x * scale, torch.ones(2))
    scale.fill_(5)
    same(captured(torch.ones(2)), torch.full((2,), 5.0))
    scale.data = torch.full((1,), 7.0)  # other memory, of another shape
    same(captured(torch.ones(2)), torch.full((2,), 7.0))


def test_capture_changing_function_runs_uncaptured():
    steps = iter(range(100))
    captured = runs_as_it_is(lambda x: x * next(steps), torch.ones(2), words="keep a state of its own")
    assert captured(torch.ones(2))[0] + 1 == captured(torch.ones(2))[0]


def test_capture_write_into_closure_tensor_runs_uncaptured():
    layer = nn.Module()
    layer.register_buffer("calls", torch.tensor(0))

    def function(x):
        layer.calls.add_(1)
        return x * layer.calls

    captured = runs_as_it_is(function, torch.ones(2), words="writes into a tensor from outside")
    same([captured(torch.ones(2)) for _ in range(3)], [torch.full((2,), float(k)) for k in (3, 4, 5)])


def test_capture_write_into_argument_runs_uncaptured():
    def function(x, y):
        x.view(-1)[:2] = y.sum()
        return x * 2

    captured = runs_as_it_is(function, torch.zeros(2, 2), torch.ones(3), words="writes into a tensor from")
    x = torch.zeros(2, 2)
    same(captured(x, torch.ones(3)), torch.tensor([[6.0, 6.0], [0.0, 0.0]]))
    same(x, torch.tensor([[3.0, 3.0], [0.0, 0.0]]))


def test_capture_results_can_be_written():
    captured = capture(lambda x: (x * 2, x * 2, x.sum() * 0 + 1))
    for _ in range(4):
        one, other, _ = captured(torch.ones(2))
        one.add_(1)
        assert one._version > 0  # an ordinary tensor: one of inference mode has no count
        same(other, torch.full((2,), 2.0))


# -- what is not replayed ------------------------------------------------------------------------------------


def test_capture_data_dependent_branch():
    function = Counted(lambda x: x * 2 if x.sum() > 0 else x * 3)
    captured = ready(function, torch.ones(2))
    same(captured(torch.full((2,), 5.0)), torch.full((2,), 10.0))
    assert function.calls == TO_RECORD
    same(captured(-torch.ones(2)), torch.full((2,), -3.0))
    assert function.calls == TO_RECORD + 1
    same(captured(torch.ones(2)), torch.full((2,), 2.0))
    assert function.calls == TO_RECORD + 1
    for _ in range(10):  # often the other way: that ends replays
        same(captured(-torch.ones(2)), torch.full((2,), -3.0))
    assert function.calls == TO_RECORD + 11
    assert next(iter(captured.entries.values())).ended


def test_capture_branch_that_fails_draws_as_the_function():
    function = lambda x: torch.rand(2) * (2 if (x + torch.rand(2)).sum() > 0 else 3) + torch.rand(2)
    captured = ready(function, torch.ones(2))
    for x in (torch.ones(2), -5 * torch.ones(2), torch.ones(2)):
        torch.manual_seed(0)
        expected = function(x), torch.rand(1)
        torch.manual_seed(0)
        same((captured(x), torch.rand(1)), expected)


@pytest.mark.parametrize(
    "read", [float, lambda x: x.item(), lambda x: 2.0 if x.bool() else 1.0, lambda x: int(x)]
)
def test_capture_item_of_closure_tensor(read):
    scale = torch.tensor(2.0)
    function = lambda x: x * read(scale)
    captured = ready(function, torch.ones(2))
    for value in (2.0, 3.0, 0.0, -0.0, float("nan") if read in (float,) else 2.0):
        scale.fill_(value)
        x = torch.ones(2)
        same(captured(x).signbit(), function(x).signbit())
        torch.testing.assert_close(captured(x), function(x), rtol=0, atol=0, equal_nan=True)


def test_capture_reads_the_type_of_a_result():
    """A rule asks an operator for it, which returns a number; PyTorch's function of that name a dtype."""
    captured = capture(vmap(torch.mul))
    for _ in range(3):
        x, y = torch.randn(4, 3), torch.randn(4, dtype=torch.float64)
        assert torch.equal(captured(x, y), x * y.float().unsqueeze(1))
    assert replays(captured) == 2


@pytest.mark.parametrize(
    "read", [lambda x: x.tolist(), lambda x: float(x.numpy()), lambda x: float(np.asarray(x))]
)
def test_capture_memory_read_without_a_kernel_runs_uncaptured(read):
    scale = torch.tensor(2.0)
    captured = runs_as_it_is(lambda x: x * read(scale), torch.ones(2), words="run uncaptured")
    scale.fill_(3)
    same(captured(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.masked_select(x, x > 0),
    ],
)
def test_capture_data_dependent_shape_runs_uncaptured(pick):
    captured = runs_as_it_is(pick, torch.tensor([1.0, -1.0, 2.0]), words="depend on data")
    x = torch.tensor([-1.0, -1.0, 3.0])
    same(captured(x), pick(x))


def _forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.rand(2)


def _twice_the_same(x):
    before = torch.get_rng_state()
    first = torch.rand(2)
    torch.set_rng_state(before)
    return x + first + torch.rand(2)


def _in_chunks(x):
    return vmap(lambda a: a + torch.rand(()), randomness="same", chunk_size=1)(x)


def _seeded(x):
    torch.manual_seed(0)
    return x + torch.rand(2)


@pytest.mark.parametrize("function", [_forked, _twice_the_same, _in_chunks, _seeded])
def test_capture_setting_random_state_runs_uncaptured(function):
    with pytest.warns(UserWarning, match="random state|run uncaptured"):
        captured = ready(function, torch.zeros(2))
    for _ in range(2):
        torch.manual_seed(5)
        expected = function(torch.zeros(2))
        torch.manual_seed(5)
        same(captured(torch.zeros(2)), expected)


def test_capture_own_generator_runs_uncaptured():
    captured = runs_as_it_is(
        lambda x: x + torch.rand(2, generator=torch.Generator().manual_seed(1)),
        torch.zeros(2),
        words="generator of its own",
    )
    same(captured(torch.zeros(2)), captured(torch.zeros(2)))


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_capture_python_and_numpy_draws_run_uncaptured(draw):
    captured = runs_as_it_is(
        lambda x: x + draw(), torch.zeros(1, dtype=torch.float64), words="Python's or NumPy's generator"
    )
    random.seed(0), np.random.seed(0)
    result = [captured(torch.zeros(1, dtype=torch.float64)).item() for _ in range(2)]
    random.seed(0), np.random.seed(0)
    assert result == [draw(), draw()]


class Keeping(nn.Linear):
    def forward(self, x):
        self.last = super().forward(x)
        self.weights = {"last": [self.last]}
        return self.last


def test_capture_module_that_keeps_tensors_runs_uncaptured():
    model = nn.Sequential(Keeping(6, 8), nn.ReLU(), Keeping(8, 4))
    x, y = batch(6)
    with pytest.warns(UserWarning, match="keeps tensors"):
        captured = ready(per_sample(model), detached(model), x, y)
    same(captured(detached(model), x, y), per_sample(model)(detached(model), x, y))


def test_capture_mutable_argument_runs_uncaptured():
    class Holder:
        factor = 2

    captured = runs_as_it_is(
        lambda x, holder: x * holder.factor, torch.ones(2), Holder, words="whose content may change"
    )
    Holder.factor = 3
    same(captured(torch.ones(2), Holder), torch.full((2,), 3.0))


def test_capture_argument_requires_grad():
    x = torch.full((3,), 2.0, requires_grad=True)
    captured = runs_as_it_is(lambda x: (x**2).sum(), x, words="requires a gradient")
    captured(x).backward()
    same(x.grad, torch.full((3,), 4.0))


def test_capture_closure_weight_requires_grad():
    weight = torch.ones(3, requires_grad=True)
    captured = runs_as_it_is(lambda x: (x * weight).sum(), torch.ones(3), words="requires a gradient")
    captured(torch.full((3,), 2.0)).backward()
    same(weight.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        same(captured(torch.ones(3)), torch.tensor(3.0))


@pytest.mark.parametrize(
    "under",
    [
        lambda f: vmap(f),
        lambda f: grad(lambda x: f(x).sum()),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.grad(lambda x: f(x).sum()),
    ],
    ids=["vmap", "grad", "torch.func.vmap", "torch.func.grad"],
)
def test_capture_inside_transforms(under):
    captured = ready(torch.sin, torch.ones(3))
    captured(torch.ones(2, 3))
    x = torch.randn(2, 3)
    torch.testing.assert_close(under(captured)(x), under(torch.sin)(x))


# -- other backends of a program -----------------------------------------------------------------------------


def obstacle(function, *devices):
    tensors = [torch.empty(2, 2, device=device) for device in devices]
    _, recording, _ = record(lambda: function(*tensors), tensors)
    return obstacle_to_cuda_graph(recording, shorten(recording, hoists=False), tensors)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_cuda_graph_of_another_device(device):
    assert obstacle(lambda x, y: x * y, device, device) == "not all of it is on one GPU"


class GraphOnCPU(CudaGraph):
    """Replays what a CUDA graph would: the program, on the memory that it was captured with."""

    captures = 0

    def _capture_graph(self, tensors, addresses):
        self.captures += 1
        self.addresses, self.given = (
            addresses,
            [x.clone() if i in self.moving else x for i, x in enumerate(tensors)],
        )
        self.results = self.run(*self.given)
        self.graph = self

    def replay(self):
        for result, value in zip(self.results, self.run(*self.given), strict=True):
            result.copy_(value)


def test_cuda_graph_reads_arguments_of_each_call():
    weight, buffers = torch.ones(2), [torch.full((2,), float(k)) for k in range(4)]
    graph = GraphOnCPU(lambda weight, x: [weight * x])
    result = [graph(weight, x)[0] for x in buffers]
    weight.fill_(2)
    result.append(graph(weight, buffers[1])[0])
    same(result, [torch.full((2,), k) for k in (0.0, 1.0, 2.0, 3.0, 2.0)])
    assert graph.captures == 2  # at first, and when the second argument turned out to move


def test_cuda_graph_failed_capture_runs_kernels():
    class Refused(GraphOnCPU):
        def _capture_graph(self, tensors, addresses):
            raise RuntimeError("operation not permitted when stream is capturing")

    graph = Refused(lambda x: [x * 2])
    same([graph(torch.ones(2))[0], graph(torch.zeros(2))[0]], [torch.full((2,), 2.0), torch.zeros(2)])
    assert graph.how.startswith("kernel by kernel, as no CUDA graph could be made: operation not permitted")


# -- What depends on tensors from outside alone --------------------------------------------------------------


def of_weight(weight, x):
    """With a view of a weight, a copy that may have been a view, a cast, and a view of a cast."""
    half = weight.to(torch.bfloat16)
    return x @ weight.t(), x.repeat(1, 2) * weight.t().reshape(-1), x.to(torch.bfloat16) @ half.t()


def write_in_place(weight):
    weight.mul_(-2)


def write_through_a_view(weight):
    weight.t()[0].mul_(-2)


@pytest.mark.parametrize("hoists", [False, True])
@pytest.mark.parametrize("write", [write_in_place, write_through_a_view])
def test_capture_values_of_an_outside_weight_follow_its_changes(hoists, write):
    weight, x = torch.randn(2, 3), torch.ones(1, 3)
    captured = Captured(lambda x: of_weight(weight, x), pytest.fail, hoists)
    for k in range(6):
        same(captured(x + k), of_weight(weight, x + k))
        write(weight)
    assert next(iter(captured.entries.values())).replays >= 4


def test_program_hoists_casts_and_small_values_but_no_larger_ones():
    weight, x = torch.randn(300, 300), torch.ones(1, 300)

    def function(x):
        table = torch.arange(3).float().exp()
        half = weight.to(torch.bfloat16).t()
        return (x @ half.float()).sum() + (x[:, :3] * table).sum() + weight.double()[0, 0]

    _, recording, _ = record(lambda: function(x), [x])
    shortened = shorten(recording, hoists=True)
    left = [str(kernel.op) for kernel in shortened.kernels if not kernel.writes]
    assert len(shortened.hoisted) == 5  # arange, two casts, exp, and a view of a cast
    assert left.count("aten._to_copy.default") == 2  # to float32 and to float64, which take more memory


def test_capture_assumption_that_does_not_hold():
    def absolute(x):
        flags = assumed(Flags)
        if flags is not None:
            flags.add(x < 0)
        return x.abs() if flags is None else x.clone()

    captured = capture(absolute)
    for x in torch.tensor([[-1.0], [-2.0], [3.0], [4.0], [-5.0]]):  # recorded, compared twice, replayed twice
        assert torch.equal(captured(x), x.abs())
    assert captured.flags == 3
