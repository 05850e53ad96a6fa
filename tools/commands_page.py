"""docs/reference/commands.md: every command with its arguments and options, from the code of the command
line.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from psgrad.cli.app import COMMANDS, app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"

HEAD = """\
# Commands

`python -m tools.pages` makes this page from the code of the commands. `psgrad COMMAND --help` prints
the same.

Results go to standard output. Messages for people go to standard error. Every command ends with one of these
exit codes:

| code | meaning |
| --- | --- |
| 0 | success; if there was a gate, it passed |
| 1 | a gate failed, or an audit contradicts a privacy guarantee |
| 2 | the command line or the config is wrong; nothing was run |
| 3 | the model, the data, a checkpoint or the disk caused an error |
| 4 | a gate could not be evaluated; this is not a pass |
| 130, 143 | interrupted by Ctrl-C, or by SIGTERM; finished work stays, and `--resume` continues |

`psgrad --install-completion` installs completion of commands and options for your shell; `--show-completion`
prints the script instead. The output has no colours if `NO_COLOR` is set or if it does
not go to a terminal.
"""


def page(text: str) -> str:
    """The whole page; nothing of its present `text` stays."""
    made = {str(command.name): command.callback for command in app.registered_commands}
    parts = [HEAD]
    for heading, names in COMMANDS.items():
        parts += [f"## {heading}\n", *(section(name, made[name]) for name in names)]  # type: ignore[arg-type]
    return "\n".join(parts)


def section(name: str, callback: Callable[..., None]) -> str:
    """One command: usage, what it does, its arguments and options."""
    parameters = list(parameters_of(callback))
    arguments = [
        about.metavar or key.upper() for key, about, _, _ in parameters if isinstance(about, ArgumentInfo)
    ]
    usage = " ".join([f"psgrad {name}", *arguments, "[OPTIONS]"])
    lines = [
        f"### psgrad {name}\n",
        f"```text\n{usage}\n```\n",
        inspect.cleandoc(callback.__doc__ or "") + "\n",
    ]
    lines += [
        "| argument or option | meaning | default |",
        "| --- | --- | --- |",
        *(row(*each) for each in parameters),
    ]
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
        declared = [
            part
            for each in (about.default, *about.param_decls)
            for part in str(each).split("/")
            if part.startswith("-")
        ]
        names = ", ".join(
            f"`{each}{'' if flag else f' {about.metavar or values(kind)}'}`" for each in declared
        )
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
