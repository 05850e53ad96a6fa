"""The command line: words in, exit code out."""

from psgrad.cli.app import main as main
