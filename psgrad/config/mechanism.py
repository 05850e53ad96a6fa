"""The parts of a private run's config that say what each record is clipped to, how much noise goes on top,
and how batches are drawn, out of what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field, model_validator

from psgrad.config.values import CallableSpec, ConfigSection, Finite, described

# -- Clipping ------------------------------------------------------------------------------------------------


def is_positive(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < value < math.inf


class AdaptiveConfig(ConfigSection):
    """A bound that follows a quantile of the norms, by a noised count of the records below it (Andrew et al.
    2021, arXiv 1905.03871).
    """

    quantile: Annotated[Finite, Field(ge=0, le=1)] = 0.5
    """The quantile of the norms that the bound follows."""
    learning_rate: Annotated[Finite, Field(gt=0)] = 0.2
    """How fast the bound follows."""
    count_noise_multiplier: Annotated[Finite, Field(gt=0)] = 10.0
    """Noise on the count of records below the bound."""


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
    """clip scales longer gradients down to the bound; automatic scales all to bound / (norm + stability)."""
    stability: Annotated[Finite, Field(gt=0)] = 0.01
    """The constant in bound / (norm + stability), of rule: automatic."""
    adaptive: AdaptiveConfig | None = None
    """A bound that follows a quantile of the norms."""

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
        if self.rule == "clip" and "stability" in self.not_default():
            raise ValueError(
                "stability belongs to rule: automatic, which divides by norm + stability; rule: clip has no"
                " such term"
            )
        return self

    @model_validator(mode="after")
    def _what_can_adapt(self) -> ClippingConfig:
        if self.adaptive is None:
            return self
        if self.groups != "flat":
            raise ValueError(
                "adaptive follows one bound, and groups gives several; set groups: flat, or leave"
                " adaptive out"
            )
        if self.rule == "automatic":
            raise ValueError(
                "adaptive has nothing to follow under rule: automatic, which makes every record about as long"
                " as the bound; choose one"
            )
        return self


# -- Noise ---------------------------------------------------------------------------------------------------


class ScheduleConfig(ConfigSection):
    """The noise multiplier of step t = 0, 1, ..., as a multiple of noise.multiplier (or of the one that meets
    target_epsilon).

    list: the multipliers themselves, where noise has neither multiplier nor target_epsilon.
    """

    kind: Literal["constant", "step", "exponential", "list"]
    """constant: 1. step: factor^(t // every). exponential: factor^t. list: one number a step."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Of step: how many steps a multiplier lasts."""
    factor: Annotated[Finite, Field(gt=0)] | None = None
    """Of step and exponential."""
    multipliers: list[Annotated[Finite, Field(gt=0)]] | None = None
    """Of list: one number for each step."""

    @model_validator(mode="after")
    def _fields_of_this_kind(self) -> ScheduleConfig:
        takes = {"step": ["every", "factor"], "exponential": ["factor"], "list": ["multipliers"]}.get(
            self.kind, []
        )
        for name in ("every", "factor", "multipliers"):
            if (getattr(self, name) is not None) != (name in takes):
                fault = f"needs {name}" if name in takes else f"does not take {name}"
                also = f"; it takes {', '.join(takes)}" if takes else ""
                raise ValueError(f"a schedule of kind {self.kind} {fault}{also}")
        return self


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
        "generator": "noise comes from AES-256 in counter mode, the only generator; leave the key out",
    }

    multiplier: Annotated[Finite, Field(ge=0)] | None = None
    """Standard deviation of the noise on the sum, as a multiple of the sensitivity."""
    target_epsilon: Annotated[Finite, Field(gt=0)] | None = None
    """In place of a multiplier: the epsilon from which the noise is solved."""
    schedule: ScheduleConfig = Field(default_factory=lambda: ScheduleConfig(kind="constant"))
    """The multiplier of step t = 0, 1, ..., as a multiple of the one above."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """For tests, with --insecure-deterministic: with the seed the noise can be subtracted."""

    @model_validator(mode="after")
    def _one_amount(self) -> NoiseConfig:
        listed = self.schedule.kind == "list"
        if self.multiplier is not None and self.target_epsilon is not None:
            raise ValueError(
                "give exactly one of multiplier (the noise) and target_epsilon (from which the noise is"
                " solved)"
            )
        if self.multiplier is not None and listed:
            raise ValueError(
                "schedule.multipliers lists the multipliers themselves; leave multiplier out, or scale the"
                " list to target_epsilon"
            )
        if self.multiplier is None and self.target_epsilon is None and not listed:
            raise ValueError(
                "the amount of noise is missing: give exactly one of multiplier and target_epsilon"
            )
        return self


Scheme = Literal["poisson", "truncated_poisson", "fixed"]
RelationName = Literal["add_or_remove_one", "replace_one", "zero_out"]

RELATIONS: Mapping[Scheme, tuple[RelationName, ...]] = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "truncated_poisson": ("zero_out", "replace_one"),
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
    """How the records of a step are drawn.

    truncated_poisson: of more than `max_batch_size` records a random part so large. fixed: every set of
    `batch_size` records is as likely; accounted without amplification.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "expected_batch_size": "it is a key of privacy itself, the divisor of the noisy sum",
        "seed": (
            "set privacy.noise.seed, with --insecure-deterministic; what it says holds for the batches, too"
        ),
    }

    scheme: Scheme
    """poisson: each record independently. truncated_poisson: the same, with a largest batch. fixed: batches
    of one size.
    """
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
        given = [name for name in SamplingConfig.model_fields if name in self.not_default() - {"scheme"}]
        missing = [name for name in takes if name not in given]
        refused = [name for name in given if name not in takes]
        if refused == ["batch_size"] and self.scheme != "fixed":
            raise ValueError(
                f"batch_size: a {self.scheme} batch has no fixed size, as each record is drawn by itself; set"
                " sample_rate here and privacy.expected_batch_size, or scheme: fixed, which is accounted"
                " without amplification"
            )
        if "sample_rate" in refused:
            raise ValueError(
                "sample_rate: fixed batches have a batch_size, and are accounted as if every record were in"
                " every one of them; scheme: poisson is amplified by a sample_rate"
            )
        if refused:
            raise ValueError(
                f"{self.scheme} sampling does not take {', '.join(refused)}; it takes {', '.join(takes)}"
            )
        if missing:
            rate = "sample_rate" in missing
            instead = " (or privacy.batch_size, and dataset_size here)" if rate else ""
            raise ValueError(
                f"{self.scheme} sampling needs {' and '.join(missing)}{instead}; it takes {', '.join(takes)}"
            )
        return self


_TAKES: Mapping[Scheme, tuple[str, ...]] = {
    "poisson": ("sample_rate",),
    "truncated_poisson": ("sample_rate", "max_batch_size", "dataset_size"),
    "fixed": ("batch_size",),
}


class UnitConfig(ConfigSection):
    """A record is all rows with one value in `column`; the first `max_rows` in dataset order count."""

    column: str
    """The column that says which record a row belongs to."""
    combine: Literal["mean", "sum"] = "mean"
    """How a record's rows are combined before the clipping."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of a record that count, the first ones; null for all."""


class AugmentationConfig(ConfigSection):
    """Each row stands for `copies` results of `function(*inputs of one row)`, averaged inside the record."""

    function: CallableSpec
    """module:callable(*inputs of one row)."""
    copies: Annotated[int, Field(ge=1)]
    """Copies of each row, averaged inside the record."""
