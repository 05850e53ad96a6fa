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
_WRITTEN = ("target", "summary", "translation", "output", "response", "answer")

Layout = Mapping[str, tuple[str, ...] | list[str]]
"""key of `data` -> the names that its column may have, or a list of columns that it needs all."""

_ONE_TEXT: tuple[Layout, ...] = (
    {"text": ["sentence1", "sentence2"], "target": _TARGETS},
    {"text": ["premise", "hypothesis"], "target": _TARGETS},
    {"text": _TEXTS, "target": _TARGETS},
)
_LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "sequence-classification": _ONE_TEXT,
    "regression": _ONE_TEXT,
    "token-classification": (
        {"text": ("tokens", "words", *_TEXTS), "target": ("ner_tags", "tags", "pos_tags", "labels")},
    ),
    "causal-lm": (
        {"messages": ("messages", "conversations", "chat")},
        {"prompt": ("prompt", "instruction", "question"), "completion": ("completion", *_WRITTEN)},
        {"text": _TEXTS},
    ),
    "masked-lm": ({"text": _TEXTS},),
    "seq2seq-lm": ({"text": (*_TEXTS, "prompt", "question"), "target": _WRITTEN},),
    "image-classification": ({"image": ("image", "img", "path", "file"), "target": _TARGETS},),
}
"""task -> what its dataset may look like; the first that fits."""
_HEADS = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForConditionalGeneration": "seq2seq-lm",
    "ForImageClassification": "image-classification",
}
_OF_ADAPTERS = {
    "SEQ_CLS": "sequence-classification",
    "TOKEN_CLS": "token-classification",
    "CAUSAL_LM": "causal-lm",
    "SEQ_2_SEQ_LM": "seq2seq-lm",
}


