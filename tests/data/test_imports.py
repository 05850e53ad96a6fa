"""Callables by `module:callable` and `file.py:callable`: what is found, and how the user's own failures are
told.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from psgrad.errors import EXIT_RUNTIME, EXIT_USAGE, ConfigError, DataError, ModelError
from psgrad.user_code import call_factory, importing_beside, resolve


def write(folder: Path, text: str, name: str = "code.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def test_module_and_nested_attribute(tmp_path: Path) -> None:
    import collections

    assert resolve("collections:OrderedDict.fromkeys", tmp_path)("ab") == {"a": None, "b": None}
    assert resolve("collections:Counter", tmp_path) is collections.Counter


def test_file_is_relative_to_the_base_and_leaves_no_trace_beside_it(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write(tmp_path / "models", "def build():\n    return __file__\n", "net.py")

    assert resolve("models/net.py:build", tmp_path)() == str(tmp_path / "models" / "net.py")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["net.py"]


def test_two_specs_share_one_run_of_a_file_and_an_edit_runs_it_again(tmp_path: Path) -> None:
    text = (
        "from pathlib import Path\nlog = Path(__file__).with_name('log')\nlog.open('a').write('x')\ndef a():"
        " return A()\nclass A: pass\n"
    )
    spec = write(tmp_path, text)
    with importing_beside(tmp_path):
        made = resolve(f"{spec}:a", tmp_path)()
        assert isinstance(made, resolve(f"{spec}:A", tmp_path))  # type: ignore[arg-type]

    assert (tmp_path / "log").read_text() == "x"
    write(tmp_path, text + "def b(): return 2\n")
    assert resolve(f"{spec}:b", tmp_path)() == 2


def test_dataclasses_work_in_a_file(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x:"
        " int = 3\n"
    )
    assert resolve(f"{write(tmp_path, text)}:A", tmp_path)().x == 3


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("nowhere.py:build", "there is no file "),
        ("missing/dir.py:build", "there is no file "),
        ("nowhere_at_all:build", "there is no module 'nowhere_at_all'"),
        ("json.nowhere:build", "there is no module 'json.nowhere'"),
        ("json:laods", "json has no 'laods'\n  hint: did you mean loads?"),
        ("json:__version__", "json:__version__ is of type str; expected a function or a class"),
        ("json:decoder", "'decoder' in json:decoder is the module json.decoder, not a callable"),
        ("json:codecs.open", "is the module codecs, not a callable"),
    ],
)
def test_what_is_not_there_is_the_configs_mistake(tmp_path: Path, spec: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(spec, tmp_path, raises=ModelError)
    assert expected in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nraise ValueError('no weights')", "raised ValueError: no weights ("),
        ("import nowhere_at_all", "raised ModuleNotFoundError: No module named 'nowhere_at_all' ("),
        ("import sys\nsys.exit(3)", "raised SystemExit: 3 ("),
        ("def f(:", "raised SyntaxError: invalid syntax (code.py, line 1)"),
        ("import json\njson.loads('{')", "raised JSONDecodeError: Expecting property name"),
    ],
)
def test_a_file_that_raises(tmp_path: Path, text: str, expected: str) -> None:
    spec = write(tmp_path, text)
    with pytest.raises(ModelError) as caught:
        resolve(f"{spec}:build", tmp_path, raises=ModelError)

    message = str(caught.value)
    assert message.startswith(f"importing {tmp_path / spec} raised")
    assert expected in message
    if "Syntax" not in message:  # whose own text holds the line already
        assert f"{tmp_path / spec}:{len(text.splitlines())}, in <module>" in message
    assert caught.value.exit_code == EXIT_RUNTIME
    assert not [
        name
        for name in sys.modules
        if name.startswith("psgrad_file_code_") and sys.modules[name].__file__ == str(tmp_path / spec)
    ]


def test_an_installed_module_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "import nowhere_at_all", "psgrad_test_broken.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        DataError,
        match="importing psgrad_test_broken raised ModuleNotFoundError: No module named 'nowhere_at_all'",
    ):
        resolve("psgrad_test_broken:build", tmp_path, raises=DataError)


def test_interrupts_pass_through(tmp_path: Path) -> None:
    spec = write(tmp_path, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{spec}:build", tmp_path)


def test_a_factory_that_raises_names_the_users_line(tmp_path: Path) -> None:
    spec = write(tmp_path, "import json\n\ndef build(text):\n    return json.loads(text)\n")
    with pytest.raises(ModelError) as caught:
        call_factory(f"{spec}:build", tmp_path, {"text": "{"}, raises=ModelError)
    assert "the factory code.py:build raised JSONDecodeError: Expecting property name" in str(caught.value)
    assert f"({tmp_path / spec}:4, in build)" in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"widht": 3}, "missing a required argument: 'width'; expected its arguments are width, depth"),
        ({"width": 1, "dept": 3}, "got an unexpected keyword argument 'dept'"),
    ],
)
def test_kwargs_that_do_not_fit_are_the_configs_mistake(
    tmp_path: Path, kwargs: dict[str, int], expected: str
) -> None:
    spec = write(tmp_path, "def build(width, depth=1): ...\n")
    with pytest.raises(ConfigError) as caught:
        call_factory(f"{spec}:build", tmp_path, kwargs, raises=ModelError)
    assert expected in str(caught.value)


def test_a_type_error_inside_the_factory_is_the_factorys(tmp_path: Path) -> None:
    spec = write(tmp_path, "def build(): return 1 + 'a'\n")
    with pytest.raises(ModelError, match="raised TypeError: unsupported operand"):
        call_factory(f"{spec}:build", tmp_path, {}, raises=ModelError)
