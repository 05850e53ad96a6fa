"""Lets tests/test_house.py check the layers of the new layout and circular imports: `house.py ROOT`."""

# ruff: noqa

import re, sys
from pathlib import Path

root = Path(sys.argv[1])
p = root / "tests/test_house.py"
t = p.read_text()


def sub(a, b, count=1):
    global t
    if a not in t:
        print("MISSING", a[:70])
        return
    t = t.replace(a, b)


sub(
    '"""The house rules of ARCHITECTURE.md: what a module may import, what it may not mention, and the'
    ' linters."""',
    '"""The layers of ARCHITECTURE.md: what a module may import, that no files import each other in a circle,'
    ' and the linters."""',
)
sub(
    "# From the top: a part may import the parts on lower floors, and none on its own.\nFLOORS",
    "# From the top: a part may import the parts of lower layers, and none of its own layer.\nLAYERS",
)
sub(
    'ENGINE_FLOORS = (("gradients",), ("transforms",))',
    'ENGINE_LAYERS = (("influence", "privacy", "measures"), ("execution",), ("gradients",), ("transforms",))',
)
sub("ENGINE_FLOORS", "ENGINE_LAYERS")
t = re.sub(r"\bFLOORS\b", "LAYERS", t)
sub("relative imports hide the floor", "relative imports hide the layer")
t = (
    t.replace("floor_of", "layer_of")
    .replace("floors:", "layers:")
    .replace("(floors)", "(layers)")
    .replace(", floors)", ", layers)")
    .replace("What is on no floor stands on top, as", "What is in no layer is above all, as")
)
t = (
    t.replace("test_every_part_has_a_floor", "test_every_part_has_a_layer")
    .replace("def climbs(", "def goes_up(")
    .replace("climbs(", "goes_up(")
    .replace("climbing", "upward")
    .replace("test_a_planted_import_is_judged", "test_planted_import_upward")
)
sub(
    """def test_each_part_does_without""",
    '''def file_imports() -> dict[str, set[str]]:
    """Each module, and the modules of psgrad that it imports: also inside functions and for type checkers only."""
    return {
        module: {
            target
            for imported in imports(tree)
            for target in [imported if imported in MODULES else imported.rpartition(".")[0]]
            if target in MODULES and target not in (module, "psgrad")
        }
        for module, tree in MODULES.items()
    }


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached = {module: set(targets) for module, targets in arrows.items()}
    for middle in arrows:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return [
        {other for other in reached[module] if module in reached[other]} for module in reached if module in reached[module]
    ]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(file_imports()) == []


def test_planted_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}] * 3


def test_each_part_does_without''',
)
p.write_text(t)
