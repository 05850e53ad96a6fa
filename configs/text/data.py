"""Passages of the Python standard library's source files, as bytes and the bytes that follow them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Plain modules that every supported Python has, in this order. Their text changes a little from one Python
# release to the next.
FILES = (
    "argparse.py",
    "ast.py",
    "bisect.py",
    "calendar.py",
    "collections/__init__.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "email/message.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "html/parser.py",
    "http/client.py",
    "inspect.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/__init__.py",
    "random.py",
    "shutil.py",
    "statistics.py",
    "subprocess.py",
    "tarfile.py",
    "textwrap.py",
    "tokenize.py",
    "traceback.py",
    "unittest/case.py",
    "urllib/parse.py",
)


class Passages(Dataset[dict[str, Tensor | str]]):
    """`count` passages of `length` bytes, spread evenly over the files.

    An item is `bytes` int64 [length], `next_bytes` int64 [length], the same one byte further on, and
    `passage`, the file and the offset in bytes at which the passage begins, such as `json/decoder.py:0`.
    """

    def __init__(self, count: int, length: int) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        sources = {name: (library / name).read_bytes() for name in FILES}
        places = [
            (name, start)
            for name, source in sources.items()
            for start in range(0, len(source) - length, length)
        ]
        if len(places) < count:
            raise ValueError(
                f"{count} passages of {length} bytes were asked for, "
                f"and the files in {library} hold {len(places)}"
            )
        self.places = [places[index * len(places) // count] for index in range(count)]
        self.sources = sources
        self.length = length

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        name, start = self.places[index]
        text = torch.tensor(list(self.sources[name][start : start + self.length + 1]))
        return {"bytes": text[:-1], "next_bytes": text[1:], "passage": f"{name}:{start}"}

    def describe(self, index: int) -> str:
        """The passage, for people to read."""
        name, start = self.places[index]
        return self.sources[name][start : start + self.length].decode("utf-8", "replace")


def passages(count: int = 512, length: int = 128) -> Passages:
    """The dataset that configs/text.yaml names."""
    return Passages(count, length)
