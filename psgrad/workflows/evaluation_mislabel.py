"""Mislabel detection: labels are flipped, a model is trained on them, and scores of single examples look for the flipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.evaluation.controls import RANDOM, has_labels, own_controls
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.members import Members
from psgrad.engine.influence.evaluation.mislabel import FOLDS, Detection, detect, flip, folds, over_flips, suspicion
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.scored import fitted_to, self_influences
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.objective import Objective
from psgrad.errors import ConfigError, InfluenceError
from psgrad.inputs.models import load_model
from psgrad.inputs.samples import Block
from psgrad.workflows.evaluation_bench import Array, Bench
from psgrad.workflows.evaluation_truths import Found, frame

CROSS_VALIDATED = f"1 - p(label), {FOLDS}-fold cross-validated"


def evaluate_mislabel(bench: Bench) -> Found:
    """How well self-influence, and scores that know nothing of it, find flipped labels, over several sets of flips."""
    wanted, labels = bench.wanted, labels_of(bench)
    draws = [np.random.default_rng([wanted.seed, 6, number]) for number in range(wanted.flips)]
    flips = [flip(labels, wanted.share, random) for random in draws]
    left_out = [folds(len(labels), random) for random in draws]
    everything = np.arange(len(labels))
    whole, parts = [], []
    for number, (given, _) in enumerate(flips):
        target = torch.from_numpy(given)
        whole.append(Job(f"set {number} of flips", everything, seed_of(wanted.seed, 2, number), target))
        for place, out in enumerate(left_out[number]):
            seed = seed_of(wanted.seed, 3, number, place)
            parts.append(Job(f"set {number} of flips, fold {place}", np.setdiff1d(everything, out), seed, target))
    states = bench.retrained(whole, packed, "weights")
    unseen = bench.retrained(parts, lambda members: members.outputs(bench.rows), "outputs")
    found: dict[str, list[Detection]] = {}
    for number, (given, flipped) in enumerate(flips):
        examples = trained_examples(bench, states[number], given)
        scores = influences(bench, examples)
        outputs = torch.cat([block["output"] for _, block in examples.outputs()]).double().numpy()
        scores |= {RANDOM: draws[number].standard_normal(len(labels)), **own_controls(examples), **suspicion(outputs, given)}
        held_out = np.zeros(len(labels))
        for place, out in enumerate(left_out[number]):
            held_out[out] = suspicion(unseen[number * FOLDS + place], given)["1 - p(label)"][out]
        scores[CROSS_VALIDATED] = held_out
        for name, score in scores.items():
            found.setdefault(name, []).append(detect(score, flipped))
    table = [{"method": name, "control": name not in bench.methods, **asdict(over_flips(each))} for name, each in found.items()]
    details = pd.DataFrame(
        [{"method": name, "set": number, **asdict(one)} for name, each in found.items() for number, one in enumerate(each)]
    )
    facts = {"flips": wanted.flips, "share": wanted.share, "models": bench.models}
    return Found(frame(table), facts, details)


def labels_of(bench: Bench) -> Array:
    """[n] int64. Raises ConfigError where targets are no labels that could be flipped."""
    if bench.setup.run.criterion.kind != "class" or not has_labels(bench.rows):
        raise ConfigError(
            f"--evaluate mislabel flips labels, and targets of the loss {bench.setup.run.config.loss.name} are none",
            expected="one class a row, as cross_entropy has it, with whole numbers as targets",
            next_step="two classes are labels 0 and 1 of cross_entropy, for a model with two outputs; or choose another kind of evaluation",
        )
    assert bench.rows.target is not None
    found: Array = bench.rows.target.cpu().numpy()
    if len(np.unique(found)) < 2:
        raise ConfigError("--evaluate mislabel flips labels, and all rows have the same one", expected="at least two classes")
    ignored = found == bench.setup.run.criterion.ignore_index
    if ignored.any():
        raise ConfigError(
            f"--evaluate mislabel flips labels, and {int(ignored.sum())} of {len(found)} rows have {found[ignored][0]}, to be ignored",
            expected="a label in every row of the training data",
            next_step="leave these rows out of the data",
        )
    count = round(bench.wanted.share * len(found))
    if not 0 < count < len(found):
        raise ConfigError(
            f"influence.evaluate.share: {bench.wanted.share:g} of {len(found)} labels are {count} of them",
            expected="some labels that are flipped, and some that are not",
        )
    return found


def packed(members: Members) -> Array:
    """[K, numbers] float64: all parameters and buffers, in the order of their names."""
    parts = [value.reshape(len(members), -1).double().cpu() for _, value in sorted(members.state.items())]
    found: Array = torch.cat(parts, dim=1).numpy()
    return found


def trained_examples(bench: Bench, state: Array, given: Array) -> Examples:
    """The training examples with these labels, as the model with this state sees them."""
    run, influence = bench.setup.run, bench.setup.run.config.influence
    bare = run.config.model.model_copy(update={"checkpoint": None, "state_dict_key": None})
    model = load_model(bare, run.config.base, influence.parameters, "influence.parameters").model.to(run.device, run.dtype)
    own: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    start = 0
    with torch.no_grad():
        for _, value in sorted(own.items()):
            value.copy_(torch.from_numpy(state[start : start + value.numel()]).reshape(value.shape))
            start += value.numel()
    training = bench.training
    labels = torch.from_numpy(given)

    def read(start: int, stop: int) -> Block:
        block: Any = training.read(start, stop)
        return Block(block.inputs, labels[start:stop])

    return replace(training, objective=Objective(model, run.criterion.function, autocast=run.objective.autocast), read=read)


def influences(bench: Bench, examples: Examples) -> dict[str, Array]:
    """name -> [n] self-influence of each method that has one. A compared method that has none is named; the config's raises."""
    found = {}
    train = bench.wanted.train
    checkpoint = Checkpoint(0, train.learning_rate if train.function is None else 1.0, bench.setup.moments[0].checkpoint.say)
    for name, method in bench.methods.items():
        try:
            found[name] = self_influences(method, fitted_to(method, [(examples, checkpoint)]))
        except InfluenceError as error:
            if name == bench.main:
                raise
            note = f"left out: {name}, as {error.arrived}"
            bench.notes += [note] if note not in bench.notes else []
    return found
