"""The measures of a config: found by name, their options checked, and prepared for the samples at hand."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from psgrad.config import Config, MeasureConfig, is_callable_spec, nearest
from psgrad.config.reading import explain
from psgrad.engine.examples import Examples
from psgrad.engine.measures.known import known_measures
from psgrad.engine.measures.known.moments import Moments
from psgrad.engine.measures.known.projected_gradients import ProjectedGradients
from psgrad.engine.measures.known.vog import VoG
from psgrad.engine.measures.measure import Measure, Setting
from psgrad.engine.measures.norms import GradientNorms
from psgrad.engine.measures.predictions import Predictions, summary_for
from psgrad.errors import ConfigError, MeasureError, PsgradError
from psgrad.inputs.imports import describe_failure, resolve
from psgrad.workflows.moments import moments_of
from psgrad.workflows.own_measure import OwnMeasure, joined_summary
from psgrad.workflows.setup import Setup, draws_at_random


def measures_of(config: Config) -> list[Measure]:
    """The measures that a config names, those that they and its detectors need before them.

    Raises ConfigError for names or options that are not known.
    """
    found: dict[str, Measure] = {}
    known = known_measures()
    for each in config.analyze.measures:
        measure = measure_from(each, config.base)
        same = next((name for name, other in found.items() if other.name == measure.name), None)
        if same is not None or (measure.name in known and is_callable_spec(each.name)):
            raise ConfigError(
                f"analyze.measures: {each.name} calls itself {measure.name}, and so does {same or 'a measure of psgrad'}",
                next_step="give your measure another `name`",
            )
        found[each.name] = measure
    waiting = [name for measure in found.values() for name in measure.needs]
    needed: dict[str, Measure] = {}
    if config.analyze.outliers.detectors and ProjectedGradients.name not in found:
        needed[ProjectedGradients.name] = ProjectedGradients(save=True)  # what later runs may be held against
    while waiting:
        name = waiting.pop()
        if name not in found and name not in needed:
            if name not in known:
                raise ConfigError(f"analyze.measures: a measure needs {name}, which is none", expected=f"some of {', '.join(known)}")
            needed[name] = known[name]()
            waiting += needed[name].needs
    return [*needed.values(), *found.values()]


def measure_from(config: MeasureConfig, base: Path) -> Measure:
    """One measure with its options. Raises ConfigError for a name or options that are not known, or can't be."""
    kind = _kind(config.name, base)
    known: list[str] = [each.name for each in dataclasses.fields(kind) if each.init] if dataclasses.is_dataclass(kind) else []
    problems = [_unknown(option, known, config.name) for option in config.options if option not in known]
    if not problems:
        try:
            measure: Measure = TypeAdapter(kind).validate_json(json.dumps(config.options), strict=True) if known else kind()
            return OwnMeasure(measure, config.name) if is_callable_spec(config.name) else measure
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems = [f"analyze.measures: {'.'.join(map(str, [config.name, *each['loc']]))}: {explain(each)}" for each in details]
        except Exception as error:
            if isinstance(error, PsgradError) or not is_callable_spec(config.name):
                raise
            raise MeasureError(
                f"the measure {config.name} raised {describe_failure(error)} as it was made",
                cause="a mistake in the measure, or options that it does not take",
            ) from error
    raise ConfigError("\n  ".join([f"the measure {config.name} does not take these options:", *problems]))


def prepare(run: Setup, measures: list[Measure], count: int, say: Callable[[str], None]) -> tuple[Setting, list[Measure]]:
    """(what is measured, all measures of the run), with the model's summary being what they keep of an output.

    `count` rows from the first one on. Raises MeasureError where a measure does not go with the model, the loss or the data.
    """
    everywhere = [GradientNorms(), Predictions(summary_for(run.criterion.kind, run.criterion.ignore_index))]
    every = [*everywhere, *measures]
    targets = run.reader.samples.targets
    setting = Setting(
        examples=Examples(run.objective, run.reader, count, run.stream_options(say)),
        kind=run.criterion.kind,
        targets=torch.as_tensor(targets[:count]) if targets is not None and targets.dtype.kind == "i" else None,
        classes=run.reader.classes,
        ignore_index=run.criterion.ignore_index,
        moments=moments_of(run),
        seed=run.config.analyze.seed,
        shows_inputs=run.config.report.include_inputs,
        say=say,
    )
    for measure in every:
        measure.prepare(setting)
    _require_one_draw(run, every)
    run.objective.summary = partial(joined_summary, every)
    return setting, every


def _require_one_draw(run: Setup, measures: list[Measure]) -> None:
    """Raises MeasureError for measures that ask more than once for a gradient of a model that draws at random.

    A second look would see another gradient wherever the first was not left in memory, and so depend on how much memory is free; what
    differs from checkpoint to checkpoint would be the draws.
    """
    twice = [each.name for each in measures if each.looks_twice or each.name == VoG.name or Moments.name in each.needs]
    if twice and draws_at_random(run.first_output, run.model):
        raise MeasureError(
            f"{', '.join(twice)} {'asks' if len(twice) == 1 else 'ask'} for a sample's gradient more than once, and the model "
            "draws at random: each time it would be another gradient",
            expected="a model that gives the same output each time",
            cause="model.mode: train, with dropout in the model",
            next_step="set model.mode to eval; or take these measures out of analyze.measures (noise_scale with resamples: 0 looks once)",
        )


def _kind(name: str, base: Path) -> type[Measure]:
    known = known_measures()
    if name in known:
        return known[name]
    if is_callable_spec(name):
        kind: Any = resolve(name, base)
        if not inspect.isclass(kind) or not issubclass(kind, Measure):
            raise ConfigError(
                f"analyze.measures: {name} is no measure",
                expected="a class that derives from psgrad.engine.measures.measure.Measure, a dataclass of its options",
                next_step="docs/reference/measures.md shows one",
            )
        if not kind.name:
            kind.name = name.rpartition(":")[2].lower()
        if not re.fullmatch(r"[a-z0-9_]+", str(kind.name)):
            raise ConfigError(f"analyze.measures: {name} calls itself {kind.name!r}", expected="lower-case letters, digits and _")
        return kind
    close = nearest(name, list(known))
    raise ConfigError(
        f"analyze.measures: there is no measure {name!r}" + (f"; did you mean {close}?" if close else ""),
        expected=f"some of {', '.join(known)}; or module:Class",
    )


def _unknown(option: str, known: list[str], name: str) -> str:
    close = nearest(option, known)
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    return f"analyze.measures: {option}: unknown option of {name}; {f'did you mean {close}? ' if close else ''}{takes}"
