"""What psgrad takes from PyTorch without a promise: a PyTorch without one of the names is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
