"""The section of a private run: who is protected, how batches are drawn, what is clipped, how much noise, and
what is spent.

Rules that join several keys are checked here, without the data; what needs the data or the model is in
psgrad/engine/privacy/refusals.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from psgrad.config.mechanism import (
    RELATIONS,
    SAMPLERS,
    ClippingConfig,
    NoiseConfig,
    RelationName,
    SamplingConfig,
    UnitConfig,
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
        "epochs": "set steps: epochs / sampling.sample_rate, rounded up",
        "batch_size": "set expected_batch_size and sampling.sample_rate: batch size / number of records",
        "preflight": "the model is run on stand-ins of the shapes of rows; psgrad dp-audit looks at rows",
        "augmentation": "let the dataset change each row as it reads it: every step reads its records anew",
        "max_physical_batch_size": "set engine.chunk_size or engine.memory, which don't change the numbers",
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
