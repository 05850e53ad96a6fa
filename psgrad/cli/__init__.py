"""The command line: one file for each command."""

from __future__ import annotations

import sys

from psgrad.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command that the arguments name, and leave with its exit code; 130 where Ctrl-C comes first."""
    try:
        from psgrad.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
