"""The command line: one file for each command."""

from __future__ import annotations

import sys

from psgrad.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command that the process's arguments name, and leave with its exit code; with 130 where Ctrl-C
    comes before it begins.
    """
    try:
        from psgrad.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
