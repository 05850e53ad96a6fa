"""The README, run: its commands, its config, its library example and the figures that it claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from psgrad.config import Config, load_config
from psgrad.reports.rankings import OFFER, OPTION, rankings_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALL_DOCS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def psgrad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "psgrad", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_ci_runs_the_test_command() -> None:
    command = 'pip install -c constraints.txt -e ".[test,hugging-face]" && pytest'
    assert command in README
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(part in script.replace(" --quiet", "") for part in command.split(" && "))


def test_the_config_loads(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    shown = load_config(tmp_path / "config.yaml")
    assert shown.model_dump().keys() == Config.model_fields.keys()


def test_the_library_example_runs() -> None:
    import torch

    names: dict[str, object] = {}
    exec(blocks("python")[0], names)  # our own page
    clipped, same, norms = names["clipped"], names["same"], names["norms"]
    assert isinstance(clipped, dict)
    assert isinstance(same, dict)
    assert isinstance(norms, torch.Tensor)
    total = torch.stack([value.detach().flatten(1).square().sum(1) for value in same.values()]).sum(0)
    torch.testing.assert_close(norms.float(), total.sqrt())
    for name, value in clipped.items():
        torch.testing.assert_close(value, torch.tensordot((1 / norms).clamp(max=1).float(), same[name].detach(), 1))


def test_the_mistake_is_told_as_shown() -> None:
    shown = next(block for block in blocks("console") if "chunksize" in block)
    command, _, expected = shown.partition("\n")
    done = psgrad(*command.removeprefix("$ psgrad ").split())
    assert done.returncode == 2
    assert done.stderr.split() == expected.split()


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("digits") / "run"
    done = psgrad("analyze", "configs/digits.yaml", "--set", "analyze.top=10", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_flipped_labels_are_found_as_claimed(digits_run: tuple[Path, str]) -> None:
    shown = next(block for block in blocks("console") if "found.py" in block).split("\n", 1)[1]
    script = [sys.executable, "configs/digits/found.py", str(digits_run[0])]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == shown


def test_the_main_job_is_quick(digits_run: tuple[Path, str]) -> None:
    """1,797 digits after the imports, plots and report included: under 20 s on two cores."""
    timings = json.loads((digits_run[0] / "manifest.json").read_text(encoding="utf-8"))["timings"]
    assert {"load", "self-check", "gradients", "report"} <= timings.keys()
    assert sum(timings.values()) < 20


def test_the_table_is_the_one_shown(digits_run: tuple[Path, str]) -> None:
    """Ids, labels and predictions to the letter; numbers may differ in the last digit on other processors."""
    shown = next(block for block in blocks("console") if "analyze.top=10" in block)

    def rows(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+digit-", line)]

    assert len(rows(shown)) == 10
    for ours, theirs in zip(rows(digits_run[1]), rows(shown), strict=True):
        assert ours[:4] == theirs[:4]
        assert [float(number) for number in ours[4:]] == pytest.approx([float(number) for number in theirs[4:]], rel=2e-3)


def test_the_rankings_are_compared_as_shown(digits_run: tuple[Path, str]) -> None:
    outliers = json.loads((digits_run[0] / "manifest.json").read_bytes())["outliers"]
    found = rankings_of(outliers)
    assert found is not None
    assert f"\n{found.sentence}\n{OFFER}: {OPTION} ranks and judges by it\n" in README
    agreement = outliers["loss_agreement"]
    page = " ".join((ROOT / "docs" / "outliers.md").read_text().split())
    correlation = f"{agreement['spearman']:.6f}"[1:6]
    top, shared = agreement["top"], agreement["shared"]
    assert f"first {top} by norm {shared} are among the first {top} by loss, at a correlation of {correlation}" in page


def test_the_gate_says_what_is_shown(tmp_path: Path) -> None:
    shown = next(block for block in blocks("console") if "digits-gate" in block)
    command, _, expected = shown.partition("\n")
    done = psgrad(*command.removeprefix("$ psgrad ").split(), "--output", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    lines = [line.split() for line in expected.splitlines() if line != "..."]
    assert len(lines) == 7
    assert lines == said[: len(lines)]


@pytest.mark.parametrize("page", ALL_DOCS, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:\(|`)((?:docs|configs|tests|benchmarks|psgrad)/[\w./-]+)(?:\)|`)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_benchmark_table_is_the_stored_result() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "cpu-2-cores.json").read_text(encoding="utf-8"))
    expected = []
    for case in stored["cases"].values():
        medians = {way: timing["median"] for way, timing in case["seconds"].items()}
        expected.append([f"{medians[way] / medians['plain']:.2f}" for way in ("torch.func", "norms", "clipped")])
    table = README[README.index("| network | torch.func norms") :].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table] == expected


def test_the_table_of_rivals_is_the_stored_result() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "rivals-cpu.json").read_text(encoding="utf-8"))
    expected = []
    for case in stored["cases"].values():
        cells = []
        for task in ("norms", "clipped", "materialised"):
            medians = {way: timing["median"] for way, timing in case[task]["seconds"].items()}
            rivals = {way: median for way, median in medians.items() if way not in ("plain", "psgrad")}
            best = min(rivals, key=rivals.__getitem__)
            cells.append(f"{rivals[best] / medians['psgrad']:.2f} ({best})")
        expected.append(cells)
    table = README[README.index("| network | norms |") :].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table] == expected


def test_the_table_of_private_steps_is_the_stored_result() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "dp-step-cpu.json").read_text(encoding="utf-8"))
    expected = []
    for case in stored["cases"].values():
        ratios = {way: timing["median"] / case["seconds"]["plain"]["median"] for way, timing in case["seconds"].items()}
        rivals = {way.removeprefix("Opacus "): ratio for way, ratio in ratios.items() if way.startswith("Opacus")}
        best = min(rivals, key=rivals.__getitem__) if rivals else None
        memory = case["bytes"]["psgrad"] / case["bytes"]["plain"]
        words = "not supported" if best is None else f"{rivals[best]:.2f} ({best})"
        expected.append([f"{ratios['psgrad']:.2f}", words, f"{memory:.2f}"])
    table = README[README.index("| network | psgrad `dp-step`") :].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table] == expected


def test_the_overhead_table_is_the_stored_result() -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "overhead-cpu.json").read_text(encoding="utf-8"))
    medians = [timing["median"] for timing in stored["seconds"].values()]
    expected = [[f"{median * 1e6:.0f}", f"{median / stored['seconds']['torch.func']['median']:.2f}"] for median in medians]
    table = README[README.index("| | microseconds") :].split("\n\n")[0].splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table] == expected


def test_the_operators_are_listed_as_shown() -> None:
    shown = next(block for block in blocks("console") if "psgrad ops" in block)
    command, _, expected = shown.partition("\n")
    done = psgrad(*command.removeprefix("$ psgrad ").replace("'", "").split())
    assert done.stdout.split() == expected.split()
