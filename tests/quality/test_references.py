"""References: what a baseline keeps of a run, and with what it may be compared."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from psgrad.errors import ConfigError, DataError
from psgrad.quality.baselines import read_reference, saved_reference
from psgrad.quality.judging import judge
from psgrad.quality.references import measured_as, reference_of, require_comparable
from psgrad.run.results.manifest import read_manifest
from tests.quality.frames import config, samples

MANIFEST: dict[str, Any] = {
    "versions": {"psgrad": "1", "torch": "2"},
    "model": {"sha256": "abc", "trainable": 10},
    "hashes": {
        "weights": "w" * 64,
        "modules": "m" * 64,
        "code": {"nets/model.py:build": {"model.py": "c" * 64, "helper": "d" * 64}},
    },
    "config": {
        "model": {"factory": "nets/model.py:build", "kwargs": {}, "mode": "eval"},
        "loss": {"name": "cross_entropy"},
        "engine": {"dtype": "float32"},
        "analyze": {
            "measures": [{"name": "el2n", "options": {}}],
            "checkpoints": None,
            "seed": 0,
            "outliers": {},
        },
    },
}


def described(manifest: dict[str, Any]) -> dict[str, Any]:
    return measured_as(read_manifest(manifest))


def with_outliers(**outliers: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(MANIFEST))
    content["config"]["analyze"]["outliers"] = outliers
    return content


@pytest.mark.parametrize("by", [None, "class"])
def test_reference_saved_judges_as_the_run(by: str | None) -> None:
    random = np.random.default_rng(0)
    known = samples(
        np.append(random.lognormal(size=300), np.nan),
        target=np.arange(301) % 3,
        fingerprint=[f"k{row:031x}" for row in range(301)],
    )
    asked = samples(random.lognormal(size=40), target=np.arange(40) % 3)
    saved = json.loads(json.dumps(saved_reference(known, read_manifest(with_outliers(group_by=by)))))
    assert saved["nonfinite"] == 1
    read = read_reference(saved, "b.json", "grad_norm", by)
    assert len(read) == 300
    direct = reference_of(known[:300], "grad_norm", by, "known")
    ours, theirs = (judge(asked, config(group_by=by), each).frame for each in (read, direct))
    assert ours["p_value"].tolist() == theirs["p_value"].tolist()
    assert "1 samples of the reference had no score" in read.caveats[0]


def test_reference_saved_subsample() -> None:
    random = np.random.default_rng(0)
    prints = [random.bytes(16).hex() for _ in range(1000)]
    saved = saved_reference(samples(np.arange(1000.0), fingerprint=prints), read_manifest(MANIFEST), 100)
    kept = saved["groups"]["all"]
    assert len(kept["scores"]) == 100
    assert set(kept["fingerprints"]) == {each[:16] for each in sorted(prints)[:100]}
    assert [prints[int(score)][:16] for score in kept["scores"]] == kept["fingerprints"], (
        "scores and fingerprints stay in step"
    )
    assert 300 < np.mean(kept["scores"]) < 700


def test_reference_shortened_fingerprints() -> None:
    frame = samples([1.0, 2.0], fingerprint=["ab" * 16, "cd" * 16])
    read = read_reference(saved_reference(frame, read_manifest(MANIFEST)), "b.json", "grad_norm", None)
    assert read.holds(frame["fingerprint"].to_numpy(), np.array([1.0, 2.5])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"sha256": "xyz", "trainable": 10}, "hashes": {}}, 'checkpoint was "xyz" and is "abc"'),
        ({"model": {"sha256": "abc", "trainable": 9}}, "trainable was 9 and is 10"),
        ({"config": MANIFEST["config"] | {"loss": {"name": "mse"}}}, 'loss.name was "mse" and is'),
        ({"config": MANIFEST["config"] | {"engine": {"dtype": "bfloat16"}}}, 'dtype was "bfloat16" and is'),
        (
            {"config": MANIFEST["config"] | {"model": {**MANIFEST["config"]["model"], "mode": "train"}}},
            'mode was "train" and is',
        ),
    ],
)
def test_reference_of_another_model_or_loss_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_comparable(described(MANIFEST), described(MANIFEST | change), "grad_norm", "b.json")
    assert words in str(caught.value)
    assert "can't be compared" in str(caught.value)


def test_reference_of_other_measures() -> None:
    other = json.loads(json.dumps(MANIFEST))
    other["config"]["analyze"]["measures"] = []
    other["config"]["model"]["factory"] = "../elsewhere/nets/model.py:build"
    other["hashes"]["code"] = {
        "../elsewhere/nets/model.py:build": MANIFEST["hashes"]["code"]["nets/model.py:build"]
    }
    assert require_comparable(described(MANIFEST), described(other), "grad_norm", "b.json") == ()
    with pytest.raises(ConfigError, match="measures"):
        require_comparable(described(MANIFEST), described(other), "el2n", "b.json")


def test_reference_checkpoint_saved_again() -> None:
    again = described(MANIFEST | {"model": {"sha256": "saved again", "trainable": 10}})
    assert require_comparable(described(MANIFEST), again, "loss", "b.json") == ()
    trained = described(MANIFEST | {"hashes": MANIFEST["hashes"] | {"weights": "x" * 64}})
    with pytest.raises(ConfigError, match=r'weights was "x+" and is "w+"'):
        require_comparable(described(MANIFEST), trained, "loss", "b.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"code": {"nets/model.py:build": {"model.py": "c" * 64, "helper": "e" * 64}}},
            "other code: helper",
        ),
        ({"modules": "n" * 64}, "other code: classes or attributes of the model's modules"),
    ],
)
def test_reference_of_edited_code_has_a_caveat(change: dict[str, Any], words: str) -> None:
    edited = described(MANIFEST | {"hashes": MANIFEST["hashes"] | change})
    (caveat,) = require_comparable(described(MANIFEST), edited, "loss", "b.json")
    assert words in caveat


@pytest.mark.parametrize(
    "damage",
    [
        {"groups": None},
        {"groups": {"all": {"scores": [1.0, 2.0], "fingerprints": ["a"]}}},
        {"groups": {"all": {"scores": ["x"], "fingerprints": ["a"]}}},
        {"nonfinite": None},
        {"score": 3},
    ],
)
def test_reference_damaged(damage: dict[str, Any]) -> None:
    saved = saved_reference(samples([1.0]), read_manifest(MANIFEST)) | damage
    with pytest.raises(DataError, match=r"the reference in b\.json can't be read"):
        read_reference(saved, "b.json", "grad_norm", None)


def test_reference_of_another_score_or_groups_refused() -> None:
    saved = saved_reference(samples([1.0]), read_manifest(MANIFEST))
    with pytest.raises(ConfigError, match=r"with score grad_norm, and analyze\.outliers\.score is loss"):
        read_reference(saved, "b.json", "loss", None)
    with pytest.raises(ConfigError, match=r"with group_by None, and analyze\.outliers\.group_by is class"):
        read_reference(saved, "b.json", "grad_norm", "class")


def test_reference_without_score_refused() -> None:
    with pytest.raises(ConfigError, match="has no column 'el2n'"):
        reference_of(samples([1.0]), "el2n", None, "runs/known")
