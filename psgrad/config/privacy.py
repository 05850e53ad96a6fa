"""The section of a private run: who is protected, how batches are drawn, what is clipped, how much noise, and
what is spent.

Rules that join several keys are checked here, without the data; what needs the data or the model is in
psgrad/engine/privacy/refusals.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from psgrad.config.mechanism import (
    RELATIONS,
    SAMPLERS,
    AugmentationConfig,
    ClippingConfig,
    NoiseConfig,
    RelationName,
    SamplingConfig,
    UnitConfig,
    is_positive,
)
from psgrad.config.values import ConfigSection, FilePath, Finite, ParameterPatterns, described


class OptimizerConfig(ConfigSection):
    """An optimiser of torch.optim by name. It sees the noisy gradient alone, and costs no privacy."""

    not_taken: ClassVar[Mapping[str, str]] = {"lr": "an optimiser's arguments go to privacy.optimizer.kwargs"}

    name: str
    """An optimiser of torch.optim."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, such as {lr: 0.1}."""

    @field_validator("name")
    @classmethod
    def _one_gradient_a_step(cls, value: str) -> str:
        if value == "LBFGS":
            raise ValueError(
                "LBFGS asks for several gradients and losses a step, of which one is released; choose a"
                " first-order optimiser"
            )
        if value == "SparseAdam":
            raise ValueError(
                "SparseAdam takes sparse gradients, and a noisy gradient is nowhere zero; choose Adam"
            )
        return value


class BudgetConfig(ConfigSection):
    """What all private runs on the same data may cost together; a file has what each of them spent."""

    file: FilePath
    """The file, relative to the config file: of all runs on these data, and of no others."""
    epsilon: Annotated[Finite, Field(gt=0)]
    """The most that all runs may cost together."""
    delta: Annotated[Finite, Field(gt=0, lt=1)]
    """The delta of that epsilon; each run may state its own epsilon at another one."""


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _interval(value: object) -> object:
    if type(value) is int and value >= 1:
        return value
    if isinstance(value, str) and (written := _DURATION.fullmatch(value.strip())) and float(written[1]) > 0:
        return value
    raise ValueError(f"got {described(value)}, expected a number of steps, or a time such as 30s, 5min or 1h")


def _steps_in(epochs: float, sample_rate: float) -> int:
    """How many steps that many passes are, each of which draws a record with probability `sample_rate`;
    rounded up, where it is not a whole number but for rounding.
    """
    return max(1, math.ceil(epochs / sample_rate * (1 - 1e-12)))


