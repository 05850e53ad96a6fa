"""What a run runs, as hashes: its model, its data and its code. Every command knows a run, an index or a
reference again by these.

Whether a run may go on where an earlier one ended: only with the same model, data and numbers.

When, from which command and from which state of the user's code a run was made.

What manifest.json says of a run: what was asked, what was used, how it went.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from psgrad.config import Config, is_callable_spec
from psgrad.engine.execution.self_check import SelfCheck
from psgrad.errors import ConfigError
from psgrad.inputs.code_identity import CodeIdentity, code_identity
from psgrad.storage.folders import RunFolder, manifest_of
from psgrad.user_code import module_of
from psgrad.wording import told
from psgrad.workflows.checkpoints import checkpoints_sha256
from psgrad.workflows.setup import Setup

NAMES = "identity.json"
"""Which tensor and which module has which hash, in a run's folder: for the message that says which of them
changed.
"""

_SHOWN = 4


def code_of(run: Setup, specs: Iterable[str | None] = ()) -> dict[str, CodeIdentity]:
    """spec -> the code that it names: of the model, the loss and the data, and of those in `specs` that name
    code.
    """
    config = run.config
    sources = {config.model.factory: run.identity.sources, config.data.factory: run.samples.sources}
    named = [config.model.factory, config.loss.name, config.data.factory, *specs]
    return {
        spec: code_identity(spec, config.base, sources.get(spec, ()))
        for spec in named
        if spec is not None and is_callable_spec(spec)
    }


def hashes_of(run: Setup, specs: Iterable[str | None] = ()) -> dict[str, Any]:
    """What manifest.json says of a run's identity: {weights, modules, code: {spec: {file: hash}}, packages:
    {name: version}}.
    """
    code = code_of(run, specs)
    packages = {name: version for each in code.values() for name, version in each.packages.items()}
    return {
        "weights": run.identity.weights_sha256,
        "modules": run.identity.modules_sha256,
        "code": {spec: dict(each.files) for spec, each in code.items()},
        "packages": dict(sorted(packages.items())),
    }


def flat(hashes: Mapping[str, Any]) -> dict[str, str]:
    """`hashes_of`, or a part of it, with a line for each thing that may change: in words -> hash."""
    found = {"model (its weights)": hashes["weights"], "model (its modules)": hashes["modules"]}
    for spec, files in hashes["code"].items():
        for place, (name, digest) in enumerate(files.items()):
            found[f"code of {spec}" if place == 0 else f"code that {spec} imports: {name}"] = digest
    return found | {f"version of {name}": version for name, version in hashes["packages"].items()}


def names_of(run: Setup) -> dict[str, Any]:
    """The content of NAMES."""
    return {"tensors": dict(run.identity.tensors), "modules": dict(run.identity.modules)}


def differing(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which of two lists of hashes by name differ, the first of them by name: '2 of 6: 0.weight, 0.bias'."""
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return (
        f"{len(changed)} of {len({**then, **now})}:"
        f" {shortened([name or 'the model itself' for name in changed])}"
    )


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# What of a config decides the numbers of a row. The rest (gates, the report, who is an outlier) is worked out
# anew when all rows are there.
_SECTIONS = ("version", "model", "loss", "data", "engine")
_OF_ANALYZE = ("measures", "checkpoints", "seed")
# What of it decides who is an outlier in rows that are there.
_OF_VERDICT = ("outliers", "review_fraction")
# What is not part of a number: how much is checked, and how much memory there is.
_FREE = ("verify", "memory", "machine", "class_names")

# Lines of an identity: see psgrad.workflows.identity.flat.
_WEIGHTS, _MODULES = "model (its weights)", "model (its modules)"
_CHECKPOINT = "model.checkpoint (its content)"


