"""The measures and methods that a config may name, with the names of their options, read from their source:
torch is not loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURES = "engine/measures/builtin"
METHODS = "engine/influence/methods"


def measure_options() -> dict[str, tuple[str, ...]]:
    """name -> names of its options, of all measures that psgrad has."""
    return _options_in(ROOT / MEASURES)


def method_options() -> dict[str, tuple[str, ...]]:
    """name -> names of its options, of all influence methods that psgrad has."""
    return _options_in(ROOT / METHODS)


@cache
def _options_in(folder: Path) -> dict[str, tuple[str, ...]]:
    found = {}
    for path in sorted(folder.glob("*.py")):
        for kind in _classes(path).values():
            name = _name_of(kind, path)
            if name:
                found[name] = tuple(_fields(kind, path))
    return dict(sorted(found.items()))


@cache
def _classes(path: Path) -> Mapping[str, ast.ClassDef]:
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name_of(kind: ast.ClassDef, path: Path) -> str | None:
    """The `name` that a class gives itself, in letters or by a constant: `name: ClassVar[str] = "el2n"`."""
    value = _value_of("name", kind.body)
    if isinstance(value, ast.Name):
        value = _constant_named(value.id, path)
    return str(value.value) if isinstance(value, ast.Constant) and value.value else None


def _value_of(name: str, body: list[ast.stmt]) -> ast.expr | None:
    for line in body:
        targets = (
            [line.target]
            if isinstance(line, ast.AnnAssign)
            else line.targets
            if isinstance(line, ast.Assign)
            else []
        )
        if isinstance(line, ast.AnnAssign | ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == name for each in targets
        ):
            return line.value
    return None


def _constant_named(name: str, path: Path) -> ast.expr | None:
    value = _value_of(name, _tree(path).body)
    source = None if value is not None else _source_of(name, path)
    return value if source is None else _constant_named(name, source)


def _fields(kind: ast.ClassDef, path: Path) -> list[str]:
    """The fields that a dataclass may be made with, those of the classes that it derives from first."""
    names: dict[str, None] = {}
    for base in kind.bases:
        found = _class_named(base.id, path) if isinstance(base, ast.Name) else None
        if found is not None:
            names |= dict.fromkeys(_fields(*found))
    if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
        for line in kind.body:
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and not _is_no_option(line)
            ):
                names[line.target.id] = None
    return list(names)


def _is_no_option(line: ast.AnnAssign) -> bool:
    value = ast.unparse(line.value) if line.value is not None else ""
    return "ClassVar" in ast.unparse(line.annotation) or "init=False" in value


def _class_named(name: str, path: Path) -> tuple[ast.ClassDef, Path] | None:
    """A class that a module defines, or imports from another module of psgrad, and where it is defined."""
    if name in _classes(path):
        return _classes(path)[name], path
    source = _source_of(name, path)
    return None if source is None else _class_named(name, source)


def _source_of(name: str, path: Path) -> Path | None:
    """The module of psgrad that a name is imported from."""
    for node in _tree(path).body:
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("psgrad.")
            and any(each.name == name for each in node.names)
        ):
            module = ROOT.parent.joinpath(*str(node.module).split("."))
            return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return None
