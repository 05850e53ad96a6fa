"""A config for a model of your own or a pretrained folder, and a dataset, for `psgrad init --from`. It reads
the names of columns and the first rows; nothing is imported, and there is no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from psgrad.config.data import data_format
from psgrad.config.model import TASK_LOSSES
from psgrad.errors import ConfigError, DataError, ModelError

_TARGETS = ("label", "labels", "target", "targets", "y", "class", "score")
_IDS = ("id", "uid", "uuid")
_INPUTS = ("x", "inputs", "input", "image", "images", "features")
_TEXTS = ("text", "sentence", "content", "review", "document", "body", "source", "input")
_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"))
_WRITTEN = ("completion", "target", "summary", "translation", "output", "response", "answer")
_TASKS: Mapping[str, tuple[str, Mapping[str, Sequence[str]]]] = {
    "ForSequenceClassification": ("sequence-classification", {"text": _TEXTS, "target": _TARGETS}),
    "ForTokenClassification": (
        "token-classification",
        {"text": ("tokens", "words", *_TEXTS), "target": ("ner_tags", "tags", "pos_tags", "labels")},
    ),
    "ForCausalLM": ("causal-lm", {"text": _TEXTS}),
    "LMHeadModel": ("causal-lm", {"text": _TEXTS}),
    "ForMaskedLM": ("masked-lm", {"text": _TEXTS}),
    "ForConditionalGeneration": (
        "seq2seq-lm",
        {"text": (*_TEXTS, "prompt", "question"), "target": _WRITTEN},
    ),
    "ForImageClassification": (
        "image-classification",
        {"image": ("image", "img", "path", "file"), "target": _TARGETS},
    ),
}
"""end of a class's name -> (its task, key of `data` -> the names that its column may have)."""
_OF_CAUSAL_LM: tuple[Mapping[str, Sequence[str]], ...] = (
    {"messages": ("messages", "conversations", "chat")},
    {"prompt": ("prompt", "instruction", "question"), "completion": _WRITTEN},
)


