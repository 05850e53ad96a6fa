"""What psgrad takes from PyTorch without a promise: each name does what psgrad needs, a PyTorch without one
is refused by name, and only private_torch.py knows such names.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import psgrad
from psgrad.engine.transforms import private_torch as private

PACKAGE = Path(psgrad.__file__).parent
MODULE = Path(private.__file__)
aten = torch.ops.aten


# -- each name -----------------------------------------------------------------------------------------------


def names_with_purpose() -> dict[str, str]:
    """The names that private_torch.py takes from PyTorch, with the comment that says what each is for."""
    lines = MODULE.read_text(encoding="utf-8").splitlines()
    result = {}
    for tree in ast.parse("\n".join(lines)).body:
        for node in ast.walk(tree) if isinstance(tree, ast.Try) else ():
            if isinstance(node, ast.ImportFrom):
                bound = [(alias.asname or alias.name, alias.lineno) for alias in node.names]
            elif isinstance(node, ast.Assign):
                bound = [(node.targets[0].id, node.lineno)]  # type: ignore[attr-defined]
            else:
                continue
            result.update({name: lines[line - 1].partition("  # ")[2] for name, line in bound})
    return result


class Wrapper(torch.Tensor):
    __torch_function__ = private.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(1)


def wrapper(*shape: int) -> Any:
    return private.make_wrapper(Wrapper, shape, (1,) * len(shape), 0, dtype=torch.float32, device="cpu")


class SeesOperators(private.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


class SeesFunctions(torch.overrides.TorchFunctionMode):
    seen = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def below_autograd_records_nothing() -> bool:
    x = torch.ones(2, requires_grad=True)
    with private.BelowAutograd():
        y = x * 2
    return not y.requires_grad


def outside_layers_can_be_set_again() -> bool:
    x, outside = torch.ones(2, requires_grad=True), (private.included_layers(), private.excluded_layers())
    with private.BelowAutograd(), private.ForceDispatchKeys(*outside):
        y = x * 2
    return y.requires_grad


def write_is_counted() -> bool:
    x = torch.zeros(2)
    before = private.write_count(x)
    x.add_(1)
    after = private.write_count(x)
    private.count_write([x])
    return bool(before < after < private.write_count(x))


def tracer_changes_its_shape() -> bool:
    x, guard = wrapper(2, 3), private.DisableTorchDispatch()
    aten.t_.default(x)
    del guard
    return bool(x.shape == (3, 2))


def modes_are_left_out() -> bool:
    outer, inner = SeesOperators(), SeesOperators()
    with outer, inner:
        assert private.current_mode() is inner
        assert private.dispatch_modes() == 2
        with private.without_innermost_mode():
            torch.ones(1)
        with private.without_modes():
            torch.zeros(1)
    return outer.seen == [aten.ones.default] and inner.seen == []


def function_modes_are_left_out() -> bool:
    with SeesFunctions() as mode:
        assert private.function_modes() == 1
        with private.DisableTorchFunction():
            torch.ones(1)
    return mode.seen == 0


def grad_mode_is_set() -> bool:
    with torch.enable_grad():
        private.set_grad_enabled(False)
        return not torch.is_grad_enabled()


def marks_are_computed() -> bool:
    private.exclude_layer(private.CONJUGATE, False)
    private.exclude_layer(private.NEGATIVE, False)
    return torch.equal(torch.tensor([1j]).conj().resolve_conj(), torch.tensor([-1j]))


def error_comes_in_the_backward_pass() -> bool:
    refused = private.DelayedError(b"not here", 1)(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="not here"):
        refused.sum().backward()
    return True


def fake_values_can_not_be_read() -> bool:
    with private.FakeTensorMode() as mode, pytest.raises(private.DataDependentOutputException):
        mode.from_tensor(torch.ones(1)).item()
    with private.FakeTensorMode() as mode, pytest.raises(private.DynamicOutputShapeException):
        mode.from_tensor(torch.ones(1)).nonzero()
    return isinstance(mode.from_tensor(torch.ones(1)), private.FakeTensor)


def make_fx_is_seen() -> bool:
    seen = []
    make_fx(lambda x: (seen.append(private.make_fx_runs()), x + 1)[1])(torch.ones(1))
    return seen == [True] and not private.make_fx_runs()


def torch_func_is_seen() -> bool:
    seen = []
    torch.func.vmap(lambda x: (seen.append(private.torch_func_runs()), x + 1)[1])(torch.ones(1))
    return seen == [True] and not private.torch_func_runs()


def forward_mode_is_seen() -> bool:
    with torch.autograd.forward_ad.dual_level():
        inside = private.forward_mode_runs()
    return inside and not private.forward_mode_runs()


def memory_has_one_key() -> bool:
    x = torch.ones(4)
    keys = [private.storage_key(y.untyped_storage()) for y in (x, x[1:], x.clone())]
    return bool(keys[0] == keys[1] != keys[2])


def load_hooks_are_listed() -> bool:
    layer = nn.Linear(1, 1)
    before = len(private.load_hooks(layer))
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    return before == 0 and len(private.load_hooks(layer)) == 1


def module_keeps_what_is_in_its_stores() -> bool:
    layer = nn.Sequential(nn.BatchNorm1d(2))
    stores = private.parameter_store(layer[0]), private.buffer_store(layer[0])
    return (
        private.module_store(layer) == {"0": layer[0]}
        and list(stores[0]) == ["weight", "bias"]
        and list(stores[1]) == ["running_mean", "running_var", "num_batches_tracked"]
    )


def tree_is_taken_apart_and_put_together() -> bool:
    tree = {"a": (1, [2]), "b": 3}
    leaves, spec = private.tree_flatten(tree)
    return (
        leaves == private.tree_leaves(tree) == [1, 2, 3]
        and private.tree_unflatten(leaves, spec) == tree
        and private.tree_map(lambda x: x + 1, tree) == {"a": (2, [3]), "b": 4}
        and private.broadcast_to_and_flatten({"a": 5, "b": 6}, spec) == [5, 5, 6]
        and callable(private.register_pytree_node)
    )


def schema_is_known() -> bool:
    schema = private.schema_of(aten.add_.Tensor)
    return (
        schema.name == "aten::add_"
        and schema.is_mutable
        and [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
        and schema.arguments[2].default_value == 1
        and schema.arguments[0].alias_info.is_write
        and schema.arguments[2].kwarg_only
    )


CHECKS: dict[str, Callable[[], bool]] = {
    "DisableTorchFunction": function_modes_are_left_out,
    "DispatchKey": lambda: hasattr(private.DispatchKey, "Conjugate"),
    "BelowAutograd": below_autograd_records_nothing,
    "no_torch_function": lambda: type(wrapper(2) + 1) is torch.Tensor,
    "DisableTorchDispatch": tracer_changes_its_shape,
    "operator_names": lambda: "aten::add.Tensor" in private.operator_names(),
    "layer_is_included": torch_func_is_seen,
    "excluded_layers": outside_layers_can_be_set_again,
    "included_layers": outside_layers_can_be_set_again,
    "exclude_layer": marks_are_computed,
    "ForceDispatchKeys": outside_layers_can_be_set_again,
    "FunctionBase": lambda: private.FunctionBase in torch.autograd.Function.__mro__,
    "mode_of_kind": make_fx_is_seen,
    "count_write": write_is_counted,
    "autocast_is_on": lambda: not private.autocast_is_on(),
    "dispatch_modes": modes_are_left_out,
    "function_modes": function_modes_are_left_out,
    "set_grad_enabled": grad_mode_is_set,
    "ModeKind": make_fx_is_seen,
    "decomposition_table": lambda: aten.silu_backward.default in private.decomposition_table,
    "Op": lambda: isinstance(aten.add.Tensor, private.Op),
    "OpOverloadPacket": lambda: isinstance(aten.add, private.OpOverloadPacket),
    "is_non_overlapping_and_dense_or_false": lambda: (
        private.is_non_overlapping_and_dense_or_false(torch.ones(2, 3).t())
        and not private.is_non_overlapping_and_dense_or_false(torch.ones(1).expand(3))
    ),
    "DataDependentOutputException": fake_values_can_not_be_read,
    "DynamicOutputShapeException": fake_values_can_not_be_read,
    "FakeTensor": fake_values_can_not_be_read,
    "FakeTensorMode": fake_values_can_not_be_read,
    "BatchNormBase": lambda: isinstance(nn.BatchNorm2d(1), private.BatchNormBase),
    "NormBase": lambda: isinstance(nn.InstanceNorm2d(1), private.NormBase),
    "TorchDispatchMode": modes_are_left_out,
    "without_modes": modes_are_left_out,
    "current_mode": modes_are_left_out,
    "without_innermost_mode": modes_are_left_out,
    "broadcast_to_and_flatten": tree_is_taken_apart_and_put_together,
    "register_pytree_node": tree_is_taken_apart_and_put_together,
    "tree_flatten": tree_is_taken_apart_and_put_together,
    "tree_leaves": tree_is_taken_apart_and_put_together,
    "tree_map": tree_is_taken_apart_and_put_together,
    "tree_unflatten": tree_is_taken_apart_and_put_together,
    "BackwardHook": lambda: callable(private.BackwardHook._apply_on_tensors),
    "CONJUGATE": marks_are_computed,
    "NEGATIVE": marks_are_computed,
    "TORCH_FUNC": torch_func_is_seen,
    "DelayedError": error_comes_in_the_backward_pass,
    "make_wrapper": lambda: bool(wrapper(2).shape == (2,)),
    "can_decompose": lambda: (
        private.can_decompose(aten.dropout.default) and not private.can_decompose(aten.mm.default)
    ),
    "schema_of": schema_is_known,
    "overload_name": lambda: private.overload_name(aten.add.Tensor) == "Tensor",
    "write_count": write_is_counted,
    "storage_key": memory_has_one_key,
    "parameter_store": module_keeps_what_is_in_its_stores,
    "buffer_store": module_keeps_what_is_in_its_stores,
    "module_store": module_keeps_what_is_in_its_stores,
    "load_method": lambda: private.load_method(nn.Linear) is private.load_method(nn.Module),
    "load_hooks": load_hooks_are_listed,
    "forward_ad": forward_mode_is_seen,
    "SingleLevelFunction": lambda: private.SingleLevelFunction in torch.autograd.Function.__mro__,
    "Function": lambda: private.Function is torch.autograd.Function,
}


@pytest.mark.parametrize("name", names_with_purpose())
def test_private_name_works(name: str) -> None:
    purpose = names_with_purpose()[name]
    assert len(purpose) > 5, f"private_torch.py does not say what {name} is for"
    assert CHECKS[name](), (
        f"PyTorch {torch.__version__} has changed what psgrad knows as private_torch.{name}: {purpose}"
    )


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
    assert f"has no {module}.{name}\n" in done.stdout


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
