"""What a private run refuses before its first step, each with its words, and what it lets pass."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from psgrad.engine.execution.objective import Objective
from psgrad.engine.privacy.box_muller import REACH
from psgrad.engine.privacy.preflight import require_separate_records, stand_ins, warm_up
from psgrad.engine.privacy.refusals import require_expected_batch_size, require_small_delta, require_tail
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.errors import EXIT_RUNTIME, EXIT_USAGE, ConfigError, ModelError
from tests.small_models import ARCHITECTURES, Architecture

# -- Numbers -------------------------------------------------------------------------------------------------


def test_refusal_delta_above_one_over_records() -> None:
    require_small_delta(1e-5, 50_000)
    with pytest.raises(ConfigError) as caught:
        require_small_delta(1e-3, 1000)
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value).splitlines() == [
        "privacy.delta is 0.001, and the dataset has 1000 records; expected less than 1 / 1000 = 0.001",
        "  hint: with such a delta a record could be published as it is; set privacy.delta well below that,"
        " such as 1e-4",
    ]


@given(delta=st.floats(1e-12, 0.999), records=st.integers(1, 10**9))
def test_refusal_advised_delta_passes(delta: float, records: int) -> None:
    try:
        require_small_delta(delta, records)
    except ConfigError as error:
        assert delta * records >= 1
        require_small_delta(float(str(error).rpartition("such as ")[2]), records)
    else:
        assert delta * records < 1


POISSON = Sampling("poisson", sample_rate=0.1)
FIXED = Sampling("fixed", batch_size=64)


@pytest.mark.parametrize(
    ("divisor", "sampling", "expected"),
    [
        (49, POISSON, "is 49, and batches will have about 100 records (sample_rate 0.1 of 1000 records)"),
        (201, POISSON, "is 201, and batches will have about 100 records"),
        (201, POISSON, "hint: set privacy.expected_batch_size: 100, or correct the sampling"),
        (20, FIXED, "batches will have about 64 records (batch_size 64)"),
    ],
)
def test_refusal_expected_batch_size_far_from_sampling(
    divisor: float, sampling: Sampling, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_expected_batch_size(divisor, sampling, 1000)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("privacy.expected_batch_size is ")


@pytest.mark.parametrize(
    ("steps", "delta", "refused"),
    [
        ([(0.3, 10**6)], 1e-12, False),
        ([(0.02, 1)], 1e-12, False),
        ([(0.01, 1)], 1e-5, False),
        ([(0.01, 10**6)], 1e-5, True),  # the sum over steps
        ([(2.0, 5), (0.009, 1)], 1e-5, True),
        ([(0.0, 5)], 1e-12, False),
    ],
)
def test_refusal_tail_of_noise(steps: list[tuple[float, int]], delta: float, refused: bool) -> None:
    exact = sum(count * mpmath.erfc((REACH - 1 / z) / mpmath.sqrt(2)) / 2 for z, count in steps if z)
    assert (exact > delta / 1000) == refused
    if not refused:
        require_tail(steps, delta)
        return
    with pytest.raises(ConfigError) as caught:
        require_tail(steps, delta)
    assert caught.value.message.startswith(
        f"the noise multiplier is {min(z for z, _ in steps):g}: a record may move the sum by"
    )
    assert f"ends at {REACH:.3g} deviations" in caught.value.message


# -- Models --------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A network with something between its two layers."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), middle, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)).flatten(1))
        return out


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class RunningMean(nn.Module):
    """Centres its input on a running mean, which it keeps in a buffer."""

    mean: Tensor

    def __init__(self, *, replace: bool) -> None:
        super().__init__()
        self.replace = replace
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.replace:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        else:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class FirstBatch(nn.Module):
    """Sets itself up by the first batch that it sees, in a buffer that was not there before."""

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", x.detach().abs().mean(0))
        return x / self.scale


class Cache(nn.Module):
    """Keeps what depends on the input's shape alone."""

    def forward(self, x: Tensor) -> Tensor:
        if "angles" not in self._buffers:
            self.register_buffer("angles", torch.arange(x.shape[-1]), persistent=False)
        return x + self.angles