class PrivacyConfig(ConfigSection):
    """A differentially private run of `steps` steps."""

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "seed": "set privacy.noise.seed, with --insecure-deterministic",
        "max_grad_norm": "set privacy.clipping.norm",
        "noise_multiplier": "set privacy.noise.multiplier",
        "epsilon": "set privacy.noise.target_epsilon",
        "target_delta": "it is called delta here",
        "loss_scaling": (
            "gradients in float32 and bfloat16 need no scaling, and a dynamic one tells of single records by"
            " the steps that it skips; leave it out"
        ),
        "max_physical_batch_size": "set engine.chunk_size or engine.memory, which don't change the numbers",
    }

    filled_in: ClassVar[tuple[str, ...]] = ("relation", "steps", "expected_batch_size")

    epochs: Annotated[Finite, Field(gt=0)] | None = None
    """In place of steps: steps = epochs / sample_rate, rounded up."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """In place of expected_batch_size: the same number. With sampling.dataset_size it also stands for
    sample_rate = batch_size / dataset_size, and of fixed batches for sampling.batch_size.
    """
    steps: Annotated[int, Field(ge=1)]
    """How many steps are planned, and accounted."""
    delta: Annotated[Finite, Field(gt=0, lt=1)]
    """The delta of (epsilon, delta), below one over the number of records."""
    expected_batch_size: Annotated[Finite, Field(gt=0)]
    """The public number that the noisy sum is divided by; the size of the batch that was drawn is private."""
    sampling: SamplingConfig
    """How the records of a step are drawn."""
    relation: RelationName
    """Which datasets are neighbours; by default the first relation of the scheme."""
    unit: UnitConfig | None = None
    """What a record is, if it is not a row: all rows with one value in a column."""
    augmentation: AugmentationConfig | None = None
    """Each row stands for several copies of itself."""
    clipping: ClippingConfig
    """The bound on each record's gradient."""
    noise: NoiseConfig
    """The amount of noise."""
    optimizer: OptimizerConfig
    """The optimiser that uses the noisy gradient."""
    budget: BudgetConfig | None = None
    """What all private runs on the same data may cost together; a run that would cost more is refused."""
    trainable: ParameterPatterns = None
    """Patterns of parameter names that are trained; null for all trainable ones."""
    records: Literal["together", "alone"] = "together"
    """alone computes each record by itself: slower, and the guarantee needs no word on how kernels round a
    record beside others.
    """
    preflight: Literal["stand_ins", "rows"] = "stand_ins"
    """What the model is run on first, to find a layer that mixes records: rows finds more, and whether
    the run begins then depends on the data.
    """
    on_error: Literal["end", "zero"] = "end"
    """Whether a record on which the model, the loss or its reading fails ends the run before the step is paid
    for, or adds zero to the sum. Where the model draws at random, zero computes each record alone.
    """
    checkpoint_every: Annotated[int | str, BeforeValidator(_interval)] = "30s"
    """A number of steps, or a time such as 30s, 5min or 1h."""
    individual_every: Annotated[int, Field(ge=1)] | None = None
    """Before every so many steps a pass computes each record's norm, for a private table of what its own
    norms cost it; 1 for all steps, more for an estimate.
    """

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between two checkpoints; None where they are given in time."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def checkpoint_seconds(self) -> float | None:
        """Seconds between two checkpoints; None where they are given in steps."""
        written = _DURATION.fullmatch(str(self.checkpoint_every).strip())
        return None if written is None else float(written[1]) * _SECONDS[written[2]]

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, value: object) -> object:
        """Where epochs and batch_size are given: the steps, the divisor and the sampling that they mean."""
        if not isinstance(value, dict):
            return value
        found, size = dict(value), value.get("batch_size")
        if is_positive(size):
            found.setdefault("expected_batch_size", float(size))
        if not isinstance(found.get("sampling"), dict):
            return found
        sampling = dict(found["sampling"])
        records = sampling.get("dataset_size")
        if is_positive(size):
            if sampling.get("scheme") == "fixed":
                sampling.setdefault("batch_size", size)
            elif is_positive(records) and sampling.get("sample_rate") is None and size <= records:
                sampling["sample_rate"] = size / records
                if sampling.get("scheme") == "poisson":
                    sampling.pop("dataset_size")  # which the rate says by now
        if is_positive(found.get("epochs")) and is_positive(sampling.get("sample_rate")):
            found.setdefault("steps", _steps_in(found["epochs"], sampling["sample_rate"]))
        return {**found, "sampling": sampling}

    @model_validator(mode="after")
    def _epochs_agree(self) -> PrivacyConfig:
        if self.batch_size is not None and self.batch_size != self.expected_batch_size:
            raise ValueError(
                f"batch_size is {self.batch_size} and expected_batch_size {self.expected_batch_size:g}; they"
                " are two names of one number: give one"
            )
        rate = self.sampling.sample_rate
        if self.epochs is not None and rate is None:
            raise ValueError(
                "epochs: an epoch is 1 / sample_rate steps, and fixed batches have no sample_rate; give steps"
            )
        if self.epochs is not None and rate is not None and self.steps != _steps_in(self.epochs, rate):
            raise ValueError(
                f"steps is {self.steps}, and epochs: {self.epochs:g} are {_steps_in(self.epochs, rate)} steps"
                f" at a sample_rate of {rate:g}; give one of them"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _relation_of_the_scheme(cls, value: object) -> object:
        """Where the relation is left open, it is the scheme's own: a resolved config says which."""
        if not isinstance(value, dict) or value.get("relation") is not None:
            return value
        sampling = value.get("sampling")
        scheme = sampling.get("scheme") if isinstance(sampling, dict) else getattr(sampling, "scheme", None)
        # A scheme that is unknown is one problem; the relation is not a second one.
        return {**value, "relation": RELATIONS[scheme if scheme in [*RELATIONS] else "poisson"][0]}

    @model_validator(mode="after")
    def _accounted(self) -> PrivacyConfig:
        scheme, known = self.sampling.scheme, RELATIONS[self.sampling.scheme]
        if self.relation not in known:
            raise ValueError(
                f"relation: no accountant covers {scheme} sampling under {self.relation}; under {scheme} it"
                f" is one of {', '.join(known)}"
            )
        return self

    @model_validator(mode="after")
    def _the_divisor_fits_the_batches(self) -> PrivacyConfig:
        sampling, divisor = self.sampling, self.expected_batch_size
        if sampling.scheme == "fixed" and divisor != sampling.batch_size:
            raise ValueError(
                f"expected_batch_size is {divisor:g}, and every batch has {sampling.batch_size} records"
                " (sampling.batch_size)"
            )
        if sampling.sample_rate is None or sampling.dataset_size is None or sampling.max_batch_size is None:
            return self
        expected = min(sampling.sample_rate * sampling.dataset_size, sampling.max_batch_size)
        if not expected / 2 <= divisor <= expected * 2:
            raise ValueError(
                f"expected_batch_size is {divisor:g}, and batches have about {expected:g} records"
                " (sample_rate * dataset_size, at most max_batch_size); is one of them off?"
            )
        return self

    @model_validator(mode="after")
    def _records_have_moments(self) -> PrivacyConfig:
        kind = f"{self.sampling.scheme} sampling under {self.relation}"
        if self.individual_every and kind.startswith(("truncated", "poisson sampling under replace")):
            raise ValueError(f"individual_every: the moments of a record are not known for {kind}")
        return self

    @model_validator(mode="after")
    def _a_budget_counts_what_is_private(self) -> PrivacyConfig:
        if self.budget is not None and self.noise.seed is not None:
            raise ValueError("budget: a seeded run protects nothing from who knows noise.seed; leave one out")
        return self

    @model_validator(mode="after")
    def _a_multiplier_for_each_step(self) -> PrivacyConfig:
        listed = self.noise.schedule.multipliers
        if listed is not None and len(listed) != self.steps:
            raise ValueError(
                f"noise.schedule.multipliers has {len(listed)} numbers for {self.steps} steps; give one a"
                " step"
            )
        return self

    @model_validator(mode="after")
    def _what_adapts_leaves_room(self) -> PrivacyConfig:
        adaptive = self.clipping.adaptive
        if adaptive is None:
            return self
        if self.noise.multiplier is not None and self.noise.multiplier >= 2 * adaptive.count_noise_multiplier:
            raise ValueError(
                f"clipping.adaptive.count_noise_multiplier is {adaptive.count_noise_multiplier:g}, and must"
                f" be more than half of noise.multiplier ({self.noise.multiplier:g}): the count's noise is"
                " taken out of what the multiplier allows"
            )
        return self
