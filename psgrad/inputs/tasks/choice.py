"""The task that a model does on texts, by its name in a config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from psgrad.config import DataConfig
from psgrad.config.model import Task
from psgrad.errors import ConfigError
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.tasks.classification import Regression, SequenceClassification
from psgrad.inputs.tasks.language_models import CausalLM, MaskedLM, Seq2SeqLM
from psgrad.inputs.tasks.multiple_choice import MultipleChoice
from psgrad.inputs.tasks.question_answering import QuestionAnswering
from psgrad.inputs.tasks.task import TextTask
from psgrad.inputs.tasks.tokens import TokenClassification
from psgrad.inputs.tokenizer import load_tokenizer

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