class Bank(nn.Module):
    """Adds the last thing that it saw, kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*self.seen, x.detach()[:1]][-2:]
        return x + self.seen[0]


def check(
    model: nn.Module, loss: Callable[..., Tensor] = F.cross_entropy, rows: int = 4, **options: Any
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)
    require_separate_records(Objective(model, loss, **options), (x,), y)


def refusal(model: nn.Module, loss: Callable[..., Tensor] = F.cross_entropy, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check(model, loss, **options)
    assert caught.value.exit_code == EXIT_RUNTIME
    return str(caught.value)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_refusal_architectures_pass(architecture: Architecture, mode: bool) -> None:
    inputs, target = architecture.batch(4)
    require_separate_records(Objective(architecture.build().train(mode), architecture.loss), inputs, target)


@pytest.mark.parametrize(
    "middle",
    [
        nn.BatchNorm1d(6).eval(),
        nn.Dropout(0.5),
        Cache(),
        nn.LayerNorm(6),
        parametrizations.spectral_norm(nn.Linear(6, 6)).eval(),
        Function(lambda x: x * torch.nan),
    ],
    ids=["batch-norm-in-eval", "dropout", "cache", "layer-norm", "spectral-norm-in-eval", "nan"],
)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_refusal_separate_records_pass(middle: nn.Module, rows: int) -> None:
    check(Around(middle), rows=rows)


RUNNING = (
    "is in train mode, and its running statistics follow the data",
    "expected parameters and buffers that a forward pass leaves alone: what the data writes into them is"
    " published without",
    "hint: set model.mode: eval, build it with track_running_stats=False, or replace it by nn.GroupNorm",
)
OF_THE_BATCH = (
    "the layer middle (BatchNorm1d) takes its statistics from the batch, on which every record's output then"
    " depends",
    "hint: replace it by nn.GroupNorm, or build it with track_running_stats=True and set model.mode: eval",
)
MIXES = (
    "what the model makes of a row changes with the other rows of its batch, by ",
    "expected an output for each record that depends on no other record",
    "hint: use layers that look at one sample, such as nn.GroupNorm",
)
POWER = ("a forward pass changes middle.", "hint: set model.mode: eval")
INSTANCE = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True))
WITHOUT_STATISTICS = nn.BatchNorm1d(6, track_running_stats=False)


def mixes(middle: nn.Module | Callable[[Tensor], Tensor], layer: str = "middle (Function)") -> Any:
    module = middle if isinstance(middle, nn.Module) else Function(middle)
    return module, (*MIXES, f"of its size, first in the layer {layer}")


REFUSED: dict[str, tuple[nn.Module, tuple[str, ...]]] = {
    "running statistics": (nn.BatchNorm1d(6), ("(BatchNorm1d", *RUNNING)),
    "running statistics of instances": (INSTANCE, ("(Instance", *RUNNING)),
    "statistics of the batch": (WITHOUT_STATISTICS.train(), OF_THE_BATCH),
    "statistics of the batch in eval mode": (copy.deepcopy(WITHOUT_STATISTICS).eval(), OF_THE_BATCH),
    "a buffer that is replaced": (
        RunningMean(replace=True),
        ("a forward pass changes middle.mean of the layer middle (RunningMean)",),
    ),
    "a buffer that is written into": (
        RunningMean(replace=False),
        ("a forward pass changes middle.mean of the layer middle (RunningMean)",),
    ),
    "power iteration": (parametrizations.spectral_norm(nn.Linear(6, 6)), POWER),
    "power iteration, the old way": (nn.utils.spectral_norm(nn.Linear(6, 6)), POWER),
    "the mean of records": mixes(lambda x: x - x.mean(0)),
    "sums of those before": mixes(lambda x: x.cumsum(0)),
    "sums of those after": mixes(lambda x: x.flip(0).cumsum(0).flip(0)),
    "another order": mixes(lambda x: x.flip(0)),
    "a softmax of records": mixes(lambda x: x.softmax(0)),
    "the mean behind a dropout": mixes(
        nn.Sequential(nn.Dropout(0.5), Function(lambda x: x - x.mean(0))), "middle.1 (Function)"
    ),
    "attention of records": mixes(nn.TransformerEncoderLayer(6, 2, 12, batch_first=False).eval(), "middle"),
}


@pytest.mark.every(1)
@pytest.mark.parametrize("name", REFUSED)
def test_refusal_of_models_that_keep_or_mix_records(name: str) -> None:
    middle, words = REFUSED[name]
    message = refusal(Around(middle))
    assert [each for each in words if each not in message] == []


def test_refusal_buffer_initialised_by_first_batch() -> None:
    """Where it has not set itself up on stand-ins before, from which nothing follows about a record."""
    model = Around(FirstBatch())
    state = Unchanged(model)
    check(model)
    with pytest.raises(ModelError, match=r"wrote into middle\.scale"):
        state.require()
    model = Around(FirstBatch())
    warm_up(model, lambda: model(*stand_ins([torch.ones(1, 6)])[0]))
    state = Unchanged(model)
    check(model)
    state.require(by_bits=True)


def test_refusal_memory_bank() -> None:
    assert "a forward pass changes middle.seen" in refusal(Around(Bank()))


def test_refusal_loss_with_a_memory() -> None:
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(F.cross_entropy(output, target).item())
        return F.cross_entropy(output, target) / (sum(seen) / len(seen))

    message = refusal(nn.Linear(6, 3), loss)
    assert "the loss of row " in message
    assert (
        "once others have passed; expected a loss of each record that depends on no other record" in message
    )


def test_refusal_model_that_depends_on_the_size_of_the_batch() -> None:
    message = refusal(Around(Function(lambda x: x * len(x))))
    assert "changes with the other rows of its batch, by " in message
    assert "first in the layer" not in message


class Balanced(nn.Module):
    """Says, beside its logits, how evenly the batch is spread over the classes."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(6, 3), nn.Dropout(drop)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shares = self.gate(x).softmax(1)
        return {"logits": self.drop(self.gate(x)), "balance": shares.mean(0).square().sum()}


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_refusal_batch_loss_of_model(drop: float) -> None:
    def balanced(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target) + output["balance"]

    assert "changes with the other rows of its batch" in refusal(Balanced(drop), balanced)
    # of which the loss makes no use
    check(Balanced(drop), lambda output, target: F.cross_entropy(output["logits"], target))


def test_refusal_error_on_one_row() -> None:
    message = refusal(Around(nn.Linear(5, 6)))
    assert (
        "the model or the loss raised RuntimeError on row 0 of the rows looked at: mat1 and mat2 shapes"
        in message
    )

    def one(x: Tensor) -> Tensor:
        if len(x) != 1:
            raise ValueError("one at a time")
        return x

    check(Around(Function(one)))


def test_refusal_check_restores_generators_and_weights() -> None:
    model = Around(nn.Dropout(0.5))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_refusal_numpy_and_python_draws_pass() -> None:
    """What a model draws there is the same in each of its runs in a step."""

    def noisy(x: Tensor) -> Tensor:
        return x * random.random() + float(np.random.rand())

    before = random.getstate(), np.random.get_state()[1].tolist()
    check(Around(Function(noisy)))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before

    own = np.random.default_rng(0)
    assert "draw random numbers with torch" in refusal(Around(Function(lambda x: x * own.random())))