def identity(run: Setup, count: int) -> dict[str, Any]:
    """All that the numbers of a run depend on, as plain values: dotted name -> value. Another one is another
    run.
    """
    config = run.config
    dumped = config.model_dump(mode="json")
    found = {f"{section}": dumped[section] for section in _SECTIONS} | {
        f"analyze.{key}": dumped["analyze"][key] for key in _OF_ANALYZE
    }
    return {
        **_flat(found),
        "rows": count,
        _CHECKPOINT: run.loaded.sha256,
        "analyze.checkpoints (their content)": checkpoints_sha256(run),
        "data (its content)": run.samples.content(count),
        **flat(hashes_of(run, measure_specs(config))),
        "the device that computes": run.device.type,
        "versions": {"psgrad": version("psgrad"), "torch": torch.__version__},
    }


def measure_specs(config: Config) -> list[str]:
    """The code of measures that a config names."""
    return [measure.name for measure in config.analyze.measures]


def reopen(path: Path, now: dict[str, Any], run: Setup) -> RunFolder | None:
    """The folder of an interrupted run with this identity, to go on with; None where there is none.

    Raises ConfigError, with the difference, where the folder holds a run with another identity, or one of
    another command.
    """
    manifest = manifest_of(path)
    if manifest is None or manifest.get("command") is None:  # killed at birth
        return None
    then = manifest.get("identity")
    if manifest["command"] != "analyze" or not isinstance(then, dict):
        raise ConfigError(
            f"the run in {path} can't be gone on with: it is one of psgrad {manifest['command']}",
            expected="the folder of an interrupted psgrad analyze",
            next_step="choose another --output",
        )
    if _WEIGHTS not in then:
        raise ConfigError(
            f"the run in {path} was begun by an older psgrad, which kept no hash of the model's weights, of"
            " all rows and of imported code",
            expected=(
                "a run that can be known again: nobody can tell whether these are the same, and rows of two"
                " runs can't be mixed"
            ),
            next_step="begin anew with --overwrite, or another --output",
        )
    changed = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if changed == [_CHECKPOINT]:  # saved again, with the same weights
        changed = []
    if changed:
        parts = _parts_that_differ(path, names_of(run))
        shown = [
            f"  {key}: was {told(then.get(key))}, is {told(now.get(key))}{parts.get(key, '')}"
            for key in changed[:12]
        ]
        more = [f"  and {len(changed) - 12} more"] if len(changed) > 12 else []
        raise ConfigError(
            "\n".join(
                [
                    f"the run in {path} was begun with something else, and rows of two runs can't be mixed:",
                    *shown,
                    *more,
                ]
            ),
            expected="the config, checkpoint, data and code of the run that is to go on",
            next_step="put back what changed; or begin anew with --overwrite, or another --output",
        )
    return RunFolder.reopen(path)


