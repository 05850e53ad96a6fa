"""The files of an index: arrays in safetensors, each with the seal of the index that it is of, and the hash
of its own numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from psgrad.errors import OutputError
from psgrad.run.folders import packed
from psgrad.wording import json_values

SEAL = "psgrad"  # of a file's metadata: which index or rows it is of, and the hash of its numbers
# Numbers of a file by the names that safetensors has for them.
_DTYPES = {
    name: f"<{kind.lower()}{int(bits) // 8}"
    for name in ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
    for kind, bits in [(name[0], name[1:])]
}

Arrays = dict[str, np.ndarray]


def sealed(arrays: Mapping[str, np.ndarray], seal: str) -> bytes:
    """The bytes of a file. seal: the hash of the index."""
    # One entry: safetensors writes several in any order, and the bytes of equal indexes would differ.
    return packed(arrays, {SEAL: f"{seal} {digest_of(arrays)}"})


def opened(path: Path, seal: str, hint: str) -> Any:
    """A handle of a file. Raises OutputError for one that can't be read, or is of another index."""
    try:
        file: Any = safe_open(path, framework="numpy")
        own = (file.metadata() or {}).get(SEAL, "").partition(" ")[0] == seal
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{path} can't be read: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
    if not own:
        raise OutputError(f"{path} is of another index", hint=hint)
    return file


def arrays_of(file: Any) -> Arrays:
    """All arrays of an open file."""
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a handle, no dict)


def require_as_written(path: Path, file: Any, hint: str) -> None:
    """Raises OutputError for an open file with other numbers than were written."""
    if digest_of(arrays_of(file)) != file.metadata()[SEAL].rpartition(" ")[2]:
        raise OutputError(f"{path} holds other numbers than were written", hint=hint)


def mapped(path: Path, names: Sequence[str]) -> Arrays:
    """Arrays of a file that safetensors has found in order, without copies, which it makes of each part."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        # Copied where it is written to: PyTorch warns of memory that can't be.
        content = mmap(file.fileno(), 0, access=ACCESS_COPY)
    found = {}
    for name in names:
        start, stop = header[name]["data_offsets"]
        data = memoryview(content)[8 + size + start : 8 + size + stop]
        found[name] = np.frombuffer(data, _DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])
    return found


def as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Rising rows, as a slice where they are neighbours: parts of arrays are then no copies."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of arrays by name."""
    digest = sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data if arrays[name].size else b"")
    return digest.hexdigest()


def as_stored(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description as a file of JSON gives it back."""
    content: dict[str, Any] = json.loads(json.dumps(json_values(description), default=str))
    return content
