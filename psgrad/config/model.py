"""The model section: what builds the model, which task it does, and the weights to put in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from psgrad.config.values import CallableSpec, ConfigSection, FilePath, Finite, described

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


class NewAdapterConfig(ConfigSection):
    """An adapter that is made, not read: its base weights are frozen, its own are trained."""

    create: Literal["lora"]
    """The kind of adapter."""
    rank: Annotated[int, Field(ge=1)] = 8
    """The rank of each update."""
    alpha: Annotated[Finite, Field(gt=0)] | None = None
    """The update is scaled by alpha / rank; null for alpha = rank."""
    target: list[str] | None = None
    """The modules that get one, by the ends of their names; null for those that peft knows for this model."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random weights."""


# The two forms of `model.adapter`, as pydantic names them in the places of its errors.
FOLDERS, MADE = "<folder>", "<made>"


def _adapter(value: object) -> object:
    if value is None or isinstance(value, dict | NewAdapterConfig) or (isinstance(value, str) and value):
        return value
    raise ValueError(
        f"got {described(value)}, expected the folder of an adapter, or {{create: lora, rank: 8}}"
    )


_Adapter = Annotated[
    Annotated[str, Tag(FOLDERS)] | Annotated[NewAdapterConfig, Tag(MADE)],
    Discriminator(lambda value: FOLDERS if isinstance(value, str) else MADE),
]


class ModelConfig(ConfigSection):
    """The model: what builds it, which task it does, and the weights to put in."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "strict": "a checkpoint fits exactly; save the model's own state dict, or set state_dict_prefix",
    }

    factory: CallableSpec | None = None
    """What builds the model: module:callable or file.py:callable; files are relative to this config."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the factory, of the pretrained model's config, or of timm's create_model."""
    pretrained: str | None = None
    """In place of a factory: a folder of save_pretrained, relative to this config, or a hub id."""
    revision: str | None = None
    """The branch, tag or commit of a hub id."""
    timm: str | None = None
    """In place of a factory: the name of one of timm's models."""
    task: Task | None = None
    """What a pretrained model does; it implies the loss and how rows become inputs."""
    adapter: Annotated[
        _Adapter | None,
        BeforeValidator(_adapter, json_schema_input_type=str | NewAdapterConfig | None),
    ] = None
    """The folder of a PEFT adapter, or {create: lora}; only the adapter is differentiated."""
    dtype: Literal["as-saved", "float32", "bfloat16"] = "as-saved"
    """Precision in which parameters that are not differentiated are stored; products run in engine.dtype."""
    load: Literal["4bit", "8bit"] | None = None
    """Keep a pretrained model's linear layers in fewer bits (bitsandbytes), frozen under an adapter; null for
    as they are saved.
    """
    attention: Literal["auto", "eager", "sdpa"] = "auto"
    """The attention implementation of a pretrained model."""
    trust_remote_code: bool = False
    """Whether Python code that lies in the pretrained folder may run."""
    checkpoint: FilePath | None = None
    """The weights: .safetensors, .safetensors.index.json, .pt, .pth or .ckpt, relative to this config."""
    state_dict_key: str | None = None
    """The place of the weights in a .pt, .pth or .ckpt file."""
    state_dict_prefix: str | None = None
    """The prefix of the model's weights in the checkpoint, such as `student.`; others are left out."""
    mode: Literal["eval", "train"] = "eval"
    """Whether the model runs as in evaluation or as in training (dropout on)."""

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        given = [name for name in ("factory", "pretrained", "timm") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of factory (a callable that builds the model), pretrained (a folder or a"
                " hub id) and timm (a model's name)"
            )
        if self.pretrained == "":
            raise ValueError("pretrained is empty, expected a folder of save_pretrained or a hub id")
        if self.pretrained is not None and self.task is None:
            raise ValueError(f"task is missing: what the pretrained model does, one of {', '.join(TASKS)}")
        for name in ("revision", "task", "adapter", "load", "trust_remote_code"):
            if not self.pretrained and name in self.not_default():
                raise ValueError(f"{name} belongs to a pretrained model, and there is a {given[0]}")
        return self

    @model_validator(mode="after")
    def _keys_need_a_checkpoint(self) -> ModelConfig:
        if self.checkpoint is not None:
            return self
        if self.timm is not None:
            raise ValueError("checkpoint is missing: timm builds its models with random weights")
        given = [name for name in ("state_dict_key", "state_dict_prefix") if getattr(self, name) is not None]
        if given:
            raise ValueError(
                f"{given[0]} says where in the checkpoint the weights lie, but there is no checkpoint"
            )
        return self
