"""A config for a model of your own or a pretrained folder, and a dataset. It reads names, headers and the
first rows; nothing is imported, and there is no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset

from psgrad.config import DATA_SUFFIXES, DataConfig
from psgrad.config.data import data_format
from psgrad.config.model import TASK_LOSSES
from psgrad.data.sources.source import DataHeader, data_headers
from psgrad.errors import ConfigError, DataError, ModelError
from psgrad.run.code_checks import callables_in

_ROWS = 1000  # that are read to tell ids and classes
_LONGEST_ID = 100  # characters
_TEXT_TYPES = (pa.string(), pa.large_string())
_TARGETS = ("label", "labels", "target", "targets", "y", "class", "outcome", "score")
_IDS = ("id", "uid", "uuid", "name", "key")
_INPUTS = ("x", "inputs", "input", "image", "images", "features", "data")
_TEXTS = ("text", "sentence", "content", "review", "document", "body", "utterance", "source", "input")
_WRITTEN = ("target", "summary", "highlights", "translation", "output", "response", "answer")
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("query", "passage"),
)

Layout = Mapping[str, tuple[str, ...] | list[str]]
"""key of `data` -> the names that its column may have, or a list of columns that it needs all."""

_PAIRED: tuple[Layout, ...] = tuple({"text": list(pair), "target": _TARGETS} for pair in _PAIRS)
_ONE_TEXT: tuple[Layout, ...] = (*_PAIRED, {"text": _TEXTS, "target": _TARGETS})
_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "sequence-classification": _ONE_TEXT,
    "regression": _ONE_TEXT,
    "token-classification": (
        {"text": ("tokens", "words", *_TEXTS), "target": ("ner_tags", "tags", "pos_tags", "labels", "label")},
    ),
    "causal-lm": (
        {"messages": ("messages", "conversations", "chat")},
        {
            "prompt": ("prompt", "instruction", "question", "input"),
            "completion": ("completion", "response", "output", "answer"),
        },
        {"text": _TEXTS},
    ),
    "masked-lm": ({"text": _TEXTS},),
    "seq2seq-lm": ({"text": (*_TEXTS, "prompt", "instruction", "question"), "target": _WRITTEN},),
    "question-answering": ({"text": ["question", "context"], "target": ("answers", "answer")},),
    "multiple-choice": ({"text": ["question", "choices"], "target": (*_TARGETS, "answer")},),
    "image-classification": ({"image": ("image", "img", "path", "file"), "target": _TARGETS},),
}
"""task -> what its dataset may look like; the first that fits."""

_ENDINGS: Mapping[str, str] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForImageClassification": "image-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
}
_OF_ADAPTERS: Mapping[str, str] = {
    "SEQ_CLS": "sequence-classification",
    "TOKEN_CLS": "token-classification",
    "CAUSAL_LM": "causal-lm",
    "SEQ_2_SEQ_LM": "seq2seq-lm",
    "QUESTION_ANS": "question-answering",
}


@dataclass(frozen=True)
class Proposal:
    """A config as plain values, and what a person should look at."""

    settings: dict[str, Any]
    notes: list[str]


def proposed(model: str, base_model: str | None, data: Path | None, folder: Path) -> Proposal:
    """A config for a model and a dataset. folder: the one that the config will be in.

    Args:
        model: a folder of save_pretrained or of PEFT, or a factory: FILE.py:CALLABLE or MODULE:CALLABLE.
        base_model: the folder or hub id of an adapter's base model, where the adapter does not say.

    Raises ModelError for a model of no known task, DataError for a file without the columns that are needed.
    """
    notes: list[str] = []
    if ":" in model and not Path(model).is_dir():
        location, name = model.rsplit(":", 1)
        place = _relative(Path(location), folder) if location.endswith(".py") else location
        section: dict[str, Any] = {"factory": f"{place}:{name}"}
        rows, loss = _rows_of_factory(data, folder, notes)
        notes.append("the weights are those that the factory gives; model.checkpoint names a file of others")
    else:
        section = _pretrained_model(Path(model), base_model, folder, notes)
        task = section["task"]
        rows, loss = _rows_of_task(task, data, folder, notes), TASK_LOSSES[task]
    output = "runs/" + ("mine" if data is None else data.resolve().name.split(".")[0])
    settings = {"version": 1, "model": section, "loss": {"name": loss}, "data": rows, "output": output}
    return Proposal(settings, notes)


def _rows_of_factory(data: Path | None, folder: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    """The section data for a model of one's own, and the loss."""
    if data is None:
        raise ConfigError(
            "--from names a factory, and no --data was given",
            expected="a file of rows, or a folder of images",
        )
    if data.is_dir():
        notes.append(
            "the loss is cross_entropy; set data.size, mean and std to what the model was trained on"
        )
        return {"images": _relative(data, folder)}, "cross_entropy"
    header, first = _header(data), _first_rows(data)
    names = header.names
    target = _named(_TARGETS, names) or names[-1]
    identifier = _identifier(first, header, [target])
    numbers = [
        name
        for name in names
        if name not in (target, identifier, *header.texts) and header.columns[name].kind != "text"
    ]
    if not numbers:
        raise DataError(
            f"{data} has no column of numbers beside {target!r}",
            expected="columns that a model of its own reads",
        )
    one = _named(_INPUTS, numbers)
    inputs: str | list[str] = one if one else numbers[0] if len(numbers) == 1 else numbers
    loss = "cross_entropy" if _has_classes(first, header, target) else "mse"
    notes.append(f"the target is {target!r}, and the loss {loss}; check both")
    rows = {"path": _relative(data, folder), "inputs": inputs, "target": target}
    return rows | ({"id": identifier} if identifier else {}), loss


