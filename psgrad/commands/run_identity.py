"""What a run runs, as hashes: its model, its data and its code. Every command recognises a run, an index or a
reference by these.

Whether a run may continue where an earlier one ended: only with the same model, data and numbers.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from psgrad import __version__
from psgrad.commands.setup import Setup, checkpoints_sha256
from psgrad.config import Config, DataConfig, EngineConfig, LossConfig, ModelConfig, is_callable_spec
from psgrad.config.values import ConfigSection
from psgrad.engine.execution.ranks import Processes
from psgrad.errors import ConfigError, DistributedError
from psgrad.run.code_identity import CodeIdentity, code_identity
from psgrad.run.folders import RunFolder, manifest_of
from psgrad.wording import short_repr

NAMES = "identity.json"
"""Which tensor and which module has which hash, in a run's folder: for the message that says which of them
changed.
"""

# Names in a sentence, and changes in a message.
_SHOWN, _LISTED = 4, 12


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
    """A run's identity as manifest.json has it: {weights, modules, code: {spec: {file: hash}}, packages:
    {name: version}}.
    """
    code = code_of(run, specs)
    packages = {name: version for each in code.values() for name, version in each.packages.items()}
    packages |= libraries_of(run)
    return {
        "weights": run.identity.weights_sha256,
        "modules": run.identity.modules_sha256,
        "code": {spec: dict(each.files) for spec, each in code.items()},
        "packages": dict(sorted(packages.items())),
    }


def libraries_of(run: Setup) -> dict[str, str]:
    """name -> version of the libraries that wrote a model which no factory built."""
    if run.config.model.factory is not None:
        return {}
    found = {}
    for name in {source.partition(".")[0] for source in run.identity.sources} - {"torch"}:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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


# The sections of a config that decide the numbers of a row. The rest (gates, the report, which rows are
# outliers) is computed anew when all rows are there.
_SECTIONS = ("version", "model", "loss", "data", "engine")
_OF_ANALYZE = ("measures", "checkpoints", "seed", "trainable")
# The keys of analyze that decide which of the finished rows are outliers.
_OF_VERDICT = ("outliers", "review_fraction")
# Keys that change no number, such as how much is checked and how much memory there is.
_FREE = (
    "verify",
    "memory",
)

# Lines of an identity: see psgrad.commands.run_identity.flat.
_WEIGHTS, _MODULES = "model (its weights)", "model (its modules)"
_CHECKPOINT = "model.checkpoint (its content)"


NUMBER_OF_PARTS = "number of parts"
"""A line of the identity of a run in parts."""


def identity(run: Setup, count: int, *, all_rows: bool = True) -> dict[str, Any]:
    """All that the columns of a run's rows depend on, as plain values: dotted name -> value. If one differs,
    it is another run.

    all_rows: whether rows that code makes are all read for it; else only what is known of them without.
    """
    config = run.config
    dumped = config.model_dump(mode="json")
    found = {f"{section}": dumped[section] for section in _SECTIONS} | {
        f"analyze.{key}": dumped["analyze"][key] for key in _OF_ANALYZE
    }
    return {
        **flattened(found),
        "rows": count,
        _CHECKPOINT: run.loaded.sha256,
        "analyze.checkpoints (their content)": checkpoints_sha256(run),
        "data (its content)": run.samples.content(count) if all_rows else run.samples.fingerprint,
        **flat(hashes_of(run, measure_specs(config))),
        "the device that computes": run.device.type,
        "versions": {"psgrad": __version__, "torch": torch.__version__},
    }


def digest(identity: Mapping[str, Any]) -> str:
    """A hash of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def measure_specs(config: Config) -> list[str]:
    """The code of measures that a config names."""
    return [measure.name for measure in config.analyze.measures]


