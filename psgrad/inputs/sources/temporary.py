"""Temporary folders and files that go with the object that reads from them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from typing import IO


class TemporaryFolder:
    """A folder that is removed with this object, or at the end of the process. Unlike that of
    `tempfile.TemporaryDirectory`, its removal is no warning, which would come up wherever memory is tidied.

    Attributes:
        name: its path.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="psgrad-")
        weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)


def temporary_file(owner: object) -> IO[bytes]:
    """A file without a name, which is closed with its owner, or at the end of the process: without a warning,
    too.
    """
    file: IO[bytes] = tempfile.TemporaryFile(prefix="psgrad-")  # noqa: SIM115 - closed with its owner
    weakref.finalize(owner, file.close)
    return file
