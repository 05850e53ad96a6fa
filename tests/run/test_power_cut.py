"""The power is cut after every durable operation: what was not synced may be lost, or torn, and the promises
hold just the same.

A killed process leaves its writes to the system; a power cut does not. A model of the disk follows what
psgrad.run asks of it, and knows what is certain to be there: of a file, what fsync has seen; of a name,
what the fsync of its folder has seen. All else may be as it was last, as it was at the last sync, or zeros,
file by file and folder by folder.
"""

from __future__ import annotations

import os
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from psgrad.errors import PsgradError
from psgrad.run import durable_files
from tests.run.runs import check, go

Tree = dict[str, bytes | None]
"""A folder's content: relative path -> bytes of a file, None for a folder."""


@dataclass
class File:
    latest: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Folder:
    latest: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """Follows the calls of `os` below one folder, which are carried out as well. `at_each` is called before
    each of them.
    """

    def __init__(self, root: Path, at_each: Callable[[Disk], None], patch: pytest.MonkeyPatch) -> None:
        self.path, self.root, self.at_each = root, Folder(), at_each
        self._open: dict[int, File | Folder] = {}
        for name in ("open", "write", "fsync", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, self._followed(name, getattr(os, name)))

    def _followed(self, name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *rest: Any, **options: Any) -> Any:
            known = (
                target in self._open if isinstance(target, int) else Path(target).is_relative_to(self.path)
            )
            if not known:
                return honest(target, *rest, **options)
            self.at_each(self)
            done = honest(target, *rest, **options)
            getattr(self, f"_after_{name}")(target, done, *rest)
            return done

        return call

    def _place(self, path: Any) -> tuple[Folder, str]:
        folder = self.root
        *above, name = Path(path).relative_to(self.path).parts or (".",)
        for part in above:
            inner = folder.latest[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def _after_open(self, path: Any, descriptor: int, flags: int, *_: Any) -> None:
        folder, name = self._place(path)
        node = folder if name == "." else folder.latest.get(name)
        if node is None:
            node = folder.latest[name] = File()
        if flags & os.O_TRUNC and isinstance(node, File):
            node.latest.clear()
        self._open[descriptor] = node

    def _after_write(self, descriptor: int, written: int, data: bytes) -> None:
        node = self._open[descriptor]
        assert isinstance(node, File)
        node.latest += bytes(data[:written])  # all writes of psgrad.run are at the end

    def _after_fsync(self, descriptor: int, _: None) -> None:
        node = self._open[descriptor]
        if isinstance(node, File):
            node.synced = bytes(node.latest)
        else:
            node.synced = dict(node.latest)

    def _after_replace(self, source: Any, _: None, target: Any) -> None:
        (above, name), (folder, new) = self._place(source), self._place(target)
        folder.latest[new] = above.latest.pop(name)

    def _after_unlink(self, path: Any, _: None) -> None:
        folder, name = self._place(path)
        del folder.latest[name]

    def _after_mkdir(self, path: Any, _: None, *__: Any) -> None:
        folder, name = self._place(path)
        folder.latest[name] = Folder()

    def after_a_cut(self, choose: Callable[[list[str]], str]) -> Tree:
        """What may be found when the power is back: `choose` picks the fate of each file and of each folder's
        names.
        """
        tree: Tree = {}

        def walk(folder: Folder, prefix: str) -> None:
            names = folder.synced if choose(["synced", "latest"]) == "synced" else folder.latest
            for name, node in names.items():
                if isinstance(node, Folder):
                    tree[prefix + name] = None
                    walk(node, f"{prefix}{name}/")
                else:
                    latest, synced = bytes(node.latest), node.synced
                    kept = len(synced) if latest.startswith(synced) else 0
                    zeros = latest[:kept] + bytes(len(latest) - kept)
                    tree[prefix + name] = {"synced": synced, "latest": latest, "zeros": zeros}[
                        choose(["synced", "latest", "zeros"])
                    ]

        walk(self.root, "")
        return tree


def cuts(path: Path) -> list[tuple[Tree, list[Any]]]:
    """(what may be found, what had been told) for a cut at every operation of an undisturbed run,
    each once.
    """
    told: list[Any] = []
    result: dict[str, tuple[Tree, list[Any]]] = {}
    rng = random.Random(0)

    def cut(disk: Disk) -> None:
        for choose in (lambda fates: fates[0], lambda fates: fates[-1], rng.choice, rng.choice):
            tree = disk.after_a_cut(choose)
            result.setdefault(repr((tree, told)), (tree, list(told)))

    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(path, cut, patch)
        go(path / "run", told.append)
        cut(disk)
    return list(result.values())


def test_write_atomically_is_durable(tmp_path: Path) -> None:
    result: list[Tree] = []
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(tmp_path, lambda disk: result.append(disk.after_a_cut(lambda fates: fates[0])), patch)
        durable_files.make_folder(tmp_path / "a" / "b")
        durable_files.write_atomically(tmp_path / "a" / "b" / "c", b"old")
        durable_files.write_atomically(tmp_path / "a" / "b" / "c", b"new")
    assert disk.after_a_cut(lambda fates: fates[0]) == {"a": None, "a/b": None, "a/b/c": b"new"}
    assert {tree.get("a/b/c") for tree in result} == {None, b"old"}


def lay_out(tree: Tree, path: Path) -> None:
    path.mkdir()
    for name, content in tree.items():
        if content is None:
            (path / name).mkdir(parents=True, exist_ok=True)
        else:
            (path / name).write_bytes(content)


def survive(cases: list[tuple[Tree, list[Any]]], path: Path, patch: pytest.MonkeyPatch) -> None:
    """Each of them must hold what was promised before the cut, and go on to the end."""
    patch.setattr(os, "fsync", lambda descriptor: None)
    for number, (tree, before) in enumerate(cases):
        told = list(before)
        folder = path / str(number)
        lay_out(tree, folder)
        check(folder / "run", told, False)
        go(folder / "run", told.append)
        check(folder / "run", told, True)


def test_power_cut_after_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched").mkdir()
    cases = cuts(tmp_path / "watched")
    assert any(
        bytes(10) in content
        for tree, _ in cases
        for name, content in tree.items()
        if content and name.endswith("ledger.jsonl")
    )
    assert {len(told) for _, told in cases} == {0, 1, 2}
    survive(cases, tmp_path, monkeypatch)


# -- What the model of the disk is for: each of these is a mistake that no kill -9 would find ----------------


def nothing(*_: Any) -> None:
    pass


def without(name: str) -> types.SimpleNamespace:
    """psgrad.run.durable_files with one of its functions taken out."""
    return types.SimpleNamespace(**{**vars(durable_files), name: nothing})


def unsynced_write(target: Path, data: bytes, mode: int | None = None) -> None:
    """What write_atomically would be without its fsync."""
    temporary = durable_files.temporary_for(target)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)
    os.replace(temporary, target)  # noqa: PTH105 (the disk follows the calls of os)
    durable_files.sync_folder(target.parent)


@pytest.mark.parametrize(
    ("place", "instead", "words"),
    [
        (
            "psgrad.run.ledger.durable_files",
            without("sync"),
            "released without a ledger|the ledger lags a release|the ledger that paid for it is gone",
        ),
        (
            "psgrad.run.ledger.durable_files",
            without("sync_folder"),
            "released without a ledger|the ledger that paid for it is gone",
        ),
        ("psgrad.run.durable_files.sync_folder", nothing, "released without a ledger"),
        ("psgrad.run.durable_files.write_atomically", unsynced_write, "is damaged|is torn"),
    ],
)
def test_power_cut_check_finds_planted_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, instead: Any, words: str
) -> None:
    (tmp_path / "watched").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(place, instead)
        cases = cuts(tmp_path / "watched")
    with pytest.raises((AssertionError, PsgradError), match=words):
        survive(cases, tmp_path, monkeypatch)
