"""The description of an index, the interface of its storage, and its rows as they are encoded on the disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.gradients.projections.projector import Kind, Projector
from psgrad.engine.influence.index.index_rows import BLOCK, Differentiated, RowBlock, moments
from psgrad.errors import ConfigError, InfluenceError

DType = Literal["float64", "float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class IndexSpec:
    """The content of an index.

    Args:
        dimension, projection, seed: as of `TRAK`.
        features: 'loss' for the gradients of the loss, or 'margin' for those of the margin, from which the
            former follow: for TRAK, if the loss is a function of the margin.
        dtype: of the numbers on the disk. Half-precision numbers are relative to the largest one of their
            row; whole numbers of 8 bits to that of their row in their parameter, where parameters have
            columns of their own.
        rows_per_shard: rows of a file, which is the least that is computed again after a kill.

    Raises ConfigError for a value out of range.
    """

    dimension: int = 2048
    projection: Kind = "sparse"
    seed: int = 0
    features: Differentiated = "loss"
    dtype: DType = "float32"
    rows_per_shard: int = 4096

    def __post_init__(self) -> None:
        for name, kind in (("projection", Kind), ("features", Differentiated), ("dtype", DType)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"an index with {name}: {getattr(self, name)}; expected one of"
                    f" {', '.join(get_args(kind))}",
                )
        for name in ("dimension", "rows_per_shard"):
            if (
                isinstance(getattr(self, name), bool)
                or not isinstance(getattr(self, name), int)
                or getattr(self, name) < 1
            ):
                raise ConfigError(
                    f"an index with {name}: {getattr(self, name)!r}; expected a whole number, at least 1"
                )


class IndexStore(Protocol):
    """The interface of an index's storage: psgrad.run.gradient_index.GradientIndex."""

    description: dict[str, Any]
    shards: list[range]

    def unwritten(self) -> list[tuple[int, int | None]]: ...

    def write(self, checkpoint: int, shard: int | None, arrays: Mapping[str, np.ndarray]) -> None: ...

    def read(self, checkpoint: int, shard: int | None) -> dict[str, np.ndarray]: ...

    def blocks(
        self,
        checkpoint: int,
        most: int,
        names: Sequence[str] | None = None,
        first: int = 0,
        step: int = 1,
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]: ...


def describe(
    spec: IndexSpec, training: Examples, fingerprint: Mapping[str, Any], checkpoints: int = 1
) -> dict[str, Any]:
    """The description of an index of these examples, in plain values; two indexes with the same description
    hold the same rows.

    fingerprint: the hashes of the data and of each checkpoint's file, the loss, by name.
    """
    projector = Projector(spec.projection, spec.dimension, spec.seed, 0, training.params)
    return {
        "rows": len(training),
        "checkpoints": checkpoints,
        **asdict(spec),
        "columns": projector.width,
        "projection_of_first_checkpoint": (
            None if projector.projection is None else projector.projection.describe()
        ),
        "parameters": {name: list(shape) for name, shape in projector.flat.shapes.items()},
        "fingerprint": dict(fingerprint),
    }


def spec_of(description: Mapping[str, Any]) -> IndexSpec:
    """The content of an index with this description."""
    return IndexSpec(**{name: description[name] for name in IndexSpec.__dataclass_fields__})


def projector_of(description: Mapping[str, Any], number: int) -> Projector:
    """The projector of a checkpoint of an index."""
    shapes = {name: torch.empty(shape, device="meta") for name, shape in description["parameters"].items()}
    return Projector(description["projection"], description["dimension"], description["seed"], number, shapes)


# Up to this many columns the sums over rows, columns x columns in float64, are kept: 512 MiB.
WIDEST = 8192
# Rows below 2^-1000 lose their smallest numbers: the inverse of their power would not be a number.
_LEAST = -1000


