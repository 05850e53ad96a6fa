"""`psgrad influence --evaluate`: do the scores predict what happens when models are trained again?

Mislabel detection: labels are flipped, a model is trained on them, and scores of single examples look for the
flipped ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from psgrad.config import Config, EvaluationKind
from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.influence.evaluation.jobs import Job, Members
from psgrad.engine.influence.evaluation.mislabel import (
    FOLDS,
    RANDOM,
    Detection,
    detect,
    flip,
    folds,
    has_labels,
    over_flips,
    own_controls,
    suspicion,
)
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.statistics import fitted_to, self_influences
from psgrad.engine.influence.method import Checkpoint
from psgrad.errors import ConfigError, InfluenceError
from psgrad.inputs.rows import Block
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.results import Progress, Say
from psgrad.results.influence import EVALUATION_FILE, EvaluationResult, evaluation_content
from psgrad.storage import RunFolder
from psgrad.user_code import with_code_beside
from psgrad.workflows.evaluation_kinds import Found, evaluate_lds, frame
from psgrad.workflows.evaluation_parts import Array, EvaluationParts, evaluation_of
from psgrad.workflows.evaluation_sets import evaluate_curve, evaluate_groups, evaluate_loo, evaluate_removal
from psgrad.workflows.influence import described
from psgrad.workflows.influence_setup import set_up_influence
from psgrad.workflows.influence_tables import without_nonfinite
from psgrad.workflows.run_manifest import describe_run, rank_facts_of_steps, running_manifest
from psgrad.workflows.run_progress import Clock

CROSS_VALIDATED = f"1 - p(label), {FOLDS}-fold cross-validated"


def evaluate_mislabel(evaluation: EvaluationParts) -> Found:
    """How well self-influence, and scores that know nothing of it, find flipped labels, over several sets of
    flips.
    """
    wanted, labels = evaluation.wanted, labels_of(evaluation)
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
            parts.append(
                Job(f"set {number} of flips, fold {place}", np.setdiff1d(everything, out), seed, target)
            )
    states = evaluation.retrained(whole, packed, "weights")
    unseen = evaluation.retrained(parts, lambda members: members.outputs(evaluation.rows), "outputs")
    found: dict[str, list[Detection]] = {}
    for number, (given, flipped) in enumerate(flips):
        examples = trained_examples(evaluation, states[number], given)
        scores = influences(evaluation, examples)
        outputs = torch.cat([block["output"] for _, block in examples.outputs()]).double().numpy()
        scores |= {
            RANDOM: draws[number].standard_normal(len(labels)),
            **own_controls(examples),
            **suspicion(outputs, given),
        }
        held_out = np.zeros(len(labels))
        for place, out in enumerate(left_out[number]):
            held_out[out] = suspicion(unseen[number * FOLDS + place], given)["1 - p(label)"][out]
        scores[CROSS_VALIDATED] = held_out
        for name, score in scores.items():
            found.setdefault(name, []).append(detect(score, flipped))
    table = [
        {"method": name, "control": name not in evaluation.methods, **asdict(over_flips(each))}
        for name, each in found.items()
    ]
    details = pd.DataFrame(
        [
            {"method": name, "set": number, **asdict(one)}
            for name, each in found.items()
            for number, one in enumerate(each)
        ]
    )
    facts = {"flips": wanted.flips, "share": wanted.share, "models": evaluation.models}
    return Found(frame(table), facts, details)


def labels_of(evaluation: EvaluationParts) -> Array:
    """[n] int64. Raises ConfigError where targets are no labels that could be flipped."""
    if evaluation.setup.run.criterion.kind != "class" or not has_labels(evaluation.rows):
        raise ConfigError(
            "--evaluate mislabel flips labels, and targets of the loss"
            f" {evaluation.setup.run.config.loss.name} are none",
            expected="one class a row, as cross_entropy has it, with whole numbers as targets",
            next_step=(
                "two classes are labels 0 and 1 of cross_entropy, for a model with two outputs; or choose"
                " another kind of evaluation"
            ),
        )
    assert evaluation.rows.target is not None
    found: Array = evaluation.rows.target.cpu().numpy()
    if len(np.unique(found)) < 2:
        raise ConfigError(
            "--evaluate mislabel flips labels, and all rows have the same one",
            expected="at least two classes",
        )
    ignored = found == evaluation.setup.run.criterion.ignore_index
    if ignored.any():
        raise ConfigError(
            f"--evaluate mislabel flips labels, and {int(ignored.sum())} of {len(found)} rows have"
            f" {found[ignored][0]}, to be ignored",
            expected="a label in every row of the training data",
            next_step="leave these rows out of the data",
        )
    count = round(evaluation.wanted.share * len(found))
    if not 0 < count < len(found):
        raise ConfigError(
            f"influence.evaluate.share: {evaluation.wanted.share:g} of {len(found)} labels are {count} of"
            " them",
            expected="some labels that are flipped, and some that are not",
        )
    return found


def packed(members: Members) -> Array:
    """[K, numbers] float64: all parameters and buffers, in the order of their names."""
    parts = [value.reshape(len(members), -1).double().cpu() for _, value in sorted(members.state.items())]
    return torch.cat(parts, dim=1).numpy()


def trained_examples(evaluation: EvaluationParts, state: Array, given: Array) -> Examples:
    """The training examples with these labels, as the model with this state sees them."""
    run = evaluation.setup.run
    bare = run.config.model.model_copy(update={"checkpoint": None, "state_dict_key": None})
    model = run.another(bare).model.to(run.device, run.dtype)
    own: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    start = 0
    with torch.no_grad():
        for _, value in sorted(own.items()):
            value.copy_(torch.from_numpy(state[start : start + value.numel()]).reshape(value.shape))
            start += value.numel()
    training = evaluation.training
    labels = torch.from_numpy(given)

    def read(start: int, stop: int) -> Block:
        return training.read(start, stop).with_target(labels[start:stop])

    return replace(
        training,
        objective=run.objective.with_model(model).with_summary(None),
        read=read,
    )


def influences(evaluation: EvaluationParts, examples: Examples) -> dict[str, Array]:
    """name -> [n] self-influence of each method that has one. A compared method that has none is named; the
    config's raises.
    """
    found = {}
    train = evaluation.wanted.train
    checkpoint = Checkpoint(
        0, train.learning_rate if train.function is None else 1.0, evaluation.setup.views[0].checkpoint.say
    )
    for name, method in evaluation.methods.items():
        try:
            found[name] = self_influences(method, fitted_to(method, [(examples, checkpoint)]))
        except InfluenceError as error:
            if name == evaluation.main:
                raise
            note = f"left out: {name}, as {error.arrived}"
            evaluation.notes += [note] if note not in evaluation.notes else []
    return found


_EVALUATIONS: dict[EvaluationKind, Callable[[EvaluationParts], Found]] = {
    "lds": evaluate_lds,
    "loo": evaluate_loo,
    "mislabel": evaluate_mislabel,
    "removal": evaluate_removal,
    "groups": evaluate_groups,
    "curve": evaluate_curve,
}


@with_code_beside
def evaluate_influence(
    config: Config,
    kind: EvaluationKind,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    progress: Say = lambda _: None,
    processes: Processes | None = None,
) -> EvaluationResult | None:
    """Retrain models, and hold the config's scores and those of controls against them: the whole of `psgrad
    influence --evaluate`.

    Args:
        kind: 'lds', 'loo', 'mislabel', 'removal', 'groups' or 'curve'; the options of each are in
            influence.evaluate.
        output: a folder of its own; None for the config's, with the kind behind its name. Scores in the
            config's folder stay as they are.
        overwrite: replace an earlier evaluation there. What it has of retrained models is used again where it
            is still true, so that a run that was stopped goes on where it was.
        processes: those that share the trainings and the passes; None for this one alone.

    Returns None on all ranks but the first.

    Raises PsgradError for everything that can be wrong with the config, the model, the data, the training or
    the disk.
    """
    path = output or config.output_of(kind)
    processes = OneProcess() if processes is None else processes
    if processes.leads:
        RunFolder.require_free(path, overwrite)
    clock, messages = Clock(), list[str]()

    def say(message: str) -> None:
        messages.append(message)
        progress(Progress(0, 0, "evaluation", message))

    with clock("load"):
        setup = set_up_influence(config, say, progress, processes)
        if config.data.weight is not None:
            raise ConfigError(
                "data.weight: models are trained again without weights",
                expected="losses that count the same for psgrad influence --evaluate",
                next_step="leave data.weight out here",
            )
        if config.data.group is not None:
            raise ConfigError(
                "data.group: scores of groups are not compared with training again",
                expected="a sample a row for psgrad influence evaluate",
                next_step=(
                    "leave data.group out, name the column in influence.groups, and evaluate groups: scores"
                    " are then summed over the rows of each"
                ),
            )
    if not processes.leads:
        setup, _ = without_nonfinite(setup, None, say)
        processes.agreed(processes.step("the folder"), list)
        _EVALUATIONS[kind](evaluation_of(setup, RunFolder(path), progress))
        rank_facts_of_steps(processes, "evaluation.")
        return None
    with clock("self-check"):
        check = setup.run.self_check(setup.views[0].training.stream)
    with clock("screening"):
        setup, _ = without_nonfinite(setup, None, say)
    folder = RunFolder.create(path, overwrite)
    manifest = replace(describe_run("influence-evaluation", setup.run, check), influence=described(setup))
    with running_manifest(folder, manifest, clock) as running:
        processes.agreed(processes.step("the folder"), list)
        with clock("evaluation"):
            evaluation = evaluation_of(setup, folder, progress)
            found = _EVALUATIONS[kind](evaluation)
        running.add(ranks=rank_facts_of_steps(processes, "evaluation."))
        result = EvaluationResult(
            kind=kind,
            method=evaluation.main,
            table=found.table,
            facts=found.facts,
            details=found.details,
            unit=setup.measurement.change,
            folder=folder.path,
            points=found.points,
            curves=found.curves,
            notes=[*evaluation.notes, *dict.fromkeys(messages)],
            manifest=running.manifest.content(),
        )
        facts = running.add(evaluation=evaluation_content(result), timings=clock.seconds)
        result = replace(result, manifest=facts)
        write_files(result, folder)
    return result


def write_files(result: EvaluationResult, folder: RunFolder) -> None:
    """evaluation.json, the tables as CSV and parquet, and the figures."""
    for plot in evaluation_plots(result):
        folder.write_bytes(f"plots/{plot.name}.png", plot.png())
        folder.write_bytes(f"plots/{plot.name}.svg", plot.svg())
    folder.write_csv("evaluation.csv", result.table)
    folder.write_table("evaluation_details.parquet", result.details)
    if len(result.points):
        folder.write_table("evaluation_points.parquet", result.points)
    folder.write_json(EVALUATION_FILE, evaluation_content(result))
