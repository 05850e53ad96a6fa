"""The index of training gradients: what it holds, and how it is searched."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from psgrad.config.values import ConfigSection, FilePath


class IndexConfig(ConfigSection):
    """An index of the training gradients, built once by `psgrad influence index` and asked many times.

    `path` is relative to the current directory, as `output` is. The rest is as in
    psgrad.engine.influence.index.stored_index.IndexSpec.
    """

    bare: ClassVar[str] = "path"

    path: FilePath
    """Folder of the index, relative to the current directory."""
    dimension: Annotated[int, Field(ge=1)] = 2048
    """Numbers stored for each gradient."""
    projection: Literal["sparse", "rademacher", "gaussian", "two-sided", "none"] = "sparse"
    """How gradients are projected; none keeps them whole."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the projection."""
    features: Literal["loss", "margin"] = "loss"
    """Gradients of the loss, or of the margin (for trak)."""
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int8"] = "float32"
    """Precision of the stored numbers."""
    rank: Annotated[int, Field(ge=1)] | None = None
    """With projection two-sided or none, a row has a matrix for each parameter: only so many vectors for its
    rows and its columns are kept; null keeps all of its numbers.
    """
    rows_per_shard: Annotated[int, Field(ge=1)] = 4096
    """Rows in each file of the index."""

    @model_validator(mode="after")
    def _rank_of_matrices(self) -> IndexConfig:
        if self.rank is not None and self.projection not in ("two-sided", "none"):
            raise ValueError(
                "rank keeps factors of a matrix for each parameter, and projection:"
                f" {self.projection} adds all parameters up; choose two-sided or none"
            )
        return self


class IndexSearchConfig(ConfigSection):
    """How the strongest rows of a query are found in an index.

    approximate: rows are divided, once, into lists of rows near to each other; of each query some lists are
    searched, and the rows found there get their exact scores. It needs faiss: pip install 'psgrad[faiss]'.
    """

    bare: ClassVar[str] = "kind"

    kind: Literal["exact", "approximate"] = "exact"
    """exact reads all rows and misses none; approximate reads a part of them."""
    lists: Annotated[int, Field(ge=1)] | None = None
    """Lists that the rows are divided into; null for the square root of their number."""
    probes: Annotated[int, Field(ge=1)] | None = None
    """Lists that are searched for either sign of each query; null for a quarter of them. With all of them no
    row is missed.
    """
    candidates: Annotated[int, Field(ge=1)] = 2
    """So many rows are found, and scored exactly, for each one that is ranked."""
    sample: Annotated[int, Field(ge=0)] = 20
    """Queries that are also answered by reading all rows, to measure which share of the strongest was found;
    0 measures nothing.
    """

    @model_validator(mode="after")
    def _options_of_approximate(self) -> IndexSearchConfig:
        if self.kind == "exact" and (given := sorted(self.not_default())):
            raise ValueError(
                f"{', '.join(given)} {'are' if len(given) > 1 else 'is'} of kind: approximate; set that, or"
                " leave them out"
            )
        if self.lists is not None and self.probes is not None and self.probes > self.lists:
            raise ValueError(f"probes: {self.probes} is more than lists: {self.lists}")
        return self
