"""A PyTorch that lacks what the transforms are built on is refused by name, at import; and the list of what
that is is whole.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import psgrad.engine
from psgrad.engine.transforms.private_torch import PRIVATE, missing

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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._C", "_AutoDispatchBelowADInplaceOrView"),
        ("torch._C", "_disabled_torch_function_impl"),
        ("torch.utils._python_dispatch", "_pop_mode_temporarily"),
    ],
)
def test_a_pytorch_without_it_is_refused_by_name(module: str, name: str) -> None:
    program = WITHOUT.format(module=module, name=name)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("PyTorch ")
    assert f"has no {module}.{name}\n" in done.stdout


def test_this_pytorch_has_it_all() -> None:
    assert missing() == []


def test_the_list_is_whole() -> None:
    listed = {f"{module}.{name}" for module, names in PRIVATE.items() for name in names}
    for file in Path(psgrad.engine.__file__).parent.rglob("*.py"):
        source = file.read_text()
        used = set(re.findall(r"\btorch\._C\.[\w.]*\w", source))
        for module, names in re.findall(
            r"^\s*from (torch(?:\.\w+)*\._\w+(?:\.\w+)*) import ([\w, ]+)", source, re.MULTILINE
        ):
            used |= {f"{module}.{name.split()[0]}" for name in names.split(",")}
        unlisted = {
            name
            for name in used
            if not any(name == known or name.startswith(f"{known}.") for known in listed)
        }
        assert unlisted <= {"torch._inductor.compile"}, file  # asked for only where a user asks for it
