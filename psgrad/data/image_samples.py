"""A dataset of images: read when they are asked for, prepared for the model, as its own image processor
prepares them or as a config says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.image_files import BrokenImage, channels_of, content_of, decoded, opened
from psgrad.data.sources.table_rows import Array, TableRows
from psgrad.data.sources.table_samples import RowName, TableSamples
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError, DataError
from psgrad.models.hub import library
from psgrad.models.pretrained import Pretrained
from psgrad.wording import first_line

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Steps:
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
        """1 for grey, 3 for colours; None for grey unless an image has colours."""
        given = self.mean or self.std
        return None if given is None else len(given)

    @property
    def described(self) -> str:
        """All that decides the numbers, as a text."""
        return json.dumps(asdict(self), sort_keys=True)

    def tensor(self, image: Image, named: str) -> Tensor:
        """[channels, height, width] float32. Raises DataError."""
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
                f"{named} has {whole_height} x {whole_width} pixels, and data.crop is {height} x {width}",
                hint="set data.size, to which images are resized before they are cropped",
            )
        left, top = (whole_width - width) // 2, (whole_height - height) // 2
        return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class Processed:
    """The image processor of a pretrained model's folder."""

    processor: Any

    @property
    def channels(self) -> int | None:
        """See Steps."""
        mean = getattr(self.processor, "image_mean", None)
        return 1 if isinstance(mean, Sequence) and len(mean) == 1 else 3

    @property
    def described(self) -> str:
        """See Steps."""
        return json.dumps(self.processor.to_dict(), sort_keys=True, default=str)

    def tensor(self, image: Image, named: str) -> Tensor:
        """See Steps."""
        try:
            found = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(f"{named} can't be prepared by the model's image processor: {error}") from error
        return torch.as_tensor(found)[0].float()


Preparation = Steps | Processed
"""How an image becomes an input of the model."""


def preparation(config: DataConfig, trained: Pretrained | Mapping[str, Any] | None) -> Preparation:
    """How a config's images become inputs: by a pretrained model's own processor, else as data.size, crop,
    mean and std say.

    `trained` is a pretrained model, or what timm's pretrained_cfg says of one. Raises ConfigError.
    """
    given = _steps(config)
    if not isinstance(trained, Pretrained):
        return given if trained is None else _with_defaults(given, trained)
    if given != Steps():
        raise ConfigError(
            "data.size, crop, mean and std are for models of a factory; a pretrained model's own image"
            " processor prepares its images",
            hint="leave them out, or change preprocessor_config.json in the model's folder",
        )
    return Processed(_processor(trained))


def _steps(config: DataConfig) -> Steps:
    def pair(value: int | list[int] | None, key: str) -> tuple[int, int] | None:
        sides = [value, value] if isinstance(value, int) else value
        if sides is not None and len(sides) != 2:
            raise ConfigError(f"data.{key} has {len(sides)} numbers; expected a side, or [height, width]")
        return None if sides is None else (sides[0], sides[1])

    for name in ("mean", "std"):
        numbers = getattr(config, name)
        if numbers is not None and len(numbers) not in (1, 3):
            raise ConfigError(f"data.{name} has {len(numbers)} numbers; expected 1 for grey images, or 3")
    if config.mean is not None and config.std is not None and len(config.mean) != len(config.std):
        raise ConfigError("data.mean and data.std differ in length; expected a number for each channel")
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
            hint="save preprocessor_config.json there with the image processor's save_pretrained",
        ) from error


_ROWS_PER_PART = 256
DIGEST = 16
"""Bytes of the digest of an image."""


class ImageSamples(TableSamples):
    """Rows of a table with a column of images: paths, bytes, or datasets' {bytes, path}.

    The headers of all images are read once, with their fingerprint; pixels are decoded when a row is read, of
    an image with the same bytes.

    Args:
        folder: paths are relative to it.
        prepared: how an image becomes an input.
    """

    def __init__(
        self,
        rows: TableRows,
        config: DataConfig,
        labels: Labels,
        unit: str | None,
        *,
        folder: Path,
        prepared: Preparation,
    ) -> None:
        assert config.image is not None
        self._image, self._folder, self._prepared = config.image, folder, prepared
        channels, self._digests = self._look(rows)
        digest = hashlib.sha256(self._digests).hexdigest()
        self._channels = prepared.channels or channels
        self._shape: tuple[int, ...] | None = None
        super().__init__(rows, config, unit, labels)
        identity = f"{rows.fingerprint} {digest} {prepared.described} {self._channels}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()

    def picture(self, row: int) -> Any:
        """The image of a row as it is in the data, for people: of Pillow, as colours or grey."""
        content, named = self._content(self._rows.take([row]), 0, self._rows.row_name(row))
        return decoded(content, named, self._channels)

    def _is_number(self, name: str) -> bool:
        return name != self._image

    def _input(self, table: pa.Table, name: str, rows: Array, row_name: RowName) -> Tensor:
        if name != self._image:
            return super()._input(table, name, rows, row_name)
        found = (self._tensor(table, place, int(row), row_name(place)) for place, row in enumerate(rows))
        return torch.stack(list(found))

    def _tensor(self, table: pa.Table, place: int, row: int, where: str) -> Tensor:
        broken, differs = None, "was changed while the run read it, or is another one on this machine"
        try:
            content, named = self._content(table, place, where)
        except BrokenImage as error:
            content, named, broken = str(error).encode(), error.message, error
            differs = "now; it was not so when the run began"
        if _digest(content) != self._digests[row * DIGEST : (row + 1) * DIGEST]:
            raise DataError(
                f"{named} {differs}",
                hint="put the file back and go on with --resume, or begin anew with --overwrite",
            )
        if broken is not None:
            raise broken
        found = self._prepared.tensor(decoded(content, named, self._channels), named)
        shape = tuple(found.shape)
        self._shape = shape if self._shape is None else self._shape
        if shape != self._shape:
            raise DataError(
                f"{named} has the shape {list(shape)} once it is prepared, the first one {list(self._shape)}",
                hint="set data.size to [height, width], or data.size and data.crop",
            )
        return found

    def _content(self, table: pa.Table, place: int, where: str) -> tuple[bytes, str]:
        return content_of(table.column(self._image)[place].as_py(), self._folder, where)

    def _look(self, rows: TableRows) -> tuple[int, bytes]:
        """(the most channels that an image has; the digest of each image, one after another). A broken image
        is an error when its row is read, and not here.
        """
        found, digests = {1}, bytearray()
        for start in range(0, rows.count, _ROWS_PER_PART):
            table = rows.take(range(start, min(start + _ROWS_PER_PART, rows.count)))
            for place in range(table.num_rows):
                try:
                    content, named = self._content(table, place, rows.row_name(start + place))
                except BrokenImage as error:
                    content = str(error).encode()
                else:
                    with suppress(BrokenImage):
                        found.add(channels_of(opened(content, named).mode))
                digests += _digest(content)
        return max(found), bytes(digests)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:DIGEST]
