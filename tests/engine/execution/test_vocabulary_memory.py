"""The memory of a head with a large vocabulary: linear_cross_entropy in chunks holds the logits of some
positions at a time.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.execution.chunk_memory import peak_bytes
from psgrad.engine.gradients import per_sample_gradients, per_sample_square_norms
from psgrad.engine.transforms.rules import cross_entropy

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="not in older PyTorch"
)


def loss_of(params: dict[str, Tensor], x: Tensor, target: Tensor, **how: Any) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=64)
    hidden = x @ params["before"]
    return F.linear_cross_entropy(hidden, params["head"], target, options=options, **how).sum()


@pytest.mark.parametrize(("positions", "width"), [(10, 4), (7, 9)], ids=["few inputs", "many inputs"])
def test_slices_have_the_gradients_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, positions: int, width: int
) -> None:
    """The oracle: autograd on the logits of all positions, sample by sample."""
    vocabulary = 11
    monkeypatch.setattr(cross_entropy, "SLICE_BYTES", 3 * vocabulary * 8)
    torch.manual_seed(0)
    params = {"before": torch.randn(width, width).double(), "head": torch.randn(vocabulary, width).double()}
    x, target = torch.randn(3, positions, width).double(), torch.randint(0, vocabulary, (3, positions))
    target[0, 2] = -100
    for reduction, weight in product(("mean", "sum", "none"), (None, torch.rand(vocabulary).double())):
        how = {"reduction": reduction, "weight": weight}
        gradients = per_sample_gradients(partial(loss_of, **how), params, x, target)
        found = gradients.materialise()
        for sample in range(3):
            leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
            logits = x[sample] @ leaves["before"] @ leaves["head"].t()
            loss = F.cross_entropy(logits, target[sample], **how).sum()
            expected = torch.autograd.grad(loss, list(leaves.values()))
            torch.testing.assert_close(gradients.losses[sample], loss.detach(), rtol=1e-12, atol=0)
            for name, value in zip(leaves, expected, strict=True):
                torch.testing.assert_close(found[name][sample], value, rtol=1e-10, atol=1e-12)


def norms(vocabulary: int, positions: int, width: int) -> Any:
    torch.manual_seed(0)
    params = {"before": torch.randn(width, width), "head": torch.randn(vocabulary, width)}
    x, target = torch.randn(1, positions, width), torch.randint(0, vocabulary, (1, positions))
    return partial(per_sample_square_norms, loss_of), params, x, target


def test_memory_of_the_head_is_that_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of the layer's gradient and a slice take 1 MiB each; the logits of all positions 15.6 MiB."""
    monkeypatch.setattr(cross_entropy, "SLICE_BYTES", 1 << 20)
    assert peak_bytes(*norms(4_000, 1_024, 64)) < 6 << 20


FULL = """
import pathlib, threading, time
from psgrad.engine.execution.memory import give_freed_memory_back
from tests.engine.execution.test_vocabulary_memory import norms
give_freed_memory_back()
def anonymous():
    return int(pathlib.Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024
norms_of, *given = norms(500, 100, 64)
norms_of(*given)
norms_of, *given = norms(128_000, 4_096, 64)
before, most, done = anonymous(), 0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
found = norms_of(*given)
done = True
thread.join()
assert found.square_norms().isfinite().all()
print(most - before)
"""


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells a process's memory")
def test_vocabulary_of_128000_at_4096_positions_takes_512_mib_beyond_the_weights() -> None:
    ended = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 512 << 20
