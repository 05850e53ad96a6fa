"""Progress in a log file and on a terminal."""

from __future__ import annotations

import io
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from psgrad.cli.progress import BarDisplay, PlainDisplay, progress_display
from psgrad.run.results import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_ten_seconds_at_most_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainDisplay(stream, clock) as display:
        for second in range(25):
            clock.now = float(second)
            display(Progress(100 * second, 2400, "gradients"))
    assert stream.getvalue().splitlines() == [
        "gradients: 1,000/2,400 samples, 100 samples/s, 14 s left",
        "gradients: 2,000/2,400 samples, 100 samples/s, 4 s left",
        "gradients: 2,400/2,400 samples, 100 samples/s",
    ]


def test_messages_come_at_once_and_the_last_phase_has_a_line() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainDisplay(stream, clock) as display:
        display(Progress(0, 0, "load", "imports: digits"))
        display(Progress(3, 3, "self-check"))
        clock.now = 2.0
        display(Progress(5, 10, "gradients"))
    assert stream.getvalue().splitlines() == [
        "imports: digits",
        "gradients: 5/10 samples",
    ]


def _with_messages(display: PlainDisplay | BarDisplay) -> None:
    display(Progress(5, 10, "samples"))
    display(Progress(0, 0, "samples", "amid"))
    display(Progress(10, 10, "samples"))
    display(Progress(7, 7, "checkpoint-0"))
    display(Progress(0, 0, "samples", "the checkpoints disagree"))


def test_a_message_amid_or_after_a_phase_is_no_progress_of_it() -> None:
    """It neither begins a phase anew, nor tells how far one has come that is over."""
    stream = io.StringIO()
    with PlainDisplay(stream, Clock()) as display:
        _with_messages(display)
    assert stream.getvalue().splitlines() == [
        "amid",
        "the checkpoints disagree",
        "checkpoint-0: 7/7 samples",
    ]


def test_a_terminal_gets_a_bar_and_its_messages_are_no_markup() -> None:
    stream = Terminal()
    with BarDisplay(stream) as display:
        display(Progress(0, 0, "load", "imports: [red]digits"))
        display(Progress(10, 20, "gradients"))
        display(Progress(20, 20, "gradients"))
    assert "imports: [red]digits" in stream.getvalue()
    assert "20/20 samples" in stream.getvalue()
    assert "load" not in stream.getvalue().splitlines()[-1]


def test_the_bar_gives_way_to_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with BarDisplay(stream) as display:
        display(Progress(0, 150, "steps", unit="step"))
        display(Progress(150, 150, "steps", unit="step", detail="epsilon 3.2961 (RDP, delta 1e-5)"))
    assert "epsilon 3.2961 (RDP, delta 1e-5)" in stream.getvalue()


def test_the_display_fits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress_display(stream=Terminal()), BarDisplay)
    assert isinstance(progress_display(stream=io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_display(stream=Terminal()), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    assert isinstance(progress_display(stream=Terminal()), PlainDisplay)


def test_phase_without_a_count_shows_its_detail() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainDisplay(stream, clock) as display:
        for second in range(13):
            clock.now = float(second)
            display(Progress(0, 0, "fit", detail=f"pass {second}"))
    assert stream.getvalue().splitlines() == ["fit: pass 10", "fit: pass 12"]
    terminal = Terminal()
    with BarDisplay(terminal) as bars:
        bars(Progress(0, 0, "fit", detail="pass 3, row 8 of 300"))
        bars._bars.refresh()
    assert "pass 3, row 8 of 300" in terminal.getvalue()


def test_a_notebook_has_a_bar_where_ipywidgets_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:  # by its name rich knows a notebook
        pass

    found = ModuleType("ipywidgets")
    found.__spec__ = ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", found)
    assert isinstance(progress_display(stream=io.StringIO()), PlainDisplay)
    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    assert isinstance(progress_display(stream=io.StringIO()), BarDisplay)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert isinstance(progress_display(stream=io.StringIO()), PlainDisplay)
