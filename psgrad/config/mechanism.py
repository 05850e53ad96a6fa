"""The part of a private run's config that says what each record is clipped to, and how much noise goes on top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from psgrad.config.values import Finite, Section, described

# Clipping -------------------------------------------------------------------------------------------------------------------------


def _positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(value) < float("inf")  # type: ignore[arg-type]


class AdaptiveConfig(Section):
    """A bound that follows a quantile of the norms, by a noised count of the records below it (Andrew et al. 2021, arXiv 1905.03871)."""

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
        wrong = [pattern for pattern, norm in value.items() if not _positive(norm)]
        if not wrong:
            return {pattern: float(norm) for pattern, norm in value.items()}
        raise ValueError(f"the bound of {wrong[0]!r} is {described(value[wrong[0]])}, expected a number above 0")
    raise ValueError(f"got {described(value)}, expected flat, layer, parameter, or patterns of parameter names with a bound each")


class ClippingConfig(Section):
    """What each record's gradient is scaled down to.

    norm: the bound on a whole record, which `layer` and `parameter` share out equally (bound / root of the number of groups). Patterns
    have a bound each. rule: clip scales what is longer down to the bound; automatic scales all to bound / (norm + stability).
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        "max_grad_norm": "the bound is called norm here",
        "bound": "the bound is called norm here",
        "threshold": "the bound is called norm here",
    }

    norm: Annotated[Finite, Field(gt=0)] | None = None
    """The bound on one record's gradient."""
    groups: Annotated[Literal["flat", "layer", "parameter"] | dict[str, float], BeforeValidator(_groups)] = "flat"
    """flat (one bound), layer or parameter (divided equally), or patterns of parameter names with a bound each."""
    rule: Literal["clip", "automatic"] = "clip"
    """clip scales longer gradients down to the bound; automatic scales all to bound / (norm + stability)."""
    stability: Annotated[Finite, Field(gt=0)] = 0.01
    """The constant in bound / (norm + stability), of rule: automatic."""
    adaptive: AdaptiveConfig | None = None
    """A bound that follows a quantile of the norms."""

    @model_validator(mode="after")
    def _one_bound_each(self) -> ClippingConfig:
        if isinstance(self.groups, dict) and self.norm is not None:
            raise ValueError("norm and groups both give bounds; with patterns, the whole record's is the root of the sum of their squares")
        if not isinstance(self.groups, dict) and self.norm is None:
            raise ValueError("norm is missing: the bound on one record's gradient, from which the noise follows")
        if self.rule == "clip" and self.stability != ClippingConfig.model_fields["stability"].default:
            raise ValueError("stability belongs to rule: automatic, which divides by norm + stability; rule: clip has no such term")
        return self

    @model_validator(mode="after")
    def _what_can_adapt(self) -> ClippingConfig:
        if self.adaptive is None:
            return self
        if self.groups != "flat":
            raise ValueError("adaptive follows one bound, and groups gives several; set groups: flat, or leave adaptive out")
        if self.rule == "automatic":
            raise ValueError(
                "adaptive has nothing to follow under rule: automatic, which makes every record about as long as the bound; choose one"
            )
        return self


# Noise ----------------------------------------------------------------------------------------------------------------------------


class ScheduleConfig(Section):
    """The noise multiplier of step t = 0, 1, ..., as a multiple of noise.multiplier (or of the one that meets target_epsilon).

    constant: 1. step: factor^(t // every). exponential: factor^t. list: one number a step, which are the multipliers themselves where
    noise has neither multiplier nor target_epsilon.
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
        takes = {"constant": [], "step": ["every", "factor"], "exponential": ["factor"], "list": ["multipliers"]}[self.kind]
        for name in ("every", "factor", "multipliers"):
            if (getattr(self, name) is not None) != (name in takes):
                said = f"needs {name}" if name in takes else f"does not take {name}"
                raise ValueError(f"a schedule of kind {self.kind} {said}" + (f"; it takes {', '.join(takes)}" if takes else ""))
        return self


class NoiseConfig(Section):
    """How much noise, of which kind, and out of which generator."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "noise_multiplier": "it is called multiplier here",
        "sigma": "it is called multiplier here: the standard deviation on the sum is multiplier * sensitivity",
        "std": "the standard deviation on the sum is multiplier * sensitivity; set multiplier",
        "epsilon": "it is called target_epsilon here",
        "delta": "it is a key of privacy itself",
        "secure": "the default generator, aes, is cryptographic",
    }

    multiplier: Annotated[Finite, Field(ge=0)] | None = None
    """Standard deviation of the noise on the sum, as a multiple of the sensitivity."""
    target_epsilon: Annotated[Finite, Field(gt=0)] | None = None
    """In place of a multiplier: the epsilon from which the noise is solved."""
    mechanism: Literal["gaussian", "discrete_gaussian"] = "gaussian"
    """The kind of noise."""
    grid: Annotated[Finite, Field(gt=0)] | None = None
    """Of discrete_gaussian: step of the grid that records are rounded to; null to derive it from the bound and the model's size."""
    generator: Literal["aes", "torch"] = "aes"
    """Where random numbers come from: aes is cryptographic."""
    schedule: ScheduleConfig = Field(default_factory=lambda: ScheduleConfig(kind="constant"))
    """The multiplier of step t = 0, 1, ..., as a multiple of the one above."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """For tests, with --insecure-deterministic: whoever knows the seed can subtract the noise."""

    @model_validator(mode="after")
    def _one_amount(self) -> NoiseConfig:
        listed = self.schedule.kind == "list"
        if self.multiplier is not None and self.target_epsilon is not None:
            raise ValueError("give exactly one of multiplier (the noise) and target_epsilon (from which the noise is solved)")
        if self.multiplier is not None and listed:
            raise ValueError(
                "schedule.multipliers lists the multipliers themselves; leave multiplier out, or scale the list to target_epsilon"
            )
        if self.multiplier is None and self.target_epsilon is None and not listed:
            raise ValueError("the amount of noise is missing: give exactly one of multiplier and target_epsilon")
        return self

    @model_validator(mode="after")
    def _a_grid_is_for_discrete_noise(self) -> NoiseConfig:
        if self.grid is not None and self.mechanism == "gaussian":
            raise ValueError("grid belongs to mechanism: discrete_gaussian; gaussian noise rounds nothing")
        return self
