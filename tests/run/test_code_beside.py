"""Code that a config names imports modules that lie beside the config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from psgrad.errors import ConfigError
from psgrad.run.identity import code_identity
from psgrad.user_code import call_factory, importing_beside, resolve
from tests.workplace import Workplace

LATE = """\
from beside import NAME

def early():
    return NAME

def late():
    from beside_late import NAME
    return NAME
"""
SCALED = """\
class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        from beside import scaled
        return super().forward(scaled(x))
"""


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> object:
    path, modules = list(sys.path), {name for name in sys.modules if name.startswith("beside")}
    yield
    assert sys.path == path
    assert {name for name in sys.modules if name.startswith("beside")} == modules


def config_folder(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "code.py").write_text(LATE)
    (folder / "beside.py").write_text(f"NAME = {name!r}\n")
    (folder / "beside_late.py").write_text(f"NAME = 'late {name}'\n")
    return folder


def test_two_configs_import_siblings_of_one_name_and_leave_nothing(tmp_path: Path) -> None:
    a, b = config_folder(tmp_path / "a", "a"), config_folder(tmp_path / "b", "b")
    for folder in (a, b, a):
        for function, name in (("early", folder.name), ("late", f"late {folder.name}")):
            assert call_factory(f"code.py:{function}", folder, {}, raises=ConfigError) == name
    assert sorted(path.name for path in a.iterdir()) == ["beside.py", "beside_late.py", "code.py"]


def test_sibling_that_was_edited_is_imported_anew(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "a", "a")
    assert resolve("code.py:early", folder)() == "a"
    (folder / "beside.py").write_text("NAME = 'b'\n")
    assert resolve("code.py:early", folder)() == "b"


def test_module_beside_the_config_is_found_by_its_name(tmp_path: Path) -> None:
    config_folder(tmp_path, "a")
    (tmp_path / "package_beside").mkdir()
    (tmp_path / "package_beside" / "inner.py").write_text(
        "from beside import NAME\ndef build(): return NAME\n"
    )
    assert resolve("package_beside.inner:build", tmp_path)() == "a"


def test_code_identity_covers_siblings_and_their_edits(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "a")
    call_factory("code.py:late", folder, {}, raises=ConfigError)
    before = code_identity("code.py:late", folder)
    assert list(before.files) == ["code.py", "beside", "beside_late"]
    (folder / "beside_late.py").write_text("NAME = 'other'\n")
    call_factory("code.py:late", folder, {}, raises=ConfigError)
    after = code_identity("code.py:late", folder)
    assert [name for name in before.files if before.files[name] != after.files[name]] == ["beside_late"]


def test_installed_module_comes_before_a_sibling_and_the_error_says_so(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("def mine(): pass\n")
    (tmp_path / "code.py").write_text("from numpy import mine\n")
    with pytest.raises(
        ConfigError, match=r"rename .*numpy\.py: numpy is also the name of an installed module"
    ):
        resolve("code.py:mine", tmp_path)
    assert sys.modules["numpy"] is np


@pytest.mark.sweep
def test_siblings_are_there_while_rows_are_read_and_the_model_runs(workplace: Workplace) -> None:
    """Imports inside functions run long after the factories; the process and the Python API alike."""
    (workplace.folder / "beside.py").write_text("import torch\n\ndef scaled(x):\n    return 2 * x\n")
    workplace.use_model(SCALED)
    workplace.succeeded()
    assert any("beside" in files for files in workplace.manifest()["hashes"]["code"].values())
    command = [sys.executable, "-P", "-m", "psgrad", "analyze", "config.yaml", "--output", "again"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=workplace.folder)
    assert done.returncode == 0, done.stderr
    assert workplace.command("validate", "config.yaml").code == 0


def test_nested_blocks_and_an_error_inside_leave_nothing(tmp_path: Path) -> None:
    config_folder(tmp_path, "a")
    with importing_beside(tmp_path), importing_beside(tmp_path):
        import beside  # type: ignore[import-not-found]

        assert beside.NAME == "a"
    (tmp_path / "broken.py").write_text("import beside\n1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve("broken.py:build", tmp_path)
