"""The parts of a private run's config that say what each record is clipped to, how much noise goes on top,
and how batches are drawn, out of what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field, model_validator

from psgrad.config.values import ConfigSection, Finite, described

# -- Clipping ------------------------------------------------------------------------------------------------


def is_positive(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < math.inf


def _groups(value: object) -> object:
    if isinstance(value, str) and value in ("flat", "layer", "parameter"):
        return value
    if isinstance(value, dict) and value and all(isinstance(pattern, str) for pattern in value):
        wrong = [pattern for pattern, norm in value.items() if not is_positive(norm)]
        if not wrong:
            return {pattern: float(norm) for pattern, norm in value.items()}
        raise ValueError(
            f"the bound of {wrong[0]!r} is {described(value[wrong[0]])}, expected a number above 0"
        )
    raise ValueError(
        f"got {described(value)}, expected flat, layer, parameter, or patterns of parameter names with a"
        " bound each"
    )


class ClippingConfig(ConfigSection):
    """What each record's gradient is scaled down to.

    norm: the bound on a whole record, which `layer` and `parameter` share out equally (bound / root of the
    number of groups).
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        "max_grad_norm": "the bound is called norm here",
        "bound": "the bound is called norm here",
        "threshold": "the bound is called norm here",
        "adaptive": "the bound stays from step to step; set norm, by the norms in the private table of steps",
        "stability": "it is 0.01, as in the paper of the automatic rule; leave the key out",
    }

    norm: Annotated[Finite, Field(gt=0)] | None = None
    """The bound on one record's gradient."""
    groups: Annotated[Literal["flat", "layer", "parameter"] | dict[str, float], BeforeValidator(_groups)] = (
        "flat"
    )
    """flat (one bound), layer or parameter (divided equally), or patterns of parameter names with a bound
    each.
    """
    rule: Literal["clip", "automatic"] = "clip"
    """clip scales longer gradients down to the bound; automatic scales all to bound / (norm + 0.01)."""

    @model_validator(mode="after")
    def _one_bound_each(self) -> ClippingConfig:
        if isinstance(self.groups, dict) and self.norm is not None:
            raise ValueError(
                "norm and groups both give bounds; with patterns, the whole record's is the root of the sum"
                " of their squares"
            )
        if not isinstance(self.groups, dict) and self.norm is None:
            raise ValueError(
                "norm is missing: the bound on one record's gradient, from which the noise follows"
            )
        return self


# -- Noise ---------------------------------------------------------------------------------------------------


_ONE_MECHANISM = (
    "the only mechanism is Gaussian noise, rounded to a public grid that follows from its deviation; leave"
    " the key out"
)


class NoiseConfig(ConfigSection):
    """How much Gaussian noise."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "mechanism": _ONE_MECHANISM,
        "grid": _ONE_MECHANISM,
        "noise_multiplier": "it is called multiplier here",
        "sigma": (
            "it is called multiplier here: the standard deviation on the sum is multiplier * sensitivity"
        ),
        "std": "the standard deviation on the sum is multiplier * sensitivity; set multiplier",
        "epsilon": "it is called target_epsilon here",
        "delta": "it is a key of privacy itself",
        "secure": "noise comes from AES-256 in counter mode, which is cryptographic",
        "schedule": "every step has the same multiplier; leave the key out",
        "generator": "noise comes from AES-256 in counter mode, the only generator; leave the key out",
    }

    multiplier: Annotated[Finite, Field(ge=0)] | None = None
    """Standard deviation of the noise on the sum, as a multiple of the sensitivity."""
    target_epsilon: Annotated[Finite, Field(gt=0)] | None = None
    """In place of a multiplier: the epsilon from which the noise is solved."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """For tests, with --insecure-deterministic: with the seed the noise can be subtracted."""

    @model_validator(mode="after")
    def _one_amount(self) -> NoiseConfig:
        if (self.multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                "the amount of noise is missing or given twice: give exactly one of multiplier and"
                " target_epsilon, from which the multiplier is solved"
            )
        return self


Scheme = Literal["poisson", "fixed"]
RelationName = Literal["add_or_remove_one", "replace_one", "zero_out"]

RELATIONS: Mapping[Scheme, tuple[RelationName, ...]] = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "fixed": ("replace_one", "zero_out"),
}
"""The relations that a scheme can be accounted under, its default first."""

_NEITHER_SHUFFLED = (
    "batches are drawn at random by privacy.sampling, and accounted as drawn; no accountant holds for another"
    " sampler"
)
SAMPLERS = {
    "shuffle": f"an epoch in shuffled order is no Poisson sample; {_NEITHER_SHUFFLED}",
    "drop_last": f"there are no epochs that a last batch could end; {_NEITHER_SHUFFLED}",
    "sampler": _NEITHER_SHUFFLED,
    "batch_sampler": _NEITHER_SHUFFLED,
    "weights": f"records that are drawn with unequal chances have no accountant; {_NEITHER_SHUFFLED}",
    "replacement": f"a record is drawn once or not at all; {_NEITHER_SHUFFLED}",
}
"""Samplers that no accountant covers, by their names in other libraries, and why they are refused."""


class SamplingConfig(ConfigSection):
    """How the records of a step are drawn. fixed: every set of `batch_size` records is as likely; accounted
    without amplification.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "dataset_size": "set sample_rate: batch size / number of records",
        "max_batch_size": "a batch of any size is computed in chunks that fit in memory; leave the key out",
        "expected_batch_size": "it is a key of privacy itself, the divisor of the noisy sum",
        "seed": (
            "set privacy.noise.seed, with --insecure-deterministic; what it says holds for the batches, too"
        ),
    }

    scheme: Scheme
    """poisson: each record independently. fixed: batches of one size."""
    sample_rate: Annotated[Finite, Field(gt=0, le=1)] | None = None
    """Of poisson: the probability of each record."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Of fixed: records in a batch."""

    @model_validator(mode="after")
    def _number_of_this_scheme(self) -> SamplingConfig:
        if self.scheme == "poisson" and self.batch_size is not None:
            raise ValueError(
                "batch_size: a Poisson batch has no fixed size, as each record is drawn by itself; set"
                " sample_rate here and privacy.expected_batch_size, or scheme: fixed, which is not amplified"
            )
        if self.scheme == "fixed" and self.sample_rate is not None:
            raise ValueError(
                "sample_rate: fixed batches have a batch_size, and are accounted as if every record were in"
                " every one of them; scheme: poisson is amplified by a sample_rate"
            )
        if self.sample_rate is None and self.batch_size is None:
            raise ValueError(f"{self.scheme} sampling needs {_NUMBERS[self.scheme]}")
        return self


_NUMBERS: Mapping[Scheme, str] = {"poisson": "sample_rate", "fixed": "batch_size"}


class UnitConfig(ConfigSection):
    """A record is all rows with one value in `column`: their average, of the first `max_rows` in the data."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "combine": "the gradients of a record's rows are averaged; leave the key out",
    }

    column: str
    """The column that says which record a row belongs to."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of a record that count, the first ones; null for all."""
