"""States of a training run on a disk: the same bits as in memory, and nothing that is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psgrad.engine.influence.training_run import OnDisk
from psgrad.engine.influence.training_steps import TrainingState
from psgrad.engine.transforms.private_torch import tree_leaves
from psgrad.errors import InfluenceError
from tests.engine.influence.test_own_steps import adam, adam_state, of_step
from tests.engine.influence.test_training_run import RECIPES, derivatives, run_of

pytestmark = pytest.mark.usefixtures("on_device")


def point_of(seed: int) -> TrainingState:
    """Tensors of several types and shapes, one without elements and one that is not contiguous."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=random).t()
    state = [torch.tensor(seed), weight.double(), torch.zeros(0, 2), {"half": weight.bfloat16()}, weight > 0]
    return TrainingState({"weight": weight, "bias": torch.tensor(float("nan"))}, state)


def test_states_on_disk_come_back_bit_by_bit(tmp_path: Path) -> None:
    kept, points = OnDisk(tmp_path, point_of(0)), [point_of(seed) for seed in range(3)]
    for point in points[:2]:
        kept.append(point)
    kept.pop()
    kept.append(points[2])
    for expected in (points[2], points[0]):
        found = kept.pop()
        assert found.params.keys() == expected.params.keys()
        for one, other in zip(tree_leaves(found.state), tree_leaves(expected.state), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert torch.equal(found.params["weight"], expected.params["weight"])
        assert found.params["bias"].isnan()


@pytest.mark.sweep
@pytest.mark.parametrize("kept", [2, None, 3])
def test_derivatives_with_states_on_disk(kept: int | None, tmp_path: Path) -> None:
    run = run_of(RECIPES["adam"], kept)
    torch.testing.assert_close(derivatives(replace(run, disk=tmp_path)), derivatives(run), rtol=0, atol=0)


@pytest.mark.sweep
def test_derivatives_of_own_steps_with_states_on_disk(tmp_path: Path) -> None:
    run = of_step(adam, adam_state, "adam")
    torch.testing.assert_close(derivatives(replace(run, disk=tmp_path)), derivatives(run), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


def test_levels_are_counted() -> None:
    """Twelve steps: kept all at once, in three parts of four, or in two of two of two of two."""
    assert [run_of(RECIPES["sgd"], kept).levels for kept in (None, 12, 4, 3, 2)] == [1, 1, 2, 3, 4]


KILLED = """
import os, signal, sys
from pathlib import Path
from psgrad.engine.influence.training_run import OnDisk
from tests.engine.influence.test_kept_states import point_of

kept = OnDisk(Path(sys.argv[1]), point_of(0))
for seed in range(20):
    kept.append(point_of(seed))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_states_on_disk_are_gone_after_a_kill(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def refused(error: InfluenceError, words: str) -> None:
    assert words in error.message
    assert "influence.training.states: disk" in error.message
    assert "influence.training.states: memory" in str(error.hint)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "w+b"))  # noqa: PTH123, SIM115
    kept = OnDisk(tmp_path, point_of(0))
    with pytest.raises(InfluenceError) as caught:
        kept.append(point_of(0))
    refused(caught.value, f"state number 0 of the training run can't be written to {tmp_path}: No space left")


def test_folder_that_is_not_there_refused(tmp_path: Path) -> None:
    with pytest.raises(InfluenceError) as caught:
        OnDisk(tmp_path / "missing", point_of(0))
    refused(caught.value, "No such file or directory")
