"""Models of timm, by name. Their weights come from a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from psgrad.config.model import ModelConfig
from psgrad.config.values import did_you_mean
from psgrad.errors import ConfigError, ModelError
from psgrad.inputs.models.hub import library
from psgrad.inputs.models.loaded import LoadedModel
from psgrad.results.manifest import ModelOrigin
from psgrad.wording import first_line


def load_timm(config: ModelConfig) -> LoadedModel:
    """The model that `config.timm` names, with random weights. Raises ConfigError and ModelError."""
    assert config.timm is not None
    if config.kwargs.get("pretrained"):
        raise ConfigError(
            "model.kwargs: pretrained would download weights, whatever they are today",
            next_step="save them once with safetensors, and name the file in model.checkpoint",
        )
    timm: Any = library("timm", extra="vision")
    if not timm.is_model(config.timm):
        raise ConfigError(
            f"timm has no model {config.timm!r}{did_you_mean(config.timm, timm.list_models())}",
            expected="a name that timm.list_models() gives",
        )
    try:
        model = timm.create_model(config.timm, pretrained=False, **config.kwargs)
    except Exception as error:
        raise ModelError(
            f"timm can't build {config.timm}: {type(error).__name__}: {first_line(error)}",
            cause=f"model.kwargs: {', '.join(config.kwargs)}" if config.kwargs else None,
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"timm built an object of type {type(model).__name__}", expected="a module")
    origin = ModelOrigin(timm=config.timm, version=str(timm.__version__))
    return LoadedModel(model, [], [type(model).__module__], None, origin=origin)
