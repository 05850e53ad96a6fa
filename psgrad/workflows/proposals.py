"""A config for what lies in a folder: your own files, or a pretrained model and a data file. It looks at
names, headers and source text; nothing is imported, and there is no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psgrad.config import DATA_SUFFIXES, DataConfig
from psgrad.config.data import data_format
from psgrad.config.model import TASK_LOSSES
from psgrad.errors import ConfigError, DataError, ModelError
from psgrad.inputs.code_checks import callables_in
from psgrad.inputs.sources.source import DataHeader, data_headers

MODEL = "model.py"
_CHECKPOINTS = (".safetensors", ".pt", ".pth", ".ckpt")
_TABLES = (".csv", ".tsv", ".parquet", ".jsonl", ".arrow", ".feather", ".npz")
_BUILDERS = ("build", "build_model", "make_model", "create_model", "get_model", "load_model", "model")
_TARGETS = ("label", "labels", "target", "targets", "y", "class", "outcome", "score")
_IDS = ("id", "uid", "uuid", "name", "key")
_INPUTS = ("x", "inputs", "input", "image", "images", "features", "data")
_TEXTS = ("text", "sentence", "content", "review", "document", "body", "utterance", "source", "input")
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("query", "passage"),
)
_PROMPTS = ("prompt", "instruction", "question", "input")
_COMPLETIONS = ("completion", "response", "output", "answer")
_CHATS = ("messages", "conversations", "chat")
_WORDS = ("tokens", "words")
_TAGS = ("ner_tags", "tags", "pos_tags", "labels", "label")
_WRITTEN = ("target", "summary", "highlights", "translation", "output", "response", "answer")
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
    """A config as plain values, sentences above its keys, and what a person should look at."""

    settings: dict[str, Any]
    remarks: dict[str, str]
    notes: list[str]


def has_own_files(folder: Path) -> bool:
    """Whether a folder has a model.py and a data file."""
    return (folder / MODEL).is_file() and bool(_files(folder, _TABLES))


def own_files(folder: Path) -> Proposal:
    """A config for the model.py, the data file and the checkpoint of a folder. Raises ModelError and
    DataError for files that can't be understood.
    """
    notes: list[str] = []
    model: dict[str, Any] = {"factory": f"{MODEL}:{_factory(folder / MODEL, notes)}"}
    checkpoint = _one(_files(folder, _CHECKPOINTS), "checkpoint", notes)
    if checkpoint is None:
        notes.append("no checkpoint lies there: the weights are those that the factory gives")
    else:
        model["checkpoint"] = checkpoint.name
    path = _one(_files(folder, _TABLES), "dataset", notes)
    assert path is not None
    header, data = _header(path), {"path": path.name}
    columns = _columns(header)
    data |= columns
    loss = "cross_entropy" if _has_classes(path, header, columns["target"]) else "mse"
    notes.append(f"the target is {columns['target']!r}, and the loss {loss}; check both")
    settings = {
        "version": 1,
        "model": model,
        "loss": {"name": loss},
        "data": data,
        "output": f"runs/{path.name.split('.')[0]}",
    }
    return Proposal(
        settings, {"model": "Of the files in this folder: change what is not as you mean it."}, notes
    )


def pretrained(folder: Path, data: Path | None, base: Path) -> Proposal:
    """A config for a folder of save_pretrained, or of a PEFT adapter, and a data file. base: the folder that
    the config will be in.

    Raises ModelError for a folder without a config of a known task, DataError for a file without columns that
    the task takes.
    """
    notes: list[str] = []
    model = _pretrained_model(folder, base, notes)
    task = model["task"]
    if data is None:
        section: dict[str, Any] = {"path": "train.jsonl", **_PLACEHOLDERS.get(task, {"text": "text"})}
        notes.append("no --data was given: the names of file and columns are examples")
    elif data.is_dir():
        if task != "image-classification":
            raise DataError(f"{data} is a folder", expected=f"a file with columns, for {task}")
        section = {"images": _relative(data, base)}
    else:
        header = _header(data)
        section = {"path": _relative(data, base), **_text_columns(task, header)}
        identifier = _named(_IDS, header.names)
        section |= {"id": identifier} if identifier else {}
    settings = {
        "version": 1,
        "model": model,
        "loss": {"name": TASK_LOSSES[task]},
        "data": section,
        "output": f"runs/{folder.resolve().name}",
    }
    remarks = {"loss": "The loss of this task; it may be left out."}
    return Proposal(settings, remarks, notes)


_PLACEHOLDERS: Mapping[str, dict[str, Any]] = {
    "sequence-classification": {"text": "text", "target": "label"},
    "regression": {"text": "text", "target": "score"},
    "token-classification": {"text": "tokens", "target": "tags"},
    "causal-lm": {"prompt": "prompt", "completion": "completion"},
    "seq2seq-lm": {"text": "text", "target": "summary"},
    "question-answering": {"text": ["question", "context"], "target": "answers"},
    "multiple-choice": {"text": ["question", "choices"], "target": "label"},
    "image-classification": {"image": "image", "target": "label"},
}


def _pretrained_model(folder: Path, base: Path, notes: list[str]) -> dict[str, Any]:
    """The section model. Raises ModelError."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        about = _json(adapter)
        inner, kind = about.get("base_model_name_or_path"), str(about.get("task_type"))
        if not isinstance(inner, str) or kind not in _OF_ADAPTERS:
            raise ModelError(
                f"{adapter} names the base model {inner!r} and the task {kind}",
                expected=f"a base model, and one of {', '.join(_OF_ADAPTERS)}",
            )
        local = Path(inner)
        name = _relative(local, base) if local.is_dir() else inner
        return {"pretrained": name, "task": _OF_ADAPTERS[kind], "adapter": [_relative(folder, base)]}
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"there is no {folder / 'config.json'}",
            expected="a folder of save_pretrained, or of a PEFT adapter",
            next_step="psgrad init DIR --from FOLDER [--data FILE]",
        )
    about = _json(folder / "config.json")
    names = [str(each) for each in about.get("architectures") or []]
    task = next((task for name in names for end, task in _ENDINGS.items() if name.endswith(end)), None)
    if task is None:
        raise ModelError(
            f"{folder / 'config.json'} names the architecture {', '.join(names) or 'none'}",
            expected=f"one whose name ends in {', '.join(_ENDINGS)}",
            cause="the folder has a model without a head, which has no loss",
        )
    labels = about.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else about.get("num_labels", 2)
    if task == "sequence-classification" and (about.get("problem_type") == "regression" or count == 1):
        task = "regression"
    notes.append(f"{names[0]} does {task}")
    return {"pretrained": _relative(folder, base), "task": task}


