"""The parts of a private run, made from its config: records, clipping, noise, sampling, and the sources of
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from psgrad.commands.setup import Setup, load
from psgrad.config import Config, PrivacyConfig
from psgrad.engine.execution.loading import to_device
from psgrad.engine.execution.ranks import Processes
from psgrad.engine.privacy.accounting import MECHANISM, StepEvent, noise_multiplier_for
from psgrad.engine.privacy.accounting.epsilon import dp_accounting
from psgrad.engine.privacy.batches import ClippedSum, GradientSource, RecordStreams
from psgrad.engine.privacy.clipping import Clipping, Group
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.preflight import stand_ins, warm_up, why_not_checked
from psgrad.engine.privacy.records import Records
from psgrad.engine.privacy.refusals import require_expected_batch_size, require_small_delta
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.unchanged import Unchanged
from psgrad.errors import ConfigError

# The number of rows that are run through the model to check that it keeps them apart.
_ROWS_LOOKED_AT = 4


@dataclass(frozen=True)
class PrivateSetup:
    """What a private run is made of, before anything was drawn.

    `common` is what all commands set up, `parameters` those that are trained, by name. `unchanged` is the
    state of the model and the loss from before any record was read; `rank` that of this process. `preflight`
    says how the model was checked before the first step.
    """

    common: Setup
    privacy: PrivacyConfig
    records: Records
    streams: RecordStreams
    parameters: dict[str, nn.Parameter]
    clipping: Clipping
    sampling: Sampling
    unchanged: Unchanged
    rank: int
    preflight: str = ""

    def source(self, records: np.ndarray, step: int = 0) -> GradientSource:
        """The clipped sum of these records, chunk by chunk. One source at a time: the next one's records take
        the place of this one's.

        step: to which the records' coins belong.
        """
        inner = self.streams.source(records, step, self.rank)

        def source(clipping: Clipping) -> ClippedSum:
            with self.unchanged.throughout():
                return inner(clipping)

        return source

    @property
    def config(self) -> Config:
        return self.common.config

    @property
    def draws(self) -> bool:
        """Whether the model may draw, or code that reads or changes rows."""
        return self.common.model.training or self.streams.read_coins is not None

    @property
    def trainable(self) -> dict[str, int]:
        """How much is trained, for people: tensors and numbers in them, of how many numbers."""
        return {
            "tensors": len(self.parameters),
            "parameters": sum(parameter.numel() for parameter in self.parameters.values()),
            "of_parameters": sum(parameter.numel() for parameter in self.common.model.parameters()),
        }


def require_privacy(config: Config) -> PrivacyConfig:
    """The private section of a config. Raises ConfigError where there is none, and PsgradError where no
    epsilon can be computed, which a run would notice after its steps.
    """
    if config.privacy is None:
        raise ConfigError(
            "the config has no section privacy; expected privacy: with steps, delta, expected_batch_size,"
            " sampling, clipping, noise and optimizer",
            hint="docs/guides/private-training.md describes it; configs/digits-dp.yaml is an example",
        )
    dp_accounting()
    return config.privacy


def set_up_privately(
    config: Config, say: Callable[[str], None] = lambda _: None, processes: Processes | None = None
) -> PrivateSetup:
    """Load all that the config of a private run names, and refuse what would break its guarantee.

    Raises PsgradError for everything that can be wrong with the config, the model or the data.
    """
    privacy = require_privacy(config)
    unit = privacy.unit
    column = None if unit is None else unit.column
    loaded = load(config, "privacy.trainable", unit=column, updates=True, processes=processes)
    _require_public_classes(loaded)
    # A row of a record must draw anew in each step.
    loaded = replace(loaded, samples=loaded.samples.anew())
    inputs = to_device(loaded.samples.take([0]), loaded.device, loaded.dtype).inputs
    warm_up(loaded.model, lambda: loaded.forward(loaded.model, *stand_ins(inputs)[0]))
    unchanged = Unchanged(loaded.model, loaded.criterion.function)
    common = loaded.with_classes(targets_later=privacy.on_error == "zero")
    if unit is None or common.samples.units is None:
        records = Records.of_rows(len(common.samples))
    else:
        records = Records.of_units(common.samples.units, unit.max_rows)
    code = common.samples.code
    draws = common.model.training or bool(code)
    streams = RecordStreams(
        records,
        common.reader,
        unchanged.checked(common.objective.loss),
        common.objective.params,
        lambda loss, rows: common.stream(say, loss, rows),
        # with a seed, they follow from the seed, the step and the rank: also when resumed
        coins=Coins(make_generator(seed=privacy.noise.seed), common.model, common.criterion.function, *code),
        reads_by_code=bool(code),
        alone=privacy.records == "alone" or (privacy.on_error == "zero" and draws),
        randomness=common.randomness,
        zero_on_error=privacy.on_error == "zero",
    )
    parameters = {name: common.model.get_parameter(name) for name in common.objective.params}
    setup = PrivateSetup(
        common=common,
        privacy=privacy,
        records=records,
        streams=streams,
        parameters=parameters,
        clipping=clipping_of(privacy, parameters),
        sampling=sampling_of(privacy),
        unchanged=unchanged,
        rank=0 if processes is None else processes.rank,
    )
    return replace(setup, preflight=refuse(setup))


def _require_public_classes(loaded: Setup) -> None:
    """Raises ConfigError where labels are numbered by the names that the records have."""
    if loaded.samples.names_found == "sorted":
        raise ConfigError(
            f"the labels of data.target: {loaded.config.data.target} are names, and their numbers follow"
            " from all names in the data; expected data.class_names: a record with another name would"
            " give others' labels new numbers",
            hint="list all names in data.class_names, in the order of the model's outputs",
        )


def refuse(setup: PrivateSetup) -> str:
    """Refuse settings that would void the guarantee, before anything is drawn. How the model was checked, in
    words. What is looked at here only ever stops a run.
    """
    privacy, common = setup.privacy, setup.common
    require_small_delta(privacy.delta, len(setup.records))
    require_expected_batch_size(privacy.expected_batch_size, setup.sampling, len(setup.records))
    setup.sampling.require_drawable(len(setup.records))
    rows = np.array([setup.records.rows_of(int(record))[0] for record in _looked_at(setup)])
    block = common.reader.take(rows)
    block = to_device(block, common.device, common.dtype)
    why_not = why_not_checked(common.objective, setup.unchanged, block.inputs, block.target)
    if why_not is not None:
        return f"not checked: {why_not}"
    return f"checked on {len(block)} stand-ins of the shapes of rows"


def _looked_at(setup: PrivateSetup) -> np.ndarray:
    """Some records from all over the data. Where errors of records count as zero, records that have none;
    raises the error where all of these have one, which is then the model's and not a record's.
    """
    count, streams = len(setup.records), setup.streams
    chosen = np.unique(np.linspace(0, count - 1, min(count, _ROWS_LOOKED_AT), dtype=np.int64))
    if not streams.zero_on_error:
        return chosen
    norms = [setup.source(record[None])(setup.clipping).records.norms for record in chosen]
    sound = chosen[[bool(each.isfinite().all()) for each in norms]]
    if not len(sound):
        streams.zero_on_error = False
        setup.source(chosen[:1])(setup.clipping)
        streams.zero_on_error = True
    return sound if len(sound) else chosen


# -- values of a config --------------------------------------------------------------------------------------


def sampling_of(privacy: PrivacyConfig) -> Sampling:
    """How batches are drawn."""
    return Sampling(**privacy.sampling.model_dump())


def clipping_of(privacy: PrivacyConfig, parameters: Mapping[str, nn.Parameter]) -> Clipping:
    """What each record's gradient in these parameters is clipped to."""
    wanted = privacy.clipping
    if isinstance(wanted.groups, dict):
        return Clipping.by_pattern(parameters, wanted.groups, rule=wanted.rule)
    assert wanted.norm is not None  # the config sees to it
    make = {"flat": Clipping.flat, "layer": Clipping.per_layer, "parameter": Clipping.per_parameter}
    return make[wanted.groups](parameters, wanted.norm, rule=wanted.rule)


