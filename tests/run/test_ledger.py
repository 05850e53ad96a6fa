"""The ledger: a line is on the disk before `append` returns, an unfinished line costs nothing, and all other
damage is named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.errors import ConfigError, LedgerError, OutputError
from psgrad.run.ledger import Ledger
from psgrad.run.ledger_lines import has_begun, parse, require_same_run
from tests.crashes import Ended, in_a_child

HEADER = {
    "delta": 1e-5,
    "relation": "add_or_remove_one",
    "scheme": {"scheme": "poisson", "sample_rate": 0.1},
    "planned": 3,
}


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a ledger says, in many files: their lines need not outlive the machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def a_ledger(path: Path, steps: int = 3) -> Path:
    with Ledger.create(path, HEADER) as ledger:
        for step in range(steps):
            ledger.append({"step": step, "noise_multiplier": 1.1, "note": "Zeile\n€"})
    return path


def test_ledger_lines_of_a_run(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "run" / "public" / "ledger.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    plain = [json.loads(line) for line in lines]  # any reader of JSON lines will do
    assert [line["kind"] for line in plain] == ["header", "step", "step", "step"]
    assert [line["position"] for line in plain] == [0, 1, 2, 3]
    assert [line["previous"] for line in plain] == [
        None,
        *(hashlib.sha256(line).hexdigest() for line in lines[:-1]),
    ]
    assert plain[0] == {
        "kind": "header",
        "position": 0,
        "previous": None,
        "tool": "psgrad",
        "format": 1,
        **HEADER,
    }
    content = Ledger.read(path)
    assert content.header == plain[0]
    assert content.steps == plain[1:]
    assert content.position == 4
    assert content.unfinished == b""


def test_ledger_resume_continues_positions(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    with Ledger.resume(path, {"from_step": 2}, expected={"delta": 1e-5, "planned": 3}) as ledger:
        assert ledger.position == 5
        assert ledger.header["relation"] == "add_or_remove_one"
        ledger.append({"step": 2, "noise_multiplier": 1.1})
        assert [line["step"] for line in ledger.steps] == [0, 1, 2, 2]
    assert [(line["kind"], line["position"]) for line in Ledger.read(path).lines[4:]] == [
        ("resume", 4),
        ("step", 5),
    ]


def test_ledger_lines_of_other_kinds(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.jsonl", HEADER) as ledger:
        ledger.append({"words": "looked at"}, kind="note")
        assert ledger.steps == []
    assert Ledger.read(tmp_path / "ledger.jsonl").lines[1]["words"] == "looked at"


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5).map("x".__add__), numbers | st.text() | st.lists(numbers)),
        max_size=4,
    )
)
def test_ledger_round_trip(tmp_path_factory: pytest.TempPathFactory, contents: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    with Ledger.create(path, HEADER) as ledger:
        for content in contents:
            ledger.append(content)
    own = ("kind", "position", "previous")
    assert [
        {key: value for key, value in line.items() if key not in own} for line in Ledger.read(path).steps
    ] == contents


# -- A line is on the disk before append returns -------------------------------------------------------------


def test_ledger_append_is_one_synced_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fsync"):
        honest = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, _name=name, _honest=honest: (calls.append(_name), _honest(*a))[1]
        )
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    assert calls == ["fsync", "write", "fsync"]  # the file's name in its folder; the header
    calls.clear()
    ledger.append({"step": 0})
    assert calls == ["write", "fsync"]


def test_ledger_append_nonfinite_number_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, HEADER) as ledger:
        before = path.read_bytes()
        with pytest.raises(ValueError, match="not JSON compliant"):
            ledger.append({"noise_multiplier": float("nan")})
        with pytest.raises(ValueError, match="position, previous: written by the ledger itself"):
            ledger.append({"position": 7, "previous": "0"})
        with pytest.raises(ValueError, match="'resume' lines can't be appended"):
            ledger.append({}, kind="resume")
        assert path.read_bytes() == before
        ledger.append({"noise_multiplier": 1.0})  # nothing was spoilt
    assert len(Ledger.read(path).steps) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_ledger_failed_write_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl", steps=1)
    ledger = Ledger.resume(path, {})

    def fails(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OutputError) as failure:
            ledger.append({"step": 1})
    assert ("the disk is full or over quota" in str(failure.value)) == (number != errno.EIO)
    assert "was not released" in str(failure.value)
    assert "--resume" in str(failure.value)
    # what is on the disk now is not known: this process may not go on
    with pytest.raises(LedgerError, match="can't be written any more"):
        ledger.append({"step": 1})
    ledger.close()
    # a line that is there though its sync failed counts: rather too much than too little
    assert len(Ledger.resume(path, {}).steps) == (2 if call == "fsync" else 1)


def test_ledger_partial_write(tmp_path: Path) -> None:
    script = f"""
        import resource, signal
        from pathlib import Path
        from psgrad.errors import OutputError
        from psgrad.run.ledger import Ledger

        ledger = Ledger.create(Path({str(tmp_path / "ledger.jsonl")!r}), {{"delta": 1e-5}})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        done = 0
        try:
            while True:
                ledger.append({{"step": done}})
                done += 1
        except OutputError as error:
            print(done, error)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    assert "the disk is full or over quota" in output
    done = int(output.split()[0])
    content = Ledger.read(tmp_path / "ledger.jsonl")
    assert content.unfinished.startswith(b'{"kind": "step"')
    assert len(content.steps) == done > 0
    with Ledger.resume(tmp_path / "ledger.jsonl", {}) as ledger:
        assert len(ledger.steps) == done


