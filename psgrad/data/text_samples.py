"""A dataset of texts: the task that makes tokens of rows, by its name in a config, and the tokens, made when
asked for, and once.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from psgrad.config import DataConfig
from psgrad.config.model import Task
from psgrad.data.kept import KeptBytes
from psgrad.data.rows import Block, Samples, checked_weights, ids_and_units
from psgrad.data.sources.arrow_types import require_numbers
from psgrad.data.sources.table_rows import Array, TableRows
from psgrad.data.tasks.classification import Regression, SequenceClassification, TokenClassification
from psgrad.data.tasks.language_models import CausalLM, MaskedLM, Seq2SeqLM
from psgrad.data.tasks.task import TARGET, EncodedRow, Field, TextRows, TextTask
from psgrad.data.tokenizer import load_tokenizer
from psgrad.errors import ConfigError
from psgrad.models.pretrained import Pretrained
from psgrad.ragged import RaggedAxes, RowNumbers, padded_and_stacked

_TASKS: Mapping[Task, type[TextTask]] = {
    "sequence-classification": SequenceClassification,
    "regression": Regression,
    "token-classification": TokenClassification,
    "causal-lm": CausalLM,
    "masked-lm": MaskedLM,
    "seq2seq-lm": Seq2SeqLM,
}


def text_task(data: DataConfig, base: Path, pretrained: Pretrained) -> TextTask:
    """What makes tensors of rows of text for a pretrained model, with its tokenizer.

    Raises ConfigError for keys that the task does not take, DataError where there is no tokenizer.
    """
    kind = _TASKS.get(pretrained.task)
    if kind is None:
        raise ConfigError(
            f"data.text is given, and model.task is {pretrained.task}; expected one of the tasks of text:"
            f" {', '.join(_TASKS)}",
        )
    return kind(data, load_tokenizer(data, base, pretrained), pretrained)


_WEIGHT = "weight"
BLOCK = 256  # rows that are tokenised together
_COLUMNS = ("text", "prompt", "completion", "messages", "target", "weight")
_FORMAT = 1  # version of how a row becomes tokens, a part of the fingerprint


class TextSamples(Samples):
    """Rows of text as the tensors of a task, each as long as its own text.

    Rows become tokens in blocks, which are kept in a temporary file.
    """

    def __init__(
        self,
        rows: TableRows,
        task: TextTask,
        config: DataConfig,
        unit: str | None = None,
    ) -> None:
        task.check(rows.schema)
        if config.weight is not None:
            require_numbers(config.weight, rows.schema.field(config.weight).type)
        self._rows, self._task, self._weight = rows, task, config.weight
        self.weighted = config.weight is not None
        weight = (Field(_WEIGHT),) if self.weighted else ()
        self._fields = (*task.fields[:-1], *weight, task.fields[-1])
        self._kept = KeptBytes()
        self.keywords = tuple(field.name for field in task.fields if field.name != TARGET)
        self.input_names, self.tokenizer = self.keywords, task.tokenizer
        self.notes, self.stamps = (*task.tokenizer.notes, *rows.notes), rows.stamps
        self.class_names = task.class_names
        self.ragged = RaggedAxes(
            tuple(field.axes for field in self._fields),
            tuple(field.padding for field in self._fields),
            masked="attention_mask" in self.keywords,
            limit=task.tokenizer.limit,
        )
        targets = None
        if config.target_column is not None:
            column = rows.table.select([config.target_column])
            targets = task.targets(TextRows(column, range(rows.count), rows.place))
        ids, units = ids_and_units(config, unit, rows.count, lambda name: rows.column(name).to_pandas())
        super().__init__(ids, targets, _fingerprint(rows, task), units)

    def take(self, rows: RowNumbers) -> Block:
        numbers = self._existing(rows).tolist()
        made = self._made([row for row in dict.fromkeys(numbers) if row not in self._kept], numbers)
        encoded = [made[row] if row in made else self._of_kept(row) for row in numbers]
        *inputs, target = (
            padded_and_stacked([torch.from_numpy(row[place]) for row in encoded], field.padding)
            for place, field in enumerate(self._fields)
        )
        lengths = torch.tensor([_lengths(row, self._fields) for row in encoded])
        return Block(tuple(inputs), target, lengths, self.ragged)

    def describe(self, row: int) -> str:
        return self._task.describe(TextRows(self._rows.take([row]), [row], self._rows.place))

    def row_name(self, row: int) -> str:
        return self._rows.row_name(row)

    def _made(self, missing: list[int], requested: list[int]) -> dict[int, EncodedRow]:
        """These rows as tokens, which are kept; where neighbours are asked for, the next ones, too, as a
        tokenizer is faster with many rows at once.
        """
        if missing and requested == list(range(requested[0], requested[-1] + 1)):
            missing = list(range(missing[0], min(len(self), -(-(requested[-1] + 1) // BLOCK) * BLOCK)))
        made: dict[int, EncodedRow] = {}
        for start in range(0, len(missing), BLOCK):
            part = missing[start : start + BLOCK]
            made.update(zip(part, self._encoded(part), strict=True))
        for row, encoded in made.items():
            self._kept.put(row, pickle.dumps(encoded, pickle.HIGHEST_PROTOCOL))
        return made

    def _of_kept(self, row: int) -> EncodedRow:
        content = self._kept.get(row)
        assert content is not None
        found: EncodedRow = pickle.loads(content)
        return found

    def _encoded(self, rows: list[int]) -> list[EncodedRow]:
        texts = TextRows(self._rows.take(np.array(rows)), rows, self._rows.place)
        encoded = self._task.encode(texts)
        if self._weight is not None:
            given = np.asarray(texts.values(self._weight), np.float64)
            weights = checked_weights(torch.from_numpy(given), self._weight, texts.where).numpy()
            encoded = [(*row[:-1], weight, row[-1]) for row, weight in zip(encoded, weights, strict=True)]
        return [tuple(_of_a_block(value) for value in row) for row in encoded]


def _of_a_block(value: Array) -> Array:
    """A value in one of the types that a block holds."""
    return np.asarray(value, np.float32 if np.asarray(value).dtype.kind == "f" else np.int64)


def _lengths(row: EncodedRow, fields: Sequence[Field]) -> list[int]:
    """The length of each ragged axis of a row."""
    found = {
        column: row[place].shape[axis] for place, field in enumerate(fields) for axis, column in field.axes
    }
    return [found[column] for column in sorted(found)]


def _fingerprint(rows: TableRows, task: TextTask) -> str:
    """A SHA-256 of all that decides the tensors: the files, the tokenizer, the task and its options."""
    data, config = task.data, task.pretrained.config
    given = data.model_dump(include={*_COLUMNS, "class_names"})
    identity = {
        "format": _FORMAT,
        "files": rows.fingerprint,
        "tokenizer": task.tokenizer.fingerprint,
        "task": task.pretrained.task,
        "inputs": [[field.name, field.padding] for field in task.fields],
        "max_length": task.tokenizer.limit,
        "truncation": data.truncation,
        "data": given,
        "labels": {str(key): name for key, name in (config.id2label or {}).items()},
        "start": getattr(config, "decoder_start_token_id", None),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
