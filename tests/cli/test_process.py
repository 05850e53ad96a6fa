"""What only a process of its own can show: imports, start-up time, signals, closed pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = ("torch", "pandas", "matplotlib", "numpy", "yaml", "scipy", "pyarrow", "psgrad.config")

# `psgrad analyze` with a workflow that says when it is under way, and then sleeps in Python.
SLEEPER = """
    import sys, time, types
    import psgrad
    from psgrad.cli import main

    def analyze(config, *, progress, **options):
        print("under way", file=sys.stderr, flush=True)
        {body}

    psgrad.workflows = sys.modules["psgrad.workflows"] = types.ModuleType("psgrad.workflows")
    psgrad.workflows.analyze = analyze
    main()
"""


def _start(config: Path, body: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(SLEEPER).format(body=textwrap.indent(textwrap.dedent(body), "    ").strip())
    arguments = [sys.executable, "-c", script, "analyze", str(config)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["ops", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = f"""
        import sys
        from psgrad.cli import main
        sys.argv = ["psgrad", *{arguments!r}]
        try:
            main()
        finally:
            print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.strip() == "[]"


def test_help_answers_in_less_than_400_ms() -> None:
    def seconds() -> float:
        """The processor's time, which is the clock's where nothing else runs; here other tests may run beside this one."""
        before = os.times()
        subprocess.run([sys.executable, "-m", "psgrad", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.4


def test_every_command_is_in_the_help() -> None:
    text = subprocess.run([sys.executable, "-m", "psgrad", "--help"], capture_output=True, text=True, check=True).stdout
    assert "analyze" in text
    assert "Exit codes" in text


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_signals_end_the_run_with_a_word(config: Path, number: signal.Signals, code: int, word: str) -> None:
    process = _start(config, "time.sleep(60)")
    assert process.stderr is not None
    assert process.stderr.readline() == "under way\n"
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    words = process.stderr.read()
    assert word in words
    assert "Traceback" not in words


def test_a_second_sigterm_ends_the_process_at_once(config: Path) -> None:
    body = """
        try:
            print("at work", file=sys.stderr, flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("cleaning up", file=sys.stderr, flush=True)
            time.sleep(60)
    """
    process = _start(config, body)
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(2)] == ["under way\n", "at work\n"]
    process.terminate()
    assert process.stderr.readline() == "cleaning up\n"
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM


def test_a_reader_that_leaves_is_no_error(config: Path) -> None:
    process = _start(config, "raise BrokenPipeError")
    _, words = process.communicate(timeout=20)
    assert process.returncode == 0
    assert words == "under way\n"


def test_a_full_disk_under_standard_output_is_told(config: Path) -> None:
    process = _start(config, "raise OSError(28, 'No space left on device')")
    _, words = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "error: what is printed can't be written: No space left on device\n" in words
    assert "internal error" not in words


def test_python_m_psgrad_is_psgrad() -> None:
    done = subprocess.run([sys.executable, "-m", "psgrad", "--version"], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.startswith("psgrad ")
