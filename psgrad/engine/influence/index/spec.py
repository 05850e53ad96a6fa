"""What an index holds, said in plain values, and the place where it is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.index.projector import Kind, Projector
from psgrad.engine.influence.index.rows import Of
from psgrad.errors import ConfigError

DType = Literal["float64", "float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class IndexSpec:
    """What an index keeps of each training example.

    Args:
        dimension, projection, seed: as of `TRAK`.
        features: 'loss' for the gradients of the loss, or 'margin' for those of the margin, from which the former follow: for TRAK, where
            the loss is a function of the margin.
        dtype: of the numbers on the disk. Halves are kept relative to the largest number of their row.
        rows_per_shard: rows of a file, which is the least that is computed again after a kill.

    Raises ConfigError for a value out of range.
    """

    dimension: int = 2048
    projection: Kind = "sparse"
    seed: int = 0
    features: Of = "loss"
    dtype: DType = "float32"
    rows_per_shard: int = 4096

    def __post_init__(self) -> None:
        for name, kind in (("projection", Kind), ("features", Of), ("dtype", DType)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"an index with {name}: {getattr(self, name)}", expected=f"one of {', '.join(get_args(kind))}")
        for name in ("dimension", "rows_per_shard"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(f"an index with {name}: {getattr(self, name)!r}", expected="a whole number, at least 1")


class Store(Protocol):
    """Where an index is kept: psgrad.storage.gradient_index.GradientIndex."""

    @property
    def description(self) -> dict[str, Any]: ...

    @property
    def shards(self) -> list[range]: ...

    def unwritten(self) -> list[tuple[int, int | None]]: ...

    def write(self, checkpoint: int, shard: int | None, arrays: Mapping[str, np.ndarray]) -> None: ...

    def read(self, checkpoint: int, shard: int | None) -> dict[str, np.ndarray]: ...

    def blocks(self, checkpoint: int, most: int, names: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, np.ndarray]]]: ...


def describe(spec: IndexSpec, training: Examples, fingerprint: Mapping[str, Any], checkpoints: int = 1) -> dict[str, Any]:
    """What an index of these examples says of itself, in plain values; two indexes with the same description hold the same rows.

    fingerprint: what the caller knows of the run: hashes of the data and of each checkpoint's file, the loss, by name.
    """
    projector = Projector(spec.projection, spec.dimension, spec.seed, 0, training.params)
    return {
        "rows": len(training),
        "checkpoints": checkpoints,
        **asdict(spec),
        "columns": projector.width,
        "projection_of_first_checkpoint": None if projector.projection is None else projector.projection.describe(),
        "parameters": {name: list(shape) for name, shape in projector.flat.shapes.items()},
        "fingerprint": dict(fingerprint),
    }


def spec_of(description: Mapping[str, Any]) -> IndexSpec:
    return IndexSpec(**{name: description[name] for name in IndexSpec.__dataclass_fields__})


def projector_of(description: Mapping[str, Any], number: int) -> Projector:
    """The projector of a checkpoint of an index."""
    shapes = {name: torch.empty(shape, device="meta") for name, shape in description["parameters"].items()}
    return Projector(description["projection"], description["dimension"], description["seed"], number, shapes)
