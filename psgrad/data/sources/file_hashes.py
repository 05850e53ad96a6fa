"""The hashes of a dataset's files. The processes of a run, of all hosts, read the files once together for
them; each host compares sizes and a sample of its own files with those of the others.
"""

from __future__ import annotations

import hashlib
import json
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from psgrad.errors import DistributedError
from psgrad.run.host_files import in_pieces, is_divided, made_once, pieces_wanted
from psgrad.run.input_files import Stamp, sha256_of

BLOCK = 1 << 30
"""Bytes of a file that are hashed together; part of the definition of a hash: see `file_hashes`."""

SMALL = 16 << 20
"""Bytes of a dataset that each host reads whole, at most, for the hashes of its files."""

SAMPLES, SAMPLE = 256, 1 << 16
"""Places in a larger dataset that each host reads for a comparison, and the bytes of each."""

_READ = 1 << 20  # bytes at a time
_DIGITS = 64  # of a hash


class _Block(NamedTuple):
    path: Path
    start: int
    size: int


def files_sha256(paths: Sequence[Path]) -> str:
    """The hash of one file, or over those of several in order; see `file_hashes`."""
    return _joined(file_hashes(paths))


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """The hash of each file, in hexadecimal: the SHA-256 of its bytes. Of a file above BLOCK it is the
    SHA-256 over the lines of its blocks' hashes, so that many processes can hash it together.

    Raises DistributedError where files of the same paths differ from those of another host.
    """
    files = [Stamp.of(path) for path in paths]
    blocks, size = [_blocks(each) for each in files], sum(each.size for each in files)
    if not is_divided() or size <= SMALL:
        return [
            sha256_of(found[0].path) if len(found) == 1 else _joined([_digest(each).hex() for each in found])
            for found in blocks
        ]

    def compare(target: Path) -> None:
        _require_alike(files)
        target.touch()

    if made_once(f"a sample of {files}", compare) is None:
        _require_alike(files)
    pieces = _pieces([block for found in blocks for block in found], size)
    made = in_pieces(f"hashes of {_named(files)}", len(pieces), lambda k: b"".join(map(_digest, pieces[k])))
    digests = b"".join(made).hex()
    found = iter([digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS)])
    return [_joined([next(found) for _ in each]) for each in blocks]


def _joined(hashes: Sequence[str]) -> str:
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _blocks(file: Stamp) -> list[_Block]:
    starts = range(0, max(1, file.size), BLOCK)
    return [_Block(file.path, start, min(BLOCK, file.size - start)) for start in starts]


def _digest(block: _Block) -> bytes:
    found, left = hashlib.sha256(), block.size
    with block.path.open("rb") as file:
        file.seek(block.start)
        while left and (content := file.read(min(_READ, left))):
            found.update(content)
            left -= len(content)
    return found.digest()


def _pieces(blocks: Sequence[_Block], size: int) -> list[list[_Block]]:
    """The blocks in order, joined into pieces of about equal size, of which each process gets a few."""
    least = size // pieces_wanted()
    pieces, held = list[list[_Block]](), least
    for block in blocks:
        if held >= least:
            pieces.append([])
            held = 0
        pieces[-1].append(block)
        held += block.size
    return pieces


def _named(files: Sequence[Stamp]) -> str:
    return f"{[str(each.path) for each in files]}"


def _require_alike(files: Sequence[Stamp]) -> None:
    """Compare this host's files with those of the process that comes here first."""
    here, own = socket.gethostname(), _sampled(files)
    (first,) = in_pieces(f"a sample of {_named(files)}", 1, lambda _: json.dumps([here, own]).encode())
    there, others = json.loads(first)
    for file, (size, content), (other_size, other_content) in zip(files, own, others, strict=True):
        if (size, content) != (other_size, other_content):
            sizes = f": {size:,} bytes, and {other_size:,} there" if size != other_size else ""
            raise DistributedError(
                f"the file {file.path} on {here} differs from the one on {there}{sizes}",
                expected="the same files on all machines",
                cause="machines with copies of their own, or a file that was changed in between",
                next_step="give all processes the same files, and run again",
            )


def _sampled(files: Sequence[Stamp]) -> list[tuple[int, str]]:
    """For each file its size, and a hash of its bytes at places that are evenly spread over all files."""
    ends = list(accumulate(each.size for each in files))
    found = defaultdict[int, Any](hashlib.sha256)
    for place in range(SAMPLES):
        start = place * (ends[-1] - SAMPLE) // (SAMPLES - 1)
        number = bisect_right(ends, start)
        with files[number].path.open("rb") as file:
            file.seek(start - ends[number] + files[number].size)
            found[number].update(file.read(SAMPLE))
    digests = {number: each.hexdigest()[:16] for number, each in found.items()}
    return [(each.size, digests.get(number, "")) for number, each in enumerate(files)]
