"""What can be known of images and their labels without a model's weights, for `psgrad validate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from psgrad.config import DataConfig, ModelConfig
from psgrad.inputs.models.hub import located


def image_facts(model: ModelConfig, data: DataConfig, base: Path) -> tuple[str, tuple[str, ...]]:
    """(how many images there are, in words; what is to be said of their folder). Labels by name are looked
    at, and no image is opened. Raises ConfigError and DataError as loading them would.
    """
    from psgrad.inputs.images.folder import with_names
    from psgrad.inputs.models.pretrained import read_settings
    from psgrad.inputs.sources.arrow import plain
    from psgrad.inputs.sources.load import labels_of_head, open_rows
    from psgrad.inputs.targets import Labels

    assert model.pretrained is not None
    folder = located(
        model.pretrained, base, key="model.pretrained", holds=("*.json",), revision=model.revision
    ).folder
    rows = open_rows(data, base)
    named = data if data.images is None else with_names(data, base)
    labels = labels_of_head(Labels(kind="class"), read_settings(folder, model), named)
    if named.target_column is not None:
        values = np.array(plain(rows.column(named.target_column)).to_pylist(), dtype=object)
        if len(values) and all(isinstance(value, str) for value in values):
            labels.encoded(values, named.target_column, rows.row_name)
    return f"{rows.count:,} images", rows.notes
