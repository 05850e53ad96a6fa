"""`psgrad schema`: what a config may hold, for editors."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a config, for editors.

    An editor with the YAML language server reads it if the config's first line is `# yaml-language-server:
    $schema=FILE`.
    """
    from psgrad.config.schema import schema as whole

    typer.echo(json.dumps(whole(), indent=1))
