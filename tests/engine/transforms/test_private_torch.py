"""What psgrad takes from PyTorch without a promise: a PyTorch without one of the names is refused by name,
and only private_torch.py knows such names.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import psgrad
from psgrad.engine.transforms import private_torch as private

PACKAGE = Path(psgrad.__file__).parent
MODULE = Path(private.__file__)
aten = torch.ops.aten


@pytest.mark.parametrize("place", ["FUNCTION_APPLY", "BACKWARD_HOOK", "FORWARD_MODE", "AUTOGRAD_FUNCTIONAL"])
def test_replacement_begins_and_ends(place: str) -> None:
    owner, name = getattr(private, place)
    before = vars(owner).get(name)
    new = private.Replacement((owner, name), lambda own: lambda *args: own)
    with new, new:
        assert vars(owner)[name] is not before
    assert vars(owner).get(name) is before, f"PyTorch {torch.__version__} has changed {owner.__name__}.{name}"


def test_function_class_is_counted() -> None:
    before = private.functions_made()
    type("Made", (torch.autograd.Function,), {})
    assert private.functions_made() != before


# -- a PyTorch without a name --------------------------------------------------------------------------------

WITHOUT = """
import {module} as module
name = "{name}".split(".")
for part in name[:-1]:
    module = getattr(module, part)
delattr(module, name[-1])
from psgrad.errors import TransformError
try:
    import psgrad.engine.transforms
except TransformError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._C", "_AutoDispatchBelowADInplaceOrView"),
        ("torch._C", "_disabled_torch_function_impl"),
        ("torch._ops", "OpOverload._can_decompose"),
        ("torch.autograd.functional", "_autograd_grad"),
        ("torch.utils._python_dispatch", "_pop_mode_temporarily"),
    ],
)
def test_pytorch_without_private_name_refused(module: str, name: str) -> None:
    program = WITHOUT.format(module=module, name=name)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("PyTorch ")
    assert name.rpartition(".")[2] in done.stdout


def test_supported_versions_said_once() -> None:
    lowest, newest = private.LOWEST, private.NEWEST
    root = PACKAGE.parent
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={lowest[0]}.{lowest[1]},<{newest[0]}.{newest[1] + 1}"' in project
    words = f"PyTorch {lowest[0]}.{lowest[1]} to {newest[0]}.{newest[1]}"
    assert words in (root / "README.md").read_text(encoding="utf-8")
    constraints = (root / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==(\d+)\.(\d+)", constraints, re.MULTILINE)
    assert pinned is not None
    assert lowest <= (int(pinned[1]), int(pinned[2])) <= newest
    assert str(private._refusal(ImportError(name="torch"))).count(words) == 1


# -- no other module -----------------------------------------------------------------------------------------

# Modules that may not import the engine, with the private names that they use.
EXCEPTIONS = {
    ("models/factory.py", "_BatchNorm"),  # models lies beside the engine
    ("models/model_identity.py", "_modules"),
}
OPERATORS = ("aten", "torch.ops")  # operators may begin with an underscore: they are named as data
# Their attributes are searched for, but for names that psgrad's own classes have, too.
EXAMPLES = (torch.empty(0), torch.empty(0).untyped_storage(), aten.add, aten.add.Tensor, nn.Module())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; the empty string of any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def own_names(trees: list[ast.Module]) -> set[str]:
    """The attributes that classes of psgrad define or set on themselves."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and dotted(node.value) == "self"
    }


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of PyTorch that a module uses."""
    attributes = {name for example in EXAMPLES for name in dir(example) if is_private(name)} - own
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch.") and "._" in a.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            of_torch |= {alias.asname or alias.name for alias in node.names}
            yield from (a.name for a in node.names if is_private(a.name) or "._" in str(node.module))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path = dotted(node.value)
            is_operator = path.startswith(OPERATORS)
            if (path.split(".")[0] in of_torch and not is_operator) or (
                node.attr in attributes and path not in ("self", "cls") and not is_operator
            ):
                yield node.attr
        elif isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
            key = node.slice.value if isinstance(node.slice, ast.Constant) else ""
            yield from [str(key)] if str(key).startswith("torch") else []


@pytest.mark.long
def test_only_one_module_uses_private_names() -> None:
    files = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
        if path != MODULE
    }
    own = own_names(list(files.values())) - {"_buffers", "_modules", "_parameters", "_schema", "_version"}
    assert {(file, name) for file, tree in files.items() for name in private_names(tree, own)} == EXCEPTIONS


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import _set_grad_enabled",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._C._get_tracing_state()",
        "torch.Tensor._make_wrapper_subclass",
        "from torch import nn\nnn.Module._load_from_state_dict",
        "x._version",
        "x.untyped_storage()._cdata",
        "op._schema.name",
        "sys.modules['torch.autograd.function']",
    ],
)
def test_planted_private_name_is_found(code: str) -> None:
    assert list(private_names(ast.parse(code), set()))


@pytest.mark.parametrize(
    "code", ["aten._softmax.default", "torch.ops.aten._softmax", "self._version", "x.__class__", "torch.ones"]
)
def test_public_name_is_not_found(code: str) -> None:
    assert not list(private_names(ast.parse(code), set()))
