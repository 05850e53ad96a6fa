"""How each task makes tensors of a row, where the library's loss does not show it, and what it refuses; and
labels by name and by number, of a model's head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psgrad.errors import ConfigError, DataError, PsgradError
from tests.hugging_face import CHAT_TEMPLATE
from tests.text_tasks import NAMED, refusal_of, samples_of, text_of

TEXT = "a dog ran over the hill and far away"
CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def target_of(*arguments: Any, **options: Any) -> torch.Tensor:
    target = samples_of(*arguments, **options).take(range(1)).target
    return target[0]


def of_chats(template: str | None = CHAT_TEMPLATE) -> dict[str, Any]:
    """The options of samples of chats in the column m, by a tokenizer with this template."""
    return {
        "kind": "gpt",
        "options": {} if template is None else {"chat_template": template},
        "messages": "m",
    }


def test_completion_begins_at_the_token_with_its_first_character(tmp_path: Path) -> None:
    row = {"p": "the c", "c": "at sat"}  # one token has characters of both
    samples = samples_of(tmp_path, "causal-lm", [row], kind="gpt", prompt="p", completion="c")
    block = samples.take(range(1))
    ids, target = block.inputs[0][0].tolist(), block.target[0].tolist()
    counted = [place + 1 for place, label in enumerate(target) if label != -100]
    assert counted == list(range(counted[0], len(ids)))
    assert [ids[place] for place in counted] == [label for label in target if label != -100]
    assert text_of(samples, ids[: counted[0]]) in "the c"
    assert text_of(samples, ids[counted[0] :]).endswith("at sat")
    assert target[-1] == -100


def test_completion_cut_away_leaves_no_label(tmp_path: Path) -> None:
    row = {"p": TEXT, "c": " sat"}
    options = {"kind": "gpt", "prompt": "p", "completion": "c", "max_length": 4}
    assert (target_of(tmp_path, "causal-lm", [row], truncation="right", **options) == -100).all()
    assert (target_of(tmp_path, "causal-lm", [row], truncation="left", **options) != -100).any()
    said = refusal_of(DataError, tmp_path, "causal-lm", [row], **options)
    assert "tokens; expected at most 4, which is data.max_length" in said
    assert "set data.truncation: right" in said


@pytest.mark.parametrize("marked", [True, False])
def test_chat_labels_are_the_tokens_of_the_assistant(marked: bool, tmp_path: Path) -> None:
    template = CHAT_TEMPLATE
    if not marked:  # found by the tokens that each turn adds
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    rows = [{"m": [*CHAT, {"role": "user", "content": "a dog"}, {"role": "assistant", "content": "ran"}]}]
    samples = samples_of(tmp_path, "causal-lm", rows, **of_chats(template))
    target = samples.take(range(1)).target
    labels = [int(label) for label in target[0] if label != -100]
    said = text_of(samples, labels)
    assert said.replace("\n", "") == "sat</s>ran</s>"
    assert samples.describe(0) == "user: the cat\nassistant: sat\nuser: a dog\nassistant: ran"


@pytest.mark.parametrize(
    ("chat", "template", "words"),
    [
        (CHAT[:1], CHAT_TEMPLATE, "the chat has no turn of the assistant; its roles: user"),
        ([], CHAT_TEMPLATE, "the chat has no turn of the assistant"),
        (CHAT, None, "the tokenizer has no chat template, and data.messages needs one"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "the chat template raised TemplateError"),
        (
            CHAT,
            "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "so that the tokens of message 1 are not known",
        ),
        ([{"role": "user"}, CHAT[1]], CHAT_TEMPLATE, "message 0 of the chat has no content"),
        ([{"role": "user", "content": None}, CHAT[1]], CHAT_TEMPLATE, "message 0 of the chat has no content"),
        ([CHAT[0], {"role": "assistant"}], CHAT_TEMPLATE, "message 1 of the chat has no content"),
        ([None, CHAT[1]], CHAT_TEMPLATE, "message 0 of the chat has no content"),
    ],
)
def test_chat_refused(chat: list[Any], template: str | None, words: str, tmp_path: Path) -> None:
    rows = [{"m": CHAT}, {"m": chat}]
    assert words in refusal_of(DataError, tmp_path, "causal-lm", rows, **of_chats(template))


def test_chat_of_parts_is_refused_by_a_template_for_texts_and_taken_by_one_for_parts(tmp_path: Path) -> None:
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    said = refusal_of(DataError, tmp_path, "causal-lm", [{"m": parts}], **of_chats())
    assert "message 0 of the chat has its content in parts, and the tokenizer's template takes" in said
    text = "{{ message['content'] }}"
    assert text in CHAT_TEMPLATE
    template = CHAT_TEMPLATE.replace(text, "{{ message['content'][0]['text'] }}")
    of_parts = target_of(tmp_path / "parts", "causal-lm", [{"m": parts}], **of_chats(template))
    of_texts = target_of(tmp_path / "texts", "causal-lm", [{"m": CHAT}], **of_chats())
    assert of_parts.tolist() == of_texts.tolist()


def test_chat_keys_of_other_rows_are_not_there_for_the_template(tmp_path: Path) -> None:
    """A column of objects has each key in each row; a template asks whether it is defined."""
    calls = [{"name": "look"}, {"name": "look", "where": "hill"}]
    chats = [[CHAT[0], {**CHAT[1], "tool_calls": [call]}] for call in calls]
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{% for call in message.tool_calls or [] %}{% if call.where is defined %}film{% endif %}{% endfor %}"
        "{{ message['content'] }}",
    )
    rows = [{"m": chat} for chat in chats]
    samples = samples_of(tmp_path, "causal-lm", rows, **of_chats(template))
    for row, has_word in enumerate((False, True)):
        target = samples.take([row]).target
        labels = [int(label) for label in target[0] if label != -100]
        assert ("film" in text_of(samples, labels)) == has_word


def test_chats_of_another_form_are_reported_how_to_rename_their_keys(tmp_path: Path) -> None:
    rows = [{"m": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]}]
    said = refusal_of(DataError, tmp_path, "causal-lm", rows, **of_chats())
    assert "the messages in 'm' have the keys from, value; expected role (system, user, assistant)" in said
    assert "rename the keys: from is role, value is content" in said


def test_masked_tokens_are_the_same_each_time_and_15_percent(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [{"t": " ".join(draw.permutation(TEXT.split() * 4))} for _ in range(200)]
    first = samples_of(tmp_path, "masked-lm", rows, text="t").take(range(200))
    again = samples_of(tmp_path, "masked-lm", rows[100:], text="t").take(range(100))
    assert torch.equal(first.target[100:], again.target)
    ids, hidden = first.inputs[0], first.target != -100
    words = (ids > 3) | hidden  # neither padding nor [CLS] and [SEP]
    assert hidden.sum() / words.sum() == pytest.approx(0.15, abs=0.03)
    assert hidden.any(1).all()
    assert (ids[hidden] == 4).float().mean() == pytest.approx(0.8, abs=0.08)
    assert (ids[hidden] == first.target[hidden]).float().mean() == pytest.approx(0.1, abs=0.06)


TOKENIZERS = {"causal-lm": "gpt", "seq2seq-lm": "t5"}
CLASSIFY = {"text": "t", "target": "y"}
TAGS = "token-classification"


T = {"t": TEXT}


@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("kind", "task", "row", "data", "words"),
    [
        (ConfigError, "causal-lm", T, {"text": "t", "target": "t"}, "the labels are the text's"),
        (ConfigError, "causal-lm", T, {"text": ["t", "u"]}, "two columns of text"),
        (
            *(ConfigError, "masked-lm", T, {"text": "t", "target": "t"}),
            "data.target is given for the task masked-lm",
        ),
        (ConfigError, "seq2seq-lm", T, {"text": "t"}, "data.target is missing for the task seq2seq-lm"),
        (ConfigError, "image-classification", T, {"text": "t"}, "and model.task is image-class"),
        (DataError, "causal-lm", {"t": " "}, {"text": "t"}, "the text in 't' is empty"),
        (DataError, "causal-lm", {"t": None}, {"text": "t"}, "'t' is of type null"),
        (DataError, "causal-lm", {"t": 5}, {"text": "t"}, "'t' is of type int64"),
        (DataError, "causal-lm", T | {"w": "heavy"}, {"text": "t", "weight": "w"}, "'w' is of type string"),
        (
            *(DataError, "causal-lm", T | {"w": 1e300}, {"text": "t", "weight": "w"}),
            "the weight 'w' is 1e+300 in",
        ),
        (DataError, "causal-lm", {"t": "an emoji \ud83d"}, {"text": "t"}, "'t' holds half of a character"),
        (DataError, TAGS, {"t": ["the", "cat"], "y": [0]}, CLASSIFY, "has 2 words and 1 labels"),
        (DataError, TAGS, {"t": ["the"], "y": None}, CLASSIFY, "'y' is of type null"),
        (DataError, TAGS, {"t": "the cat", "y": [0, 1]}, CLASSIFY, "expected a list of words in each row"),
        (DataError, TAGS, {"t": ["the", None], "y": [0, 1]}, CLASSIFY, "the word at position 1 is missing"),
        (DataError, "regression", T | {"y": [1.0, 2.0]}, CLASSIFY, "the length of 'y' is 2; expected 1"),
    ],
)
def test_task_refuses_a_config_and_a_row(
    kind: type[PsgradError], task: str, row: Any, data: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tokenizer = TOKENIZERS.get(task, "bert")
    assert words in refusal_of(kind, tmp_path, task, [row], kind=tokenizer, **data)


def rows(*labels: object) -> list[dict[str, object]]:
    return [{"t": "the cat sat", "y": label} for label in labels]


def test_labels_are_names_of_the_models_config_or_numbers(tmp_path: Path) -> None:
    task = "sequence-classification"
    named = samples_of(tmp_path, task, rows("odd", "dull"), config=NAMED, **CLASSIFY)
    assert named.targets.tolist() == [2, 0]
    assert named.class_names == ("dull", "fine", "odd")
    numbered = samples_of(tmp_path, task, rows(2, -100), **CLASSIFY)
    assert numbered.targets.tolist() == [2, -100]


def test_labels_class_names_stand_in_for_names_that_nobody_gave(tmp_path: Path) -> None:
    task = "sequence-classification"
    given = samples_of(tmp_path, task, rows("no", "yes"), class_names=["yes", "no"], **CLASSIFY)
    assert given.targets.tolist() == [1, 0]
    assert samples_of(tmp_path, task, rows(0, 1), **CLASSIFY).class_names is None
    said = refusal_of(ConfigError, tmp_path, task, rows(0), class_names=["a", "b", "c"], **CLASSIFY)
    assert "the length of data.class_names is 3, and that of the model's head 2" in said


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("finn", "'finn' in row 1 (ROWS, row 1), 1 of 2 rows, is no class; did you mean fine?"),
        (3, "row 1 (ROWS, row 1) has the label 3; expected a number from 0 to 2, or -100"),
        (None, "row 1 (ROWS, row 1) has no label; expected one of dull, fine, odd"),
    ],
)
def test_label_outside_the_head_is_refused_with_its_row(label: object, words: str, tmp_path: Path) -> None:
    first: object = "fine" if isinstance(label, str) else 0
    said = refusal_of(
        DataError, tmp_path, "sequence-classification", rows(first, label), config=NAMED, **CLASSIFY
    )
    assert words.replace("ROWS", str(tmp_path / "rows.jsonl")) in said


def test_label_by_name_without_names_is_refused_with_the_way_to_give_them(tmp_path: Path) -> None:
    said = refusal_of(DataError, tmp_path, "sequence-classification", rows("good"), **CLASSIFY)
    assert "row 0) has the label 'good'; expected a number from 0 to 1" in said
    assert "list the names in data.class_names" in said


def test_several_labels_become_ones_and_zeros(tmp_path: Path) -> None:
    config = {**NAMED, "problem_type": "multi_label_classification"}
    found = samples_of(
        tmp_path, "sequence-classification", rows(["odd", "dull"], [], ["fine"]), config=config, **CLASSIFY
    )
    target = found.take(range(3)).target
    assert torch.equal(target, torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]]))
    said = refusal_of(DataError, tmp_path, "sequence-classification", rows("odd"), **CLASSIFY)
    assert "expected lists of labels: the model's problem_type is multi_label_classification" in said


def test_labels_class_names_in_another_order_than_the_models_are_refused(tmp_path: Path) -> None:
    task, names = "sequence-classification", ["odd", "fine", "dull"]
    said = refusal_of(ConfigError, tmp_path, task, rows("odd"), config=NAMED, class_names=names, **CLASSIFY)
    assert "data.class_names has 'odd' at another place than the model's config (id2label)" in said
    assert "expected the model's order: dull, fine, odd" in said
    others = samples_of(tmp_path, task, rows("odd"), class_names=["matt", "fine", "new"], **CLASSIFY)
    assert others.class_names == ("dull", "fine", "odd")


def test_labels_of_a_config_that_contradicts_itself_are_refused(tmp_path: Path) -> None:
    turned = {**NAMED, "label2id": {"odd": 0, "fine": 1, "dull": 2}}
    said = refusal_of(
        ConfigError, tmp_path, "sequence-classification", rows("odd"), config=turned, **CLASSIFY
    )
    assert "the model's config has 'dull' as class 0 in id2label, and as class 2 in label2id" in said
