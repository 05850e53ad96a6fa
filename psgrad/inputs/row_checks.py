"""What is known of rows of text or images and their labels without weights, for `psgrad validate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from psgrad.config import DataConfig, ModelConfig
from psgrad.inputs.models.hub import located
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.models.pretrained import read_settings
from psgrad.inputs.sources.arrow_columns import plain
from psgrad.inputs.sources.load import labels_of_head, open_rows
from psgrad.inputs.targets import Labels

_ROWS = 2048


def text_facts(model: ModelConfig, data: DataConfig, base: Path) -> str:
    """The lengths of the first rows in tokens, in words. The columns, all labels that are one number or name
    a row, and these rows are looked at. Raises ConfigError and DataError as loading and reading them would.
    """
    from psgrad.inputs.text_samples import TextSamples, text_task

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
    from psgrad.inputs.image_files import with_names

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
