"""What a run runs, as hashes: its model, its data and its code. Every command knows a run, an index or a reference again by these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psgrad.config import is_callable_spec
from psgrad.inputs.code_identity import CodeIdentity, code_identity
from psgrad.workflows.setup import Setup

NAMES = "identity.json"
"""Which tensor and which module has which hash, in a run's folder: for the message that says which of them changed."""

_SHOWN = 4


def code_of(run: Setup, specs: Iterable[str | None] = ()) -> dict[str, CodeIdentity]:
    """spec -> the code that it names: of the model, the loss and the data, and of those in `specs` that name code."""
    config = run.config
    sources = {config.model.factory: run.identity.sources, config.data.factory: run.samples.sources}
    named = [config.model.factory, config.loss.name, config.data.factory, *specs]
    return {spec: code_identity(spec, config.base, sources.get(spec, ())) for spec in named if spec is not None and is_callable_spec(spec)}


def hashes_of(run: Setup, specs: Iterable[str | None] = ()) -> dict[str, Any]:
    """What manifest.json says of a run's identity: {weights, modules, code: {spec: {file: hash}}, packages: {name: version}}."""
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
    return f"{len(changed)} of {len({**then, **now})}: {shortened([name or 'the model itself' for name in changed])}"


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
