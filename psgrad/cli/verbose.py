"""The option `-v`: how a run was computed, on stderr."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Also print how it was computed, and the time of each part.")
]


def say_computed(manifest: dict[str, Any]) -> None:
    """The processes of a finished run, a line each, its versions, engine and times."""
    if manifest.get("ranks"):
        from psgrad.workflows.run_manifest import words_for

        typer.echo("\n".join(words_for(manifest["ranks"])), err=True)
    for about in ("versions", "engine", "timings"):
        facts: dict[str, Any] = manifest.get(about) or {}
        if facts:
            words = ", ".join(f"{key} {_brief(value)}" for key, value in facts.items())
            typer.echo(f"{about}: {words}", err=True)


def _brief(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
