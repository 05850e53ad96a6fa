"""`psgrad dp-step` by several ranks: the numbers of one process, each record summed once, and a ledger that
never lags what was learned, whichever rank dies.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from psgrad.commands import private_agreement, private_steps
from psgrad.engine.execution import process_group
from psgrad.engine.execution.process_group import RankGroup
from psgrad.engine.privacy import rank_steps
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.snapshot import Snapshot
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.errors import EXIT_RUNTIME, EXIT_TERMINATED, DataError
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import has_begun
from tests.forked_ranks import EndedRank, Plant, die, run_ranks
from tests.private_workplace import EXACT, PrivateWorkplace

SEEDED = ("--insecure-deterministic", "--set", "privacy.noise.seed=5")


def ranks(
    private: PrivateWorkplace, size: int, *options: str, plant: Plant = lambda rank: None
) -> list[EndedRank]:
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    return run_ranks(private.folder, size, "dp-step", "config.yaml", *options, plant=plant)


def succeeded(
    private: PrivateWorkplace, size: int, *options: str, plant: Plant = lambda rank: None
) -> list[EndedRank]:
    ended = ranks(private, size, *options, plant=plant)
    assert [rank.code for rank in ended] == [0] * size, [rank.err for rank in ended]
    return ended


def released(folder: Path) -> dict[str, torch.Tensor]:
    """The weights and the last noisy sum."""
    sums = load_file(folder / "public" / "noisy_sum.safetensors")
    weights = load_file(folder / "public" / "model.safetensors")
    return {f"sum {name}": value for name, value in sums.items()} | weights


def assert_released_alike(one: Path, other: Path, bound: float) -> None:
    first, second = released(one), released(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        apart = float((second[name] - value).abs().max())
        assert apart <= bound, f"{name} differs by {apart}"


# -- the numbers of one process ------------------------------------------------------------------------------

UNITS = {"unit": {"column": "user"}, "expected_batch_size": 5}
FEW = {"sampling": {"scheme": "poisson", "sample_rate": 0.04}, "expected_batch_size": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.sweep),
        pytest.param(2, UNITS, marks=pytest.mark.sweep, id="units"),
        pytest.param(3, FEW, marks=pytest.mark.sweep, id="empty shares"),
    ],
)
def test_dp_step_of_ranks_equals_one_process(
    private: PrivateWorkplace, size: int, changes: dict[str, Any]
) -> None:
    """Without noise every mistake in a sum shows, and weights differ by rounding alone."""
    private.workplace.save(user=np.arange(24) // 5)
    private.privacy.update({**EXACT, "optimizer": {"name": "Adam", "kwargs": {"lr": 0.1}}, **changes})
    ended = succeeded(private, size, "--steps", "4", "--output", "several", *SEEDED)
    assert ended[0].out.startswith("privacy spent")
    assert [(rank.out, rank.err) for rank in ended[1:]] == [("", "")] * (size - 1)
    private.succeeded("--steps", "4", "--output", "one", *SEEDED)
    assert_released_alike(private.folder / "one", private.folder / "several", 1e-12)
    steps = [
        pd.read_parquet(private.folder / run / "private/NOT_PRIVATE_steps.parquet")
        for run in ("one", "several")
    ]
    pd.testing.assert_frame_equal(*steps, rtol=1e-12)


@pytest.mark.sweep
def test_noise_of_ranks_is_the_one_of_rank_0(private: PrivateWorkplace) -> None:
    """With the same seed the noisy sum is that of one process, to a step of the grid that both are rounded
    to.
    """
    succeeded(private, 2, "--steps", "1", "--output", "two", *SEEDED)
    private.succeeded("--steps", "1", "--output", "one", *SEEDED)
    (line,) = Ledger.read(private.folder / "one/public/ledger.jsonl").steps
    sums = [load_file(private.folder / run / "public/noisy_sum.safetensors") for run in ("one", "two")]
    for name, value in sums[0].items():
        assert (sums[1][name] - value).abs().max() <= line["noise_grid"]
    assert line["noise_grid"] < line["noise_std"] / 2000


@pytest.mark.sweep
def test_one_record_more_moves_the_sum_of_ranks_by_at_most_the_bound(private: PrivateWorkplace) -> None:
    """A record that comes gives all that follow it to other ranks."""
    private.config["engine"]["dtype"] = "float32"
    private.privacy.update(EXACT)
    arrays = dict(private.workplace.arrays)
    succeeded(private, 2, "--output", "all")
    for row in (0, 13):
        private.workplace.save(**{name: np.delete(array, row, 0) for name, array in arrays.items()})
        private.privacy["expected_batch_size"] = 23
        succeeded(private, 2, "--output", f"without-{row}")
        sums = [
            load_file(private.folder / run / "public/noisy_sum.safetensors")
            for run in ("all", f"without-{row}")
        ]
        apart = sum(float((sums[1][name] - value).square().sum()) for name, value in sums[0].items()) ** 0.5
        assert 0.4999 < apart <= 0.5


DROPOUT = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 3))
"""


