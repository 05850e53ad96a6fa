"""`psgrad report`: the same bytes as the run wrote, from its folder alone, and words for a folder that is
none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workplace import Workplace

MEASURES = (
    "analyze.measures=[el2n, margin, noise_scale, {name: ntk, samples: 16}, relative_norm, gradient_x_input]"
)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.sweep
def test_the_report_made_again_is_the_same_byte_for_byte(workplace: Workplace) -> None:
    workplace.config["data"]["class_names"] = ["a", "<b>", "c"]
    workplace.config["gate"] = {"max_outliers": 3}
    workplace.arrays["x"][3] = float("nan")
    workplace.save()
    workplace.succeeded("--set", MEASURES, "--limit", "20")
    run = workplace.folder / "out"
    before = _files(run)
    (run / "report.html").unlink()
    for plot in (run / "plots").iterdir():
        plot.unlink()
    outcome = workplace.command("report", "out").succeeded()
    assert Path(outcome.out.strip()) == Path("out/report.html")
    assert _files(run) == before


@pytest.mark.long
def test_another_folder_takes_the_report_and_the_run_stays_as_it_was(workplace: Workplace) -> None:
    workplace.succeeded()
    before = _files(workplace.folder / "out")
    workplace.command("report", "out", "--output", "elsewhere/deep").succeeded()
    assert _files(workplace.folder / "out") == before
    written = _files(workplace.folder / "elsewhere" / "deep")
    assert written == {
        name: data for name, data in before.items() if name == "report.html" or name.startswith("plots/")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "manifest.json").unlink(), "holds no run of psgrad"),
        (lambda run: (run / "samples.parquet").write_bytes(b"PAR1"), "samples.parquet can't be read"),
        (lambda run: (run / "measures.json").write_text("{"), "measures.json can't be read"),
    ],
)
def test_a_folder_that_is_no_finished_run_is_refused(
    workplace: Workplace, change: object, words: str
) -> None:
    workplace.succeeded("--no-report")
    change(workplace.folder / "out")  # type: ignore[operator]
    workplace.command("report", "out").refused(3, words)
    assert not (workplace.folder / "out" / "report.html").exists()


@pytest.mark.sweep
def test_no_torch_is_loaded(workplace: Workplace) -> None:
    workplace.succeeded()
    script = (
        "import sys, pathlib; from psgrad.commands.report import report; report(pathlib.Path('out'));"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
