"""Temporary folders and files go with their objects, and without a warning."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

from psgrad.data.sources.source_rows import TemporaryFolder, temporary_file


@pytest.mark.long
def test_a_temporary_folder_goes_with_its_object() -> None:
    folder = TemporaryFolder()
    path = Path(folder.name)
    (path / "file").write_text("content")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del folder
        gc.collect()
    assert not path.exists()


class Owner:
    def __init__(self) -> None:
        self.file = temporary_file(self)


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_temporary_file_is_closed_with_its_owner() -> None:
    owner = Owner()
    owner.file.write(b"content")
    file = owner.file
    del owner
    gc.collect()
    assert file.closed