def test_ledger_interrupted_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.append({"step": 0})
    with pytest.raises(LedgerError, match="can't be written any more"):
        ledger.append({"step": 0})


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def restored(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, 10)


@pytest.mark.parametrize("change", [moved, restored, appended, cut])
def test_ledger_changed_during_run_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    ledger.append({"step": 0})
    change(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match=r"was changed or replaced|can't be opened"):
        ledger.append({"step": 1})


# -- Unfinished lines ----------------------------------------------------------------------------------------


def test_ledger_resume_after_cut_step_line(tmp_path: Path, quick_disk: None) -> None:
    whole = a_ledger(tmp_path / "whole.jsonl").read_bytes()
    start = whole.index(b'{"kind": "step", "position": 3')
    for length in range(start, len(whole) + 1):
        path = tmp_path / f"{length}.jsonl"
        path.write_bytes(whole[:length])
        # the last line counts when nothing but its newline is missing, as it is unknown what removed that
        steps = 3 if length >= len(whole) - 1 else 2
        assert len(Ledger.read(path).steps) == steps
        with Ledger.resume(path, {"from_step": 0}) as ledger:
            assert len(ledger.steps) == steps
            ledger.append({"step": 99})
        content = Ledger.read(path)
        resumed, last = content.lines[-2:]
        assert last["step"] == 99
        assert last["position"] == steps + 2
        assert resumed["kind"] == "resume"
        assert path.read_bytes().startswith(whole[:start] if steps == 2 else whole)


