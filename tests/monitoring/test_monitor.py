"""The monitor of training loops: its numbers against PyTorch's autograd, what it leaves as it was, and the
rows that it names.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import psgrad
from psgrad import random_state
from psgrad.errors import ConfigError, DataError, OutputExistsError
from psgrad.monitoring.batch_gradients import BatchGradients, SourceSums
from psgrad.monitoring.monitor import monitor, noise_scale
from tests.monitoring.loops import BATCH, Classifier, digits, trained


def gradients_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[n, parameters] float64, row by row, in evaluation mode."""
    model.eval()
    params = [x for x in model.parameters() if x.requires_grad]
    rows = []
    for place in range(len(images)):
        loss = F.cross_entropy(model(images[place : place + 1]), labels[place : place + 1])
        rows.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, params)]))
    model.train()
    return torch.stack(rows).double()


def test_measured_numbers_are_those_of_autograd_before_and_with_a_program() -> None:
    torch.manual_seed(0)
    images, labels = digits()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    measured = BatchGradients(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    sources = ["even" if place % 2 == 0 else "odd" for place in range(BATCH)]
    for step in range(6):
        batch = images[step * BATCH :][:BATCH], labels[step * BATCH :][:BATCH]
        found = measured.measure(batch, sources)
        gradients = gradients_of(model, *batch)
        norms, whole = gradients.norm(dim=1), gradients.sum(0)
        np.testing.assert_allclose(found.norms, norms, rtol=1e-4)
        np.testing.assert_allclose(found.cosines, gradients @ whole / norms / whole.norm(), atol=1e-5)
        odd = gradients[1::2]
        assert found.sums[0]["odd"].rows == BATCH // 2
        assert found.sums[0]["odd"].square_of_sum == pytest.approx(float(odd.sum(0).square().sum()), rel=1e-4)
        assert found.sums[0]["odd"].sum_of_squares == pytest.approx(float(odd.square().sum()), rel=1e-4)
        head = model.head.weight.numel() + model.head.bias.numel()
        assert found.squares["head"] == pytest.approx(float(gradients[:, -head:].square().sum()), rel=1e-4)
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        with torch.no_grad():  # a write that PyTorch does not count, and a parameter of another memory
            model.head.bias.data += 0.01
            model.convolution.weight.data = model.convolution.weight.data * 1.01
    (replay,) = measured._replays.values()
    assert replay.chunks >= 2


def test_monitor_of_lora_measures_the_adapter_alone() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    images, labels = digits()
    base = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["3"]))
    batch = images[:BATCH], labels[:BATCH]
    found = monitor(model, F.cross_entropy, output=None).step(batch)
    assert found is not None
    np.testing.assert_allclose(found.norms, gradients_of(model, *batch).norm(dim=1), rtol=1e-4)
    names = [name for name, x in model.named_parameters() if x.requires_grad]
    assert set(found.shares) == {name.rpartition(".")[0] for name in names}


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + np.random.rand() + random.random())


def test_monitor_keeps_the_states_of_all_random_generators() -> None:
    images, labels = digits()
    watched = monitor(Noisy(64, 10), F.cross_entropy, output=None)
    before = random_state.all_states()
    for _ in range(4):
        assert watched.step((images[:BATCH].flatten(1), labels[:BATCH])) is not None, watched.stopped
    assert random_state.all_states() == before


def test_training_with_a_monitor_gives_the_same_bits_and_modes() -> None:
    plain, _, _ = trained(40, watch=False)
    watched, _, watcher = trained(40)
    assert watcher is not None
    assert not watcher.stopped
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    assert watched.training
    assert all(x.grad is not None for x in watched.parameters())


