"""A dataset of texts: the task that makes tokens of rows, by its name in a config, and the tokens, made when
asked for, kept without padding in mapped Arrow tables.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.config.model import Task
from psgrad.data.rows import Block, Samples, checked_weights, ids_and_units
from psgrad.data.sources.arrow_columns import plain, require_numbers
from psgrad.data.sources.source_rows import Array, SourceRows, TemporaryFolder
from psgrad.data.tasks.classification import Regression, SequenceClassification, TokenClassification
from psgrad.data.tasks.language_models import CausalLM, MaskedLM, Seq2SeqLM
from psgrad.data.tasks.questions import MultipleChoice, QuestionAnswering
from psgrad.data.tasks.task import TARGET, EncodedRow, Field, TextRows, TextTask
from psgrad.data.tokenizer import load_tokenizer
from psgrad.errors import ConfigError
from psgrad.models.pretrained import Pretrained
from psgrad.ragged import RaggedAxes

_TASKS: Mapping[Task, type[TextTask]] = {
    "sequence-classification": SequenceClassification,
    "regression": Regression,
    "token-classification": TokenClassification,
    "causal-lm": CausalLM,
    "masked-lm": MaskedLM,
    "seq2seq-lm": Seq2SeqLM,
    "multiple-choice": MultipleChoice,
    "question-answering": QuestionAnswering,
}


def text_task(data: DataConfig, base: Path, pretrained: Pretrained) -> TextTask:
    """What makes tensors of rows of text for a pretrained model, with its tokenizer.

    Raises ConfigError for keys that the task does not take, DataError where there is no tokenizer.
    """
    kind = _TASKS.get(pretrained.task)
    if kind is None:
        raise ConfigError(
            f"data.text is given, and model.task is {pretrained.task}",
            expected=f"one of the tasks of text: {', '.join(_TASKS)}",
        )
    return kind(data, load_tokenizer(data, base, pretrained), pretrained)


_WEIGHT = "weight"
BLOCK = 256  # rows that are tokenised together
_COLUMNS = ("text", "prompt", "completion", "messages", "target", "weight")
_FORMAT = 1  # version of how a row becomes tokens, a part of the fingerprint


class TextSamples(Samples):
    """Rows of text as the tensors of a task, each as long as its own text.

    Rows become tokens in blocks, which are kept in memory-mapped files: in the folder `kept`, where a later
    process finds them, or in a temporary one.
    """

    def __init__(
        self,
        rows: SourceRows,
        task: TextTask,
        config: DataConfig,
        unit: str | None = None,
        kept: Path | None = None,
    ) -> None:
        task.check(rows.schema)
        if config.weight is not None:
            require_numbers(config.weight, rows.schema.field(config.weight).type)
        self._rows, self._task, self._weight = rows, task, config.weight
        self.weighted = config.weight is not None
        weight = (Field(_WEIGHT),) if self.weighted else ()
        self._fields = (*task.fields[:-1], *weight, task.fields[-1])
        fingerprint = _fingerprint(rows, task)
        self._blocks = TokenBlocks(kept, fingerprint)
        self.keywords = tuple(field.name for field in task.fields if field.name != TARGET)
        self.notes = task.tokenizer.notes
        self.class_names = task.class_names
        self.labels_are_positions = task.labels_are_positions
        self.ragged = RaggedAxes(
            tuple(field.axes for field in self._fields),
            tuple(field.padding for field in self._fields),
            masked=task.masked and "attention_mask" in self.keywords,
            limit=task.tokenizer.limit,
        )
        targets = None
        if config.target_column is not None:
            column = pa.table({config.target_column: plain(rows.column(config.target_column))})
            targets = task.targets(TextRows(column, range(rows.count), rows.line))
        ids, units = ids_and_units(
            config, unit, rows.count, lambda name: plain(rows.column(name)).to_pandas()
        )
        super().__init__(ids, targets, fingerprint, units)

    def read(self, start: int, stop: int) -> Block:
        numbers = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        parts = [
            self._block(number).slice(
                max(start - number * BLOCK, 0), min(stop, (number + 1) * BLOCK) - max(start, number * BLOCK)
            )
            for number in numbers
        ]
        return self._stacked(parts)

    def take(self, rows: Array) -> Block:
        distinct, places = np.unique(self._existing(rows), return_inverse=True)
        parts = []
        for group in np.split(distinct, np.flatnonzero(np.diff(distinct // BLOCK)) + 1):
            kept = self._blocks.get(int(group[0]) // BLOCK)
            parts.append(self._encoded(group) if kept is None else kept.take(pa.array(group % BLOCK)))
        return self._stacked(parts).at(places)

    def describe(self, row: int) -> str:
        return self._task.describe(TextRows(self._rows.read(row, row + 1), [row], self._rows.place))

    def row_name(self, row: int) -> str:
        return self._rows.row_name(row, line=True)

    def input_names(self) -> list[str]:
        return list(self.keywords)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self._task.tokenizer.pieces(ids)

    def special_tokens(self) -> frozenset[int]:
        return self._task.tokenizer.special_tokens

    def _block(self, number: int) -> pa.Table:
        found = self._blocks.get(number)
        if found is None:
            rows = np.arange(number * BLOCK, min((number + 1) * BLOCK, len(self)))
            found = self._blocks.put(number, self._encoded(rows))
        return found

    def _encoded(self, rows: Array) -> pa.Table:
        numbers = rows.tolist()
        consecutive = numbers[-1] - numbers[0] + 1 == len(numbers)
        table = self._rows.read(numbers[0], numbers[-1] + 1) if consecutive else self._rows.take(rows)
        texts = TextRows(table, numbers, self._rows.place)
        encoded = self._task.encode(texts)
        if self._weight is not None:
            given = np.asarray(texts.values(self._weight), np.float64)
            weights = checked_weights(torch.from_numpy(given), self._weight, texts.where).numpy()
            encoded = [(*row[:-1], weight, row[-1]) for row, weight in zip(encoded, weights, strict=True)]
        return packed(encoded, self._fields)

    def _stacked(self, parts: Sequence[pa.Table]) -> Block:
        (*inputs, target), lengths = stacked(pa.concat_tables(parts), self._fields)
        return Block(tuple(inputs), target, lengths, self.ragged)


def _fingerprint(rows: SourceRows, task: TextTask) -> str:
    """A SHA-256 of all that decides the tensors: the files, the tokenizer, the task and its options."""
    data, config = task.data, task.pretrained.config
    given = data.model_dump(include={*_COLUMNS, "class_names", "masked", "seed"})
    said = {
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
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


_LENGTHS = "lengths"
_OPEN = 8  # files that stay mapped


def packed(rows: Sequence[EncodedRow], fields: Sequence[Field]) -> pa.Table:
    """A table of these rows: a column for each field, with the values of a row as a list, and the lengths."""
    columns: dict[str, pa.Array] = {}
    for place, field in enumerate(fields):
        values = [row[place] for row in rows]
        kind = np.dtype(np.float32 if values[0].dtype.kind == "f" else np.int32)
        ends = np.cumsum([0, *(value.size for value in values)], dtype=np.int64)
        flat = np.concatenate([value.ravel() for value in values]).astype(kind)
        columns[field.name] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))
    lengths = np.array([_lengths(row, fields) for row in rows], np.int64)
    columns[_LENGTHS] = pa.FixedSizeListArray.from_arrays(pa.array(lengths.ravel()), lengths.shape[1])
    shapes = {field.name: list(rows[0][place].shape) for place, field in enumerate(fields)}
    return pa.table(columns).replace_schema_metadata({"shapes": json.dumps(shapes)})


def _lengths(row: EncodedRow, fields: Sequence[Field]) -> list[int]:
    found = {
        column: row[place].shape[axis] for place, field in enumerate(fields) for axis, column in field.axes
    }
    return [found[column] for column in sorted(found)]


def stacked(table: pa.Table, fields: Sequence[Field]) -> tuple[list[Tensor], Tensor]:
    """(the tensor of each field [n, ...], padded to its longest row; lengths [n, a]) of packed rows."""
    count, shapes = len(table), json.loads(table.schema.metadata[b"shapes"])
    lengths = _flat(table.column(_LENGTHS)).reshape(count, -1)
    tensors = []
    for field in fields:
        values, shape, inside = _flat(table.column(field.name)), [count, *shapes[field.name]], None
        for axis, column in field.axes:
            shape[axis + 1] = width = int(lengths[:, column].max())
            own = np.arange(width) < lengths[:, column, None]
            own = own.reshape(count, *[1] * axis, width, *[1] * (len(shape) - axis - 2))
            inside = own if inside is None else inside & own
        kind = np.float32 if values.dtype.kind == "f" else np.int64
        whole = np.full(shape, field.padding, kind)
        whole[np.broadcast_to(True if inside is None else inside, shape)] = values
        tensors.append(torch.from_numpy(whole))
    return tensors, torch.from_numpy(lengths.astype(np.int64))


def _flat(column: pa.ChunkedArray) -> Array:
    found: Array = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return found


class TokenBlocks:
    """Tables by number, each in a file of its own.

    Args:
        kept: of a run, where files outlive this process once the run has begun; None for a temporary folder.
        key: what tells these tables from others in the same folder.

    A file that can't be written is not kept, one that can't be read counts as not there.
    """

    def __init__(self, kept: Path | None, key: str) -> None:
        self._temporary = TemporaryFolder()
        self._kept = kept
        self._name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._open: OrderedDict[int, pa.Table] = OrderedDict()

    def get(self, number: int) -> pa.Table | None:
        """The table of this number; None where there is none."""
        found = self._open.get(number)
        for folder in self._folders() if found is None else []:
            path = self._path(folder, number)
            with suppress(OSError, pa.ArrowException):
                if found is None and path.exists():
                    found = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        if found is not None:
            self._open[number] = found
            self._open.move_to_end(number)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return found

    def put(self, number: int, table: pa.Table) -> pa.Table:
        """Store the table, and return it: from its file where that could be written."""
        with suppress(OSError):
            path = self._path(self._folders()[0], number)
            path.parent.mkdir(parents=True, exist_ok=True)
            half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with pa.ipc.new_file(str(half), table.schema) as writer:
                    writer.write_table(table)
                half.replace(path)
            finally:
                half.unlink(missing_ok=True)
        found = self.get(number)
        return table if found is None else found

    def _folders(self) -> list[Path]:
        temporary = Path(self._temporary.name)
        usable = self._kept is not None and (self._kept.parent / "manifest.json").exists()
        return [self._kept, temporary] if self._kept is not None and usable else [temporary]

    def _path(self, folder: Path, number: int) -> Path:
        return folder / self._name / f"{number:06d}.arrow"