def reopen(
    path: Path, now: dict[str, Any], run: Setup, *, alone: bool = True, command: str = "analyze"
) -> RunFolder | None:
    """The folder of an interrupted run with this identity, to go on with; None where there is none.

    alone: whether no other process writes in it now, so that files that a killed one left can be removed.

    Raises ConfigError, with the difference, where the folder holds a run with another identity, or one of
    another command.
    """
    manifest = manifest_of(path)
    if manifest is None or manifest.get("command") is None:  # killed before the command was written
        return None
    then = manifest.get("identity")
    if manifest["command"] != command or not isinstance(then, dict):
        raise ConfigError(
            f"the run in {path} can't be gone on with: it is one of psgrad {manifest['command']}",
            expected=f"the folder of an interrupted psgrad {command}",
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
    parts = _parts_that_differ(path, names_of(run))
    changed = _changes(_with_later_keys(then, now), now, parts)
    if list(changed) != [_CHECKPOINT] and changed:  # a file saved again with the same weights is accepted
        raise ConfigError(
            f"the run in {path} was begun with something else, and rows of two runs can't be mixed:"
            f"{_listed(changed)}",
            expected="the config, checkpoint, data and code of the run that is to go on",
            next_step="put back what changed; or begin anew with --overwrite, or another --output",
        )
    return RunFolder.reopen(path) if alone else RunFolder(path)


def _parts_that_differ(path: Path, now: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The names of the model's weights and modules that differ, in words; empty where the list of them is
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
    changed = _changes(flattened(then, "analyze"), flattened(now, "analyze"))
    if changed:
        raise ConfigError(
            f"the run in {path} is finished, and its samples were judged by other rules:{_listed(changed)}",
            expected="the rules by which it was judged; its gate alone may be another",
            next_step="run it anew with --overwrite, or another --output; or put back what changed",
        )


def _changes(
    then: Mapping[str, Any], now: Mapping[str, Any], more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """key -> what of it changed, in words; `more` is added to those of some keys."""
    return {
        key: f"was {short_repr(then.get(key))}, is {short_repr(now.get(key))}{(more or {}).get(key, '')}"
        for key in {**then, **now}
        if then.get(key) != now.get(key)
    }


def _listed(changed: Mapping[str, str]) -> str:
    """The first changes, a line each."""
    lines = [f"\n  {key}: {words}" for key, words in list(changed.items())[:_LISTED]]
    return "".join(lines) + (f"\n  and {len(changed) - _LISTED} more" if len(changed) > _LISTED else "")


def _with_later_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """An identity with the defaults of the config's keys that a run of an earlier version did not know."""
    sections: dict[str, type[ConfigSection]] = {
        "model": ModelConfig,
        "loss": LossConfig,
        "data": DataConfig,
        "engine": EngineConfig,
    }
    defaults = {
        f"{name}.{key}": info.get_default(call_default_factory=True)
        for name, section in sections.items()
        for key, info in section.model_fields.items()
        if not info.is_required()
    }
    return {**{key: value for key, value in defaults.items() if key in now}, **then}


def flattened(content: Any, above: str = "") -> dict[str, Any]:
    """Dotted name -> value, of nested dictionaries, without the keys that change no number."""
    if not isinstance(content, dict):
        return {above: content}
    inside = [
        flattened(value, f"{above}.{key}" if above else str(key))
        for key, value in content.items()
        if key not in _FREE
    ]
    return {key: value for part in inside for key, value in part.items()}


def require_same_on_ranks(what: str, found: Mapping[str, Any], processes: Processes) -> None:
    """Raises DistributedError on a rank that has loaded something else than rank 0; the others end with its
    error where they next wait for it.

    what: a name for the comparison. found: in words -> plain value, of this rank.
    """
    if processes.size == 1:
        return
    own = json.dumps(found, default=str)
    of_first = bytes(processes.agreed(f"same {what}", lambda: list(own.encode())))
    first, here = json.loads(of_first), json.loads(own)
    others = [name for name in {**first, **here} if first.get(name) != here.get(name)]
    if not others:
        return
    lines = [
        f"\n  {name}: {short_repr(first.get(name))} on rank 0, {short_repr(here.get(name))} here"
        for name in others[:_SHOWN]
    ]
    more = f"\n  and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise DistributedError(
        f"rank {processes.rank} on {socket.gethostname()} has loaded something else than rank 0:"
        f"{''.join(lines)}{more}",
        expected="the same config, files, code and versions in all processes",
        cause="machines with copies of their own, a file that was changed in between, or a model or dataset"
        " that draws at random when it is made",
        next_step="give all processes the same files, or save a checkpoint of the model, and run again",
    )
