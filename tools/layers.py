"""ARCHITECTURE.md: the picture of the layers, from the imports of the code.

`python -m tools.pages` writes it. A component is a folder or a file directly in psgrad/, and inside the
engine one directly in psgrad/engine/. It stands one layer below the lowest component that imports it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.made_part import with_made_part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
WIDTH = 108


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "layers", generated())


def generated() -> str:
    """The layers of psgrad, and the layers inside its engine, as two blocks of text."""
    whole, engine = (picture(ROOT / folder) for folder in ("psgrad", "psgrad/engine"))
    return f"\n```text\n{whole}\n```\n\nInside `psgrad/engine`:\n\n```text\n{engine}\n```\n\n"


def picture(folder: Path) -> str:
    """At least one line for each component of a folder, the highest layer first, a rule between layers."""
    found = components(folder)
    names = max(map(len, found)) + 2
    blocks = []
    for layer in layers(
        {name: imported(paths, folder) & set(found) - {name} for name, paths in found.items()}
    ):
        lines = []
        for name in layer:
            words = textwrap.wrap(first_sentence(found[name]), WIDTH - names)
            lines += [
                f"{label:{names}}{line}"
                for label, line in zip([name, *[""] * len(words)], words, strict=False)
            ]
        blocks.append("\n".join(lines))
    return f"\n{'-' * WIDTH}\n".join(blocks)


def components(folder: Path) -> dict[str, list[Path]]:
    """name -> its files, of all components of a folder; a folder's own `__init__` comes first."""
    found = {}
    for path in sorted(folder.iterdir()):
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
        if files and not path.stem.startswith("__"):
            first = [file for file in files if file == path / "__init__.py"]
            found[path.stem] = [*first, *(file for file in files if file not in first)]
    return found


def imported(paths: list[Path], folder: Path) -> set[str]:
    """The names directly below a folder's package that some files import from."""
    package = [*folder.relative_to(ROOT).parts]
    dotted = (
        name.split(".") for path in paths for name in modules(ast.parse(path.read_text(encoding="utf-8")))
    )
    return {
        name[len(package)] for name in dotted if name[: len(package)] == package and len(name) > len(package)
    }


def modules(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything that is imported: `from a import b` gives `a.b`, which may be a module or
    not.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The components by layer, the highest first; `arrows` names what each imports. Raises ValueError for a
    cycle.
    """
    try:
        order = list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        raise ValueError(
            f"components import each other in a cycle: {' > '.join(reversed(error.args[1]))}"
        ) from error
    depth = dict.fromkeys(order, 0)
    for name in reversed(order):
        for below in arrows[name]:
            depth[below] = max(depth[below], depth[name] + 1)
    return [
        sorted(name for name in order if depth[name] == level) for level in range(max(depth.values()) + 1)
    ]


def first_sentence(paths: list[Path]) -> str:
    """The first sentence of a component's docstring."""
    text = ast.get_docstring(ast.parse(paths[0].read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
