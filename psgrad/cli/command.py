"""What all commands share: `--debug`, and a message and an exit code for each error and signal."""

from __future__ import annotations

import errno
import inspect
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Annotated, Any

import typer

from psgrad import __version__
from psgrad.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUNTIME, EXIT_TERMINATED, PsgradError
from psgrad.reports.words import printable

_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def with_boundary(function: Callable[..., None]) -> Callable[..., None]:
    """The command with one more option, --debug, and with words for its errors (see `boundary`)."""

    @wraps(function)
    def run(debug: bool = False, **options: Any) -> None:
        with boundary(debug):
            function(**options)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    debug = inspect.Parameter("debug", kind, default=False, annotation=_Debug)
    signature = inspect.signature(function, eval_str=True)
    vars(run)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), debug])
    run.__annotations__ = {**function.__annotations__, "debug": _Debug}
    return run


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, so that what cleans up after Ctrl-C cleans up after this too."""


@contextmanager
def boundary(debug: bool) -> Iterator[None]:
    """Run a command's body: errors and signals end it with a message and an exit code."""
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _end)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _end)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except PsgradError as error:
        _leave(f"error: {error}", error.exit_code, debug)
    except Terminated:
        _leave("terminated: what was finished stays in the run folder", EXIT_TERMINATED, debug)
    except KeyboardInterrupt:
        _leave("interrupted: what was finished stays in the run folder", EXIT_INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of our stdout has seen enough. Nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_OK) from None
    except OSError as error:
        # This error is of standard output: writes to files raise errors of psgrad.
        full = error.errno == errno.ENOSPC
        _leave(_no_room(error) if full else _internal_error(error), EXIT_RUNTIME, debug)
    except SystemExit:
        # Raised by a model, a dataset or a loss. Their exit code must not be taken for that of a gate.
        _leave(_LEFT_EARLY, EXIT_RUNTIME, debug)
    except MemoryError as error:
        _leave(_no_memory(error), EXIT_RUNTIME, debug)
    except Exception as error:
        _leave(_internal_error(error), EXIT_RUNTIME, debug)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end(signum: int, frame: FrameType | None) -> None:
    """An exception for SIGTERM or SIGINT; one that comes while modules are imported is sent again a moment
    later. Libraries have `except:` around imports, which would swallow the exception.
    """
    if _is_importing(frame):
        _first_signal[:] = _first_signal or [time.monotonic()]
        if time.monotonic() - _first_signal[0] < _LONGEST_IMPORT:
            again = threading.Timer(_MOMENT, os.kill, (os.getpid(), signum))
            again.daemon = True
            again.start()
            return
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    # A second SIGTERM ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


# Seconds. A module of the user's may do its work while it is imported.
_MOMENT, _LONGEST_IMPORT = 0.05, 5.0
_first_signal: list[float] = []


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _leave(message: str, exit_code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
    typer.echo(printable(message, keep="\n\t"), err=True)
    raise typer.Exit(exit_code) from None


def _no_room(error: OSError) -> str:
    return (
        f"error: what is printed can't be written: {error.strerror}\n"
        "  hint: free some space, or print to another place; the files of the run are in its folder"
    )


_LEFT_EARLY = (
    "error: code that the config names has called sys.exit, before psgrad was done\n"
    "  hint: --debug shows the line"
)


def _no_memory(error: MemoryError) -> str:
    origin = traceback.extract_tb(error.__traceback__)[-1]
    words = str(error).strip().split("\n")[0][:500]
    return (
        f"error: out of memory in {origin.name}{f': {words}' if words else ''}\n"
        "  hint: make the option smaller that asks for much, or free memory, and run psgrad again;"
        " analyze goes on with --resume"
    )


def _internal_error(error: Exception) -> str:
    origin = traceback.extract_tb(error.__traceback__)[-1]
    words = str(error).strip().split("\n")[0][:500]
    torch = getattr(sys.modules.get("torch"), "__version__", "not loaded")
    return (
        f"internal error: {type(error).__name__}: {words}\n"
        f"  where: {origin.name} in {origin.filename}, line {origin.lineno}\n"
        f"  versions: psgrad {__version__}, Python {platform.python_version()}, torch {torch},"
        f" {platform.system()}\n"
        "  hint: this is a mistake in psgrad, not in your config; report it with what --debug prints and"
        " the config"
    )
