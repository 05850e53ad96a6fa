"""A folder with a tiny pretrained model, its tokenizer, rows of text and a config in YAML, for each task; and
the norms of single rows by the library's own loss and PyTorch's autograd.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from psgrad.config import DataConfig
from psgrad.config.model import Task
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.errors import PsgradError
from psgrad.models.pretrained import Pretrained
from tests.hugging_face import TEXTS, tiny_model, tiny_tokenizer

Row = dict[str, Any]
LABELS = {0: "dull", 1: "fine", 2: "odd"}
LONGER = (
    *TEXTS,
    "the cat",
    "a fine day",
    "over the hill and far away the dog ran, and the cat sat on the mat",
    "dull",
    "how are you?",
)


@dataclass(frozen=True)
class TextCase:
    """A task's model, tokenizer, rows, keys of the data section, and how the library takes one row.

    arguments: (tokenizer, row) to what the model is called with, labels included.
    """

    task: str
    rows: Sequence[Row]
    data: str
    arguments: Callable[[Any, Row], Mapping[str, Any]]
    tokenizer: str = "bert"
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None

    def write(self, folder: Path, extra: str = "", dtype: str = "float32") -> Path:
        """The YAML file of a config for the folder, in which all that it names is written."""
        folder.mkdir(exist_ok=True)
        tiny_model(self.task, folder / "model", **(self.config or {}))
        tiny_tokenizer(folder / "model", kind=self.tokenizer, **(self.options or {}))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        lines = [
            "version: 1",
            f"model: {{pretrained: model, task: {self.task}}}",
            f"data: {{path: rows.jsonl, {self.data}}}",
            f"engine: {{dtype: {dtype}, verify: 0}}",
            *([extra] if extra else []),
            f"output: {folder / 'run'}",
        ]
        assert len(lines) <= 12
        (folder / "config.yaml").write_text("\n".join(lines) + "\n")
        return folder / "config.yaml"

    def norms(self, folder: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """[n] float64: each row alone, without padding, by the library's own loss.

        The library takes the loss of causal-lm in float32 whatever the model's type; in float64 it is taken
        again of its logits.
        """
        import transformers

        from tests.hugging_face import AUTO

        model = getattr(transformers, AUTO[self.task]).from_pretrained(folder / "model", dtype=dtype).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        found = []
        for row in self.rows:
            model.zero_grad()
            arguments = self.arguments(tokenizer, row)
            output = model(**arguments)
            loss = output.loss
            if self.task == "causal-lm" and dtype == torch.float64:
                loss = F.cross_entropy(output.logits[0, :-1], arguments["labels"][0, 1:])
                torch.testing.assert_close(loss.float(), output.loss)
            loss.backward()
            squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
            found.append(torch.stack(squares).sum().sqrt())
        return torch.stack(found)


def tensors(encoding: Any, **labels: Any) -> dict[str, torch.Tensor]:
    """What a tokenizer made of one row, as a batch of one, and its labels."""
    found = {key: torch.tensor([value]) for key, value in encoding.items()}
    return found | {key: torch.tensor([value]) for key, value in labels.items()}


def _classified(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    return tensors(tokenizer(row["text"]), labels=list(LABELS.values()).index(row["label"]))


def _scored(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    return tensors(tokenizer(row["text"], row["other"]), labels=float(row["score"]))


def _completed(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    """The labels of the prompt, whose tokens end where the completion's space begins, are -100."""
    prompt, ids = tokenizer(row["prompt"])["input_ids"], tokenizer(row["prompt"] + row["completion"])
    assert ids["input_ids"][: len(prompt)] == prompt
    return tensors(ids, labels=[-100] * len(prompt) + ids["input_ids"][len(prompt) :])


