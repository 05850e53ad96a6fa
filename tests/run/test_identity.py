"""Which files belong to the code that a config names: all that it imports of the user's own, wherever the
import statement stands; and the words for two identities that differ.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

from psgrad.errors import ConfigError, OutputError
from psgrad.run.identity import code_identity, require_same
from psgrad.user_code import call_factory

FILES = {
    "top.py": (
        """\
import ci_one
from ci_package import inside as other
import json, numpy, tabnanny


def build():
    import ci_late
    from ci_package.deep import leaf
"""
    ),
    "ci_one.py": "from ci_two import *\n",
    "ci_two.py": "import ci_one\nif False:\n    import ci_never\n",
    "ci_never.py": "",
    "ci_late.py": "try:\n    import ci_absent\nexcept ImportError:\n    pass\n",
    "tabnanny.py": "",  # as a module of Python's own library is called
    "ci_unrelated.py": "",
    "ci_package/__init__.py": "",
    "ci_package/inside.py": ("from . import beside\nfrom .deep.leaf import x\n"),
    "ci_package/beside.py": "",
    "ci_package/unused.py": "",
    "ci_package/deep/__init__.py": "",
    "ci_package/deep/leaf.py": "from ..beside import __name__ as x\n",
}
EXPECTED = {
    "top.py",
    "ci_one",
    "ci_two",
    "ci_never",
    "ci_late",
    "ci_package",
    "ci_package.inside",
    "ci_package.beside",
}
EXPECTED |= {
    "ci_package.deep",
    "ci_package.deep.leaf",
    "tabnanny",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    return tmp_path


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith(("ci_", "psgrad_file_", "tabnanny"))]:
        del sys.modules[name]


def test_code_identity_has_every_imported_file_of_ones_own(folder: Path) -> None:
    call_factory("top.py:build", folder, {}, raises=ConfigError)
    found = code_identity("top.py:build", folder)
    assert set(found.files) == EXPECTED
    assert next(iter(found.files)) == "top.py"
    assert set(found.packages) == {"numpy"}, "Python's own library goes with Python"


@pytest.mark.parametrize("name", FILES)
def test_code_identity_sees_an_edit_of_every_file_and_no_other(folder: Path, name: str) -> None:
    call_factory("top.py:build", folder, {}, raises=ConfigError)
    before = code_identity("top.py:build", folder)
    (folder / name).touch()
    assert code_identity("top.py:build", folder) == before
    (folder / name).write_text(FILES[name] + "# edited\n")
    changed = dict(code_identity("top.py:build", folder).files) != dict(before.files)
    assert changed == (name not in ("ci_unrelated.py", "ci_package/unused.py"))


def test_code_identity_of_a_file_whose_older_content_and_namesake_were_imported(tmp_path: Path) -> None:
    """One process, twelve files of one name: whichever of them sorts last must not stand for the others."""
    found = set()
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        for content in ("def build(): ...\n", f"def build(): return {number}\n"):
            (folder / "named.py").write_text(content)
            call_factory("named.py:build", folder, {}, raises=ConfigError)
            files = code_identity("named.py:build", folder).files
            assert files == {"named.py": hashlib.sha256(content.encode()).hexdigest()}
            found.add(files["named.py"])
    assert len(found) == 7


def test_code_identity_does_not_depend_on_what_was_imported_before(folder: Path) -> None:
    call_factory("top.py:build", folder, {}, raises=ConfigError)
    first = code_identity("top.py:build", folder)
    forget()
    for name in ("ci_late", "ci_never", "ci_unrelated"):
        importlib.import_module(name)
    call_factory("top.py:build", folder, {}, raises=ConfigError)
    assert code_identity("top.py:build", folder) == first


def test_code_identity_of_another_folder_is_the_same(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    call_factory("top.py:build", folder, {}, raises=ConfigError)
    here = code_identity("top.py:build", folder)
    forget()
    elsewhere = folder.rename(tmp_path_factory.mktemp("other") / "place")
    sys.path.insert(0, str(elsewhere))
    try:
        importlib.invalidate_caches()
        call_factory("top.py:build", elsewhere, {}, raises=ConfigError)
        assert code_identity("top.py:build", elsewhere) == here
    finally:
        sys.path.remove(str(elsewhere))


def test_code_identity_of_an_installed_package_is_its_version_and_the_file_of_the_callable(
    tmp_path: Path,
) -> None:
    found = code_identity("torch.nn.functional:cross_entropy", tmp_path)
    assert list(found.files) == ["torch.nn.functional"]
    assert set(found.packages) == {"torch"}


def test_code_identity_of_a_class_from_elsewhere(folder: Path) -> None:
    """Classes of what was made belong to it, wherever they were imported from."""
    importlib.import_module("ci_unrelated")
    assert "ci_unrelated" in code_identity("top.py:build", folder, ["ci_unrelated"]).files


def test_require_same_says_all_that_differs_by_dotted_names() -> None:
    then = {"model": {"kwargs": {"width": 3}}, "rows": [1, 2], "kept": None}
    require_same(then, {"model": {"kwargs": {"width": 3}}, "rows": (1, 2)}, "the run", hint="go on")
    with pytest.raises(ConfigError) as caught:
        require_same(then, {"model": {"kwargs": {"depth": 2}}, "rows": [1]}, "the run", hint="go on")
    assert str(caught.value).splitlines()[0] == (
        "the run: model.kwargs.width was 3 and is null; model.kwargs.depth was null and is 2; rows was"
        " [1, 2] and is [1]"
    )
    now = {"model": {"kwargs": {"width": 4}}, "rows": [1, 2], "kept": "secret"}
    with pytest.raises(OutputError, match=r"^the index: model\.kwargs\.width, kept differ") as hidden:
        require_same(then, now, "the index", hint="go on", show=False, raises=OutputError)
    assert "secret" not in str(hidden.value)
