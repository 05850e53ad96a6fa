"""What a run was made with, as hashes: its model, its code, its files and the settings that decide its
numbers; and whether another run was made with the same.

An identity is a dictionary of plain values. Resuming, merging, references, indexes and private runs compare
two of them by `require_same`, which says what differs. The hashes of a model are taken in
psgrad.models.model_identity.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from psgrad.config import Config, is_callable_spec
from psgrad.errors import ConfigError, PsgradError
from psgrad.run.input_files import sha256_of
from psgrad.user_code import imported, importing_beside, resolve
from psgrad.wording import first_of, shorten_middle

# -- files ---------------------------------------------------------------------------------------------------


def files_sha256(paths: Sequence[Path]) -> str:
    """The SHA-256 of one file's bytes, or of the hashes of several files, a line each."""
    hashes = [sha256_of(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


# -- the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes of a model, in hexadecimal.

    tensors: name -> of a tensor's type, shape and bytes; a shared one once. modules: name -> of a module's
    class, mode and plain attributes; the model itself is ''. sources: the modules of Python that the classes
    of its modules are written in.
    """

    tensors: Mapping[str, str]
    modules: Mapping[str, str]
    sources: tuple[str, ...]

    @property
    def weights_sha256(self) -> str:
        """The hash of all tensors."""
        return digest(self.tensors)

    @property
    def modules_sha256(self) -> str:
        """The hash of all that is no tensor."""
        return digest(self.modules)


# -- code ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeIdentity:
    """files: name -> SHA-256, in the order in which they were met, the callable's own first. packages: name
    -> version.

    A file has the name of its module; one that a config names as a file has its file name. So the same code
    in another folder is the same.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def code_identity(spec: str, base: Path, sources: Iterable[str] = ()) -> CodeIdentity:
    """The identity of the code that a spec names, relative to `base`: the file of the callable, all files of
    the user's own that it imports, wherever the import statement stands, and the versions of installed
    packages.

    Imports are read off the source. What is imported under a computed name, or held by a closure, is not
    seen. `sources` are further modules of Python that belong to it: those of the classes that it made. Raises
    ConfigError as `resolve` does.
    """
    files, packages, met = dict[str, str](), dict[str, str](), set[str]()
    with importing_beside(base):
        module, function = imported(spec, base), inspect.unwrap(resolve(spec, base))
        first = str(getattr(function, "__module__", None) or module.__name__)
        waiting = [*reversed(list(sources)), module.__name__, first]
        while waiting:
            name = waiting.pop()
            package, file = name.partition(".")[0], _file_of(name)
            if name in met or package == "psgrad" or file is None:
                continue
            met.add(name)
            own = not is_installed(file)
            if not own:
                if package not in sys.stdlib_module_names:
                    packages[package] = _version(package)
                if name != first:
                    continue
            is_named_file = name == "__main__" or name.startswith("psgrad_file_")
            files[file.name if is_named_file else name] = sha256_of(file)
            if own and file.suffix == ".py":
                waiting += reversed(list(_imports_of(file, name)))
    return CodeIdentity(files, dict(sorted(packages.items())))


def _file_of(name: str) -> Path | None:
    """The file of a module, which is not imported; None for a folder, a part of Python, an absent module."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file).resolve() if file else None
    parts = name.split(".")
    try:
        found = importlib.util.find_spec(parts[0])
        for end in range(2, len(parts) + 1):
            if found is None or found.submodule_search_locations is None:
                return None
            found = PathFinder.find_spec(".".join(parts[:end]), list(found.submodule_search_locations))
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(found.origin).resolve() if found is not None and found.origin and found.has_location else None


def _imports_of(file: Path, name: str) -> Iterator[str]:
    """The names that a file may import, packages before what is in them; some are no modules."""
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError):
        return
    package = (name if file.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _prefixes(each.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from _prefixes(source)
            yield from (f"{source}.{each.name}" for each in node.names if source)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".") if name else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def _installed_roots() -> tuple[Path, ...]:
    found = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(each).resolve() for each in found})


@cache
def is_installed(file: Path) -> bool:
    """Whether a file is of an installed package, or of Python itself."""
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or any(
        file.is_relative_to(root) for root in _installed_roots()
    )


@cache
def _version(package: str) -> str:
    """The version of an installed package; most are distributed under their own names, and asking for all
    names takes long.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        names = sorted(metadata.packages_distributions().get(package, ()))
        return ", ".join(f"{name} {metadata.version(name)}" for name in names) or "unknown"


def hashes_of(
    config: Config, model: ModelIdentity, dataset: Iterable[str] = (), specs: Iterable[str | None] = ()
) -> dict[str, Any]:
    """The hashes of a run as manifest.json has them: {weights, modules, code: {spec: {file: hash}}, packages:
    {name: version}}: of its model, and of the code of the model, the loss and the data, and of those in
    `specs` that name code.

    dataset: the modules of Python that the classes of the dataset are written in.
    """
    sources = {config.model.factory: model.sources, config.data.factory: tuple(dataset)}
    named = [config.model.factory, config.loss.name, config.data.factory, *specs]
    code = {
        spec: code_identity(spec, config.base, sources.get(spec, ()))
        for spec in named
        if spec is not None and is_callable_spec(spec)
    }
    packages = {name: version for each in code.values() for name, version in each.packages.items()}
    if config.model.factory is None:  # the libraries that wrote the model
        names = {source.partition(".")[0] for source in model.sources} - {"torch", *sys.stdlib_module_names}
        packages |= {name: _version(name) for name in names}
    return {
        "weights": model.weights_sha256,
        "modules": model.modules_sha256,
        "code": {spec: dict(each.files) for spec, each in code.items()},
        "packages": dict(sorted(packages.items())),
    }


WEIGHTS, MODULES = "model (its weights)", "model (its modules)"


def lines_of(hashes: Mapping[str, Any]) -> dict[str, str]:
    """`hashes_of` with a line for each thing that may change: in words -> hash."""
    found = {WEIGHTS: hashes["weights"], MODULES: hashes["modules"]}
    for spec, files in hashes["code"].items():
        for place, (name, sha256) in enumerate(files.items()):
            found[f"code of {spec}" if place == 0 else f"code that {spec} imports: {name}"] = sha256
    return found | {f"version of {name}": version for name, version in hashes["packages"].items()}


# -- settings ------------------------------------------------------------------------------------------------

# The sections of a config that decide the numbers of a row. The rest (gates, the report, which rows are
# outliers) is computed anew when all rows are there.
_SECTIONS = ("version", "model", "loss", "data", "engine")
_OF_ANALYZE = ("measures", "checkpoints", "seed", "trainable")
# Keys that change no number, such as how much is checked and how much memory there is.
_FREE = ("verify", "memory", "process_timeout")


def settings_of(config: Config) -> dict[str, Any]:
    """The keys of a config that decide the numbers of a row: dotted name -> plain value."""
    dumped = config.model_dump(mode="json")
    found = {section: dumped[section] for section in _SECTIONS}
    return flattened(found | {f"analyze.{key}": dumped["analyze"][key] for key in _OF_ANALYZE})


def flattened(content: Any, above: str = "") -> dict[str, Any]:
    """Dotted name -> value, of nested dictionaries, without the keys that change no number."""
    if not isinstance(content, Mapping):
        return {above: content}
    inside = [
        flattened(value, f"{above}.{key}" if above else str(key))
        for key, value in content.items()
        if key not in _FREE
    ]
    return {key: value for part in inside for key, value in part.items()}


# -- comparing -----------------------------------------------------------------------------------------------

_LISTED, _LONG = 12, 80


def digest(identity: Mapping[str, Any]) -> str:
    """A hash of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def differences(then: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(name, then, now) of each value that differs, as JSON has them; nested dictionaries by dotted names."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return [
            found
            for key in {**then, **now}
            for found in differences(then.get(key), now.get(key), f"{name}.{key}" if name else str(key))
        ]
    was, found = (json.loads(json.dumps(each, default=str)) for each in (then, now))
    return [] if was == found else [(name, was, found)]


def require_same(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    said: str,
    *,
    hint: str,
    show: bool = True,
    raises: type[PsgradError] = ConfigError,
) -> None:
    """Raises `raises`, with all that differs, where two identities are not the same.

    then: what the earlier run wrote down. now: what this one would write. said: the beginning of the message,
    before what differs. show: whether the message may show the values; False for what is private.
    """
    changed = differences(then, now)
    if not changed:
        return
    names = [name for name, _, _ in changed]
    if not show:
        words = f"{first_of(names, _LISTED)} differ{'s' if len(names) == 1 else ''}"
    else:
        lines = [f"{name} was {_shortened(was)} and is {_shortened(found)}" for name, was, found in changed]
        words = "; ".join(lines[:_LISTED])
        words += f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    raise raises(f"{said}: {words}", hint=hint)


def _shortened(value: Any) -> str:
    return shorten_middle(json.dumps(value), _LONG)
