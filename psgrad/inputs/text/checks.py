"""What can be known without a model's weights, for `psgrad validate`: of rows of text and their labels, and
of the model's class: its inputs, and how it shifts labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from psgrad.config import DataConfig, ModelConfig
from psgrad.inputs.models.hub import library, located, quiet
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.models.pretrained import AUTO_CLASSES

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


def model_inputs(pretrained: Pretrained) -> frozenset[str] | None:
    """The names of what the model's forward takes; None for a class that transformers does not know."""
    kind = _model_class(pretrained)
    return None if kind is None else frozenset(inspect.signature(kind.forward).parameters)


def shift_of(pretrained: Pretrained) -> Callable[[list[int]], list[int]]:
    """What makes the decoder's inputs of labels: the model's own function."""
    with quiet(), torch.device("meta"):
        model = _model_class(pretrained)(pretrained.config)

    def shifted(labels: list[int]) -> list[int]:
        made = model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([labels]))
        return [int(each) for each in made[0]]

    return shifted


def _model_class(pretrained: Pretrained) -> Any:
    auto = getattr(library("transformers"), AUTO_CLASSES[pretrained.task])
    if type(pretrained.config) not in auto._model_mapping:
        return None
    kind = auto._model_mapping[type(pretrained.config)]
    return kind[0] if isinstance(kind, tuple) else kind