def _written(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    return tensors(tokenizer(row["text"]), labels=tokenizer(row["summary"])["input_ids"])


def _tagged(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    names, labels, last = list(LABELS.values()), [], None
    encoding = tokenizer(row["words"], is_split_into_words=True)
    for word in encoding.word_ids():
        labels.append(-100 if word is None or word == last else names.index(row["tags"][word]))
        last = word
    return tensors(encoding, labels=labels)


def _hidden(tokenizer: Any, row: Row) -> dict[str, torch.Tensor]:
    """What a row's draws hide, one token at least: 80 % become a mask, 10 % another token, 10 % stay."""
    encoding = tokenizer(row["text"], return_special_tokens_mask=True)
    special, ids = np.array(encoding.pop("special_tokens_mask")), np.array(encoding["input_ids"])
    key = hashlib.blake2b(ids.tobytes(), digest_size=8, salt=b"0").digest()
    draws = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).random((3, len(ids)))
    chance = np.where(special == 0, draws[0], 1.0)
    hidden = chance < 0.15
    if not hidden.any():
        hidden[chance.argmin()] = True
    for place in np.flatnonzero(hidden):
        kind = draws[1][place]
        if kind < 0.9:
            other = int(draws[2][place] * len(tokenizer))
            encoding["input_ids"][place] = tokenizer.mask_token_id if kind < 0.8 else other
    return tensors(encoding, labels=np.where(hidden, ids, -100).tolist())


def samples_of(
    folder: Path,
    task: str,
    rows: Sequence[Row],
    *,
    kind: str = "bert",
    config: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **data: Any,
) -> Samples:
    """The samples of rows for a tiny model of a task. kind, options: of the tokenizer; config: of the model;
    data: keys of the data section. A folder that has the model keeps it, and its tokenizer.
    """
    if not (folder / "model").exists():
        tiny_model(task, folder / "model", **(config or {}))
        tiny_tokenizer(folder / "model", kind=kind, **(options or {}))
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataConfig.model_validate({"path": Path("rows.jsonl"), **data})
    pretrained = Pretrained(folder / "model", cast(Task, task), settings)
    return load_data(section, folder, pretrained=pretrained)


def text_of(samples: Samples, ids: Sequence[int]) -> str:
    """The text of these ids, by the samples' own tokenizer."""
    assert samples.tokenizer is not None
    return "".join(samples.tokenizer.pieces(ids))


def refusal_of(error_kind: type[PsgradError], *arguments: Any, **options: Any) -> str:
    """What `samples_of`, or reading all of its rows, is refused with."""
    try:
        samples = samples_of(*arguments, **options)
        samples.take(range(len(samples)))
    except error_kind as error:
        return str(error)
    pytest.fail("not refused")


NAMED = {"id2label": LABELS, "label2id": {name: place for place, name in LABELS.items()}, "num_labels": 3}
_TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}

CASES: dict[str, TextCase] = {
    "classification": TextCase(
        "sequence-classification",
        [{"text": text, "label": LABELS[place % 3]} for place, text in enumerate(LONGER)],
        "text: text, target: label",
        _classified,
        config=NAMED,
    ),
    "last token": TextCase(  # the config has no pad token, by which the model would find a row's last token
        "sequence-classification",
        [{"text": text, "label": LABELS[place % 3]} for place, text in enumerate(LONGER)],
        "text: text, target: label",
        _classified,
        tokenizer="gpt",
        config={**NAMED, "architecture": "gpt2"},
    ),
    "regression": TextCase(
        "regression",
        [{"text": a, "other": b, "score": len(a) / 8} for a, b in zip(LONGER, LONGER[3:], strict=False)],
        "text: [text, other], target: score",
        _scored,
        options=_TYPES,
    ),
    "completion": TextCase(
        "causal-lm",
        [{"prompt": a, "completion": f" {b}"} for a, b in zip(LONGER, LONGER[3:], strict=False)],
        "prompt: prompt, completion: completion",
        _completed,
        tokenizer="gpt",
    ),
    "text": TextCase(
        "causal-lm",
        [{"text": text} for text in LONGER],
        "text: text",
        lambda tokenizer, row: tensors(tokenizer(row["text"]), labels=tokenizer(row["text"])["input_ids"]),
        tokenizer="gpt",
        config={"architecture": "gpt2"},
    ),
    "seq2seq": TextCase(
        "seq2seq-lm",
        [{"text": a, "summary": b} for a, b in zip(LONGER, LONGER[3:], strict=False)],
        "text: text, target: summary",
        _written,
        tokenizer="t5",
    ),
    "tokens": TextCase(
        "token-classification",
        [
            {"words": text.split(), "tags": [LABELS[len(word) % 3] for word in text.split()]}
            for text in LONGER
        ],
        "text: words, target: tags",
        _tagged,
        config=NAMED,
    ),
    "masked": TextCase(
        "masked-lm",
        [
            {"text": "the cat sat on the mat"},
            {"text": "a dog ran over the hill and far away"},
            {"text": "what a fine day"},
        ],
        "text: text",
        _hidden,
    ),
}

__all__ = ["CASES", "LABELS", "LONGER", "NAMED", "TextCase", "refusal_of", "samples_of", "tensors"]
