"""`psgrad report`: the page and the figures of a finished run, made again from its folder, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psgrad.reports import monitor_page
from psgrad.reports.analyze_page import write_report
from psgrad.run import RunFolder
from psgrad.run.finished import load_run


@dataclass(frozen=True)
class WrittenReport:
    """page: where report.html is. figures: how many were written to plots/ beside it."""

    page: Path
    figures: int


def report(run: Path, *, output: Path | None = None) -> WrittenReport:
    """Make report.html and plots/ of the finished run in a folder again, there or in the folder `output`.

    From the same run folder and the same version of psgrad the same bytes come, those that `psgrad analyze`
    wrote. Raises PsgradError where the folder holds no finished run of `psgrad analyze`, and where the report
    can't be written.
    """
    folder = RunFolder(run if output is None else output)
    written: list[str] = []

    def write(name: str, data: bytes) -> None:
        folder.write_bytes(name, data)
        written.append(name)

    if (RunFolder.manifest_of(run) or {}).get("command") == "monitor":
        monitor_page.write_report(run, write)
    else:
        write_report(load_run(run), write)
    return WrittenReport(folder.path / "report.html", len(written) - 1)
