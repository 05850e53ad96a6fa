"""The tokenizer of a config: where it is read, and how rows are cut and padded."""

from __future__ import annotations

from pathlib import Path

import pytest

from psgrad.errors import ConfigError, DataError
from tests.hugging_face import tiny_model, tiny_tokenizer
from tests.text_tasks import refusal_of, samples_of

ROWS = [{"t": "a dog ran over the hill and far away"}, {"t": "the cat"}]
TASK = "causal-lm"


def test_tokenizer_missing_in_the_models_folder(tmp_path: Path) -> None:
    tiny_model(TASK, tmp_path / "model")
    said = refusal_of(DataError, tmp_path, TASK, ROWS, text="t")
    assert f"there is no tokenizer in {tmp_path / 'model'}" in said
    assert "name another folder in data.tokenizer" in said


def test_tokenizer_missing_is_reported_where_transformers_makes_an_empty_one(tmp_path: Path) -> None:
    tiny_model("masked-lm", tmp_path / "model")
    assert "there is no tokenizer in" in refusal_of(DataError, tmp_path, "masked-lm", ROWS, text="t")


def test_tokenizer_damaged(tmp_path: Path) -> None:
    tiny_model(TASK, tmp_path / "model")
    tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert "can't be read" in refusal_of(DataError, tmp_path, TASK, ROWS, text="t")


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    tiny_model(TASK, tmp_path / "model")
    tiny_tokenizer(tmp_path / "words", kind="t5")
    samples = samples_of(tmp_path, TASK, ROWS, text="t", tokenizer="words")
    assert samples.take(range(1, 2)).inputs[0][0, -1] == 6  # </s>, which the tokenizer puts at the end
    said = refusal_of(ConfigError, tmp_path, TASK, ROWS, text="t", tokenizer="nobody/there")
    assert "data.tokenizer" in said
    assert "`hf download nobody/there` fetches it" in said


def test_rows_are_padded_with_the_end_token_where_there_is_no_pad_token(tmp_path: Path) -> None:
    config = {"architecture": "gpt2"}
    samples = samples_of(tmp_path, TASK, ROWS, text="t", kind="gpt", config=config)
    assert samples.notes == ("the tokenizer has no pad token: rows are padded with </s>",)
    block = samples.take(range(2))
    length = int(block.lengths[1])
    assert block.inputs[0][1, length:].unique().tolist() == [6]
    assert not block.inputs[1][1, length:].any()


@pytest.mark.parametrize(("truncation", "kept"), [("right", slice(3)), ("left", slice(-3, None))])
def test_long_rows_are_cut_at_one_end(truncation: str, kept: slice, tmp_path: Path) -> None:
    whole = samples_of(tmp_path, TASK, ROWS, text="t", kind="gpt").take(range(1)).inputs[0][0]
    cut = samples_of(tmp_path, TASK, ROWS, text="t", max_length=3, truncation=truncation).take(range(1))
    assert cut.inputs[0][0].tolist() == whole[kept].tolist()


@pytest.mark.parametrize(
    ("architecture", "limit"), [("bert", 6), ("roberta", 5)]
)  # whose positions begin behind the pad token's
def test_rows_longer_than_the_models_positions_are_refused(
    architecture: str, limit: int, tmp_path: Path
) -> None:
    config = {"architecture": architecture, "max_position_embeddings": 6, "pad_token_id": 0}
    said = refusal_of(DataError, tmp_path, "masked-lm", ROWS, text="t", config=config)
    assert f"expected at most {limit}, which is data.max_length or else what the model takes" in said
    said = refusal_of(ConfigError, tmp_path, "masked-lm", ROWS, text="t", max_length=limit + 1)
    assert f"data.max_length is {limit + 1}, and the model has {limit} positions" in said
    fits = samples_of(tmp_path, "masked-lm", ROWS, text="t", truncation="right")
    assert fits.take(range(1)).inputs[0].shape == (1, limit)


@pytest.mark.parametrize("task", ["sequence-classification", "causal-lm", "seq2seq-lm"])
def test_tokens_beyond_the_models_vocabulary_are_refused(task: str, tmp_path: Path) -> None:
    rows = [{"t": "the", "y": 0 if task == "sequence-classification" else "the cat"}]
    options = {"target": "y"} if task != "causal-lm" else {}
    said = refusal_of(DataError, tmp_path, task, rows, text="t", config={"vocab_size": 9}, **options)
    assert f"row 0 ({tmp_path / 'rows.jsonl'}, row 0) has the token '" in said
    assert "and the model has embeddings for 9 tokens" in said
    assert "or call resize_token_embeddings" in said


def test_largest_token_of_the_vocabulary_is_taken(tmp_path: Path) -> None:
    ids = samples_of(tmp_path, TASK, ROWS, text="t").take(range(1)).inputs[0]
    for size in (int(ids.max()) + 1, int(ids.max())):
        tiny_model(TASK, tmp_path / str(size) / "model", vocab_size=size)
        options = {"text": "t", "tokenizer": str(tmp_path / "model")}
        if size > ids.max():
            block = samples_of(tmp_path / str(size), TASK, ROWS[:1], **options).take(range(1))
            assert block.inputs[0].tolist() == ids.tolist()
        else:
            assert "has the token" in refusal_of(DataError, tmp_path / str(size), TASK, ROWS[:1], **options)


def test_pad_token_that_the_model_has_no_embedding_for_is_not_used(tmp_path: Path) -> None:
    tiny_model(TASK, tmp_path / "model", architecture="gpt2")
    tokenizer = tiny_tokenizer(tmp_path / "model", kind="gpt")
    tokenizer.add_tokens([f"more{number}" for number in range(400 - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "<PADDING>"})
    tokenizer.save_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id == 400
    samples = samples_of(tmp_path, TASK, ROWS, text="t")
    assert samples.notes == (
        "the model has no embedding for the pad token <PADDING>: rows are padded with </s>",
    )
    assert int(samples.take(range(2)).inputs[0][1, -1]) == 6
