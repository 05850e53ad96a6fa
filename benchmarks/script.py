"""What the benchmark scripts have in common: options, the line with the machine, the file of the numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def command_line(
    description: str, *, rounds: int | None = None, only: Iterable[str] = (), device: bool = False
) -> argparse.ArgumentParser:
    """The command line of a script: --json, and --rounds, --only and --device where it has them.

    Args:
        rounds: the default number of timings of each way.
        only: the names of the cases, of which a call can choose some.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    if rounds is not None:
        text = "timings of each way (default: %(default)s)"
        parser.add_argument("--rounds", type=int, default=rounds, help=text)
    names = list(only)
    if names:
        text = f"of {', '.join(names)}"
        parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=text)
    if device:
        text = "cpu or cuda (default: %(default)s)"
        parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help=text)
    return parser


def print_facts(facts: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Print where and how often it is measured, in one line."""
    rounds = f", {arguments.rounds} rounds" if "rounds" in arguments else ""
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + rounds, flush=True)


def write_json(arguments: argparse.Namespace, content: Mapping[str, Any]) -> None:
    """Write the numbers to the file of --json, if there is one."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
