"""The model section: what builds the model, which task it does, and the weights to put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from psgrad.config.values import CallableSpec, ConfigSection, FilePath

Task = Literal[
    "sequence-classification",
    "token-classification",
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "image-classification",
    "question-answering",
    "regression",
]
TASKS: tuple[str, ...] = get_args(Task)
TASK_LOSSES: Mapping[str, str] = {
    **dict.fromkeys(TASKS, "cross_entropy"),
    **dict.fromkeys(("token-classification", "causal-lm", "masked-lm", "seq2seq-lm"), "token_cross_entropy"),
    "regression": "mse",
}
"""The loss that a task implies."""
LABELS_FROM_TEXT = ("causal-lm", "masked-lm")
"""The tasks whose labels are tokens of the text itself, so that a target may be left out."""


_OWN_STATE_DICT = "a checkpoint fits exactly; save the model's own state dict alone"


def _adapter(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError(
            "got a group of keys, expected a folder; make a new adapter by"
            " peft.get_peft_model(model, settings).save_pretrained(folder), and name that"
        )
    if value == "":
        raise ValueError("adapter is empty, expected the folder of an adapter")
    return value


class ModelConfig(ConfigSection):
    """The model: what builds it, which task it does, and the weights to put in."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "strict": _OWN_STATE_DICT,
        "state_dict_key": _OWN_STATE_DICT,
        "state_dict_prefix": _OWN_STATE_DICT,
        "timm": "set factory: timm:create_model, kwargs: {model_name: NAME}, and the checkpoint",
        "revision": "name the snapshot's folder in pretrained: `hf download NAME --revision R` prints it",
        "load": "save the quantised model by save_pretrained, and name its folder in pretrained",
        "attention": 'write "attn_implementation": "eager" into the folder\'s config.json',
        "trust_remote_code": "a model with code of its own is a factory, which loads it by from_pretrained",
    }

    factory: CallableSpec | None = None
    """What builds the model: module:callable or file.py:callable; files are relative to this config."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the factory, or of the pretrained model's config."""
    pretrained: str | None = None
    """In place of a factory: a folder of save_pretrained, relative to this config, or a cached hub id."""
    task: Task | None = None
    """What a pretrained model does; it implies the loss and how rows become inputs."""
    adapter: Annotated[str | None, BeforeValidator(_adapter)] = None
    """The folder of a PEFT adapter, or its cached hub id; only the adapter is differentiated."""
    dtype: Literal["as-saved", "float32", "bfloat16"] = "as-saved"
    """Precision in which parameters that are not differentiated are stored; products run in engine.dtype."""
    checkpoint: FilePath | None = None
    """The weights: .safetensors, .safetensors.index.json, .pt, .pth or .ckpt, relative to this config."""
    mode: Literal["eval", "train"] = "eval"
    """Whether the model runs as in evaluation or as in training (dropout on)."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.factory is None) == (self.pretrained is None):
            raise ValueError(
                "give exactly one of factory (a callable that builds the model) and pretrained (a folder or a"
                " hub id)"
            )
        if self.pretrained == "":
            raise ValueError("pretrained is empty, expected a folder of save_pretrained or a hub id")
        if self.pretrained is not None and self.task is None:
            raise ValueError(f"task is missing: what the pretrained model does, one of {', '.join(TASKS)}")
        for name in ("task", "adapter"):
            if self.pretrained is None and getattr(self, name) is not None:
                raise ValueError(f"{name} belongs to a pretrained model, and there is a factory")
        return self
