"""Samples of texts: blocks, tokens that are kept, fingerprints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from psgrad.config import DataConfig
from psgrad.data.reader import digests
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.data.tasks.language_models import CausalLM
from psgrad.data.text_samples import BLOCK
from psgrad.errors import ConfigError, DataError
from tests.hugging_face import TEXTS, tiny_tokenizer
from tests.text_tasks import refusal_of, samples_of, text_of

ROWS = [{"t": f"{TEXTS[place % 4]} {place}", "w": place / 4} for place in range(BLOCK + 20)]


def made(folder: Path, **options: object) -> Samples:
    return samples_of(folder, "causal-lm", ROWS, kind="gpt", text="t", **options)


def test_rows_are_the_same_read_in_any_parts(tmp_path: Path) -> None:
    samples = made(tmp_path)
    whole = samples.take(range(len(ROWS)))
    rows = np.array([BLOCK + 3, 1, BLOCK - 1, 1])
    for part, places in ((samples.take(rows), rows), (samples.take(range(BLOCK - 2, BLOCK + 2)), None)):
        expected = whole.at(np.arange(BLOCK - 2, BLOCK + 2) if places is None else places)
        assert all(torch.equal(a, b) for a, b in zip(part.inputs, expected.inputs, strict=True))
        assert torch.equal(part.target, expected.target)
        assert torch.equal(part.lengths, expected.lengths)
    assert torch.equal(made(tmp_path).take(rows).inputs[0], whole.at(rows).inputs[0])  # without whole blocks


def test_digest_of_a_row_leaves_padding_out(tmp_path: Path) -> None:
    samples = made(tmp_path)
    alone = [digests(samples.take([row]))[0] for row in range(4)]
    assert digests(samples.take(range(4))) == alone
    assert len(set(alone)) == 4


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = made(tmp_path)
    first = samples.take(range(len(ROWS)))
    monkeypatch.setattr(CausalLM, "encode", None)
    assert torch.equal(first.inputs[0], samples.take(range(len(ROWS))).inputs[0])
    with pytest.raises(TypeError):
        made(tmp_path).take(range(1))


def test_fingerprint_covers_files_tokenizer_template_and_options(tmp_path: Path) -> None:
    found = {made(tmp_path).fingerprint, made(tmp_path, max_length=30).fingerprint}
    found.add(made(tmp_path, max_length=30, truncation="left").fingerprint)
    assert made(tmp_path).fingerprint in found
    tiny_tokenizer(tmp_path / "model", kind="gpt", chat_template="{{ messages }}")
    found.add(made(tmp_path).fingerprint)
    tiny_tokenizer(tmp_path / "model", ["other words"], kind="gpt")
    found.add(made(tmp_path).fingerprint)
    found.add(samples_of(tmp_path, "causal-lm", ROWS[:-1], text="t").fingerprint)
    assert len(found) == 6


def test_text_of_rows_and_of_tokens(tmp_path: Path) -> None:
    samples = made(tmp_path)
    assert samples.describe(2) == ROWS[2]["t"]
    assert text_of(samples, samples.take(range(2, 3)).inputs[0][0].tolist()) == ROWS[2]["t"]
    assert text_of(samples, [-100]) == ""
    assert samples.input_names == ("input_ids", "attention_mask")


def test_weights_of_rows_are_the_last_input(tmp_path: Path) -> None:
    samples = made(tmp_path, weight="w")
    assert samples.weighted
    assert samples.take(range(4, 6)).inputs[-1].tolist() == [1.0, 1.25]
    rows = [{"t": "the cat", "w": -1.0}]
    said = refusal_of(DataError, tmp_path, "causal-lm", rows, text="t", weight="w")
    assert "the weight 'w' is -1 in row 0" in said


def test_text_needs_a_pretrained_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model is not a pretrained one"):
        load_data(DataConfig(path=Path("rows.jsonl"), text="t"), tmp_path)
