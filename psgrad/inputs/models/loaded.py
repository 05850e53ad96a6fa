"""A model with its weights, and facts about its origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from psgrad.config.model import Task
from psgrad.results.manifest import ModelOrigin


@dataclass(frozen=True)
class Pretrained:
    """What a pretrained model's folder tells those that prepare its data.

    Attributes:
        folder: the local folder of the model: the one that the config names, or a cached snapshot.
        task: what the model does.
        config: transformers' config object of the model (id2label, pad_token_id, problem_type, ...).
        allow_download: whether hub ids that are not in the local cache may be downloaded.
    """

    folder: Path
    task: Task
    config: Any
    allow_download: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use, and what a person should know about its origin.

    `notes` are sentences for the manifest and the terminal, `modules_imported` the modules and files whose
    code was run, `sha256` the hash of the checkpoint (of the hashes of its files, where it has several); None
    without a checkpoint. `pick` takes what the loss reads out of what the model returns; None for all of it.
    `pretrained` is what a pretrained model's folder tells; None for other models. `origin` says where
    a model that no factory built came from.
    """

    model: nn.Module
    notes: list[str]
    modules_imported: list[str]
    sha256: str | None
    pick: Callable[[Any], Any] | None = None
    pretrained: Pretrained | None = None
    origin: ModelOrigin = field(default_factory=ModelOrigin)
