"""docs/commands.md, made from the commands themselves.

python -m tests.commands_page > docs/commands.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from psgrad.cli.app import app

HEAD = """\
# Commands

This page is made from the commands themselves (`python -m tests.commands_page`); `psgrad COMMAND --help` says the same.

Data goes to standard output, words for people to standard error. Every command leaves with one of these exit codes:

| code | meaning |
| --- | --- |
| 0 | all went well, and the gate, if there was one, is passed |
| 1 | a gate failed, or an audit contradicts a guarantee |
| 2 | the command line or the config is wrong; nothing was run |
| 3 | the model, the data, a checkpoint or the disk is at fault |
| 4 | a gate could not be evaluated, which is no pass |
| 130, 143 | interrupted by Ctrl-C, or by SIGTERM; what was finished stays, and `--resume` goes on |

`psgrad --install-completion` completes commands, options and their values in your shell; `--show-completion` prints the script instead.
Colours are left out where `NO_COLOR` is set or the output is no terminal.
"""


def page() -> str:
    """The whole page."""
    panels: dict[str, list[Any]] = {}
    for command in app.registered_commands:
        panels.setdefault(str(command.rich_help_panel), []).append(command)
    parts = [HEAD]
    for panel, commands in panels.items():
        parts.append(f"## {panel}\n")
        parts += [section(name_of(command), command.callback) for command in commands]
    return "\n".join(parts)


def name_of(command: Any) -> str:
    return str(command.name or command.callback.__name__)


def section(name: str, callback: Callable[..., None]) -> str:
    """One command: usage, what it does, its arguments and options."""
    parameters = list(parameters_of(callback))
    arguments = [about.metavar or key.upper() for key, about, _, _ in parameters if isinstance(about, ArgumentInfo)]
    usage = " ".join([f"psgrad {name}", *arguments, "[OPTIONS]"])
    lines = [f"### psgrad {name}\n", f"```text\n{usage}\n```\n", inspect.cleandoc(callback.__doc__ or "") + "\n"]
    lines += ["| argument or option | meaning | default |", "| --- | --- | --- |", *(row(*each) for each in parameters)]
    return "\n".join(lines) + "\n"


def parameters_of(callback: Callable[..., None]) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, what typer is told of it, its type, its default) of each parameter."""
    hints = get_type_hints(callback, include_extras=True)
    for key, parameter in inspect.signature(callback).parameters.items():
        kind, about = get_args(hints[key])[:2]
        yield key, about, kind, parameter.default


def row(key: str, about: Any, kind: Any, default: Any) -> str:
    """One line of the table."""
    if isinstance(about, ArgumentInfo):
        names = f"`{about.metavar or key.upper()}`"
    else:
        flag = kind is bool
        # Inside Annotated the first name stands where a default would.
        declared = [part for each in (about.default, *about.param_decls) for part in str(each).split("/") if part.startswith("-")]
        names = ", ".join(f"`{each}{'' if flag else f' {about.metavar or values(kind)}'}`" for each in declared)
    meaning = " ".join((about.help or "").split())
    return f"| {names} | {meaning} | {words(default)} |".replace("N|FRACTION", "N\\|FRACTION")


def values(kind: Any) -> str:
    """The values of an option without a name for them: those of an enumeration."""
    found = [each for each in (kind, *get_args(kind)) if inspect.isclass(each) and issubclass(each, Enum)]
    if found:
        return ",".join(str(each.value) for each in found[0])
    return getattr(kind, "__name__", "value").upper()


def words(default: Any) -> str:
    """The default, in words; empty where there is none to tell."""
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or default is False:
        return ""
    return "on" if default is True else f"`{getattr(default, 'value', default)}`"


if __name__ == "__main__":
    print(page(), end="")