def _rows_of_task(task: str, data: Path | None, folder: Path, notes: list[str]) -> dict[str, Any]:
    """The section data for a pretrained model."""
    if data is None:
        notes.append("no --data was given: the names of file and columns are examples")
        last = _LAYOUTS[task][-1]
        return {"path": "train.jsonl", **{k: v if isinstance(v, list) else v[0] for k, v in last.items()}}
    if data.is_dir():
        if task != "image-classification":
            raise DataError(f"{data} is a folder", expected=f"a file with columns, for {task}")
        return {"images": _relative(data, folder)}
    header = _header(data)
    columns = _columns(task, header)
    taken = [name for each in columns.values() for name in ([each] if isinstance(each, str) else each)]
    identifier = _identifier(_first_rows(data), header, taken)
    return {"path": _relative(data, folder), **columns} | ({"id": identifier} if identifier else {})


def _columns(task: str, header: DataHeader) -> dict[str, str | list[str]]:
    """The keys of data for a task, from the names of the columns. Raises DataError where they do not say."""
    missing: list[str] = []
    for layout in _LAYOUTS[task]:
        found: dict[str, str | list[str]] = {}
        for key, names in layout.items():
            left = [name for name in header.names if name not in found.values()]
            one = _named(names, left)
            if isinstance(names, list) and set(names) <= set(left):
                found[key] = names
            elif isinstance(names, tuple) and one is not None:
                found[key] = one
        missing = [key for key in layout if key not in found]
        if not missing:
            return found
    raise DataError(
        f"the columns of {header.path}, {', '.join(header.names[:12])}, do not say which is"
        f" {' and which '.join(missing)}, for {task}",
        next_step="write the config without --data, and name the columns in it",
    )


def _pretrained_model(path: Path, base_model: str | None, folder: Path, notes: list[str]) -> dict[str, Any]:
    """The section model. Raises ModelError."""
    if (path / "adapter_config.json").is_file():
        return _adapted_model(path, base_model, folder)
    if path.suffix == ".py" and path.is_file():
        names = [each.name for each in callables_in(path)]
        raise ConfigError(
            f"{path} is a file of Python, and --from does not say what builds the model",
            next_step=f"--from {path}:NAME, of {', '.join(names) or 'a function that returns the model'}",
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"there is no {path / 'config.json'}",
            expected="a folder of save_pretrained or of PEFT, or FILE.py:CALLABLE",
        )
    about = _json(path / "config.json")
    names = [str(each) for each in about.get("architectures") or []]
    task = next((task for name in names for end, task in _ENDINGS.items() if name.endswith(end)), None)
    if task is None:
        raise ModelError(
            f"{path / 'config.json'} names the architecture {', '.join(names) or 'none'}",
            expected=f"one whose name ends in {', '.join(_ENDINGS)}",
            cause="the folder has a model without a head, which has no loss",
        )
    labels = about.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else about.get("num_labels", 2)
    if task == "sequence-classification" and (about.get("problem_type") == "regression" or count == 1):
        task = "regression"
    notes.append(f"{names[0]} does {task}")
    return {"pretrained": _relative(path, folder), "task": task}


