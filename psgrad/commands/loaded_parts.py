"""What a config names, loaded: the device and precision, the model and where its weights live, the loss, and
the samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psgrad.commands.class_names import require_names_of_outputs, require_one_numbering
from psgrad.commands.weight_placement import WeightPlacement, weight_placement_of
from psgrad.config import Config, DataConfig
from psgrad.config.model import TASK_LOSSES
from psgrad.data.loss import Criterion, resolve_loss
from psgrad.data.rows import Samples
from psgrad.data.sources.load import load_data
from psgrad.engine.execution.memory import give_freed_memory_back
from psgrad.engine.execution.objective import Forward
from psgrad.engine.execution.placement import place
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.execution.recompute import Recompute
from psgrad.engine.execution.weight_supply import Supply
from psgrad.errors import ConfigError
from psgrad.models.factory import LoadedModel, load_model
from psgrad.models.model_folders import automatic_precision
from psgrad.models.model_identity import identify
from psgrad.run.identity import ModelIdentity, hashes_of
from psgrad.wording import first_of


@dataclass(frozen=True)
class Loaded:
    """What a config names, before any row went through the model.

    Attributes:
        trained: the parameters that are differentiated.
        dtype, autocast: see `pick_precision`.
        loaded: the model as its factory and checkpoint gave it, and where it came from.
        identity: the hashes of that model.
        model: the same on the device, as `place` puts it there.
        forward: how that model is called on a batch of the samples.
        placement: where its weights live.
        recompute: whether its repeated modules run again in the backward pass; None for never.
    """

    config: Config
    trained: Trained
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    loaded: LoadedModel
    identity: ModelIdentity
    criterion: Criterion
    samples: Samples
    model: nn.Module
    forward: Forward
    placement: WeightPlacement
    recompute: Recompute | None

    @property
    def supply(self) -> Supply | None:
        """What brings offloaded weights to the device; None where all are there."""
        return self.placement.supply

    def model_at(self, checkpoint: Path) -> LoadedModel:
        """The model with the weights of another checkpoint, with the same parameters trained; on no device
        yet.
        """
        section, trained = self.config.model.model_copy(update={"checkpoint": checkpoint}), self.trained
        in_files = self.supply is not None
        return load_model(section, self.config.base, trained.patterns, trained.key, in_files=in_files)

    def hashes(self, specs: Iterable[str | None] = ()) -> dict[str, Any]:
        """The hashes of the model and of all code, that of `specs` included; see `hashes_of`."""
        return hashes_of(self.config, self.identity, self.samples.sources, specs)

    def placed(self, model: nn.Module) -> nn.Module:
        """Another model, such as that of another checkpoint, where this one's is and as this one is."""
        frozen = self.config.model.dtype
        found = place(model, self.device, self.dtype, frozen, self.supply)
        return found if self.recompute is None else self.recompute.add(found)

    def class_count(self, criterion: Criterion) -> int | None:
        """The size of the output's class axis, by the first row; None where that differs from row to row, the
        loss has no classes, or the model fails (reported later).
        """
        if criterion.kind not in ("class", "token"):
            return None
        shape = self._shape_of_output()
        return None if len(shape) < 2 else shape[-1 if criterion.kind == "token" else 1]

    def require_names_of_outputs(self, classes: int | None) -> None:
        """Raises ConfigError or DataError where the classes have names, and not as many as the model has
        outputs. classes: as the loss counts them; of a loss of the user's own the model's output tells it,
        where that is one vector a row.
        """
        custom = self.criterion.kind == "custom"
        if custom and self.config.data.class_names is not None:
            shape = self._shape_of_output()
            classes = shape[1] if len(shape) == 2 else None
            if not self.samples.names_found and classes != len(self.config.data.class_names):
                return  # a loss of one's own may read the output as it likes
        require_names_of_outputs(self.config, self.samples, classes, custom)

    def _shape_of_output(self) -> tuple[int, ...]:
        """The shape of the model's output for the first row; empty where the model fails, which is reported
        later, or where its output is no tensor.
        """
        try:
            output = self.first_output()
        except Exception:
            return ()
        return tuple(output.shape) if isinstance(output, torch.Tensor) else ()

    def other_samples(
        self, data: DataConfig, unit: str | None = None, weighted: bool | None = None
    ) -> Samples:
        """Another dataset for the same model and loss: labels by name mean the same as in the run's own.

        weighted: whether its losses are to have weights; None for as the run's own have.
        """
        names = self.config.data.class_names
        if data.class_names is not None and names not in (None, data.class_names):
            raise ConfigError(
                f"class_names of {data.source} are {first_of(data.class_names, 20)}, and those of"
                f" {self.config.data.source} {first_of(names or [], 20)}; expected one order of the"
                " classes, that of the model's outputs",
            )
        if names is not None:
            data = data.model_copy(update={"class_names": names})
        found = samples_of(data, self.config, self.loaded, self.criterion, unit)
        require_one_numbering(names, self.config.data.source, found, data.source)
        if found.ragged is not None and self.samples.ragged is not None:
            found.ragged = replace(found.ragged, masked=self.samples.ragged.masked)
        if found.weighted != (self.samples.weighted if weighted is None else weighted):
            raise ConfigError(
                f"only one of {self.config.data.source} and {data.source} has weights; expected a column"
                " data.weight in both, or in neither",
            )
        return found

    def first_output(self) -> Any:
        """The model's output for the first row as a batch of one, without psgrad's transforms."""
        inputs = self.samples.take([0]).inputs
        with torch.no_grad():
            return self.forward(
                self.model,
                *[x.to(self.device, self.dtype if x.is_floating_point() else None) for x in inputs],
            )


