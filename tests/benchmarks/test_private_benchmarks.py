"""The benchmarks of private steps and of private training: their own arithmetic, and each at a size that
takes no time.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.test_benchmarks import script as script

CPU = torch.device("cpu")


@pytest.fixture
def posed(script: Any) -> tuple[Any, Any]:
    """The training and the data of a perceptron of a few numbers."""
    norms, models = script("norms"), script("models")
    case = norms.Case("tiny", lambda: models.mlp((6, 5, 10)), lambda: norms.draw_vectors(7, 6))
    training, data = script("dp_step").pose(case, CPU)
    assert isinstance(training, script("dp_contenders").Training)
    return training, data


# -- the step ------------------------------------------------------------------------------------------------


def test_a_step_without_noise_is_that_of_the_loop_and_a_wrong_rival_is_named(
    script: Any, posed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dp_step, contenders = script("dp_step"), script("dp_contenders")
    training, data = posed

    def off(training: Any) -> Any:
        step = contenders.psgrad(training)
        return contenders.Step(
            step.draw, lambda x, y: (step.update(x, y), step.parameters[0].data.mul_(1.1)), step.parameters
        )

    def refuses(training: Any) -> Any:
        raise NotImplementedError("no such layer\nand more")

    rivals = {"right": contenders.psgrad, "wrong": off, "refuses": refuses}
    monkeypatch.setattr(dp_step, "RIVALS", rivals)
    found, refused, errors = dp_step.able(training, data)
    assert list(found) == ["right"]
    assert errors["psgrad"] < 1e-5
    assert refused["wrong"].startswith("wrong: relative error")
    assert refused["refuses"] == "not supported: NotImplementedError: no such layer"


def test_psgrad_is_held_against_the_loop_before_anything_is_timed(
    script: Any, posed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dp_step = script("dp_step")
    monkeypatch.setattr(dp_step, "psgrad", script("dp_contenders").plain)  # which does not clip
    with pytest.raises(AssertionError, match="nothing is timed"):
        dp_step.able(*posed)


def test_noise_is_added_as_its_multiplier_says(script: Any, posed: tuple[Any, Any]) -> None:
    """What two steps from the same weights differ by is the difference of two noises."""
    contenders = script("dp_contenders")
    training, data = posed
    moved = []
    for _ in range(2):
        step = contenders.psgrad(training)
        step.update(*data.rows())
        moved.append(torch.cat([parameter.detach().flatten().double() for parameter in step.parameters]))
    scale = training.learning_rate * training.noise_multiplier * training.bound / training.expected_batch_size
    apart = (moved[0] - moved[1]) / (scale * 2**0.5)
    assert len(apart) == 6 * 5 + 5 + 5 * 10 + 10
    assert 0.6 < float(apart.std()) < 1.4  # 95 draws: five standard errors on either side


@pytest.mark.long
def test_a_contest_has_times_memory_and_a_verdict(
    script: Any, posed: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dp_step, norms, models = script("dp_step"), script("norms"), script("models")
    monkeypatch.setattr(dp_step, "RIVALS", {"again": script("dp_contenders").psgrad})
    monkeypatch.setattr(norms, "SHORTEST_TIMING", 0.0)
    case = norms.Case("tiny", lambda: models.mlp((6, 5, 10)), lambda: norms.draw_vectors(7, 6))
    found = dp_step.contest(case, 1, CPU)
    assert list(found["seconds"]) == ["plain", "psgrad", "again"]
    gradients = 4 * (6 * 5 + 5 + 5 * 10 + 10)
    assert found["bytes"]["plain"] >= gradients
    assert found["bytes"]["psgrad"] >= gradients
    assert found["verdict"]["best"] == "again"


def test_the_verdict_is_on_the_fastest_rival(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dp_step, norms = script("dp_step"), script("norms")
    monkeypatch.setattr(dp_step, "RIVALS", dict.fromkeys(("slow", "quick")))
    seconds = {
        name: norms.Timing(value, value, value, value)
        for name, value in {"plain": 1.0, "psgrad": 1.5, "slow": 9.0, "quick": 1.8}.items()
    }
    verdict = dp_step.verdicts(seconds, {"plain": 100, "psgrad": 150})
    assert (verdict["time_kept"], verdict["memory_kept"], verdict["speedup_kept"]) == (True, False, False)
    assert (verdict["best"], verdict["memory"], verdict["speedup"]) == ("quick", 1.5, pytest.approx(1.2))


# -- the training --------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_private_training_in_pieces_releases_a_model_and_an_epsilon_each(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utility = script("dp_utility")
    monkeypatch.setattr(utility, "EVERY", 1)
    split = utility.Split.of(0)
    found = list(utility.by_psgrad(0, split, tmp_path, steps=2, noise={"multiplier": 2.0}))
    assert [step["steps"] for step in found] == [1, 2]
    assert 0 < found[0]["epsilon_pld"] < found[1]["epsilon_pld"]
    assert found[1]["noise_multiplier"] == 2.0
    assert all(0 <= step["accuracy"] <= 100 for step in found)


def test_the_difference_is_of_means_over_seeds_and_the_curve_is_drawn(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    utility = script("dp_utility")
    public = {
        "sample_rate": 0.1,
        "noise_multiplier": 2.0,
        "expected_batch_size": 144,
        "delta": 1e-5,
        "relation": "add_or_remove_one",
    }
    accuracies = itertools.cycle([50.0, 90.0, 60.0, 94.0])

    def ours(seed: int, *rest: Any) -> list[dict[str, Any]]:
        return [
            {
                **public,
                "steps": steps,
                "epsilon_rdp": 1.1 * steps,
                "epsilon_pld": 1.0 * steps,
                "accuracy": next(accuracies),
            }
            for steps in (1, 2)
        ]

    monkeypatch.setattr(utility, "by_psgrad", ours)
    monkeypatch.setattr(utility, "by_opacus", lambda seed, *rest: [40.0, 91.0 + seed])
    monkeypatch.setattr(utility, "opacus_epsilon", lambda *rest: 2.5)
    found = utility.compare(2)
    assert found["difference"]["mean"] == pytest.approx(((90 - 91) + (94 - 92)) / 2)
    assert found["difference"]["standard_error"] == pytest.approx(np.std([-1, 2], ddof=1) / 2**0.5)
    assert found["difference"]["kept"]
    utility.print_table(found)
    assert "psgrad minus Opacus: +0.50 ± 1.50 (standard error) points; within 1" in capsys.readouterr().out
    utility.draw(found, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
