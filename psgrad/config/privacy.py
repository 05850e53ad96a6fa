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

from psgrad.config.values import ConfigSection, FilePath, Finite, ParameterPatterns, described


def _groups(value: object) -> object:
    if isinstance(value, str) and value in ("flat", "layer", "parameter"):
        return value
    if isinstance(value, dict) and value and all(isinstance(pattern, str) for pattern in value):
        wrong = [
            pattern
            for pattern, norm in value.items()
            if type(norm) not in (int, float) or not 0 < norm < math.inf
        ]
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
        "adaptive": "the bound stays from step to step; set norm, by the norms in the private table of steps",
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


class NoiseConfig(ConfigSection):
    """How much Gaussian noise."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "mechanism": "the only mechanism is Gaussian noise, rounded to a public grid; leave the key out",
        "noise_multiplier": "it is called multiplier here",
        "epsilon": "it is called target_epsilon here",
        "schedule": "every step has the same multiplier; leave the key out",
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

SAMPLERS = dict.fromkeys(
    ("shuffle", "drop_last", "sampler", "batch_sampler", "weights", "replacement"),
    "batches are drawn at random by privacy.sampling, and accounted as drawn; no accountant holds for another"
    " sampler, such as epochs in shuffled order",
)
"""Samplers that no accountant covers, by their names in other libraries, and why they are refused."""


class SamplingConfig(ConfigSection):
    """How the records of a step are drawn. fixed: every set of `batch_size` records is as likely; accounted
    without amplification.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "max_batch_size": "a batch of any size is computed in chunks that fit in memory; leave the key out",
        "expected_batch_size": "it is a key of privacy itself, the divisor of the noisy sum",
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
            needed = "sample_rate" if self.scheme == "poisson" else "batch_size"
            raise ValueError(f"{self.scheme} sampling needs {needed}")
        return self


class UnitConfig(ConfigSection):
    """A record is all rows with one value in `column`: their average, of the first `max_rows` in the data."""

    column: str
    """The column that says which record a row belongs to."""
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Rows of a record that count, the first ones; null for all."""


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


class PrivacyConfig(ConfigSection):
    """A differentially private run of `steps` steps."""

    not_taken: ClassVar[Mapping[str, str]] = {
        **SAMPLERS,
        "max_grad_norm": "set privacy.clipping.norm",
        "noise_multiplier": "set privacy.noise.multiplier",
        "epsilon": "set privacy.noise.target_epsilon",
        "loss_scaling": (
            "gradients in float32 and bfloat16 need no scaling, and a dynamic one tells of single records by"
            " the steps that it skips; leave it out"
        ),
        "epochs": "set steps: epochs / sampling.sample_rate, rounded up",
        "batch_size": "set expected_batch_size and sampling.sample_rate: batch size / number of records",
        "preflight": "the model is run on stand-ins of the shapes of rows; psgrad dp-audit looks at rows",
        "augmentation": "let the dataset change each row as it reads it: every step reads its records anew",
    }

    filled_in: ClassVar[tuple[str, ...]] = ("relation",)

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
        return self

    @model_validator(mode="after")
    def _records_have_moments(self) -> PrivacyConfig:
        replaced = self.sampling.scheme == "poisson" and self.relation == "replace_one"
        if self.individual_every and replaced:
            raise ValueError(
                "individual_every: the moments of a record are not known for poisson sampling under"
                " replace_one"
            )
        return self

    @model_validator(mode="after")
    def _a_budget_counts_what_is_private(self) -> PrivacyConfig:
        if self.budget is not None and self.noise.seed is not None:
            raise ValueError("budget: a seeded run protects nothing from who knows noise.seed; leave one out")
        return self