@pytest.mark.sweep
def test_coins_of_ranks_follow_from_secrets_that_are_in_no_file(
    private: PrivateWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a seed two runs are alike; without one each rank has a secret of its own."""
    private.workplace.use_model(DROPOUT)
    private.config["model"] |= {"mode": "train"}
    private.privacy.update(EXACT)
    begin = Coins.begin

    def noted(self: Coins, *place: int) -> None:
        begin(self, *place)
        (private.folder / f"key-{place[-1]}").write_bytes(self._key)

    def plant(rank: int) -> None:
        monkeypatch.setattr(Coins, "begin", noted)

    for name in ("two", "again"):
        succeeded(private, 2, "--steps", "2", "--output", name, *SEEDED, plant=plant)
    assert_released_alike(private.folder / "two", private.folder / "again", 1e-12)
    succeeded(private, 2, "--steps", "2", "--output", "secret", plant=plant)
    keys = [(private.folder / f"key-{rank}").read_bytes() for rank in range(2)]
    assert keys[0] != keys[1]
    for file in (path for path in (private.folder / "secret").rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert all(key not in content and key.hex().encode() not in content for key in keys)


# -- mistakes ------------------------------------------------------------------------------------------------


def of_rank_1(change: Callable[[np.ndarray], np.ndarray], says: bool) -> Plant:
    """Rank 1 sums other records than it was given, and says so, or not."""

    def plant(rank: int) -> None:
        computed = rank_steps.summed_share

        def other(own: Any, mine: np.ndarray, *about: Any) -> Any:
            found = computed(own, change(mine), *about)
            if not says:
                found.columns = computed(own, mine, *about).columns
            return found

        if rank == 1:
            rank_steps.summed_share = other

    return plant


def noisy_rank(rank: int) -> None:
    computed = rank_steps.summed_share

    def noisy(*arguments: Any) -> Any:
        found = computed(*arguments)
        found.sums = {name: value + 0.01 for name, value in found.sums.items()}
        return found

    if rank == 1:
        rank_steps.summed_share = noisy


def one_more(mine: np.ndarray) -> np.ndarray:
    return np.append(mine, mine[-1] - 1)  # of rank 0, which has the records of even numbers


def others(mine: np.ndarray) -> np.ndarray:
    return (mine + 1) % 24


@pytest.mark.long
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(of_rank_1(one_more, says=False), id="another rank's record too"),
        pytest.param(of_rank_1(others, says=False), id="another batch", marks=pytest.mark.sweep),
        pytest.param(noisy_rank, id="noise of its own"),
    ],
)
def test_mistake_in_a_share_is_seen_in_the_numbers(private: PrivateWorkplace, plant: Plant) -> None:
    private.privacy.update(EXACT | {"optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}}})
    succeeded(private, 2, "--output", "two", *SEEDED, plant=plant)
    private.succeeded("--output", "one", *SEEDED)
    with pytest.raises(AssertionError, match="differs by"):
        assert_released_alike(private.folder / "one", private.folder / "two", 1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        one_more,
        pytest.param(others, marks=pytest.mark.sweep),
        pytest.param(lambda mine: mine[1:], marks=pytest.mark.sweep),
    ],
)
def test_rank_that_sums_other_records_than_given_stops_the_step(
    private: PrivateWorkplace, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    ended = ranks(private, 2, plant=of_rank_1(change, says=True))
    assert [rank.code for rank in ended] == [EXIT_RUNTIME] * 2
    assert "the ranks have summed other records than those that were drawn for step 1" in ended[0].err
    assert "Traceback" not in ended[0].err
    # Rank 0 holds the store here, which torchrun does else: rank 1 may not learn why it has ended.
    assert ended[1].err == "" or "error: rank 1 has lost another rank" in ended[1].err
    assert "Traceback" not in ended[1].err
    assert private.ledger("step") == []


@pytest.mark.long
def test_rank_with_another_dataset_is_refused_before_anything_is_made(private: PrivateWorkplace) -> None:
    (private.folder / "config.yaml").write_text(yaml.safe_dump(private.config))
    other = private.folder / "other"
    other.mkdir()
    for name in ("config.yaml", "model.py", "model.safetensors"):
        shutil.copy(private.folder / name, other / name)
    x = private.workplace.arrays["x"].copy()
    x[3, 0] += 1
    np.savez(other / "data.npz", **{**private.workplace.arrays, "x": x})
    ended = ranks(private, 2, plant=lambda rank: os.chdir(other) if rank else None)
    assert [rank.code for rank in ended] == [EXIT_RUNTIME] * 2
    assert "has loaded another dataset than rank 0" in ended[1].err
    assert "error: rank 1" in ended[1].err
    assert ended[0].err == ""  # the rank that fails first prints
    assert not private.run_folder.exists()


# -- deaths --------------------------------------------------------------------------------------------------


def dying(rank: int, owner: Any, name: str, at: int, after: bool) -> Plant:
    """The rank dies at call number `at` of a function, before or after it."""

    def plant(own: int) -> None:
        original, calls = getattr(owner, name), 0

        def dies(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and not after:
                die()
            result = original(*arguments, **options)
            if calls == at:
                die()
            return result

        if own == rank:
            setattr(owner, name, dies)

    return plant


def noting_what_is_learned(folder: Path, plant: Plant) -> Plant:
    """Each rank but the first writes how many steps' noise is in the weights that it has."""

    def noting(rank: int) -> None:
        broadcast = RankGroup.broadcast

        def noted(self: RankGroup, name: str, arrays: Any) -> Any:
            message = broadcast(self, name, arrays)
            if rank and "step" in message:
                (folder / f"learned-{rank}").write_text(str(int(message["step"])))
            return message

        RankGroup.broadcast = noted
        plant(rank)

    return noting


# In step 2 of 4: (rank, function, its call, whether it returns first, paid steps, lost steps).
MOMENTS = {
    "rank 0 before the ledger": (0, private_steps.StepFiles, "pay", 2, False, 1),
    "rank 0 after the ledger": (0, private_steps.StepFiles, "pay", 2, True, 2),
    "rank 0 before the update": (0, PrivateTraining, "update", 2, False, 2),
    "rank 0 while it sends weights": (0, process_group.dist, "broadcast", 29, True, 1),
    "rank 0 while it receives": (0, process_group.dist, "recv", 18, True, 1),
    "rank 1 before its share": (1, rank_steps, "summed_share", 2, False, 1),
    "rank 1 after its share": (1, rank_steps, "summed_share", 2, True, 1),
    "rank 1 while it sends its share": (1, process_group.dist, "send", 18, True, 1),
    "rank 1 while it loads": (1, private_agreement, "private_hashes", 1, False, 0),
}
BY_DEFAULT = {"rank 0 before the ledger", "rank 0 after the ledger", "rank 1 while it sends its share"}


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "moment",
    [each if each in BY_DEFAULT else pytest.param(each, marks=pytest.mark.sweep) for each in MOMENTS],
)
def test_rank_dies_and_the_ledger_has_what_was_learned(private: PrivateWorkplace, moment: str) -> None:
    rank, owner, name, at, after, paid = MOMENTS[moment]
    plant = noting_what_is_learned(private.folder, dying(rank, owner, name, at, after))
    ended = ranks(private, 2, "--steps", "4", plant=plant)
    assert ended[rank].code == -signal.SIGKILL
    other = ended[1 - rank]
    assert other.code == EXIT_RUNTIME, other.err
    assert other.seconds - ended[rank].seconds < 30
    assert "has lost another rank" in other.err
    assert "Traceback" not in other.err
    learned = private.folder / "learned-1"
    if moment == "rank 1 while it loads":
        assert not private.run_folder.exists()
        return
    assert int(learned.read_text() or 0) <= len(private.ledger("step")) == paid
    # goes on with three ranks, or one
    size = 3 if rank else 1
    succeeded(private, size, "--resume", "--steps", "2")
    assert len(private.ledger("step")) == paid + 2
    if rank:  # rank 0 saved what was paid for
        assert private.ledger("resume")[0]["checkpoint_step"] == paid


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_rank_dies_at_any_time(private: PrivateWorkplace, seed: int) -> None:
    """A rank dies, and one of those that resume; from when it is in the store, where others see it."""
    private.privacy.update({"steps": 1000, "noise": {"multiplier": 9.0}})
    random_source = random.Random(seed)
    for _ in range(2):
        size = random_source.choice([2, 3])
        victim, delay = random_source.randrange(size), random_source.random()
        (private.folder / "learned-1").unlink(missing_ok=True)
        before = paid(private)

        def plant(rank: int, victim: int = victim, delay: float = delay) -> None:
            meets = RankGroup.__init__

            def met(self: RankGroup, *arguments: Any) -> None:
                meets(self, *arguments)
                threading.Timer(delay, die).start()

            if rank == victim:
                RankGroup.__init__ = met

        noting = noting_what_is_learned(private.folder, plant)
        ended = ranks(private, size, "--steps", "all", going_on(private), plant=noting)
        assert ended[victim].code == -signal.SIGKILL, ended[victim].err
        others = [rank for rank in range(size) if rank != victim]
        told = "\n".join(rank.err for rank in ended)  # with the threads of a rank that hangs, uncut
        assert [ended[rank].code for rank in others] == [EXIT_RUNTIME] * (size - 1), told
        assert max(ended[rank].seconds for rank in others) - ended[victim].seconds < 30
        learned = private.folder / "learned-1"
        last = learned.read_text() if learned.exists() else ""  # empty where it died while it wrote
        assert paid(private) >= max(before, int(last or 0))
    before = paid(private)
    succeeded(private, 2, going_on(private), "--steps", "3")
    assert paid(private) == before + 3


