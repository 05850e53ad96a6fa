"""What can be said of the data of a config before a run, for `psgrad validate`: the headers of files, without
torch; rows of text or images and their labels, without the weights of a model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from psgrad.config import DataConfig, ModelConfig
from psgrad.inputs.image_folder import (
    FILE_NAME,
    IMAGE,
    LABEL,
    class_folders,
    metadata_of,
    required_folder,
    with_names,
)
from psgrad.inputs.models.hub import located
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.models.pretrained import read_settings
from psgrad.inputs.sources.arrow_columns import plain
from psgrad.inputs.sources.library_datasets import library_dataset
from psgrad.inputs.sources.load import labels_of_head, open_rows
from psgrad.inputs.sources.source import Column, DataHeader, TableSource, column_of, data_headers
from psgrad.inputs.sources.streams import is_library_stream, stream_schema
from psgrad.inputs.targets import Labels
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
        columns = {image: _IMAGE, FILE_NAME: _TEXT, **({LABEL: _TEXT} if class_folders(folder) else {})}
        return named, [DataHeader(folder, list(columns), columns, None)]
    source = configured(SOURCES, metadata.suffix.removeprefix("."), {}, folder)
    assert isinstance(source, TableSource)
    header = source.header(metadata)
    names = [image if name == FILE_NAME and image not in header.names else name for name in header.names]
    columns = {name: header.columns[old] for name, old in zip(names, header.names, strict=True)}
    texts = {
        name: header.texts[old] for name, old in zip(names, header.names, strict=True) if old in header.texts
    }
    return named, [DataHeader(metadata, names, columns, header.rows, texts, header.unusable)]


_ROWS = 2048


def text_facts(model: ModelConfig, data: DataConfig, base: Path) -> str:
    """The lengths of the first rows in tokens, in words. The columns, all labels that are one number or name
    a row, and these rows are looked at. Raises ConfigError and DataError as loading and reading them would.
    """
    from psgrad.inputs.tasks.choice import text_task
    from psgrad.inputs.text_samples import TextSamples

    task = text_task(data, base, _settings(model, base))
    samples = TextSamples(open_rows(data, base), task, data)
    count = min(_ROWS, len(samples))
    lengths = samples.read(0, count).lengths
    assert lengths is not None
    limit = "" if task.tokenizer.limit is None else f", at most {task.tokenizer.limit:,} are taken"
    notes = "".join(f"; {note}" for note in task.tokenizer.notes)
    rows = f"the first {count:,} rows" if count < len(samples) else "rows"
    return f"{rows} of {int(lengths[:, 0].min()):,} to {int(lengths[:, 0].max()):,} tokens{limit}{notes}"


def image_facts(model: ModelConfig, data: DataConfig, base: Path) -> tuple[str, tuple[str, ...]]:
    """(how many images there are, in words; what is to be said of their folder). Labels by name are looked
    at, and no image is opened. Raises ConfigError and DataError as loading them would.
    """
    from psgrad.inputs.image_folder import with_names

    settings = _settings(model, base).config
    rows = open_rows(data, base)
    named = data if data.images is None else with_names(data, base)
    labels = labels_of_head(Labels(kind="class"), settings, named)
    if named.target_column is not None:
        values = np.array(plain(rows.column(named.target_column)).to_pylist(), dtype=object)
        if len(values) and all(isinstance(value, str) for value in values):
            labels.encoded(values, named.target_column, rows.row_name)
    return f"{rows.count:,} images", rows.notes


def _settings(model: ModelConfig, base: Path) -> Pretrained:
    assert model.pretrained is not None
    assert model.task is not None
    found = located(
        model.pretrained, base, key="model.pretrained", holds=("*.json",), revision=model.revision
    )
    return Pretrained(found.folder, model.task, read_settings(found.folder, model))
