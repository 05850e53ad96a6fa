"""The registry of commands: a command is one file in `psgrad/cli`, with a function below `@command`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from psgrad.cli.boundary import boundary

_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Function = TypeVar("Function", bound=Callable[..., None])


class Panel(StrEnum):
    """The groups of commands in `psgrad --help`, in order."""

    BEGIN = "Begin"
    QUALITY = "Data quality"
    INFLUENCE = "Influence"
    PRIVACY = "Private training"
    INSIDE = "Inside"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: one word or two, as on the command line.
        place: within the panel; commands without one come last, by name.
        function: a function of Typer; its docstring is the help.
    """

    name: str
    panel: Panel
    place: int
    function: Callable[..., None]


_registered: dict[str, Command] = {}


def command(panel: Panel, place: int = 99, name: str | None = None) -> Callable[[Function], Function]:
    """Registers the function below it, with the option --debug. name: by default the function's, with dashes
    for underscores.
    """

    def register(function: Function) -> Function:
        known_as = name or function.__name__.replace("_", "-")
        _registered[known_as] = Command(known_as, panel, place, _in_boundary(function))
        return function

    return register


def _in_boundary(function: Callable[..., None]) -> Callable[..., None]:
    """The function with one more option, --debug, and with words for its errors (see boundary.py)."""

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


def registered_commands() -> list[Command]:
    """All commands of the modules that are imported by now, in the order of `psgrad --help`."""
    panels = list(Panel)
    return sorted(_registered.values(), key=lambda each: (panels.index(each.panel), each.place, each.name))
