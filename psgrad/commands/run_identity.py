"""The identity of a run of `psgrad analyze`, and whether a run may continue where an
earlier one ended: only with the same model, data, code and settings.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psgrad import __version__
from psgrad.commands.setup import Setup, checkpoints_sha256
from psgrad.config import Config
from psgrad.engine.execution.ranks import Processes
from psgrad.errors import ConfigError, DistributedError
from psgrad.run.folders import RunFolder, manifest_of
from psgrad.run.identity import (
    differences,
    lines_of,
    require_same,
    settings_of,
)
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import short_repr

NUMBER_OF_PARTS = "number of parts"
"""A line of the identity of a run in parts."""
# The keys of analyze that decide which of the finished rows are outliers.
_OF_VERDICT = ("outliers", "review_fraction", "probabilities")
_SHOWN = 4


def identity(run: Setup, count: int, *, all_rows: bool = True) -> dict[str, Any]:
    """All that the columns of a run's rows depend on, as plain values: dotted name -> value. If one differs,
    it is another run. A checkpoint that is saved again with the same weights is the same.

    all_rows: whether rows that code makes are all read for it; else only what is known of them without.
    """
    return {
        **settings_of(run.config),
        "rows": count,
        "analyze.checkpoints (their content)": checkpoints_sha256(run),
        "data (its content)": run.samples.content(count) if all_rows else run.samples.fingerprint,
        **lines_of(run.hashes(measure_specs(run.config))),
        "the device that computes": run.device.type,
        "versions": {"psgrad": __version__, "torch": torch.__version__},
    }


def measure_specs(config: Config) -> list[str]:
    """The code of measures that a config names."""
    return [measure.name for measure in config.analyze.measures]


def reopen(path: Path, now: dict[str, Any], *, alone: bool = True) -> RunFolder | None:
    """The folder of an interrupted run with this identity, to go on with; None where there is none.

    alone: whether no other process writes in it now, so that files that a killed one left can be removed.

    Raises ConfigError, with the difference, where the folder holds a run with another identity, or one of
    another command.
    """
    manifest = manifest_of(path)
    if manifest is None or manifest.get("command") is None:  # killed before the command was written
        return None
    then = manifest.get("identity")
    if manifest["command"] != "analyze" or not isinstance(then, dict):
        raise ConfigError(
            f"the run in {path} is one of psgrad {manifest['command']}, and analyze can't go on with it",
            hint="choose another --output",
        )
    require_same(
        then,
        now,
        f"the run in {path} was begun with something else, and rows of two runs can't be mixed",
        hint="put back what changed; or begin anew with --overwrite, or another --output",
    )
    return RunFolder.reopen(path) if alone else RunFolder(path)


def require_judged_alike(path: Path, manifest: RunManifest, config: Config) -> None:
    """Raises ConfigError, with the difference, where the finished run in a folder was judged by other rules
    than this config has.
    """
    then, now = (
        {f"analyze.{key}": each.get(key) for key in _OF_VERDICT}
        for each in (
            manifest.setting("analyze") or {},
            config.model_dump(mode="json")["analyze"],
        )
    )
    require_same(
        then,
        now,
        f"the run in {path} is finished, and its samples were judged by other rules",
        hint="run it anew with --overwrite, or another --output; or put back what changed",
    )


def require_same_on_ranks(what: str, found: Mapping[str, Any], processes: Processes) -> None:
    """Raises DistributedError on a rank that has loaded something else than rank 0; the others end with its
    error where they next wait for it.

    what: a name for the comparison. found: in words -> plain value, of this rank.
    """
    if processes.size == 1:
        return
    own = json.dumps(found, default=str)
    others = differences(json.loads(processes.texts(f"same {what}", own)[0]), json.loads(own))
    if not others:
        return
    lines = [
        f"\n  {name}: {short_repr(first)} on rank 0, {short_repr(here)} here"
        for name, first, here in others[:_SHOWN]
    ]
    more = f"\n  and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise DistributedError(
        f"rank {processes.rank} on {socket.gethostname()} has loaded something else than rank"
        f" 0:{''.join(lines)}{more}; expected the same config, files, code and versions in all processes",
        hint=(
            "machines with copies of their own, a file that was changed in between, or a model or"
            " dataset that draws at random when it is made; give all processes the same files, or save"
            " a checkpoint of the model, and run again"
        ),
    )
