"""The manifest of a run: what it ran, where and when, and its identity, which is all that its numbers depend
on; and whether another run, or another process, has the same one.
"""

from __future__ import annotations

import json
import platform
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from psgrad import __version__
from psgrad.commands.checkpoints import checkpoints_sha256
from psgrad.commands.setup import Setup
from psgrad.config import Config
from psgrad.data.derived import DrawnSamples
from psgrad.data.sources.files import hashes_of_files
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients.machine import device_name
from psgrad.errors import ConfigError, DistributedError, OutputExistsError
from psgrad.run.folders import RunFolder
from psgrad.run.identity import differences, flattened, lines_of, require_same, settings_of
from psgrad.run.results.manifest import DataFacts, EngineFacts, ModelFacts, RunManifest, SelfCheckFacts
from psgrad.run.run import now
from psgrad.user_code import module_of
from psgrad.wording import short_repr

NUMBER_OF_PARTS = "number of parts"
"""A line of the identity of a run in parts."""
# The keys of analyze that decide which of the finished rows are outliers.
_OF_VERDICT = ("outliers", "review_fraction", "probabilities")
_SHOWN = 4


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad,
    whose arguments may be secret.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def describe_run(
    command: str, setup: Setup, stream: Stream | None, specs: Iterable[str | None] = ()
) -> RunManifest:
    """The content of manifest.json before a run starts, with the self-check of the stream's gradients, which
    runs now; None for none. `specs` name code that it runs besides its model's, loss's and data's.

    Raises SelfCheckError.
    """
    check = None if stream is None else setup.self_check(stream)
    config, loaded, device = setup.config, setup.loaded, str(setup.device)
    parameters = list(loaded.model.parameters())
    made = module_of(config.data.factory) if config.data.factory else None
    if setup.device.type == "cuda":
        device = f"{device} ({device_name(setup.device)})"
    return RunManifest(
        command=command,
        created=now(),
        command_line=command_line(),
        config=config.model_dump(mode="json"),
        config_folder=str(config.base),
        versions={
            "psgrad": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        model=ModelFacts(
            factory=config.model.factory,
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if p.requires_grad),
            checkpoint=config.model.checkpoint,
            sha256=loaded.sha256,
            notes=loaded.notes,
            modules_imported=[
                *loaded.modules_imported,
                *setup.criterion.modules_imported,
                *([] if made is None else [made]),
            ],
            origin=loaded.origin,
        ),
        data=DataFacts(
            config.data.source,
            setup.samples.fingerprint,
            hashes_of_files(config.data, config.base),
            list(setup.samples.notes),
        ),
        hashes=setup.hashes(specs),
        engine=EngineFacts(
            device,
            config.engine.dtype,
            torch.get_num_threads(),
            None if setup.supply is None else setup.placement.where,
            setup.recompute.modules if setup.recompute is not None and setup.recompute.on else None,
        ),
        self_check=(
            SelfCheckFacts(reason="the model draws at random in train mode")
            if check is None
            else SelfCheckFacts(
                len(check.rows),
                rows=check.rows,
                worst_relative_error=check.worst,
                worst_error_of_autocast=check.worst_rounding if check.rounding else None,
                worst_norm_error_of_autocast=check.worst_norm_rounding if check.norm_rounding else None,
            )
        ),
    )


def identity(setup: Setup, count: int, *, parts: int | None = None, all_rows: bool = True) -> dict[str, Any]:
    """All that the columns of a run's rows depend on, as plain values: dotted name -> value. If one differs,
    it is another run. A checkpoint that is saved again with the same weights is the same.

    parts: of how many the run is made, where it is one in parts. all_rows: whether rows that code makes are
    all read for it; else only what is known of them without.
    """
    drawn = {"rows are drawn at random": True} if isinstance(setup.samples, DrawnSamples) else {}
    return {
        **settings_of(setup.config),
        "rows": count,
        "analyze.checkpoints (their content)": checkpoints_sha256(setup),
        "data (its content)": setup.samples.content(count) if all_rows else setup.samples.fingerprint,
        **lines_of(setup.hashes(measure_specs(setup.config))),
        "the device that computes": setup.device.type,
        "versions": {"psgrad": __version__, "torch": torch.__version__},
        **drawn,
        **({} if parts is None else {NUMBER_OF_PARTS: parts}),
    }


def issue_table_settings(config: Config) -> dict[str, Any]:
    """What the issue table depends on besides the rows, as plain values: the evaluation data, and models
    trained on folds. They are no part of the identity: a run that goes on keeps its rows whatever these are.
    """
    queries, folds = config.influence.queries, config.analyze.folds
    own, found = None if queries is None else queries.own_data, dict[str, Any]()
    if own is not None:
        found |= flattened({"influence.queries": own.model_dump(mode="json")})
        found["influence.queries (their content)"] = hashes_of_files(own, config.base)
    if folds is not None:
        train = config.influence.evaluate.train.model_dump(mode="json", exclude={"together"})
        found |= flattened({"analyze.folds": folds, "influence.evaluate.train": train})
    return found


def measure_specs(config: Config) -> list[str]:
    """The code of measures that a config names."""
    return [measure.name for measure in config.analyze.measures]


def reopen(path: Path, now: dict[str, Any], *, alone: bool = True) -> RunFolder | None:
    """The folder of an interrupted run with this identity, to go on with; None where there is none.

    alone: whether no other process writes in it now, so that files that a killed one left can be removed.

    Raises ConfigError, with the difference, where the folder holds a run with another identity, or one of
    another command.
    """
    manifest = RunFolder.manifest_of(path)
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


def folder_of_parts(path: Path, manifest: RunManifest) -> RunFolder:
    """The folder of a run, which the first of its parts makes. No other process can replace the run while
    this one has it.

    manifest: at the run's beginning. Raises ConfigError for the folder of another run, OutputExistsError for
    one of no run, or of a run that is merged, and OutputError.
    """
    folder = RunFolder.join(
        path,
        lambda: reopen(path, manifest.identity or {}, alone=False),
        lambda: RunFolder.create(path, about=replace(manifest, state="running").content()),
    )
    if folder.finished:
        raise OutputExistsError(
            f"the parts in {folder.path} are merged already", hint="choose another --output for a new run"
        )
    folder.hold()
    return folder


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
        then | (manifest.issue_table or {}),
        now | issue_table_settings(config),
        f"the run in {path} is finished, and its samples were judged by other rules",
        hint="run it anew with --overwrite, or another --output; or put back what changed",
    )


def require_same_on_ranks(
    what: str, found: Mapping[str, Any], processes: Processes, *, show: bool = True
) -> None:
    """Raises DistributedError on a rank that has loaded something else than rank 0; the others end with its
    error where they next wait for it.

    what: a name for the comparison. found: in words -> plain value, of this rank. show: whether the message
    may show the values; False for what is private.
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
    words = f"something else than rank 0:{''.join(lines)}{more}"
    if not show:
        words = f"another {' and another '.join(name for name, _, _ in others)} than rank 0"
    raise DistributedError(
        f"rank {processes.rank} on {socket.gethostname()} has loaded {words}; expected the same config,"
        " files, code and versions in all processes",
        hint=(
            "machines with copies of their own, a file that was changed in between, or a model or"
            " dataset that draws at random when it is made; give all processes the same files, or save"
            " a checkpoint of the model, and run again"
        ),
    )
