"""docs/reference/commands.md: every command with its arguments and options, from the code of the command
line.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

from psgrad.cli.app import COMMANDS, app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"

HEAD = """\
# Commands

`python -m tools.pages` makes this page from the code of the commands. `psgrad COMMAND --help` says
more of each.

Results go to standard output, messages for people to standard error. The exit codes:

- 0: success; if there was a gate, it passed
- 1: a gate failed, or an audit contradicts a privacy guarantee
- 2: the command line or the config is wrong; nothing was run
- 3: the model, the data, a checkpoint or the disk caused an error
- 4: a gate could not be evaluated; this is not a pass
- 130, 143: interrupted by Ctrl-C, or by SIGTERM; finished work stays, and `--resume` continues

`psgrad --install-completion` installs completion for your shell; `--show-completion` prints the script.
The output has no colours if `NO_COLOR` is set or if it does not go to a terminal.

## Options of several commands

Every command has `--debug`.
"""
_COMMON = 3
"""An option of so many commands, in the same words, is described once for all of them."""


def page(text: str) -> str:
    """The whole page; nothing of its present `text` stays."""
    made = {str(command.name): command.callback for command in app.registered_commands}
    lines = {name: [row(*each) for each in parameters_of(made[name])] for name in made}  # type: ignore[arg-type]
    counts = Counter(line for each in lines.values() for line in each)
    common = sorted((line for line, count in counts.items() if count >= _COMMON), key=lambda each: each[0])
    parts = [HEAD, "\n".join(common) + "\n"]
    for heading, names in COMMANDS.items():
        parts.append(f"## {heading}\n")
        parts += [section(name, made[name], lines[name], common) for name in names]  # type: ignore[arg-type]
    return "\n".join(parts)


def section(name: str, callback: Callable[..., None], lines: list[str], common: list[str]) -> str:
    """One command: its arguments, the first words of its help, and its own options."""
    arguments = [
        about.metavar or key.upper()
        for key, about, _, _ in parameters_of(callback)
        if isinstance(about, ArgumentInfo)
    ]
    own = [line for line in lines if line not in common]
    shared = ", ".join(
        f"`{line.split('`')[1].split()[0]}`"
        for line in lines
        if line in common and "--" in line and "debug" not in line
    )
    parts = [
        f"### {' '.join([f'psgrad {name}', *arguments])}",
        inspect.cleandoc(callback.__doc__ or "").split("\n\n")[0],
        "\n".join([*own, *([f"- As above: {shared}."] if shared else [])]),
    ]
    return "\n\n".join(parts) + "\n"


def parameters_of(callback: Callable[..., None]) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, what typer is told of it, its type, its default) of each parameter."""
    hints = get_type_hints(callback, include_extras=True)
    for key, parameter in inspect.signature(callback).parameters.items():
        kind, about = get_args(hints[key])[:2]
        yield key, about, kind, parameter.default


def row(key: str, about: Any, kind: Any, default: Any) -> str:
    """One line of a list: the names, the default, and what it does."""
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
    brackets = f" ({words(default)})" if words(default) else ""
    return f"- {names}{brackets}: {' '.join((about.help or '').split())}"


def values(kind: Any) -> str:
    """The values of an option without a name for them: those of an enumeration."""
    found = [each for each in (kind, *get_args(kind)) if inspect.isclass(each) and issubclass(each, Enum)]
    if found:
        return ",".join(str(each.value) for each in found[0])
    return getattr(kind, "__name__", "value").upper()


def words(default: Any) -> str:
    """The default, in words; empty where there is none to tell."""
    if default is inspect.Parameter.empty:
        return "*required*"
    if default is None or default is False:
        return ""
    return "**on**" if default is True else f"**`{getattr(default, 'value', default)}`**"
