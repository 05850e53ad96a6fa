"""`psgrad schema`: what a config may hold, for editors."""

from __future__ import annotations

import json

import typer

from psgrad.cli.boundary import boundary
from psgrad.cli.command import Panel, command
from psgrad.cli.options import Debug


@command(Panel.BEGIN, 3)
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a config, from which editors complete and check YAML.

    An editor with the YAML language server reads it if the config's first line is `# yaml-language-server:
    $schema=FILE`.
    """
    with boundary(debug):
        from psgrad.config.schema import schema as whole

        typer.echo(json.dumps(whole(), indent=1))
