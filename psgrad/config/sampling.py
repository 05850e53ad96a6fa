"""The part of a private run's config that says how batches are drawn, and out of what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from psgrad.config.values import CallableSpec, Finite, Section

Scheme = Literal["poisson", "truncated_poisson", "fixed"]
RelationName = Literal["add_or_remove_one", "replace_one", "zero_out"]

RELATIONS: Mapping[Scheme, tuple[RelationName, ...]] = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "truncated_poisson": ("zero_out", "replace_one"),
    "fixed": ("replace_one", "zero_out"),
}
"""The relations that a scheme can be accounted under, its default first."""

_NEITHER_SHUFFLED = "batches are drawn at random by privacy.sampling, and accounted as drawn; no accountant holds for another sampler"
SAMPLERS = {
    "shuffle": f"an epoch in shuffled order is no Poisson sample; {_NEITHER_SHUFFLED}",
    "drop_last": f"there are no epochs that a last batch could end; {_NEITHER_SHUFFLED}",
    "sampler": _NEITHER_SHUFFLED,
    "batch_sampler": _NEITHER_SHUFFLED,
    "weights": f"records that are drawn with unequal chances have no accountant; {_NEITHER_SHUFFLED}",
    "replacement": f"a record is drawn once or not at all; {_NEITHER_SHUFFLED}",
}
"""Wishes for a sampler that no accountant covers, in the words of other libraries, and why not."""


class SamplingConfig(Section):
    """How the records of a step are drawn.

    poisson: each record by itself, with probability `sample_rate`. truncated_poisson: the same, and of more than `max_batch_size` a
    random part so large; `dataset_size` is the number of records, which is public then. fixed: `batch_size` records, every set of
    them as likely; accounted without amplification.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "expected_batch_size": "it is a key of privacy itself, the divisor of the noisy sum",
        "seed": "set privacy.noise.seed, with --insecure-deterministic; what it says holds for the batches, too",
    }

    scheme: Scheme
    """poisson: each record independently. truncated_poisson: the same, with a largest batch. fixed: batches of one size."""
    sample_rate: Annotated[Finite, Field(gt=0, le=1)] | None = None
    """Of the poisson schemes: the probability of each record."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Of fixed: records in a batch."""
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Of truncated_poisson: the largest number of records."""
    dataset_size: Annotated[int, Field(ge=1)] | None = None
    """Of truncated_poisson: the number of records, which is public then."""

    @model_validator(mode="after")
    def _fields_of_this_scheme(self) -> SamplingConfig:
        takes = _TAKES[self.scheme]
        given = [name for name in SamplingConfig.model_fields if name != "scheme" and getattr(self, name) is not None]
        missing = [name for name in takes if name not in given]
        refused = [name for name in given if name not in takes]
        if refused == ["batch_size"] and self.scheme != "fixed":
            raise ValueError(
                f"batch_size: a {self.scheme} batch has no fixed size, as each record is drawn by itself; "
                "set sample_rate here and privacy.expected_batch_size, or scheme: fixed, which is accounted without amplification"
            )
        if "sample_rate" in refused:
            raise ValueError(
                "sample_rate: fixed batches have a batch_size, and are accounted as if every record were in every one of them; "
                "scheme: poisson is amplified by a sample_rate"
            )
        if refused:
            raise ValueError(f"{self.scheme} sampling does not take {', '.join(refused)}; it takes {', '.join(takes)}")
        if missing:
            raise ValueError(f"{self.scheme} sampling needs {' and '.join(missing)}; it takes {', '.join(takes)}")
        return self


_TAKES: Mapping[Scheme, tuple[str, ...]] = {
    "poisson": ("sample_rate",),
    "truncated_poisson": ("sample_rate", "max_batch_size", "dataset_size"),
    "fixed": ("batch_size",),
}


class UnitConfig(Section):
    """A record is all rows with one value in `column`; their gradients are averaged or summed before the clipping.

    Of a unit with more than `max_rows` rows the first ones in dataset order count, and the others never.
    """

    column: str
    """The column that says which record a row belongs to."""
    combine: Literal["mean", "sum"] = "mean"
    """How a record's rows are combined before the clipping."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of a record that count, the first ones; null for all."""


class AugmentationConfig(Section):
    """Each row stands for `copies` of what `function(*inputs of one row)` returns, averaged inside the record."""

    function: CallableSpec
    """module:callable(*inputs of one row)."""
    copies: Annotated[int, Field(ge=1)]
    """Copies of each row, averaged inside the record."""