def _adapted_model(path: Path, base_model: str | None, folder: Path) -> dict[str, Any]:
    """The section model of a PEFT adapter. Raises ModelError and ConfigError."""
    about = _json(path / "adapter_config.json")
    base, kind = base_model or about.get("base_model_name_or_path"), str(about.get("task_type"))
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path / 'adapter_config.json'} does not name the base model",
            next_step="add --base FOLDER, the model that the adapter was trained on",
        )
    if kind not in _OF_ADAPTERS:
        raise ModelError(
            f"{path / 'adapter_config.json'} names the task {kind}",
            expected=f"one of {', '.join(_OF_ADAPTERS)}",
        )
    name = _relative(Path(base), folder) if Path(base).is_dir() else base
    return {"pretrained": name, "task": _OF_ADAPTERS[kind], "adapter": [_relative(path, folder)]}


def _identifier(first: pa.Table, header: DataHeader, taken: Sequence[str]) -> str | None:
    """The column that names the rows: one that is called so, or a column of short texts that all differ."""
    left = [name for name in header.names if name not in taken]
    named = _named(_IDS, left)
    texts: list[str] = [
        field.name for field in first.schema if field.name in left and field.type in _TEXT_TYPES
    ]
    for name in [named, *texts] if named else texts:
        if name not in first.column_names:
            return name  # of arrays, whose rows are not read here
        column = first[name].cast(pa.string()) if pa.types.is_primitive(first[name].type) else first[name]
        if column.null_count or column.type not in _TEXT_TYPES or len(pc.unique(column)) < len(column):
            continue
        lengths = pc.min_max(pc.utf8_length(column)).as_py()
        if lengths["min"] and (name == named or lengths["max"] <= _LONGEST_ID):
            return name
    return None


def _has_classes(first: pa.Table, header: DataHeader, target: str) -> bool:
    """Whether the target names classes: texts, whole numbers, true and false."""
    if target not in first.column_names:
        return header.columns[target].kind in ("integer", "boolean", "text")
    if not pa.types.is_floating(first[target].type):
        return True
    values = first[target].drop_null().cast(pa.float64())
    return bool(pc.all(pc.equal(values, pc.floor(values))).as_py())


def _header(path: Path) -> DataHeader:
    if f".{data_format(path)}" not in DATA_SUFFIXES:
        raise ConfigError(f"{path} ends in none of {', '.join(DATA_SUFFIXES)}", next_step="name another file")
    config = DataConfig.model_validate({"path": path.name, "inputs": "any"}, strict=False)
    return data_headers(config, path.parent)[0]


def _first_rows(path: Path) -> pa.Table:
    """The first rows of a table; no columns for a file of arrays, and for rows of mixed types."""
    suffix = data_format(path)
    tabs = pa.dataset.CsvFileFormat(pa.csv.ParseOptions(delimiter="\t"))
    kinds = {
        "csv": "csv",
        "tsv": tabs,
        "jsonl": "json",
        "parquet": "parquet",
        "arrow": "arrow",
        "feather": "arrow",
    }
    if suffix not in kinds:
        return pa.table({})
    try:
        return pa.dataset.dataset(path, format=kinds[suffix]).head(_ROWS)
    except (pa.ArrowException, OSError):
        return pa.table({})


def _named(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of the wanted names that there is, in whatever case."""
    known = {name.lower(): name for name in reversed(names)}
    return next((known[name] for name in wanted if name in known), None)


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.resolve(), base.resolve())).as_posix()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no object", expected="the config of a model")
    return found