@dataclass(frozen=True)
class Trained:
    """The parameters that are differentiated.

    patterns: of their names; None for those that the factory left trainable. key: the config's name for the
    patterns.
    """

    patterns: Sequence[str] | None
    key: str


def load(
    config: Config,
    *,
    trained: Trained,
    unit: str | None = None,
    updates: bool = False,
    processes: Processes | None = None,
) -> Loaded:
    """Load all that a config names. All processes of a run do so together, once.

    Args:
        trained: the parameters that are differentiated.
        unit: the column of the data that says whom each row belongs to.
        updates: whether the run writes to the parameters that are trained.
        processes: those that run it; None for this one alone.

    Raises PsgradError for everything that can be wrong with the config, the model or the data.
    """
    device = pick_device(config.engine.device)
    processes = OneProcess() if processes is None else processes
    placement = weight_placement_of(config, device, processes)
    if placement.where != "resident" and device.type == "cpu":
        give_freed_memory_back()  # before the first tensor is made
    loaded = load_model(
        config.model,
        config.base,
        trained.patterns,
        trained.key,
        in_files=placement.where != "resident",
    )
    if config.engine.dtype == "auto":  # what is kept of the run names the precision that this is
        found = "float32" if loaded.pretrained is None else automatic_precision(loaded.pretrained.precision)
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": found})})
    dtype, autocast = pick_precision(config.engine.dtype)
    identity = identify(loaded.model)  # now: placing converts tensors
    placement = placement.supplied(device)
    model = place(loaded.model, device, dtype, config.model.dtype, placement.supply, trained_too=not updates)
    placement.require_memory(model)
    engine, recompute = config.engine, None
    if engine.recompute != "none":
        recompute = Recompute(engine.recompute == "blocks" or placement.supply is not None)
        recompute.add(model)
    criterion = resolve_loss(config.loss, config.base)
    _require_loss_of_the_head(loaded, criterion)
    samples = samples_of(config.data, config, loaded, criterion, unit)
    if config.data.class_names is None and samples.class_names is not None:
        named = config.data.model_copy(update={"class_names": list(samples.class_names)})
        config = config.model_copy(update={"data": named})
    forward = Forward(samples.keywords, loaded.pick, samples.weighted)
    return Loaded(
        config,
        trained,
        device,
        dtype,
        autocast,
        loaded,
        identity,
        criterion,
        samples,
        model,
        forward,
        placement,
        recompute,
    )


def _require_loss_of_the_head(loaded: LoadedModel, criterion: Criterion) -> None:
    """Raises ConfigError where a head of several labels a row, or of one a token, would be compared with one
    class a row.
    """
    task = None if loaded.pretrained is None else loaded.pretrained.task
    if task is not None and TASK_LOSSES[task] == "token_cross_entropy" and criterion.kind == "class":
        raise ConfigError(
            f"the task {task} has a label for each token, and the loss {criterion.name} takes one a row;"
            " expected loss: token_cross_entropy, or a loss of your own",
            hint="leave loss out: the task has its own",
        )
    problem = None if loaded.pretrained is None else getattr(loaded.pretrained.config, "problem_type", None)
    if problem == "multi_label_classification" and criterion.kind == "class":
        raise ConfigError(
            f"the model has several labels a row ({problem}), and the loss {criterion.name} has one;"
            " expected loss: bce_with_logits, or a loss of your own",
            hint="say the loss in the config; the task's own is that of one label",
        )


def pick_device(name: str) -> torch.device:
    """The device of a config; 'auto' is a GPU if there is one. One of several processes on a machine takes
    the GPU of its own number (LOCAL_RANK, as torchrun sets it).
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{int(os.environ['LOCAL_RANK']) % max(1, torch.cuda.device_count())}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"engine.device: {name!r} can't be used: {str(error).splitlines()[0]}; expected auto, cpu,"
            " cuda or cuda:N",
            hint="set engine.device: auto, or install a PyTorch build for this device",
        ) from error
    return device


def pick_precision(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """(the type of parameters and inputs, the type that autocast computes in) of a config's dtype; None
    without autocast.

    What is differentiated of a checkpoint in half precision is float32, which holds its numbers exactly.
    """
    kind: torch.dtype = getattr(torch, name)
    return (torch.float32, kind) if kind.itemsize == 2 else (kind, None)


def samples_of(
    data: DataConfig,
    config: Config,
    loaded: LoadedModel,
    criterion: Criterion,
    unit: str | None = None,
) -> Samples:
    """The dataset as `load_data` has it for a config's model and loss."""
    # timm's facts about the images that its model was trained on.
    images = getattr(loaded.model, "pretrained_cfg", None)
    return load_data(data, config.base, unit, loaded.pretrained, criterion=criterion, trained_on=images)