def proposed(model: str, data: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """(a config as plain values, what a person should look at). folder: the one that the config will be in.

    Args:
        model: a folder of save_pretrained, or a factory: FILE.py:CALLABLE or MODULE:CALLABLE.
        data: a file of rows or a folder of images.

    Raises ModelError for a model of no known task, DataError for a file without the columns that are needed.
    """
    columns = {} if data.is_dir() else _columns_of(data)
    place = _relative(data, folder)
    if ":" in model and not Path(model).is_dir():
        location, name = model.rsplit(":", 1)
        location = _relative(Path(location), folder) if location.endswith(".py") else location
        section: dict[str, Any] = {"factory": f"{location}:{name}"}
        rows, loss = _rows_for_factory(data, columns)
        target = f"the target is {rows['target']!r}, and " if "target" in rows else ""
        notes = [
            "the weights are those that the factory gives; model.checkpoint names a file of others",
            f"{target}the loss is {loss}: check that",
        ]
    else:
        task, wanted = _task_of(Path(model))
        section = {"pretrained": _relative(Path(model), folder), "task": task}
        rows, loss = _rows_for_task(task, wanted, data, columns), TASK_LOSSES[task]
        notes = [f"the task is {task}"]
    taken = [name for each in rows.values() for name in ([each] if isinstance(each, str) else each)]
    identifier = _named(_IDS, [name for name in columns if name not in taken])
    source = {"images": place} if data.is_dir() else {"path": place}
    rows = {**source, **rows} | ({"id": identifier} if identifier else {})
    output = f"runs/{data.resolve().name.split('.')[0]}"
    return {"version": 1, "model": section, "loss": loss, "data": rows, "output": output}, notes


def _rows_for_factory(data: Path, columns: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The columns for a model of one's own, and the loss: all columns of numbers are inputs."""
    if data.is_dir():
        return {}, "cross_entropy"
    target = _named(_TARGETS, list(columns)) or list(columns)[-1]
    identifier = _named(_IDS, [name for name in columns if name != target])
    numbers = [name for name, kind in columns.items() if kind != "text" and name not in (target, identifier)]
    if not numbers:
        raise DataError(f"{data} has no column of numbers beside {target!r}", hint="name a file with inputs")
    one = _named(_INPUTS, numbers) or (numbers[0] if len(numbers) == 1 else None)
    loss = "mse" if columns[target] == "fraction" else "cross_entropy"
    return {"inputs": one or numbers, "target": target}, loss


def _rows_for_task(
    task: str, wanted: Mapping[str, Sequence[str]], data: Path, columns: Mapping[str, str]
) -> dict[str, Any]:
    """The columns for a pretrained model. Raises DataError where their names do not say which is which."""
    if data.is_dir():
        if task != "image-classification":
            raise DataError(f"{data} is a folder, and {task} reads a file with columns")
        return {}
    names = list(columns)
    for layout in (*(_OF_CAUSAL_LM if task == "causal-lm" else ()), wanted):
        found: dict[str, Any] = {key: _named(each, names) for key, each in layout.items()}
        pair = next((list(pair) for pair in _PAIRS if set(pair) <= {*names}), None)
        if "text" in found and "target" in found and pair is not None:
            found["text"] = pair
        if None not in found.values():
            return found
    missing = [key for key, name in found.items() if name is None]
    raise DataError(
        f"the columns of {data}, {', '.join(names[:12])}, do not say which is"
        f" {' and which '.join(missing)}, for {task}",
        hint="rename the columns, or write the config by hand: docs/reference/data.md has one for each task",
    )


def _task_of(path: Path) -> tuple[str, Mapping[str, Sequence[str]]]:
    """(the task of a folder of save_pretrained, the columns that it needs). Raises ModelError."""
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{path} is a file of Python, and --from does not say what builds the model",
            hint=f"--from {path}:NAME, of a function that returns the model",
        )
    file = path / "config.json"
    try:
        about = json.loads(file.read_bytes())
        names = [str(each) for each in about.get("architectures") or []]
    except FileNotFoundError:
        raise ModelError(
            f"there is no {file}", hint="--from takes a folder of save_pretrained, or FILE.py:NAME"
        ) from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{file} is not the config of a model: {error}") from error
    found = next((each for name in names for end, each in _TASKS.items() if name.endswith(end)), None)
    if found is None:
        raise ModelError(
            f"{file} names the architecture {', '.join(names) or 'none'}, which has no head",
            hint=f"save a model whose class ends in {', '.join(_TASKS)}",
        )
    one_number = about.get("problem_type") == "regression" or len(about.get("id2label") or {}) == 1
    regression = found[0] == "sequence-classification" and one_number
    return ("regression", found[1]) if regression else found


def _columns_of(path: Path) -> dict[str, str]:
    """name -> integer, fraction or text, of the columns of a file. Raises DataError."""
    if not path.exists():
        raise DataError(f"there is no dataset {path}", hint="check the path")
    kind = data_format(path)
    tabs = pa.dataset.CsvFileFormat(pa.csv.ParseOptions(delimiter="\t"))
    formats = {"csv": "csv", "tsv": tabs, "jsonl": "json", "parquet": "parquet", "arrow": "arrow"}
    try:
        if kind == "npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: _KINDS.get(arrays[name].dtype.kind, "text") for name in arrays.files}
        schema = pa.dataset.dataset(path, format=formats[kind]).schema
    except KeyError:
        raise DataError(
            f"the columns of {path} can't be read by init",
            hint=f"name a file of {', '.join([*formats, 'npz'])}",
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    return {each.name: _kind_of(each.type) for each in schema}


_KINDS = {"i": "integer", "u": "integer", "b": "integer", "f": "fraction"}


def _kind_of(kind: pa.DataType) -> str:
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    listed = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    return "fraction" if pa.types.is_floating(kind) or listed else "text"


def _named(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of the wanted names that there is, in whatever case."""
    known = {name.lower(): name for name in reversed(names)}
    return next((known[name] for name in wanted if name in known), None)


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.resolve(), base.resolve())).as_posix()