def proposed(model: str, data: Path | None, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """(a config as plain values, what a person should look at). folder: the one that the config will be in.

    Args:
        model: a folder of save_pretrained or of PEFT, or a factory: FILE.py:CALLABLE or MODULE:CALLABLE.
        data: a file of rows or a folder of images; None for names that are examples.

    Raises ModelError for a model of no known task, DataError for a file without the columns that are needed.
    """
    if ":" in model and not Path(model).is_dir():
        if data is None:
            raise ConfigError(
                "--from names a factory, and no --data was given",
                hint="add --data FILE",
            )
        location, name = model.rsplit(":", 1)
        place = _relative(Path(location), folder) if location.endswith(".py") else location
        section: dict[str, Any] = {"factory": f"{place}:{name}"}
        rows, loss = _rows_for_factory(data, folder)
        target = f"the target is {rows['target']!r}, and " if "target" in rows else ""
        notes = [
            "the weights are those that the factory gives; model.checkpoint names a file of others",
            f"{target}the loss is {loss}: check that",
        ]
    else:
        section = _pretrained_model(Path(model), folder)
        task = section["task"]
        rows, loss = _rows_for_task(task, data, folder), TASK_LOSSES[task]
        notes = [f"the task is {task}"]
        notes += [] if data else ["no --data was given: the names of file and columns are examples"]
    output = "runs/" + ("mine" if data is None else data.resolve().name.split(".")[0])
    return {"version": 1, "model": section, "loss": loss, "data": rows, "output": output}, notes


def _rows_for_factory(data: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """The section data for a model of one's own, and the loss: all columns of numbers are inputs."""
    if data.is_dir():
        return {"images": _relative(data, folder)}, "cross_entropy"
    columns = _columns_of(data)
    target = _named(_TARGETS, list(columns)) or list(columns)[-1]
    identifier = _named(_IDS, [name for name in columns if name != target])
    numbers = [name for name, kind in columns.items() if kind != "text" and name not in (target, identifier)]
    if not numbers:
        raise DataError(
            f"{data} has no column of numbers beside {target!r}",
            hint="name a file with inputs",
        )
    one = _named(_INPUTS, numbers) or (numbers[0] if len(numbers) == 1 else None)
    rows: dict[str, Any] = {"path": _relative(data, folder), "inputs": one or numbers, "target": target}
    loss = "mse" if columns[target] == "fraction" else "cross_entropy"
    return rows | ({"id": identifier} if identifier else {}), loss


def _rows_for_task(task: str, data: Path | None, folder: Path) -> dict[str, Any]:
    """The section data for a pretrained model."""
    if data is None:
        last = _LAYOUTS[task][-1]
        return {
            "path": "train.jsonl",
            **{key: each if isinstance(each, list) else each[0] for key, each in last.items()},
        }
    if data.is_dir():
        if task != "image-classification":
            raise DataError(f"{data} is a folder, and {task} reads a file with columns")
        return {"images": _relative(data, folder)}
    names = list(_columns_of(data))
    columns = _columns_for(task, data, names)
    taken = [name for each in columns.values() for name in ([each] if isinstance(each, str) else each)]
    identifier = _named(_IDS, [name for name in names if name not in taken])
    return {"path": _relative(data, folder), **columns} | ({"id": identifier} if identifier else {})


def _columns_for(task: str, data: Path, names: Sequence[str]) -> dict[str, str | list[str]]:
    """The keys of data for a task, from the names of the columns. Raises DataError where they do not say."""
    missing: list[str] = []
    for layout in _LAYOUTS[task]:
        found: dict[str, str | list[str]] = {}
        for key, wanted in layout.items():
            left = [name for name in names if name not in found.values()]
            one = _named(wanted, left)
            if isinstance(wanted, list) and set(wanted) <= set(left):
                found[key] = wanted
            elif isinstance(wanted, tuple) and one is not None:
                found[key] = one
        missing = [key for key in layout if key not in found]
        if not missing:
            return found
    raise DataError(
        f"the columns of {data}, {', '.join(names[:12])}, do not say which is"
        f" {' and which '.join(missing)}, for {task}",
        hint="write the config without --data, and name the columns in it",
    )


def _pretrained_model(path: Path, folder: Path) -> dict[str, Any]:
    """The section model of a folder of save_pretrained or of PEFT. Raises ModelError."""
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{path} is a file of Python, and --from does not say what builds the model",
            hint=f"--from {path}:NAME, of a function that returns the model",
        )
    if (path / "adapter_config.json").is_file():
        about = _json(path / "adapter_config.json")
        base, kind = about.get("base_model_name_or_path"), str(about.get("task_type"))
        if not base or kind not in _OF_ADAPTERS:
            raise ModelError(
                f"{path / 'adapter_config.json'} names the base model {base!r} and the task {kind}",
                hint="write both into it: base_model_name_or_path, and a task_type such as CAUSAL_LM",
            )
        name = _relative(Path(base), folder) if Path(base).is_dir() else base
        return {"pretrained": name, "task": _OF_ADAPTERS[kind], "adapter": _relative(path, folder)}
    about = _json(path / "config.json")
    names = [str(each) for each in about.get("architectures") or []]
    task = next((task for name in names for end, task in _HEADS.items() if name.endswith(end)), None)
    if task is None:
        raise ModelError(
            f"{path / 'config.json'} names the architecture {', '.join(names) or 'none'}, which has no head",
            hint=f"save a model whose class ends in {', '.join(_HEADS)}",
        )
    labels = about.get("id2label") or {}
    one_number = about.get("problem_type") == "regression" or len(labels) == 1
    if task == "sequence-classification" and one_number:
        task = "regression"
    return {"pretrained": _relative(path, folder), "task": task}


def _columns_of(path: Path) -> dict[str, str]:
    """name -> integer, fraction or text, of the columns of a file. Raises DataError."""
    if not path.exists():
        raise DataError(
            f"there is no dataset {path}",
            hint="check the path",
        )
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
            hint=f"name a file of {', '.join([*formats, 'npz'])}, or write the config without --data",
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


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"there is no {path}",
            hint="--from takes a folder of save_pretrained or of PEFT, or FILE.py:NAME",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no object, and the config of a model is one")
    return found
