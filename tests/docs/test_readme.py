"""README.md, the tutorial and the pages with its details: commands, configs, code and figures are compared
with what psgrad does.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from psgrad.config import load_config
from tests.docs.pages import DOCS, README, ROOT, blocks, shown, stored, table

TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
ANALYZE = (DOCS / "guides" / "analyze.md").read_text(encoding="utf-8")
LIBRARY = (DOCS / "guides" / "library.md").read_text(encoding="utf-8")
CONFIG = (DOCS / "reference" / "config.md").read_text(encoding="utf-8")
COSTS = (ROOT / "benchmarks" / "costs.md").read_text(encoding="utf-8")


def psgrad(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "psgrad", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# -- The README and the config -------------------------------------------------------------------------------


def test_ci_runs_the_test_command() -> None:
    command = 'pip install -c constraints.txt -e ".[test,hugging-face,quantised]" && pytest'
    assert command in README
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(part in script.replace(" --quiet", "") for part in command.split(" && "))


def test_the_readme_config_has_at_most_twelve_lines_and_loads(tmp_path: Path) -> None:
    (block,) = blocks(README, "yaml")
    assert len(block.splitlines()) <= 12
    (tmp_path / "config.yaml").write_text(block, encoding="utf-8")
    assert load_config(tmp_path / "config.yaml").data.text == "text"  # run by test_task_guides.py


def test_the_library_example_runs() -> None:
    import torch

    names: dict[str, object] = {}
    exec(blocks(README, "python")[0], names)  # our own page
    clipped, same, norms = names["clipped"], names["same"], names["norms"]
    assert isinstance(clipped, dict)
    assert isinstance(same, dict)
    assert isinstance(norms, torch.Tensor)
    total = torch.stack([value.detach().flatten(1).square().sum(1) for value in same.values()]).sum(0)
    torch.testing.assert_close(norms.float(), total.sqrt())
    for name, value in clipped.items():
        torch.testing.assert_close(
            value, torch.tensordot((1 / norms).clamp(max=1).float(), same[name].detach(), 1)
        )


def test_the_code_of_the_library_guide_runs() -> None:
    names: dict[str, object] = {}
    exec(blocks(LIBRARY, "python")[0], names)  # our own page
    assert tuple(names["norms"].shape) == (5,)  # type: ignore[attr-defined]


@pytest.mark.long
def test_the_error_of_a_wrong_key_is_the_one_shown() -> None:
    (_, *arguments), expected = shown(CONFIG, "chunksize")
    done = psgrad(*arguments)
    assert done.returncode == 2
    assert done.stderr.split() == " ".join(expected).split()


# -- The digits ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("digits") / "runs" / "digits"
    (_, *arguments), _ = shown(TUTORIAL, "analyze.top=10")
    done = psgrad(*arguments, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize("page", [README, TUTORIAL], ids=["README", "tutorial"])
def test_the_flipped_labels_are_found_as_claimed(page: str, digits_run: tuple[Path, str]) -> None:
    (_, script, _), lines = shown(page, "found.py")
    done = subprocess.run(
        [sys.executable, script, str(digits_run[0])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == lines


@pytest.mark.long
def test_the_main_job_is_quick(digits_run: tuple[Path, str]) -> None:
    """1,797 digits after the imports, plots and report included: under 20 s on two cores."""
    timings = json.loads((digits_run[0] / "manifest.json").read_text(encoding="utf-8"))["timings"]
    assert {"load", "self-check", "gradients", "report"} <= timings.keys()
    assert sum(timings.values()) < 20


@pytest.mark.long
@pytest.mark.parametrize(("page", "top"), [(README, 5), (TUTORIAL, 10)], ids=["README", "tutorial"])
def test_the_table_is_the_one_shown(page: str, top: int, digits_run: tuple[Path, str]) -> None:
    """Ids, labels and predictions to the letter; numbers may differ in the last digit on other processors."""

    def rows(lines: list[str]) -> list[list[str]]:
        return [line.split() for line in lines if re.match(r"\s*\d+\s+digit-", line)]

    expected = rows(shown(page, f"analyze.top={top}")[1])
    assert len(expected) == top
    for ours, theirs in zip(rows(digits_run[1].splitlines())[:top], expected, strict=True):
        assert ours[:4] == theirs[:4]
        assert [float(number) for number in ours[4:]] == pytest.approx(
            [float(number) for number in theirs[4:]], rel=2e-3
        )


@pytest.mark.sweep
def test_the_influence_run_prints_what_is_shown(tmp_path: Path) -> None:
    """Words to the letter; numbers may differ in the last digit on other processors."""
    guide = (DOCS / "guides" / "influence.md").read_text(encoding="utf-8")
    arguments, lines = shown(guide, "influence.queries.rows=[5] --top 5")
    done = psgrad(*arguments[1:], "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    printed = (done.stderr + done.stdout).splitlines()
    for expected in lines[1:-1]:
        assert any(alike(expected, line) for line in printed), expected
    short = shown(README, "influence.queries.rows=[5] --top 3")[1]
    assert set(short[1:-1]) <= set(lines)


def alike(one: str, other: str) -> bool:
    """Whether two lines have the same words, and numbers that are within 2 percent."""
    pairs = list(zip(one.split(), other.split(), strict=False))
    same = all(a == b or _near(a.strip("+,"), b.strip("+,")) for a, b in pairs)
    return same and len(one.split()) == len(other.split())


def _near(a: str, b: str) -> bool:
    try:
        return float(a) == pytest.approx(float(b), rel=0.02)
    except ValueError:
        return False


@pytest.mark.long
def test_the_rankings_are_compared_as_shown(digits_run: tuple[Path, str]) -> None:
    outliers = json.loads((digits_run[0] / "manifest.json").read_bytes())["outliers"]
    agreement = outliers["loss_agreement"]
    assert f"\n{agreement['words']}\n" in TUTORIAL
    page = " ".join((DOCS / "explanation" / "outliers.md").read_text().split())
    correlation = f"{agreement['spearman']:.6f}"[1:6]
    top, shared = agreement["top"], agreement["shared"]
    assert (
        f"first {top} by norm {shared} are among the first {top} by loss, at a correlation of {correlation}"
        in page
    )


def test_the_code_of_the_tutorial_prints_what_is_shown(
    digits_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(digits_run[0].parents[1])
    exec(blocks(TUTORIAL, "python")[0], {})  # our own page
    said, expected = capsys.readouterr().out.splitlines(), blocks(TUTORIAL, "text")[0].splitlines()
    assert [line.split()[:3] for line in said] == [line.split()[:3] for line in expected]


@pytest.mark.long
def test_init_and_validate_print_what_the_tutorial_shows(tmp_path: Path) -> None:
    for words in ("psgrad init", "psgrad validate"):
        (_, *arguments), lines = shown(TUTORIAL, words)
        done = psgrad(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        assert [each.split()[:3] for each in said] == [each.split()[:3] for each in lines]


@pytest.mark.sweep
def test_the_gate_prints_what_the_tutorial_shows(tmp_path: Path) -> None:
    (_, *arguments), expected = shown(TUTORIAL, "digits-gate")
    done = psgrad(*arguments, "--output", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    lines = [line.split() for line in expected if line != "..."]
    assert len(lines) == 7
    assert lines == said[: len(lines)]


@pytest.mark.sweep
def test_the_plan_has_the_parameters_shown() -> None:
    """Times are those of a machine; parameters, shapes and kinds of terms are not."""
    (_, *arguments), expected = shown(ANALYZE, "psgrad plan")
    done = psgrad(*arguments)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split()[:3] for line in said[:9]] == [line.split()[:3] for line in expected[:9]]
    assert [line.split()[0] for line in said[10:] if line] == [
        line.split()[0] for line in expected[10:] if line
    ]


@pytest.mark.long
def test_the_operators_are_listed_as_shown() -> None:
    (_, *arguments), expected = shown(LIBRARY, "psgrad ops")
    assert psgrad(*arguments).stdout.splitlines() == expected


# -- Figures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [README, COSTS], ids=["README", "costs"])
def test_the_benchmark_table_is_the_stored_result(page: str) -> None:
    expected = []
    for case in stored("cpu-2-cores")["cases"].values():
        medians = {way: timing["median"] for way, timing in case["seconds"].items()}
        expected.append(
            [f"{medians[way] / medians['plain']:.2f}" for way in ("torch.func", "norms", "clipped")]
        )
    assert table(page, "| network | torch.func norms") == expected


def test_the_table_of_rivals_is_the_stored_result() -> None:
    expected = []
    for case in stored("rivals-cpu")["cases"].values():
        cells = []
        for task in ("norms", "clipped", "materialised"):
            medians = {way: timing["median"] for way, timing in case[task]["seconds"].items()}
            rivals = {way: median for way, median in medians.items() if way not in ("plain", "psgrad")}
            best = min(rivals, key=rivals.__getitem__)
            cells.append(f"{rivals[best] / medians['psgrad']:.2f} ({best})")
        expected.append(cells)
    assert table(COSTS, "| network | norms |") == expected


def test_the_table_of_private_steps_is_the_stored_result() -> None:
    expected = []
    for case in stored("dp-step-cpu")["cases"].values():
        ratios = {
            way: timing["median"] / case["seconds"]["plain"]["median"]
            for way, timing in case["seconds"].items()
        }
        rivals = {
            way.removeprefix("Opacus "): ratio for way, ratio in ratios.items() if way.startswith("Opacus")
        }
        best = min(rivals, key=rivals.__getitem__) if rivals else None
        memory = case["bytes"]["psgrad"] / case["bytes"]["plain"]
        words = "not supported" if best is None else f"{rivals[best]:.2f} ({best})"
        expected.append([f"{ratios['psgrad']:.2f}", words, f"{memory:.2f}"])
    assert table(COSTS, "| network | psgrad `dp-step`") == expected


def test_the_overhead_table_is_the_stored_result() -> None:
    expected, networks = [], stored("overhead-cpu")["networks"].values()
    for found in networks:
        further, rival = found["each further chunk"], found.get("torch.func")
        ratios = ["refused" if rival is None else f"{each / rival:.2f}" for each in further.values()]
        expected.append([*ratios, f"{further['512'] / found['plain']:.2f}"])
    assert table(COSTS, "| network, further chunks of") == expected
    sums = []
    for found in networks:
        rival = found["clipped sums"].get("torch.func")
        words = "refused" if rival is None else f"{rival / found['plain']:.2f}"
        sums.append([f"{found['clipped sums']['psgrad'] / found['plain']:.2f}", words])
    assert table(COSTS, "| network, a clipped sum of") == sums
    steps = []
    for found in networks:
        if "private steps" in found:
            taken = found["private steps"]
            rivals = {way: seconds for way, seconds in taken.items() if way.startswith("Opacus")}
            best = min(rivals, key=rivals.__getitem__)
            words = f"{rivals[best] / taken['plain']:.2f} ({best.removeprefix('Opacus ')})"
            steps.append([f"{taken['psgrad'] / taken['plain']:.2f}", words])
    assert table(COSTS, "| network, a private step of") == steps
