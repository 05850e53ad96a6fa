"""The damping that a run of `psgrad influence` chooses, as it is reported."""

from __future__ import annotations

import pytest

from tests.influence_workplace import InfluenceWorkplace

MODEL = """\
def Model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
"""


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    found = influence_place
    found.use_model(MODEL)
    found.section["method"] = "influence"
    return found


@pytest.mark.sweep
def test_influence_damping_on_terminal_page_and_in_manifest(place: InfluenceWorkplace) -> None:
    outcome = place.influence().succeeded()
    (facts,) = place.manifest()["influence"]["fit"]
    relative, tried = facts["relative_damping"], facts["damping_agreement"]
    assert facts["damping"] == pytest.approx(relative * facts["mean_eigenvalue"])
    words = f"with {list(tried)[-1]}"
    assert f"damping: {relative:.3g} mean eigenvalue" in outcome.out
    assert words in outcome.out
    page = (place.folder / "out" / "report.html").read_text()
    assert f"Damping: {relative:.3g} mean eigenvalue" in page
    assert words in page


@pytest.mark.long
def test_influence_damping_of_several_checkpoints_is_the_default(place: InfluenceWorkplace) -> None:
    for name, seed in (("a.safetensors", 1), ("b.safetensors", 2)):
        place.save_checkpoint(name, seed, hidden=6)
    place.section["checkpoints"] = ["a.safetensors", "b.safetensors"]
    assert place.influence("--no-report").code == 0
    for facts in place.manifest()["influence"]["fit"]:
        assert facts["damping"] == pytest.approx(facts["mean_eigenvalue"])
        assert "damping_agreement" not in facts
