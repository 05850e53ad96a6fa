"""The arguments that commands share, declared once, and what `-v` prints.

What a shell completes: keys of a config, measures, methods. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgrad.cli.processes import require_one
from psgrad.errors import ConfigError

if TYPE_CHECKING:
    from psgrad.config import Config
    from psgrad.config.values import ConfigSection

_MEASURES = "analyze.measures=["


def complete_setting(incomplete: str) -> list[str]:
    """Dotted keys for `--set`; behind `analyze.measures=[` the names of measures."""
    if incomplete.startswith(_MEASURES):
        from psgrad.config.plugin_options import plugin_names

        begun, _, last = incomplete.removeprefix(_MEASURES).rpartition(",")
        before = f"{_MEASURES}{begun}," if begun else _MEASURES
        return [f"{before}{name}]" for name in plugin_names("measures") if name.startswith(last.strip())]
    from psgrad.config import Config

    return [f"{key}=" for key in _keys(Config, "") if key.startswith(incomplete)]


def complete_method(incomplete: str) -> list[str]:
    """Names of influence methods."""
    from psgrad.config.plugin_options import plugin_names

    return [name for name in plugin_names("methods") if name.startswith(incomplete)]


def _keys(section: type[ConfigSection], above: str) -> Iterator[str]:
    """The keys that hold plain values, dotted. Lists of sections count as plain: they are written whole."""
    from psgrad.config.values import sections_in

    for key, info in section.model_fields.items():
        inside = next(sections_in(info.annotation), None)
        if inside is None or str(info.annotation).startswith("list"):
            yield f"{above}{key}"
        else:
            yield from _keys(inside, f"{above}{key}.")


ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="YAML file that names the model, the loss and the data.", show_default=False
    ),
]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a finished psgrad analyze.", show_default=False)
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help="Run folder, instead of the config's `output`.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Change one value of the config: dotted path, YAML value. May be repeated.",
        autocompletion=complete_setting,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the run folder.")]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Compute only part K of N of the rows, for job arrays; psgrad merge joins the parts.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the tables.")]


def part_of(given: str) -> tuple[int, int]:
    """Which part, and how many there are. Raises ConfigError."""
    number, _, count = given.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {given}", expected="K/N: which part, and how many there are, such as 3/64")
    return int(number), int(count)


def require_one_of(both: bool, first: str, second: str) -> None:
    """Raises ConfigError where two options were given that exclude each other."""
    if both:
        raise ConfigError(
            f"{first} was given together with {second}", expected="one of them", next_step="leave one out"
        )


def require_part_alone(part: str | None, command: str, given: Mapping[str, bool]) -> None:
    """Raises ConfigError for --part with an option that it excludes, or in one of several processes. given:
    option -> whether it was given.
    """
    if part is not None:
        for other, there in given.items():
            require_one_of(there, "--part", other)
        require_one(f"{command} --part")


def require_alone(option: str, which: str, others: str, given: Mapping[str, bool]) -> None:
    """Raises ConfigError where an option was given with one that it excludes. which: what it does; others:
    what they are of; given: option -> whether it was given.
    """
    for other, there in given.items():
        if there:
            raise ConfigError(
                f"{option} was given together with {other}",
                expected=f"{option}, which {which}, or an option of {others}",
                next_step="leave one of them out",
            )


def read_config(path: Path, settings: list[str] | None, output: Path | None) -> Config:
    """The config with the command line's changes, the last of which win."""
    from psgrad.config import load_config

    return load_config(path, settings_of(settings, output))


def settings_of(settings: list[str] | None, output: Path | None) -> list[str]:
    """The command line's changes, the last of which win, as `--set` takes them."""
    overrides = list(settings or ())
    if output is not None:
        # A JSON string is a YAML string: a folder named `no` or `1e3` stays text.
        overrides.append(f"output={json.dumps(str(output), ensure_ascii=False)}")
    return overrides


Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Also print how it was computed, and the time of each part.")
]


def say_computed(manifest: dict[str, Any]) -> None:
    """The processes of a finished run, a line each, its versions, engine and times."""
    if manifest.get("ranks"):
        from psgrad.commands.run_manifest import words_for

        typer.echo("\n".join(words_for(manifest["ranks"])), err=True)
    for about in ("versions", "engine", "timings"):
        facts: dict[str, Any] = manifest.get(about) or {}
        if facts:
            known = {key: value for key, value in facts.items() if value is not None and value != []}
            words = [f"{key.replace('_', ' ')} {_brief(value)}" for key, value in known.items()]
            typer.echo(f"{about}: {', '.join(words)}", err=True)


def _brief(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