def test_steps_between_are_not_measured() -> None:
    images, labels = digits()
    watcher = monitor(Classifier(), F.cross_entropy, output=None, every=3)
    found = [watcher.step((images[:4], labels[:4])) for _ in range(6)]
    assert [each is not None for each in found] == [False, False, True, False, False, True]
    assert found[5] is not None
    assert found[5].step == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_planted_batches_are_named_and_no_clean_row(seed: int) -> None:
    _, spikes, _ = trained(150, seed)
    assert not spikes
    draw = torch.Generator().manual_seed(seed)

    def permuted(step: int, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, labels[torch.randperm(len(labels), generator=draw)] if step == 100 else labels

    _, spikes, _ = trained(110, seed, change=permuted)
    assert [*spikes] == [100]
    assert len(spikes[100]) > BATCH // 2

    def broken(step: int, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 100:
            images[7] = torch.randint(0, 256, (1, 8, 8), generator=draw).float()
        return images, labels

    _, spikes, _ = trained(110, seed, change=broken)
    assert [*spikes] == [100]
    assert len(spikes[100]) == 1


def test_row_that_is_not_finite_is_named_and_spoils_no_other_number() -> None:
    images, labels = digits()
    spoilt = images[:8].clone()
    spoilt[3] = torch.inf
    model = Classifier()
    watcher = monitor(model, F.cross_entropy, output=None)
    found, clean = watcher.step((spoilt, labels[:8])), watcher.step((images[:8], labels[:8]))
    assert found is not None
    assert clean is not None
    assert [(row.place, row.reason) for row in found.spike] == [(3, "its loss or gradient is not finite")]
    others = np.arange(8) != 3
    np.testing.assert_allclose(found.norms[others], clean.norms[others], rtol=1e-5)
    assert np.isnan(found.cosines[3])
    assert np.isfinite(found.cosines[others]).all()


def test_out_of_memory_halves_the_rows_and_keeps_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = digits()
    model = Classifier()
    compute = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    whole = BatchGradients(model, compute).measure((images[:9], labels[:9]))
    measured = BatchGradients(model, compute)
    replay_of = measured._replay_of

    def small(*arguments: Any) -> Any:
        replay = replay_of(*arguments)

        class Small:
            drop_program = replay.drop_program

            def __call__(self, inputs: Any, *rest: Any) -> Any:
                if len(inputs[0]) > 4:
                    raise torch.OutOfMemoryError("out of memory")
                return replay(inputs, *rest)

        return Small()

    monkeypatch.setattr(measured, "_replay_of", small)
    halved = measured.measure((images[:9], labels[:9]))
    np.testing.assert_allclose(halved.norms, whole.norms, rtol=1e-5)
    assert [sums[None].rows for sums in halved.sums] == [3, 2, 4]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.zeros(4, 1, 8, 8), torch.zeros(3, dtype=torch.int64)), "shapes [4, 1, 8, 8], [3]"),
        ((torch.zeros(2, 1, 12, 12), torch.zeros(2, dtype=torch.int64)), "mat1 and mat2"),
        ((), "shapes of none"),
    ],
)
def test_failure_warns_once_and_training_goes_on(batch: Any, words: str, tmp_path: Path) -> None:
    watcher = monitor(Classifier(), F.cross_entropy, output=tmp_path / "run")
    with pytest.warns(UserWarning, match="training goes on") as caught:
        assert watcher.step(batch) is None
    assert words in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert watcher.step(batch) is None
    assert '"failed"' in (tmp_path / "run" / "manifest.json").read_text()


def test_tables_and_inputs_of_a_run(tmp_path: Path) -> None:
    images, labels = digits()
    logged: dict[int, dict[str, float]] = {}
    with monitor(
        Classifier(),
        F.cross_entropy,
        output=tmp_path,
        every=2,
        log=lambda numbers, step: logged.update({step: numbers}),
    ) as watcher:
        for step in range(1, 7):
            rows = slice(step * 8, step * 8 + 8)
            batch = images[rows].clone(), labels[rows]
            if step == 4:
                batch[0][5] = torch.nan
            watcher.step(batch, ids=[f"row {number}" for number in range(rows.start, rows.stop)])
    steps, table = pd.read_parquet(tmp_path / "steps"), pd.read_parquet(tmp_path / "rows")
    assert steps["step"].tolist() == [2, 4, 6] == [*logged]
    assert len(table) == 3 * 8
    named = table[table["reason"].notna()]
    assert named[["step", "place", "id"]].values.tolist() == [[4, 5, "row 37"]]
    largest = table[table["step"] == 6]["grad_norm"].max()
    assert steps["grad_norm_max"].iloc[2] == largest == logged[6]["psgrad/grad_norm_max"]
    layers = pd.read_parquet(tmp_path / "layers")
    assert layers[layers["step"] == 6]["share"].sum() == pytest.approx(1)
    kept = load_file(tmp_path / "spikes" / "step-00000004-0.safetensors")
    assert kept["0"].shape == (1, 1, 8, 8)
    assert kept["0"].isnan().all()
    written = psgrad.report(tmp_path)
    page = written.page.read_text()
    assert "row 37" in page
    assert "its loss or gradient is not finite" in page
    assert written.figures == 4
    (tmp_path / "steps" / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="can't be read"):
        psgrad.report(tmp_path)


def test_taken_folder_and_arguments_are_refused(tmp_path: Path) -> None:
    monitor(Classifier(), F.cross_entropy, output=tmp_path / "run").close()
    with pytest.raises(OutputExistsError):
        monitor(Classifier(), F.cross_entropy, output=tmp_path / "run")
    monitor(Classifier(), F.cross_entropy, output=tmp_path / "run", overwrite=True).close()
    with pytest.raises(ConfigError, match="both loss and compute_loss"):
        monitor(Classifier(), F.cross_entropy, compute_loss=lambda model, batch: batch, output=None)
    with pytest.raises(ConfigError, match="every is 0"):
        monitor(Classifier(), F.cross_entropy, output=None, every=0)


def test_noise_scale_is_that_of_a_normal_law() -> None:
    draw = np.random.default_rng(0)
    mean, deviation, size = np.array([0.5, -0.2, 0.1]), 0.7, 8
    sums = []
    for _ in range(4000):
        gradients = mean + deviation * draw.standard_normal((size, 3))
        sums.append(
            {None: SourceSums(size, float((gradients**2).sum()), float((gradients.sum(0) ** 2).sum()))}[None]
        )
    assert noise_scale(sums) == pytest.approx(3 * deviation**2 / (mean @ mean), rel=0.05)
    assert noise_scale([SourceSums(1, 2.0, 2.0)]) is None