@pytest.mark.long
def test_error_of_a_rank_stops_the_step_unpaid(private: PrivateWorkplace) -> None:
    def plant(rank: int) -> None:
        def fails(*arguments: Any) -> Any:
            raise DataError("the disk of this machine is gone")

        if rank == 1:
            rank_steps.summed_share = fails

    ended = ranks(private, 2, plant=plant)
    assert [rank.code for rank in ended] == [EXIT_RUNTIME] * 2
    assert ended[1].err.startswith("error: the disk of this machine is gone")
    assert "error" not in ended[0].err  # the rank that failed first prints it
    assert private.ledger("step") == []
    facts = json.loads((private.run_folder / "private/NOT_PRIVATE_manifest.json").read_bytes())
    assert "has lost another rank" in facts["error"]


@pytest.mark.long
def test_signal_to_all_ranks_ends_them_after_the_step(private: PrivateWorkplace) -> None:
    def plant(rank: int) -> None:
        computed = rank_steps.summed_share

        def signalled(own: Any, mine: Any, step: int, *about: Any) -> Any:
            if step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return computed(own, mine, step, *about)

        rank_steps.summed_share = signalled

    ended = ranks(private, 2, "--steps", "all", plant=plant)
    assert [rank.code for rank in ended] == [EXIT_TERMINATED] * 2, ended
    kept = Snapshot.from_bytes((private.run_folder / "checkpoint.pt").read_bytes())
    assert len(private.ledger("step")) == kept.metadata["step"] == 2


# -- helpers -------------------------------------------------------------------------------------------------


def paid(private: PrivateWorkplace) -> int:
    """How many steps the ledger has; none where there is no ledger yet."""
    return len(private.ledger("step")) if has_begun(private.run_folder / "public/ledger.jsonl") else 0


def going_on(private: PrivateWorkplace) -> str:
    """The option for the folder of a run that was killed, perhaps before its ledger was begun."""
    return "--resume" if has_begun(private.run_folder / "public/ledger.jsonl") else "--overwrite"
