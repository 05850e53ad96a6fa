"""Two completions of one prompt: what helps the first more than the second, by the library's own model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers

from psgrad.api import influence
from psgrad.errors import PsgradError
from tests.hugging_face import tiny_model, tiny_tokenizer

TRAINED = [
    {"q": "the cat", "a": " sat on the mat"},
    {"q": "a fine day", "a": " over the hill"},
    {"q": "the dog", "a": " ran far away"},
    {"q": "how are", "a": " you"},
]
ASKED = [
    {"key": "one", "q": "the dog", "a": " sat on the hill", "worse": " ran"},
    {"key": "two", "q": "a fine", "a": " mat", "worse": " day far away"},
]


def section(**changes: object) -> dict[str, object]:
    queries = {"path": "asked.jsonl", "prompt": "q", "completion": "a", "id": "key", "contrast": "worse"}
    return {"method": "gradient_dot", "measurement": "log_probability", "queries": queries, **changes}


def config(folder: Path, **changes: object) -> dict[str, object]:
    tiny_model("causal-lm", folder / "model")
    tiny_tokenizer(folder / "model", kind="gpt")
    for name, rows in (("rows", TRAINED), ("asked", ASKED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "version": 1,
        "model": {"pretrained": "model", "task": "causal-lm"},
        "data": {"path": "rows.jsonl", "prompt": "q", "completion": "a"},
        "engine": {"dtype": "float64", "verify": 0},
        "influence": section(**changes),
        "output": str(folder / "out"),
    }


@pytest.mark.long
def test_influence_of_two_completions_is_that_of_their_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = influence(config(tmp_path), report=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    model.train(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    parameters = list(model.parameters())

    def gradient(prompt: str, completion: str, reduction: str) -> torch.Tensor:
        start, ids = (
            len(tokenizer(prompt)["input_ids"]),
            torch.tensor([tokenizer(prompt + completion)["input_ids"]]),
        )
        logits = model(ids).logits[0, start - 1 : -1]
        lost = F.cross_entropy(logits, ids[0, start:], reduction=reduction)
        found = torch.autograd.grad(lost, parameters, allow_unused=True)
        return torch.cat([each.flatten() for each in found if each is not None])

    trained = torch.stack([gradient(row["q"], row["a"], "mean") for row in TRAINED])
    contrasts = result.questions.contrasts
    for row in ASKED:
        first, second = (gradient(row["q"], row[key], "sum") for key in ("a", "worse"))
        truth = (trained @ (first - second)).numpy()
        found = contrasts[contrasts["first"] == row["key"]]
        assert set(found["second"]) == {f"{row['key']} (worse)"}
        np.testing.assert_allclose(found["score"], truth[found["train_index"]], rtol=1e-6)
        assert found["train_index"].iloc[0] == int(np.argmax(truth))
    assert list(result.queries["id"]) == ["one", "one (worse)", "two", "two (worse)"]
    assert result.unit.startswith("fall of the query's log-probability, in nats")


@pytest.mark.long
def test_influence_of_two_completions_of_chosen_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = influence(config(tmp_path), report=False).questions.contrasts
    wanted = config(tmp_path, queries={**section()["queries"], "ids": ["two"]})  # type: ignore[dict-item]
    result = influence(wanted, report=False, overwrite=True)
    assert list(result.queries["id"]) == ["two", "two (worse)"]
    expected = whole[whole["first"] == "two"].reset_index(drop=True)
    pd.testing.assert_frame_equal(result.questions.contrasts, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contrast": "a"}, "contrast and completion are both the column 'a'"),
        ({"contrast": "worst"}, "worst"),
        ({"path": None, "rows": [0]}, "contrast is a second completion of each prompt"),
    ],
)
def test_influence_of_two_completions_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    queries = {**section()["queries"], **changes}  # type: ignore[dict-item]
    wanted = config(tmp_path, queries={key: value for key, value in queries.items() if value is not None})
    with pytest.raises(PsgradError, match=words):
        influence(wanted, report=False)