def test_ledger_resume_after_trailing_zeros(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    appended = path.read_bytes() + bytes(200)
    path.write_bytes(appended)
    with Ledger.resume(path, {}) as ledger:
        assert len(ledger.steps) == 3
    assert bytes(1) not in path.read_bytes()


@pytest.mark.parametrize(
    "left",
    [b"", bytes(50), b"{", b'{"kind": "header", "position": 0, "previous": nu', b'{"kind": "he' + bytes(20)],
)
def test_ledger_create_after_cut_header(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(left)
    assert not has_begun(path)
    with pytest.raises(LedgerError, match="has no header") as refusal:
        Ledger.resume(path, {})
    assert "nothing was spent" in str(refusal.value)
    with pytest.raises(LedgerError, match="has no header"):
        Ledger.read(path)
    assert path.read_bytes() == left
    with Ledger.create(path, HEADER) as ledger:
        ledger.append({"step": 0})
    assert len(Ledger.read(path).steps) == 1
    assert has_begun(path)


# -- Damage --------------------------------------------------------------------------------------------------


def damaged(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> str:
    """What is said of the ledger after its lines were changed; resuming it is refused alike, and writes
    nothing.
    """
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(LedgerError) as refusal:
        Ledger.read(path)
    with pytest.raises(LedgerError):
        Ledger.resume(path, {})
    assert path.read_bytes() == before
    assert has_begun(path)
    return str(refusal.value)


@pytest.mark.parametrize(
    "number", range(3)
)  # the last line, lost whole, is missed by the checkpoint's mark alone: below
def test_ledger_damage_lost_line(tmp_path: Path, number: int) -> None:
    words = damaged(a_ledger(tmp_path / "ledger.jsonl"), lambda lines: lines[:number] + lines[number + 1 :])
    assert (
        f"is damaged: line {number + 1} says that there are {number + 1} lines before it, and there are"
        f" {number}" in words
    )


@pytest.mark.parametrize("number", range(3))
def test_ledger_damage_changed_number(tmp_path: Path, number: int) -> None:
    def change(lines: list[bytes]) -> list[bytes]:
        lines[number] = lines[number].replace(b"1.1" if number else b"1e-05", b"9.9" if number else b"1e-04")
        return lines

    words = damaged(a_ledger(tmp_path / "ledger.jsonl"), change)
    assert f"line {number + 2} was written after another line" in words
    assert "an epsilon computed from the rest would be too small" in words


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "garbage", [b"\n", b"garbage\n", b"12\n", b'{"kind": "step"}\n', bytes(30) + b"\n", b"\xff\xfe\n"]
)
def test_ledger_damage_unreadable_line(tmp_path: Path, number: int, garbage: bytes) -> None:
    def change(lines: list[bytes]) -> list[bytes]:
        lines[number] = garbage
        return lines

    assert f"line {number + 1} is not a line that psgrad wrote" in damaged(
        a_ledger(tmp_path / "ledger.jsonl"), change
    )


def test_ledger_damage_flipped_bit(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    whole = path.read_bytes()
    for place in range(whole.rindex(b"{")):
        changed = bytearray(whole)
        changed[place] ^= 1
        with pytest.raises(LedgerError):
            parse(path, bytes(changed))


def test_ledger_damage_flipped_bit_in_last_line(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    whole = path.read_bytes()
    for place in range(whole.rindex(b"{"), len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        try:
            content = parse(path, bytes(changed))
        except LedgerError:
            continue
        assert len(content.steps) == 3


def test_ledger_damage_line_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    def words(*lines: dict[str, Any]) -> str:
        raw = b""
        previous = None
        path.unlink(missing_ok=True)
        with path.open("ab") as file:
            for position, line in enumerate(lines):
                raw = json.dumps({"position": position, "previous": previous, **line}).encode() + b"\n"
                previous = hashlib.sha256(raw).hexdigest()
                file.write(raw)
        with pytest.raises(LedgerError) as refusal:
            Ledger.read(path)
        return str(refusal.value)

    header = {"kind": "header", "tool": "psgrad", "format": 1}
    assert "line 1 is a step line, which has no place there" in words({"kind": "step"})
    assert "line 2 is a header line, which has no place there" in words(header, header)
    assert "is of format 2" in words({**header, "format": 2})


def test_ledger_matches_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, HEADER) as ledger:
        ledger.append({"step": 0})
        early = path.read_bytes()
        ledger.append({"step": 1})
        mark = ledger.mark()
    late = path.read_bytes()
    assert mark == {
        "ledger_position": 3,
        "ledger_sha256": hashlib.sha256(late.splitlines(keepends=True)[2]).hexdigest(),
    }
    Ledger.resume(path, {}, mark={**mark, "step": 2}).close()
    path.write_bytes(early)
    with pytest.raises(LedgerError, match="had 3 lines, and it has 2") as refusal:
        Ledger.resume(path, {}, mark=mark)
    assert "the epsilon would be too small" in str(refusal.value)
    path.write_bytes(late.replace(b'"step": 1}', b'"step": 7}'))
    with pytest.raises(
        LedgerError, match=r"line 3 of the ledger .* is not the one that the checkpoint was made after"
    ):
        Ledger.resume(path, {}, mark=mark)
    path.write_bytes(late[:-1])  # an editor that took the last newline away
    Ledger.resume(path, {}, mark=mark).close()


# -- One process, one run ------------------------------------------------------------------------------------


def test_ledger_second_process_refused(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")

    def elsewhere() -> Ended:
        return in_a_child(lambda tell: tell(Ledger.resume(path, {}).position))

    with Ledger.resume(path, {}) as ledger:
        before = path.read_bytes()
        assert "another process is writing to the ledger" in elsewhere().error
        with pytest.raises(LedgerError, match="another process is writing to the ledger"):
            Ledger.create(path, HEADER)
        assert path.read_bytes() == before
        assert Ledger.read(path).position == ledger.position  # reading is free
    assert elsewhere().told == [6]


def test_ledger_resume_after_other_process_refused(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    seen = Ledger.read(path)
    with Ledger.resume(path, {}, seen=seen) as ledger:
        ledger.append({"step": 3})
    with pytest.raises(LedgerError, match="changed while this run was getting ready") as refusal:
        Ledger.resume(path, {}, seen=seen)
    assert "another process" in str(refusal.value)
    Ledger.resume(path, {}, seen=Ledger.read(path)).close()


def test_ledger_refusal_releases_lock(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    for _ in range(2):
        with pytest.raises(ConfigError):
            Ledger.resume(path, {}, expected={"delta": 1})
        with pytest.raises(LedgerError, match="of an earlier run"):
            Ledger.create(path, HEADER)
    Ledger.resume(path, {}).close()


def test_ledger_resume_other_run_refused(tmp_path: Path) -> None:
    path = a_ledger(tmp_path / "ledger.jsonl")
    before = path.read_bytes()
    with pytest.raises(ConfigError) as refusal:
        Ledger.resume(
            path, {}, expected={**HEADER, "delta": 1e-6, "scheme": {"scheme": "fixed"}, "unit": "row"}
        )
    assert refusal.value.exit_code == 2
    words = str(refusal.value)
    assert "is that of another run: delta was 1e-05 and is 1e-06; scheme.scheme was " in words
    assert 'is "fixed"' in words
    assert 'unit was null and is "row"' in words
    assert "planned" not in words
    assert path.read_bytes() == before


def test_ledger_refusal_hides_private_values() -> None:
    require_same_run({"fingerprint": "abc", "rows": [1, 2]}, {"rows": (1, 2)}, "the data")
    with pytest.raises(ConfigError, match="the data is that of another run: fingerprint differs") as refusal:
        require_same_run({"fingerprint": "abc"}, {"fingerprint": "def"}, "the data", show=False)
    assert "abc" not in str(refusal.value)
    assert "def" not in str(refusal.value)


@pytest.mark.parametrize("content", [b"my notes\n", b'{"a": 1}\n', b"x"])
def test_ledger_create_over_other_file_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.create(path, HEADER)
    with pytest.raises(LedgerError):
        Ledger.resume(path, {})
    assert path.read_bytes() == content


def test_ledger_resume_missing_file(tmp_path: Path) -> None:
    for use in (
        lambda: Ledger.resume(tmp_path / "ledger.jsonl", {}),
        lambda: Ledger.read(tmp_path / "ledger.jsonl"),
    ):
        with pytest.raises(LedgerError, match="can't be opened: No such file"):
            use()
    assert not (tmp_path / "ledger.jsonl").exists()
    assert not has_begun(tmp_path / "ledger.jsonl")


def test_ledger_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(LedgerError, match="No locks available") as refusal:
        Ledger.create(tmp_path / "ledger.jsonl", HEADER)
    assert "a file system that can lock files" in str(refusal.value)
