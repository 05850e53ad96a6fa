"""The hashes of a dataset's files, by which a later command knows that they are as they were. No torch."""

from __future__ import annotations

from pathlib import Path

from psgrad.config import DataConfig
from psgrad.data.sources.source import data_files
from psgrad.run.input_files import sha256_of


def hashes_of_files(data: DataConfig, base: Path, allow_download: bool = False) -> list[str] | None:
    """The hash of each file of a dataset, of a folder of images that of its listing; None where the dataset
    is not in files. Of a dataset of the datasets library that of the columns that are named.
    """
    if data.dataset is not None:
        from psgrad.data.sources.library_datasets import library_dataset, library_hashes

        return library_hashes(data, library_dataset(data, base, allow_download))
    if data.images is not None:
        from psgrad.data.image_files import folder_rows

        return [folder_rows(data, base).fingerprint]
    return None if data.path is None else [sha256_of(path) for path in data_files(data, base)]