class StoredRows:
    """The rows of one checkpoint of an index, a RowSource. Each use reads them from the disk, block by
    block.
    """

    def __init__(self, store: IndexStore, number: int) -> None:
        self.store, self.number = store, number
        spec = spec_of(store.description)
        self.of, self.dtype = spec.features, spec.dtype
        self.projector = projector_of(store.description, number)

    def __len__(self) -> int:
        return int(self.store.description["rows"])

    @property
    def finite(self) -> int:
        return int(self.losses_and_square_norms()[1].isfinite().sum())

    def blocks(self, first: int = 0, step: int = 1) -> Iterator[RowBlock]:
        most = max(1, BLOCK // self.projector.width)
        for start, arrays in self.store.blocks(self.number, most, None, first, step):
            yield decoded(arrays, start, self.dtype, self.projector.spans)

    def losses_and_square_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] float64 both, of whole gradients of the loss, NaN where one is not finite; no row is read for
        them.
        """
        parts = [block for _, block in self.store.blocks(self.number, BLOCK, ("loss", "square_norm"))]
        loss, square_norm = (
            torch.from_numpy(np.concatenate([part[name] for part in parts]))
            for name in ("loss", "square_norm")
        )
        return loss, square_norm

    def moment(self, of: Differentiated) -> torch.Tensor:
        stored = self.store.read(self.number, None).get(of)
        if stored is None:
            raise InfluenceError(
                f"the index has rows of {self.projector.width:,} columns, and keeps no second moment of so"
                f" many: at most {WIDEST:,}, for trak and projected_influence",
                hint="build an index with a smaller dimension, or ask for gradient_dot or gradient_cosine",
            )
        return torch.from_numpy(stored)

    def sums(self, processes: Processes) -> dict[str, np.ndarray]:
        """What is stored of all rows together, after they are written: `rows` [1], their number, and their
        second moments `loss` and `margin` [k, k] float64, if not too large. Each process reads its share.
        """
        result = {"rows": np.array([len(self)])}
        if self.projector.width <= WIDEST:
            result.update((str(of), moment.numpy()) for of, moment in moments(self, processes).items())
        return result


# The largest 8-bit number of a row.
_LARGEST = 127


def encoded(blocks: Sequence[RowBlock], dtype: DType, spans: Sequence[slice]) -> dict[str, np.ndarray]:
    """Neighbouring blocks as arrays of one shard.

    rows: each divided by the power of two above its largest number, which is exact, so that no row is too
    small or too large for a half; bfloat16 as the uint16 of its bits. exponent: [b] of that power. scales:
    [b, s] of int8, one for each span of columns.
    """
    rows = torch.cat([block.rows.double() for block in blocks])
    exponent = torch.frexp(rows.abs().amax(1)).exponent.clamp(min=_LEAST)
    relative = torch.ldexp(rows, -exponent.unsqueeze(1))
    arrays = {
        "exponent": exponent.to(torch.int16).numpy(),
        "loss": torch.cat([block.loss for block in blocks]).numpy(),
        "square_norm": torch.cat([block.square_norm for block in blocks]).numpy(),
    }
    if dtype == "int8":
        largest = torch.stack([relative[:, span].abs().amax(1) for span in spans], 1)
        # of zeros, and of numbers that float32 does not have, any scale is right
        scales = (largest / _LARGEST).float().clamp(min=torch.finfo(torch.float32).tiny)
        values = (relative / _by_column(scales, spans)).round().to(torch.int8)
        arrays |= {"rows": values.numpy(), "scales": scales.numpy()}
    else:
        values = relative.to(getattr(torch, dtype))
        halves = dtype == "bfloat16"  # which numpy has not
        arrays["rows"] = values.view(torch.int16).numpy().view(np.uint16) if halves else values.numpy()
    weights = [block.weight for block in blocks if block.weight is not None]
    return {**arrays, "weight": torch.cat(weights).numpy()} if weights else arrays


def decoded(arrays: dict[str, np.ndarray], start: int, dtype: DType, spans: Sequence[slice]) -> RowBlock:
    """A block of rows [b, k] of a shard from the arrays of `encoded`."""
    values = torch.from_numpy(arrays["rows"].view(np.int16) if dtype == "bfloat16" else arrays["rows"])
    if dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    elif dtype == "int8":
        values = values * _by_column(torch.from_numpy(arrays["scales"]), spans)
    rows = values * torch.from_numpy(np.ldexp(1.0, arrays["exponent"])).unsqueeze(1)
    weight = torch.from_numpy(arrays["weight"]) if "weight" in arrays else None
    loss, square_norm = torch.from_numpy(arrays["loss"]), torch.from_numpy(arrays["square_norm"])
    return RowBlock(start, start + len(rows), rows, loss, square_norm, weight)


def _by_column(scales: torch.Tensor, spans: Sequence[slice]) -> torch.Tensor:
    """[b, k] float64 of one scale [b, s] for each span of columns."""
    widths = torch.tensor([span.stop - span.start for span in spans])
    return scales.double().repeat_interleave(widths, 1)
