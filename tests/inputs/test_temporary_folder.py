"""Temporary folders go with their objects, and without a warning."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

from psgrad.inputs.sources.file_checks import TemporaryFolder


def test_a_temporary_folder_goes_with_its_object() -> None:
    folder = TemporaryFolder()
    path = Path(folder.name)
    (path / "file").write_text("content")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del folder
        gc.collect()
    assert not path.exists()
