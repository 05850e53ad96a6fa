"""Private training as a library's user sets it up."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.engine.transforms import functional_call
from psgrad.errors import ConfigError


def training_of_the_head(optimizer_has_all: bool, frozen: bool) -> tuple[nn.Module, PrivateTraining]:
    """All have gradients of an earlier pass without noise; the optimiser would use those of frozen ones."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(10, 4)
    model(rows).square().sum().backward()
    head = {name: value for name, value in model.named_parameters() if name.startswith("1.")}
    model[0].requires_grad_(not frozen)
    return model, PrivateTraining(
        head,
        lambda drawn: batch_source(
            lambda params, row: functional_call(model, params, (row,)).square().sum(), head, rows[drawn]
        ),
        10,
        clipping=Clipping.flat(head, 1.0),
        noise=Noise(1.0),
        sampling=Sampling("poisson", sample_rate=0.5),
        relation="add_or_remove_one",
        expected_batch_size=5,
        optimizer=torch.optim.SGD(model.parameters() if optimizer_has_all else head.values(), lr=0.1),
        generator=make_generator(),
    )


def test_private_step_optimiser_of_other_parameters_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="the optimiser has 2 trainable parameters that are not among those of the private training",
    ):
        training_of_the_head(optimizer_has_all=True, frozen=False)


@pytest.mark.parametrize("optimizer_has_all", [False, True])
def test_private_step_other_tensors_unchanged(optimizer_has_all: bool) -> None:
    model, training = training_of_the_head(optimizer_has_all, frozen=optimizer_has_all)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    training.step()
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias"}


STEPS_OF_TEN_MEBIBYTES = """
import resource, statistics, torch
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.noise import Noise
from psgrad.engine.privacy.batches import batch_source
from psgrad.engine.privacy.step import private_sum

torch.set_num_threads(1)
params, rows = {"w": torch.randn(600, 500)}, torch.randn(64, 500)
source = batch_source(lambda params, row: torch.tanh(params["w"] @ row).sum(), params, rows)

def step():
    private_sum(source, Clipping.flat(params, 1.0), Noise(1.0), "add_or_remove_one", make_generator())

def new_pages_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(5):
    step()
print(statistics.median(new_pages_of_a_step() for _ in range(11)))
"""


@pytest.mark.sweep
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="what is kept of freed memory is the C library's choice"
)
def test_private_sum_new_pages_of_memory() -> None:
    """A step gets the memory of the step before: new pages from the system would take a fifth of its time."""
    result = subprocess.run(
        [sys.executable, "-c", STEPS_OF_TEN_MEBIBYTES], capture_output=True, text=True, check=True
    )
    assert float(result.stdout) < 100
