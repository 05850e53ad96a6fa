"""`psgrad init`: what it writes, that nothing of it can be forgotten, and that it never takes
anything away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from psgrad.config import Config
from psgrad.config.schema import commented
from psgrad.config.values import ConfigSection
from psgrad.yaml12 import parse
from tests.workplace import Outcome

Run = Callable[..., Outcome]

KINDS = ("image", "tabular", "text")
LEAST: dict[str, Any] = {
    "version": 1,
    "model": {"factory": "model.py:build"},
    "loss": {"name": "mse"},
    "data": {"path": "rows.csv", "inputs": "x", "target": "y"},
    "output": "out",
}


def keys_of(section: type[ConfigSection], above: str = "") -> Iterator[str]:
    """Every key of a section and of those inside it, dotted; not those of items of lists."""
    for key, info in section.model_fields.items():
        yield f"{above}{key}"
        parts = [info.annotation]
        for part in parts:
            parts += () if get_origin(part) in (dict, list) else get_args(part)
        for inside in [part for part in parts if isinstance(part, type) and issubclass(part, ConfigSection)]:
            yield from keys_of(inside, f"{above}{key}.")


def keys_in(content: Any, above: str = "") -> Iterator[str]:
    """Every key of a mapping, dotted."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield f"{above}{key}"
            yield from keys_in(value, f"{above}{key}.")


def uncommented(text: str) -> Any:
    """The content of a config of which every key is set: the first "# " of each line taken off."""
    lines = [line.removeprefix("# ") for line in text.splitlines() if not line.strip().startswith("## ")]
    return parse("\n".join(lines), "config").content


def test_every_key_of_the_models_is_in_a_commented_config() -> None:
    assert set(keys_in(uncommented(commented(LEAST, {})))) == set(keys_of(Config))


def test_what_is_commented_out_is_what_a_config_without_it_has(tmp_path: Path) -> None:
    """Of every section that is there by default, each line that is set changes nothing."""
    everything = uncommented(commented(LEAST, {}))
    resolved = Config.model_validate(LEAST).model_dump(mode="json")

    def same(ours: Any, theirs: Any, where: str) -> None:
        if isinstance(theirs, dict) and isinstance(ours, dict) and theirs:
            for key in theirs:
                same(ours[key], theirs[key], f"{where}.{key}")
        elif theirs is None or theirs == []:
            assert ours in (None, []) or isinstance(ours, dict | list), where
        else:
            assert ours == theirs, where

    same(everything, resolved, "")


def test_a_commented_config_says_what_each_key_means() -> None:
    text = commented(LEAST, {})
    assert "  ## Rows computed together; auto fits them to the memory.\n#   chunk_size: auto\n" in text
    assert max(map(len, text.splitlines())) <= 140
    assert "## The delta of (epsilon, delta), below one over the number of records. Required." in text


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_right_and_runs(
    kind: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = run("init", "new", "--kind", kind)
    assert written.code == 0
    folder = tmp_path / "new"
    assert sorted(written.out.split()) == sorted(str(path.relative_to(tmp_path)) for path in folder.iterdir())
    assert "psgrad validate new/psgrad.yaml" in written.err
    assert written.err.count("\n") == 1  # what to do next
    assert run("validate", "new/psgrad.yaml").code == 0

    monkeypatch.chdir(folder)
    ended = run("analyze", "psgrad.yaml", "--no-report", "--limit", "64", "-q")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1].startswith("runs/")


@pytest.mark.parametrize("name", ["model.py", "digits.npz", "psgrad.yaml"])
def test_init_replaces_no_file(name: str, tmp_path: Path, run: Run) -> None:
    mine = tmp_path / name
    mine.write_text("mine")
    ended = run("init", tmp_path)
    assert ended.code == 2
    assert f"has {name} already; nothing was written" in ended.err
    assert "--overwrite" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert mine.read_text() == "mine"
    assert run("init", tmp_path, "--overwrite").code == 2
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_short_config_and_all_keys_with_full(kind: str, tmp_path: Path, run: Run) -> None:
    texts = []
    for option in ([], ["--full"]):
        folder = tmp_path / f"new{len(option)}"
        assert run("init", folder, "--kind", kind, *option).code == 0
        texts.append((folder / "psgrad.yaml").read_text(encoding="utf-8"))
    short, full = texts
    assert len(short.splitlines()) <= 20
    assert parse(short, "config").content == parse(full, "config").content
    assert set(keys_of(Config)) <= set(keys_in(uncommented(full)))


def test_a_file_in_the_way_of_the_folder(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        ended = run("init", tmp_path / place)
        assert ended.code in (2, 3)
        ended.refused(ended.code, "hint: name another folder")


def test_a_kind_is_no_folder(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("names a folder, and tabular is a kind of samples", "psgrad init --kind tabular, or a folder of")
    run("init", "tabular").refused(2, words[0], f"hint: {words[1]} another name")
    assert list(tmp_path.iterdir()) == []
