"""A temporary folder that goes with the object that reads from it."""

from __future__ import annotations

import shutil
import tempfile
import weakref


class TemporaryFolder:
    """A folder that is removed with this object, or at the end of the process. Unlike that of
    `tempfile.TemporaryDirectory`, its removal is no warning, which would come up wherever memory is tidied.

    Attributes:
        name: its path.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="psgrad-")
        weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)
