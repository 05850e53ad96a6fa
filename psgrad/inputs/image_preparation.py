"""Images as tensors: as a model's own image processor prepares them, or as a config says."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.models.hub import library
from psgrad.inputs.models.loaded import Pretrained
from psgrad.wording import first_line

if TYPE_CHECKING:
    from PIL.Image import Image


class Preparation(ABC):
    """How an image becomes an input of the model."""

    @property
    @abstractmethod
    def channels(self) -> int | None:
        """1 for grey, 3 for colours; None for those of the first image."""

    @property
    @abstractmethod
    def described(self) -> str:
        """All that decides the numbers, as a text."""

    @abstractmethod
    def tensor(self, image: Image, named: str) -> Tensor:
        """[channels, height, width] float32. Raises DataError."""


@dataclass(frozen=True)
class Steps(Preparation):
    """Resize, crop, values from 0 to 1, then less the mean and divided by the standard deviation.

    size: the shorter side, or (height, width). crop: of the middle, (height, width).
    """

    size: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str = "bilinear"

    @property
    def channels(self) -> int | None:
        given = self.mean or self.std
        return None if given is None else len(given)

    @property
    def described(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def tensor(self, image: Image, named: str) -> Tensor:
        image = self._cropped(self._resized(image), named)
        values = np.asarray(image, dtype=np.float32) / 255
        found = torch.from_numpy(values[None] if values.ndim == 2 else values.transpose(2, 0, 1).copy())
        if self.mean is not None:
            found = found - torch.tensor(self.mean)[:, None, None]
        return found if self.std is None else found / torch.tensor(self.std)[:, None, None]

    def _resized(self, image: Image) -> Image:
        if self.size is None:
            return image
        pillow = library("PIL.Image", "vision")
        if isinstance(self.size, int):
            shorter = min(image.size)
            width, height = (max(1, round(side * self.size / shorter)) for side in image.size)
        else:
            height, width = self.size
        if (width, height) == image.size:
            return image
        return image.resize((width, height), getattr(pillow.Resampling, self.interpolation.upper()))

    def _cropped(self, image: Image, named: str) -> Image:
        if self.crop is None:
            return image
        (height, width), (whole_width, whole_height) = self.crop, image.size
        if height > whole_height or width > whole_width:
            raise DataError(
                f"{named} has {whole_height} x {whole_width} pixels, and data.crop wants {height} x {width}",
                expected="an image that is at least as large as the crop",
                next_step="set data.size, to which images are resized before they are cropped",
            )
        left, top = (whole_width - width) // 2, (whole_height - height) // 2
        return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class Processed(Preparation):
    """The image processor of a pretrained model's folder."""

    processor: Any

    @property
    def channels(self) -> int | None:
        mean = getattr(self.processor, "image_mean", None)
        return 1 if isinstance(mean, Sequence) and len(mean) == 1 else 3

    @property
    def described(self) -> str:
        return json.dumps(self.processor.to_dict(), sort_keys=True, default=str)

    def tensor(self, image: Image, named: str) -> Tensor:
        try:
            found = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{named} can't be prepared by the model's image processor: {error}") from error
        return torch.as_tensor(found)[0].float()


def preparation(config: DataConfig, trained: Pretrained | Mapping[str, Any] | None) -> Preparation:
    """How a config's images become inputs: by the model's own processor, or as data.size, crop, mean and std
    say.

    `trained` is a pretrained model, or what timm's pretrained_cfg says of one. Raises ConfigError.
    """
    given = _steps(config)
    if not isinstance(trained, Pretrained):
        return given if trained is None else _with_defaults(given, trained)
    processor = _processor(trained)
    if given == Steps():
        return Processed(processor)
    defaults = {"mean": getattr(processor, "image_mean", None), "std": getattr(processor, "image_std", None)}
    return _with_defaults(given, {name: value for name, value in defaults.items() if value})


def _steps(config: DataConfig) -> Steps:
    def pair(value: int | list[int] | None, key: str) -> tuple[int, int] | None:
        sides = [value, value] if isinstance(value, int) else value
        if sides is not None and len(sides) != 2:
            raise ConfigError(f"data.{key} has {len(sides)} numbers", expected="a side, or [height, width]")
        return None if sides is None else (sides[0], sides[1])

    for name in ("mean", "std"):
        numbers = getattr(config, name)
        if numbers is not None and len(numbers) not in (1, 3):
            raise ConfigError(f"data.{name} has {len(numbers)} numbers", expected="1 for grey images, or 3")
    if config.mean is not None and config.std is not None and len(config.mean) != len(config.std):
        raise ConfigError("data.mean and data.std differ in length", expected="a number for each channel")
    return Steps(
        config.size if isinstance(config.size, int) else pair(config.size, "size"),
        pair(config.crop, "crop"),
        None if config.mean is None else tuple(config.mean),
        None if config.std is None else tuple(config.std),
    )


def _with_defaults(given: Steps, trained_on: Mapping[str, Any]) -> Steps:
    """The steps of a config, with those of the model's training where it says nothing."""
    size, crop = given.size, given.crop
    if size is None and crop is None and "input_size" in trained_on:
        _, height, width = trained_on["input_size"]
        crop = (height, width)
        size = int(height / trained_on.get("crop_pct", 1.0))
    mean, std = (getattr(given, name) or trained_on.get(name) for name in ("mean", "std"))
    return Steps(
        size,
        crop,
        None if mean is None else tuple(mean),
        None if std is None else tuple(std),
        trained_on.get("interpolation", given.interpolation),
    )


def _processor(pretrained: Pretrained) -> Any:
    transformers = library("transformers")
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            str(pretrained.folder), local_files_only=True, backend="pil"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{pretrained.folder} has no image processor: {first_line(error)}",
            expected="preprocessor_config.json in the model's folder",
            next_step="save it there with the image processor's save_pretrained",
        ) from error
