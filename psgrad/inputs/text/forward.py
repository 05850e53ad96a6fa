"""What the class of a pretrained model says without its weights: its inputs, and how it shifts labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from psgrad.inputs.models.hub import library, quiet
from psgrad.inputs.models.loaded import Pretrained
from psgrad.inputs.models.pretrained import AUTO_CLASSES


def model_inputs(pretrained: Pretrained) -> frozenset[str] | None:
    """The names of what the model's forward takes; None for a class that transformers does not know."""
    kind = _model_class(pretrained)
    return None if kind is None else frozenset(inspect.signature(kind.forward).parameters)


def shift_of(pretrained: Pretrained) -> Callable[[list[int]], list[int]]:
    """What makes the decoder's inputs of labels: the model's own function."""
    with quiet(), torch.device("meta"):
        model = _model_class(pretrained)(pretrained.config)

    def shifted(labels: list[int]) -> list[int]:
        made = model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([labels]))
        return [int(each) for each in made[0]]

    return shifted


def _model_class(pretrained: Pretrained) -> Any:
    auto = getattr(library("transformers"), AUTO_CLASSES[pretrained.task])
    if type(pretrained.config) not in auto._model_mapping:
        return None
    kind = auto._model_mapping[type(pretrained.config)]
    return kind[0] if isinstance(kind, tuple) else kind