def clipping_without_model(privacy: PrivacyConfig) -> Clipping:
    """A clipping of the same sensitivity as `clipping_of`, for a plan without parameters: a group for
    each bound.
    """
    wanted = privacy.clipping
    if isinstance(wanted.groups, dict):
        return Clipping(tuple(Group(pattern, (pattern,), bound) for pattern, bound in wanted.groups.items()))
    assert wanted.norm is not None  # the config sees to it
    return Clipping.flat(["all"], wanted.norm)


def step_event(privacy: PrivacyConfig, multiplier: float) -> StepEvent:
    """What a step of the run costs with this noise multiplier."""
    return StepEvent(multiplier, sampling_of(privacy), privacy.relation)


def noise_multiplier(privacy: PrivacyConfig) -> float:
    """The config's noise multiplier, or the one that meets the target epsilon over all planned steps."""
    noise = privacy.noise
    if noise.multiplier is not None:
        return noise.multiplier
    assert noise.target_epsilon is not None  # the config sees to it
    return noise_multiplier_for(
        noise.target_epsilon,
        privacy.delta,
        lambda multiplier: [(step_event(privacy, multiplier), privacy.steps)],
    )


def terms_of(privacy: PrivacyConfig) -> dict[str, Any]:
    """The terms of a run that its ledger, its statement and its plan give alike, as plain values."""
    return {
        "planned_steps": privacy.steps,
        "delta": privacy.delta,
        "target_epsilon": privacy.noise.target_epsilon,
        "mechanism": MECHANISM,
        "relation": privacy.relation,
        "unit": unit_in_words(privacy),
        "sampling": sampling_of(privacy).describe(),
        "expected_batch_size": privacy.expected_batch_size,
    }


def unit_in_words(privacy: PrivacyConfig) -> str:
    """Who is protected, as a part of a sentence."""
    if privacy.unit is None:
        return "one row"
    capped = f", at most {privacy.unit.max_rows} of them" if privacy.unit.max_rows is not None else ""
    return f"all rows with one {privacy.unit.column}{capped}, averaged inside it"