def _text_columns(task: str, header: DataHeader) -> dict[str, Any]:
    """The keys of data for a task, from the names of the columns. Raises DataError where they do not say."""
    names = header.names
    pair = next((list(each) for each in _PAIRS if set(each) <= set(names)), None)
    text, target = _named(_TEXTS, names), _named(_TARGETS, names)
    written = _named(_WRITTEN, [name for name in names if name != text])
    chat, prompt = _named(_CHATS, names), _named(_PROMPTS, names)
    completion = _named(_COMPLETIONS, [name for name in names if name != prompt])
    words, tags = _named(_WORDS, names) or text, _named(_TAGS, names)
    found: dict[str, dict[str, Any]] = {
        "sequence-classification": {"text": pair or text, "target": target},
        "regression": {"text": pair or text, "target": target},
        "token-classification": {"text": words, "target": tags},
        "causal-lm": {"messages": chat}
        if chat
        else {"prompt": prompt, "completion": completion}
        if prompt and completion
        else {"text": text},
        "masked-lm": {"text": text},
        "seq2seq-lm": {"text": text or prompt, "target": written},
        "question-answering": {
            "text": ["question", "context"] if {"question", "context"} <= set(names) else None,
            "target": _named(("answers", "answer"), names),
        },
        "multiple-choice": {
            "text": ["question", "choices"] if {"question", "choices"} <= set(names) else None,
            "target": target or _named(("answer",), names),
        },
        "image-classification": {"image": _named(("image", "img", "path", "file"), names), "target": target},
    }
    keys = found[task]
    missing = [key for key, value in keys.items() if value is None]
    if missing:
        raise DataError(
            f"the columns of {header.path}, {', '.join(names[:12])}, do not say which is"
            f" {' and which '.join(missing)}, for {task}",
            next_step="write the config without --data, and name the columns in it",
        )
    return keys


