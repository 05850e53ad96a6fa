"""What can be known of rows of text and their labels without a model's weights, for `psgrad validate`."""

from __future__ import annotations

from pathlib import Path

from psgrad.config import DataConfig, ModelConfig
from psgrad.inputs.models.hub import located
from psgrad.inputs.models.loaded import Pretrained

_ROWS = 2048


def text_facts(model: ModelConfig, data: DataConfig, base: Path) -> str:
    """The lengths of the first rows in tokens, in words. The columns, all labels that are one number or name
    a row, and these rows are looked at. Raises ConfigError and DataError as loading and reading them would.
    """
    from psgrad.inputs.models.pretrained import read_settings
    from psgrad.inputs.sources.load import open_rows
    from psgrad.inputs.tasks.choice import text_task
    from psgrad.inputs.text.samples import TextSamples

    assert model.pretrained is not None
    assert model.task is not None
    folder = located(
        model.pretrained, base, key="model.pretrained", holds=("*.json",), revision=model.revision
    ).folder
    task = text_task(data, base, Pretrained(folder, model.task, read_settings(folder, model)))
    samples = TextSamples(open_rows(data, base), task, data)
    count = min(_ROWS, len(samples))
    lengths = samples.read(0, count).lengths
    assert lengths is not None
    limit = "" if task.tokenizer.limit is None else f", at most {task.tokenizer.limit:,} are taken"
    notes = "".join(f"; {note}" for note in task.tokenizer.notes)
    rows = f"the first {count:,} rows" if count < len(samples) else "rows"
    return f"{rows} of {int(lengths[:, 0].min()):,} to {int(lengths[:, 0].max()):,} tokens{limit}{notes}"
