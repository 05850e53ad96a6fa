"""The section of a private run: who is protected, how batches are drawn, what is clipped, how much noise, and what is spent.

Rules that join several keys are checked here, without the data; what needs the data or the model is in psgrad/engine/privacy/refusals.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from psgrad.config.values import CallableSpec, Finite, Section, described

Scheme = Literal["poisson", "truncated_poisson", "fixed"]
RelationName = Literal["add_or_remove_one", "replace_one", "zero_out"]

RELATIONS: Mapping[Scheme, tuple[RelationName, ...]] = {
    "poisson": ("add_or_remove_one", "zero_out", "replace_one"),
    "truncated_poisson": ("zero_out", "replace_one"),
    "fixed": ("replace_one", "zero_out"),
}
"""The relations that a scheme can be accounted under, its default first."""

_NEITHER_SHUFFLED = "batches are drawn at random by privacy.sampling, and accounted as drawn; no accountant holds for another sampler"
_SAMPLERS = {
    "shuffle": f"an epoch in shuffled order is no Poisson sample; {_NEITHER_SHUFFLED}",
    "drop_last": f"there are no epochs that a last batch could end; {_NEITHER_SHUFFLED}",
    "sampler": _NEITHER_SHUFFLED,
    "batch_sampler": _NEITHER_SHUFFLED,
    "weights": f"records that are drawn with unequal chances have no accountant; {_NEITHER_SHUFFLED}",
    "replacement": f"a record is drawn once or not at all; {_NEITHER_SHUFFLED}",
}


def _positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(value) < float("inf")  # type: ignore[arg-type]


# Sampling -------------------------------------------------------------------------------------------------------------------------


class SamplingConfig(Section):
    """How the records of a step are drawn.

    poisson: each record by itself, with probability `sample_rate`. truncated_poisson: the same, and of more than `max_batch_size` a
    random part so large; `dataset_size` is the number of records, which is public then. fixed: `batch_size` records, every set of
    them as likely; accounted without amplification.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **_SAMPLERS,
        "expected_batch_size": "it is a key of privacy itself, the divisor of the noisy sum",
        "seed": "set privacy.noise.seed, with --insecure-deterministic; what it says holds for the batches, too",
    }

    scheme: Scheme
    sample_rate: Annotated[Finite, Field(gt=0, le=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    dataset_size: Annotated[int, Field(ge=1)] | None = None

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


# The record -----------------------------------------------------------------------------------------------------------------------


class UnitConfig(Section):
    """A record is all rows with one value in `column`; their gradients are averaged or summed before the clipping.

    Of a unit with more than `max_rows` rows the first ones in dataset order count, and the others never.
    """

    column: str
    combine: Literal["mean", "sum"] = "mean"
    max_rows: Annotated[int, Field(ge=1)] | None = None


class AugmentationConfig(Section):
    """Each row stands for `copies` of what `function(*inputs of one row)` returns, averaged inside the record."""

    function: CallableSpec
    copies: Annotated[int, Field(ge=1)]


# Clipping -------------------------------------------------------------------------------------------------------------------------


class AdaptiveConfig(Section):
    """A bound that follows a quantile of the norms, by a noised count of the records below it (Andrew et al. 2021, arXiv 1905.03871)."""

    quantile: Annotated[Finite, Field(ge=0, le=1)] = 0.5
    learning_rate: Annotated[Finite, Field(gt=0)] = 0.2
    count_noise_multiplier: Annotated[Finite, Field(gt=0)] = 10.0


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
    groups: Annotated[Literal["flat", "layer", "parameter"] | dict[str, float], BeforeValidator(_groups)] = "flat"
    rule: Literal["clip", "automatic"] = "clip"
    stability: Annotated[Finite, Field(gt=0)] = 0.01
    adaptive: AdaptiveConfig | None = None

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
    every: Annotated[int, Field(ge=1)] | None = None
    factor: Annotated[Finite, Field(gt=0)] | None = None
    multipliers: list[Annotated[Finite, Field(gt=0)]] | None = None

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
    target_epsilon: Annotated[Finite, Field(gt=0)] | None = None
    mechanism: Literal["gaussian", "discrete_gaussian"] = "gaussian"
    # Step of the grid that records are rounded to, before the discrete noise; None lets the bound and the model's size decide.
    grid: Annotated[Finite, Field(gt=0)] | None = None
    generator: Literal["aes", "torch"] = "aes"
    schedule: ScheduleConfig = Field(default_factory=lambda: ScheduleConfig(kind="constant"))
    seed: Annotated[int, Field(ge=0)] | None = None

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


# Optimiser ------------------------------------------------------------------------------------------------------------------------


class OptimizerConfig(Section):
    """An optimiser of torch.optim by name. It sees the noisy gradient alone, so that whatever it makes of it costs no privacy."""

    not_taken: ClassVar[Mapping[str, str]] = {"lr": "an optimiser's arguments go to privacy.optimizer.kwargs"}

    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _one_gradient_a_step(cls, value: str) -> str:
        if value == "LBFGS":
            raise ValueError("LBFGS asks for several gradients and losses a step, of which one is released; choose a first-order optimiser")
        if value == "SparseAdam":
            raise ValueError("SparseAdam takes sparse gradients, and a noisy gradient is nowhere zero; choose Adam")
        return value


# The whole ------------------------------------------------------------------------------------------------------------------------


def _loss_scaling(value: object) -> object:
    if value == "dynamic":
        raise ValueError(
            "dynamic loss scaling skips a step when a gradient overflows, which one record can bring about: the branch would tell of it "
            "outside the guarantee; set none, with engine.dtype: bfloat16 for mixed precision, which needs no scaling"
        )
    if value != "none":
        raise ValueError(f"got {described(value)}, expected none, the only value: gradients in float32 and bfloat16 need no scaling")
    return value


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _interval(value: object) -> object:
    if type(value) is int and value >= 1:
        return value
    if isinstance(value, str) and (written := _DURATION.fullmatch(value.strip())) and float(written[1]) > 0:
        return value
    raise ValueError(f"got {described(value)}, expected a number of steps, or a time such as 30s, 5min or 1h")


def _patterns(value: object) -> object:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"got {described(value)}, expected one pattern of parameter names or a list of them, such as [head.*]")
    return patterns


class PrivacyConfig(Section):
    """A differentially private run of `steps` steps.

    expected_batch_size is what the noisy sum is divided by: a public constant, never the size of the batch that was drawn.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **_SAMPLERS,
        "batch_size": "batches have the size that privacy.sampling gives them, and the noisy sum is divided by expected_batch_size",
        "epochs": "privacy is spent by steps; give steps (an epoch is about 1 / sample_rate of them)",
        "seed": "set privacy.noise.seed, with --insecure-deterministic",
        "max_grad_norm": "set privacy.clipping.norm",
        "noise_multiplier": "set privacy.noise.multiplier",
        "epsilon": "set privacy.noise.target_epsilon",
        "target_delta": "it is called delta here",
        "max_physical_batch_size": "set engine.chunk_size or engine.memory, which don't change the numbers",
    }

    steps: Annotated[int, Field(ge=1)]
    delta: Annotated[Finite, Field(gt=0, lt=1, description="the delta of (epsilon, delta), below one over the number of records")]
    expected_batch_size: Annotated[
        Finite,
        Field(gt=0, description="the public number that the noisy sum is divided by; the size of the batch that was drawn is private"),
    ]
    sampling: SamplingConfig
    relation: RelationName
    unit: UnitConfig | None = None
    augmentation: AugmentationConfig | None = None
    clipping: ClippingConfig
    noise: NoiseConfig
    optimizer: OptimizerConfig
    trainable: Annotated[list[str] | None, BeforeValidator(lambda value: None if value is None else _patterns(value))] = None
    loss_scaling: Annotated[Literal["none"], BeforeValidator(_loss_scaling)] = "none"
    checkpoint_every: Annotated[int | str, BeforeValidator(_interval)] = "30s"

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between two checkpoints; None where they are told in time."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def checkpoint_seconds(self) -> float | None:
        """Seconds between two checkpoints; None where they are told in steps."""
        written = _DURATION.fullmatch(self.checkpoint_every.strip()) if isinstance(self.checkpoint_every, str) else None
        return None if written is None else float(written[1]) * _SECONDS[written[2]]

    @model_validator(mode="before")
    @classmethod
    def _relation_of_the_scheme(cls, value: object) -> object:
        """Where the relation is left open, it is the scheme's own: a resolved config says which."""
        if not isinstance(value, dict) or value.get("relation") is not None:
            return value
        sampling = value.get("sampling")
        scheme = sampling.get("scheme") if isinstance(sampling, dict) else getattr(sampling, "scheme", None)
        # A scheme that is none is told as such: the relation is no second problem then.
        known = next((relations for name, relations in RELATIONS.items() if name == scheme), RELATIONS["poisson"])
        return {**value, "relation": known[0]}

    @model_validator(mode="after")
    def _accounted(self) -> PrivacyConfig:
        scheme, known = self.sampling.scheme, RELATIONS[self.sampling.scheme]
        if self.relation not in known:
            raise ValueError(
                f"relation: no accountant covers {scheme} sampling under {self.relation}; under {scheme} it is one of {', '.join(known)}"
            )
        if self.noise.mechanism == "discrete_gaussian" and (
            scheme == "truncated_poisson" or (scheme, self.relation) == ("poisson", "replace_one")
        ):
            raise ValueError(
                f"noise.mechanism: discrete noise is accounted by moments, which don't cover {scheme} sampling under {self.relation}; "
                "use poisson under add_or_remove_one or zero_out, or fixed batches"
            )
        return self

    @model_validator(mode="after")
    def _the_divisor_fits_the_batches(self) -> PrivacyConfig:
        sampling, divisor = self.sampling, self.expected_batch_size
        if sampling.scheme == "fixed" and divisor != sampling.batch_size:
            raise ValueError(f"expected_batch_size is {divisor:g}, and every batch has {sampling.batch_size} records (sampling.batch_size)")
        if sampling.sample_rate is None or sampling.dataset_size is None or sampling.max_batch_size is None:
            return self
        expected = min(sampling.sample_rate * sampling.dataset_size, sampling.max_batch_size)
        if not expected / 2 <= divisor <= expected * 2:
            raise ValueError(
                f"expected_batch_size is {divisor:g}, and batches have about {expected:g} records (sample_rate * dataset_size, at most "
                "max_batch_size); is one of them off?"
            )
        return self

    @model_validator(mode="after")
    def _a_multiplier_for_each_step(self) -> PrivacyConfig:
        listed = self.noise.schedule.multipliers
        if listed is not None and len(listed) != self.steps:
            raise ValueError(f"noise.schedule.multipliers has {len(listed)} numbers for {self.steps} steps; give one a step")
        return self

    @model_validator(mode="after")
    def _what_adapts_leaves_room(self) -> PrivacyConfig:
        adaptive = self.clipping.adaptive
        if adaptive is None:
            return self
        if self.noise.mechanism == "discrete_gaussian":
            raise ValueError(
                "clipping.adaptive: the grid of discrete noise is made for one bound, and the count that a bound adapts by is noised in "
                "floating point, which discrete noise is there to avoid; choose one"
            )
        if self.noise.multiplier is not None and self.noise.multiplier >= 2 * adaptive.count_noise_multiplier:
            raise ValueError(
                f"clipping.adaptive.count_noise_multiplier is {adaptive.count_noise_multiplier:g}, and must be more than half of "
                f"noise.multiplier ({self.noise.multiplier:g}): the count's noise is taken out of what the multiplier allows"
            )
        return self