def _factory(path: Path, notes: list[str]) -> str:
    """The name of what builds the model in a file. Raises ModelError where nothing does."""
    found = callables_in(path)
    ready = [each for each in found if not each.required]
    functions = {each.name: each for each in ready if not each.bases}
    modules = [each for each in ready if any(base.split(".")[-1] == "Module" for base in each.bases)]
    chosen = next((name for name in _BUILDERS if name in functions), None)
    if chosen is None and modules:
        chosen = modules[-1].name  # the whole usually stands below its parts
    if chosen is None and functions:
        chosen = next(iter(functions))
    if chosen is not None:
        others = [each.name for each in ready if each.name != chosen and not each.name.startswith("_")]
        notes.append(f"the model is {path.name}:{chosen}" + (f", not {', '.join(others)}" if others else ""))
        return chosen
    if not found:
        raise ModelError(
            f"{path} defines no function and no class",
            expected="a function that returns the model, or its class",
        )
    first = next((each for each in found if each.name in _BUILDERS), found[-1])
    notes.append(f"{path.name}:{first.name} needs {', '.join(first.required)}: write them into model.kwargs")
    return first.name


def _columns(header: DataHeader) -> dict[str, Any]:
    """inputs, target and id of a table of numbers. Raises DataError where no column is left for inputs."""
    names = header.names
    target = _named(_TARGETS, names) or names[-1]
    identifier = _named(_IDS, [name for name in names if name != target])
    numbers = [
        name
        for name in names
        if name not in (target, identifier, *header.texts) and header.columns[name].kind != "text"
    ]
    if not numbers:
        raise DataError(
            f"{header.path} has no column of numbers beside {target!r}",
            expected="columns that a model of its own reads",
            next_step="psgrad init --from FOLDER --data FILE is for texts and a pretrained model",
        )
    one = _named(_INPUTS, numbers)
    inputs: str | list[str] = one if one else numbers[0] if len(numbers) == 1 else numbers
    return {"inputs": inputs, "target": target} | ({"id": identifier} if identifier else {})


def _has_classes(path: Path, header: DataHeader, target: str) -> bool:
    """Whether the target names classes: texts, whole numbers, true and false."""
    kind = header.columns[target].kind
    if target in header.texts:
        return True
    if kind is not None:
        return kind in ("integer", "boolean", "text")
    import pandas as pd

    cells = pd.read_csv(path, sep="\t" if data_format(path) == "tsv" else ",", usecols=[target], nrows=1000)
    return bool((cells[target].dropna() % 1 == 0).all())


def _header(path: Path) -> DataHeader:
    if f".{data_format(path)}" not in DATA_SUFFIXES:
        raise ConfigError(f"{path} ends in none of {', '.join(DATA_SUFFIXES)}", next_step="name another file")
    config = DataConfig.model_validate({"path": path.name, "inputs": "any"}, strict=False)
    return data_headers(config, path.parent)[0]


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of these suffixes, by suffix, those named train first, then by name."""
    found = [path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in suffixes]
    return sorted(
        found,
        key=lambda path: ("train" not in path.name, suffixes.index(path.suffix.lower()), path.name),
    )


def _one(paths: Sequence[Path], what: str, notes: list[str]) -> Path | None:
    if len(paths) > 1:
        others = ", ".join(path.name for path in paths[1:5])
        notes.append(f"the {what} is {paths[0].name}; there are others: {others}")
    return paths[0] if paths else None


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