def _parts_that_differ(path: Path, now: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Of the model's weights and modules the names that differ, in words; nothing where the list of them is
    gone.
    """
    try:
        then, kinds = json.loads((path / NAMES).read_bytes()), {_WEIGHTS: "tensors", _MODULES: "modules"}
        return {key: f"; differing {kind}: {differing(then[kind], now[kind])}" for key, kind in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def require_judged_alike(path: Path, manifest: dict[str, Any], config: Config) -> None:
    """Raises ConfigError, with the difference, where the finished run in a folder was judged by other rules
    than this config has.
    """
    dumped = config.model_dump(mode="json")["analyze"]
    then, now = (
        {key: each.get(key) for key in _OF_VERDICT}
        for each in (manifest.get("config", {}).get("analyze", {}), dumped)
    )
    then, now = _flat(then, "analyze"), _flat(now, "analyze")
    changed = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if changed:
        shown = [f"  {key}: was {told(then.get(key))}, is {told(now.get(key))}" for key in changed[:12]]
        raise ConfigError(
            "\n".join(
                [f"the run in {path} is finished, and its samples were judged by other rules:", *shown]
            ),
            expected="the rules by which it was judged; its gate alone may be another",
            next_step="run it anew with --overwrite, or another --output; or put back what changed",
        )


def _flat(content: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {above: content}
    inside = [
        _flat(value, f"{above}.{key}" if above else str(key))
        for key, value in content.items()
        if key not in _FREE
    ]
    return {key: value for part in inside for key, value in part.items()}


_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def origin(base: Path) -> dict[str, Any]:
    """created: now, UTC. command_line: of psgrad, None where it was called from Python. revision:
    `revision_of` the folder `base`.
    """
    return {"created": now(), "command_line": command_line(), "revision": revision_of(base)}


def now() -> str:
    """The time as ISO 8601, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line() -> str | None:
    """The arguments of this process as a shell takes them; None where it is another program than psgrad,
    whose arguments may be secret.
    """
    program = Path(sys.argv[0]) if sys.argv else Path()
    own = program.stem == "psgrad" or (program.name == "__main__.py" and program.parent.name == "psgrad")
    return shlex.join(["psgrad", *sys.argv[1:]]) if own else None


def revision_of(folder: Path) -> str | None:
    """The commit that is checked out where a folder lies; None outside of a git repository.

    Git's files are read and git is not run, which would run programs that a repository's settings name. So
    changes that are not committed are not seen.
    """
    try:
        for above in (folder.resolve(), *folder.resolve().parents):
            if (above / ".git").exists():
                return _checked_out(above / ".git")
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _checked_out(git: Path) -> str | None:
    if git.is_file():  # of a worktree or a submodule: "gitdir: <path>"
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    for where in (git, shared):
        if (where / name).is_file():
            return _commit((where / name).read_text())
    packed = (shared / "packed-refs").read_text().splitlines() if (shared / "packed-refs").exists() else []
    return next((_commit(line.split()[0]) for line in packed if line.endswith(f" {name}")), None)


def _commit(text: str) -> str | None:
    found = _COMMIT.fullmatch(text.strip())
    return found and found[0]


class Clock:
    """Seconds spent in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = round(time.perf_counter() - start, 3)


def describe_run(
    command: str, run: Setup, check: SelfCheck | None, specs: Iterable[str | None] = ()
) -> dict[str, Any]:
    """What manifest.json says of a run before it starts. `specs` name code that it runs besides its model's,
    loss's and data's.
    """
    config, loaded = run.config, run.loaded
    parameters = list(loaded.model.parameters())
    return {
        "version": 1,
        "command": command,
        **origin(config.base),
        "config": config.model_dump(mode="json"),
        "config_folder": str(config.base),  # what the paths in it are relative to
        "versions": {
            "psgrad": version("psgrad"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": {
            "factory": config.model.factory,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "checkpoint": config.model.checkpoint,
            "sha256": loaded.sha256,
            "notes": loaded.notes,
            "modules_imported": [
                *loaded.modules_imported,
                *run.criterion.modules_imported,
                *([module_of(config.data.factory)] if config.data.factory else []),
            ],
        },
        "data": {"source": config.data.path or config.data.factory, "fingerprint": run.samples.fingerprint},
        "hashes": hashes_of(run, specs),
        "engine": {
            "device": (
                str(run.device)
                if run.device.type == "cpu"
                else f"{run.device} ({torch.cuda.get_device_name(run.device)})"
            ),
            "dtype": config.engine.dtype,
            "threads": torch.get_num_threads(),
        },
        "self_check": (
            {"samples": 0, "reason": "the model draws at random in train mode"}
            if check is None
            else {"samples": len(check.rows), "rows": check.rows, "worst_relative_error": check.worst}
            | ({"worst_error_of_autocast": check.worst_rounding} if check.rounding else {})
        ),
        "contains_private_statistics": True,
    }


@contextmanager
def recorded(folder: RunFolder, facts: dict[str, Any], clock: Clock) -> Iterator[None]:
    """Keeps manifest.json true to what has happened: running, finished, failed or interrupted.

    `created` is when the run began, whichever process goes on with it, and `finished` when it came to its
    end.
    """
    facts["created"] = folder.manifest().get("created") or facts["created"]
    folder.write_manifest({**facts, "state": "running"})
    try:
        yield
    except BaseException as error:
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        try:
            counts = {"finished_samples": folder.rows}
            folder.write_manifest(
                {**facts, "state": state, "error": str(error), "counts": counts, "timings": clock.seconds}
            )
        except Exception:
            pass  # the disk may be full, and what has gone wrong first is what the user must hear
        raise
    folder.write_manifest({**facts, "state": "finished", "finished": now(), "timings": clock.seconds})
