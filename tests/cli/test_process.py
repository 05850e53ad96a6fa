"""What only a process of its own can show: imports, start-up time, signals, closed pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from psgrad.cli import app

ROOT = Path(__file__).parents[2]
HEAVIEST = ("torch", "pandas", "matplotlib", "scipy", "sklearn")
HEAVY = ("torch", "pandas", "matplotlib", "numpy", "yaml", "scipy", "pyarrow", "psgrad.config")

# `psgrad analyze` with a workflow that says when it is under way, and then sleeps in Python.
SLEEPER = """
    import sys, time, types
    import psgrad
    from psgrad.cli import main

    def analyze(config, *, progress, **options):
        print("under way", file=sys.stderr, flush=True)
        {body}

    workflow = sys.modules["psgrad.commands.analyze"] = types.ModuleType("psgrad.commands.analyze")
    workflow.analyze = analyze
    main()
"""


def _start(config: Path, body: str) -> subprocess.Popen[str]:
    script = textwrap.dedent(SLEEPER).format(body=textwrap.indent(textwrap.dedent(body), "    ").strip())
    arguments = [sys.executable, "-c", script, "analyze", str(config)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(arguments, cwd=config.parent, text=True, **pipes)


def ended(arguments: list[str], names: tuple[str, ...], folder: Path | None = None) -> tuple[str, str, str]:
    """What `psgrad` with these arguments writes to stdout and to stderr, in a process of its own; and its
    exit code, which of the modules it has loaded, and whether the collector leaves what it imported alone.
    """
    script = f"""
        import gc, sys
        from psgrad.cli import main
        sys.argv = ["psgrad", *{arguments!r}]
        try:
            main()
        except SystemExit as left:
            alone = gc.get_freeze_count() > len(gc.get_objects())
            loaded = [name for name in {names!r} if name in sys.modules]
            print("ENDED", left.code, loaded, alone, file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    words, _, end = done.stderr.rpartition("ENDED ")
    return done.stdout, words, end.strip()


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["analyze", "--help"], ["influence", "index", "--help"], ["ops", "--help"], ["--version"]],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    out, err, end = ended(arguments, HEAVY)
    assert out
    assert err == ""
    assert end.startswith("0 []")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `psgrad init` writes."""
    folder = tmp_path_factory.mktemp("begun")
    subprocess.run([sys.executable, "-m", "psgrad", "init"], cwd=folder, capture_output=True, check=True)
    return folder


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["schema"],
        ["validate", "psgrad.yaml", "--set", "engine.chunksize=3"],
        ["validate", "psgrad.yaml", "--output", "psgrad.yaml"],
        ["init", "there"],
        ["analyze", "nowhere.yaml"],
    ],
)
def test_what_needs_no_model_loads_no_torch(begun: Path, arguments: list[str]) -> None:
    assert " [] " in ended(arguments, HEAVIEST, begun)[2]


COMMANDS = (
    ("out", ["analyze", "psgrad.yaml"]),
    ("out", ["influence", "psgrad.yaml"]),
    ("out-lds", ["influence", "psgrad.yaml", "--evaluate", "lds"]),
    ("out", ["dp-step", "psgrad.yaml", "--steps", "1"]),
    ("out-audit", ["dp-audit", "psgrad.yaml"]),
    ("index", ["influence", "index", "psgrad.yaml", "--set", "influence.index={path: index}"]),
)


@pytest.mark.long
@pytest.mark.parametrize(("output", "arguments"), COMMANDS, ids=[" ".join(each) for _, each in COMMANDS])
def test_output_that_is_there_is_refused_before_imports(
    begun: Path, output: str, arguments: list[str]
) -> None:
    (begun / output).mkdir(exist_ok=True)
    (begun / output / "mine.txt").write_text("mine")
    _, err, end = ended([*arguments, "--set", "output=out"], HEAVIEST, begun)
    assert "is not empty" in err
    assert end.startswith("2 []")


# What a run without measures has no use for. sympy is not listed: PyTorch 2.13 imports it itself, for the
# first operator on a tensor of another class.
UNUSED = ("torch._dynamo", "torch._inductor", "scipy", "sklearn")


@pytest.mark.long
@pytest.mark.parametrize(("name", "rows"), [("digits", 400), ("text", 40)])
def test_analyze_loads_neither_the_compiler_nor_what_it_has_no_use_for(
    name: str, rows: int, tmp_path: Path
) -> None:
    arguments = ["analyze", f"configs/{name}.yaml", "--limit", str(rows), "--output", str(tmp_path / "out")]
    end = ended(arguments, UNUSED, ROOT)[2]
    assert (tmp_path / "out" / "report.html").exists()
    assert end == "0 [] True", "the collector walks over what is imported"


# What the import of typer and rich takes on a quiet machine, in seconds of the processor.
IMPORT_SECONDS = 0.13


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "bar"),
    [
        (["--help"], 0.3),
        (["validate", "psgrad.yaml", "--set", "engine.chunksize=3"], 1.0),
        (["analyze", "psgrad.yaml", "--output", "."], 1.0),
        (["schema"], 1.0),
    ],
)
def test_answers_come_at_once(begun: Path, arguments: list[str], bar: float) -> None:
    """In processor time, the smallest of up to ten: other programs only add to it. On a slow or busy machine
    the bar is longer by as much as the import of typer and rich is.
    """

    def seconds(*command: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *command], cwd=begun, capture_output=True, check=False)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    found, imports = [], []
    for _ in range(10):
        found.append(seconds("-m", "psgrad", *arguments))
        imports.append(seconds("-c", "import typer, rich.console, rich.table, rich.progress"))
        if min(found) < bar * max(1.0, min(imports) / IMPORT_SECONDS):
            return
    pytest.fail(f"{min(found):.2f} s of the processor, beside {min(imports):.2f} s for the import")


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("arguments", [["schema"], ["--help"], ["ops"], ["validate", "psgrad.yaml"]])
def test_a_pipe_that_closes_early_is_no_error(begun: Path, arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "psgrad", *arguments],
        cwd=begun,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    words = process.stderr.read()
    assert process.wait(timeout=60) in (0, 1)  # the help is typer's, which leaves with 1
    assert "Traceback" not in words
    assert "Exception ignored" not in words


@pytest.mark.long
def test_a_closed_output_is_no_error(begun: Path) -> None:
    command = f"{sys.executable} -m psgrad schema >&-"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=begun, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_command_that_was_mistyped_is_suggested() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "psgrad", "analize"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "analyze" in done.stderr
    assert done.stdout == ""


def test_help_has_every_command_on_one_screen() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "psgrad", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(f"  {name} " in text for commands in app.COMMANDS.values() for name in commands)
    assert "Exit codes" in text
    assert text.count("...") == 1, "a sentence is cut"
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80


SIGNALS = pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)


@pytest.mark.long
@SIGNALS
def test_signals_end_the_run_with_a_word(config: Path, number: signal.Signals, code: int, word: str) -> None:
    process = _start(config, "time.sleep(60)")
    assert process.stderr is not None
    assert process.stderr.readline() == "under way\n"
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    words = process.stderr.read()
    assert word in words
    assert "Traceback" not in words


@pytest.mark.long
@SIGNALS
def test_a_signal_during_an_import_is_not_swallowed(
    config: Path, number: signal.Signals, code: int, word: str
) -> None:
    """Libraries import others in a `try` with an `except:` of all kinds."""
    (config.parent / "swallows.py").write_text(
        "import os, time\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(1)\n"
        "except:\n"
        "    pass\n"
    )
    process = _start(config, "import swallows; time.sleep(60)")
    _, words = process.communicate(timeout=20)
    assert process.returncode == code
    assert word in words


@pytest.mark.long
def test_an_import_that_does_not_end_is_ended_by_a_signal(config: Path) -> None:
    (config.parent / "works.py").write_text(
        "import sys, time\nprint('at work', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    process = _start(config, "import works")
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(2)] == ["under way\n", "at work\n"]
    process.terminate()
    assert process.wait(timeout=30) == 143


def test_ctrl_c_before_a_command_begins_is_reported_by_the_exit_code_alone() -> None:
    script = """
        import sys

        class Interrupted:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupted())
        from psgrad.cli import main
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.long
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


@pytest.mark.long
def test_a_full_disk_under_standard_output_is_reported(config: Path) -> None:
    process = _start(config, "raise OSError(28, 'No space left on device')")
    _, words = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "error: what is printed can't be written: No space left on device\n" in words
    assert "internal error" not in words


def test_processes_import_nothing_from_the_current_folder(begun: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    # what the script psgrad in a bin folder does, where the current folder is no place of modules
    script = [sys.executable, "-P", "-c", "from psgrad.cli import main; main()"]
    options = ["--output", str(tmp_path / "run"), "--no-report", "--processes", "2"]
    done = subprocess.run(
        [*script, "analyze", str(begun / "psgrad.yaml"), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
