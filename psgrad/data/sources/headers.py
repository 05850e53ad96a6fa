"""The headers of the data of a config, before their rows are read. No torch."""

from __future__ import annotations

from pathlib import Path

from psgrad.config import DataConfig
from psgrad.data.image_files import (
    FILE_NAME,
    IMAGE,
    LABEL,
    class_folders,
    listed_images,
    metadata_of,
    required_folder,
    with_names,
)
from psgrad.data.sources.library_datasets import library_dataset
from psgrad.data.sources.source import Column, DataHeader, TableSource, column_of, data_headers
from psgrad.data.sources.streams import is_library_stream, stream_schema
from psgrad.plugins import SOURCES, configured

_TEXT, _IMAGE = Column("text", "text"), Column("image", "image")


def headers_of(config: DataConfig, base: Path) -> tuple[DataConfig, list[DataHeader]]:
    """(the config with all columns named, the headers of its files, dataset or folder of images).

    Raises ConfigError where there is none, DataError where one can't be read. Nothing is downloaded.
    """
    if config.dataset is not None:
        found = library_dataset(config, base)
        streamed = is_library_stream(found)
        schema = stream_schema(found, config.dataset) if streamed else found.features.arrow_schema
        columns = {field.name: column_of(field.type) for field in schema}
        rows = None if streamed else len(found)
        return config, [DataHeader(base / config.dataset, list(columns), columns, rows)]
    if config.images is None:
        return config, data_headers(config, base)
    folder = required_folder(base / config.images)
    metadata, named = metadata_of(folder), with_names(config, base)
    image = named.image or IMAGE
    if metadata is None:
        classes = class_folders(folder)
        columns = {image: _IMAGE, FILE_NAME: _TEXT, **({LABEL: _TEXT} if classes else {})}
        images, _ = listed_images(folder, {*classes})
        return named, [DataHeader(folder, list(columns), columns, len(images))]
    source = configured(SOURCES, metadata.suffix.removeprefix("."), {}, folder)
    assert isinstance(source, TableSource)
    header = source.header(metadata)
    names = [image if name == FILE_NAME and image not in header.names else name for name in header.names]
    columns = {name: header.columns[old] for name, old in zip(names, header.names, strict=True)}
    texts = {
        name: header.texts[old] for name, old in zip(names, header.names, strict=True) if old in header.texts
    }
    return named, [DataHeader(metadata, names, columns, header.rows, texts, header.unusable)]
