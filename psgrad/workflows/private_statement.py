"""What a private run says of itself in public: its ledger's lines, and step.json. Nothing here follows from
the data but by noise.

Whether a private run may go on: only with the data, the model and the code that it began with, and in its own
folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from psgrad.engine.privacy.accounting import Epsilon, StepEvent, epsilon_pld, epsilon_rdp, event_of, merged
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.rounding import GRID_BITS, grid_of, residual_epsilon
from psgrad.engine.privacy.snapshot import tensors_of
from psgrad.engine.privacy.step import PrivateTraining
from psgrad.errors import ConfigError
from psgrad.reports.privacy import guarantee
from psgrad.results.privacy import StepStatement
from psgrad.storage import Ledger, LedgerContent, PrivateRunFolder
from psgrad.storage.folders import differences, place_of, require_in_place
from psgrad.storage.ledger_lines import require_same
from psgrad.workflows.identity import flat, hashes_of
from psgrad.workflows.private_setup import PrivateSetup, planned_events, schedule_of, unit_in_words

_PLACE = "place.json"


def require_own_folder(folder: PrivateRunFolder, before: LedgerContent, moved: bool) -> bool:
    """Whether the folder was moved since the run was last in it, as its owner says by `moved`.

    Raises LedgerError where it was and nobody says so, ConfigError for a run of which psgrad did not keep
    where it is.
    """
    if "run" not in before.header:
        raise ConfigError(
            f"the run in {folder.path} was begun by an older psgrad, which kept neither the model's mode and"
            " arguments, nor hashes of its weights, of all rows and of imported code, nor where the"
            " folder is",
            expected=(
                "a run that can be known again: nobody can tell whether these are the same, or whether the"
                " folder is a copy"
            ),
            next_step="begin a run of its own with another --output; the ledger says what this one spent",
        )
    then = folder.read_private_json(_PLACE)
    if then is None and not before.steps:
        return False  # a process was killed before it could write that down, and nothing is spent yet
    if not moved:
        require_in_place(folder.path, folder.ledger, then)
    return then is None or bool(differences(then, place_of(folder.ledger)))


def keep_place(folder: PrivateRunFolder) -> str | None:
    """Write down where the ledger is, for the next process; a sentence for people where the last one was on
    another machine.
    """
    then, now = folder.read_private_json(_PLACE), place_of(folder.ledger)
    if then is None or any(then.get(key) != value for key, value in now.items()):
        folder.write_private_json(_PLACE, now)
    if then is None or then.get("machine") == now["machine"]:
        return None
    return (
        f"the run was on the machine {then.get('machine')} and is on {now['machine']} now: right for a folder"
        " that both share; where the disk was copied, what both copies spend adds up, and neither ledger"
        " says so"
    )


def private_hashes(setup: PrivateSetup, run: str) -> dict[str, Any]:
    """What a run is known again by, its number first. It stays private: the data's hash tells whether a guess
    of all rows is right.
    """
    augmentation, data = setup.privacy.augmentation, setup.run.config.data
    restored = tensors_of(setup.run.model)
    return {
        "run": run,
        "attributes": {
            name: digest for name, digest in setup.run.identity.tensors.items() if name not in restored
        },
        "data": setup.run.samples.content(),
        "columns": data.model_dump(mode="json", include={"inputs", "target", "id"}),
        **hashes_of(setup.run, [] if augmentation is None else [augmentation.function]),
    }


def model_of(setup: PrivateSetup) -> dict[str, Any]:
    """What of the model's section of a config decides what it computes, as JSON; NaN and infinities
    as text.
    """
    section = setup.run.config.model.model_dump(
        mode="json", include={"factory", "kwargs", "mode", "state_dict_key"}
    )
    found: dict[str, Any] = json.loads(json.dumps(section), parse_constant=str)
    return found


def require_same_data(folder: PrivateRunFolder, now: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes that the run began with. Raises ConfigError where the data are others, or the private folder
    is another run's.
    """
    then: dict[str, Any] = folder.private_manifest().get("hashes") or {}
    if then.get("run") != now["run"]:
        raise ConfigError(
            f"the private folder in {folder.path} belongs to another run than the ledger",
            expected=f"the one of the run {now['run']}",
            cause="a part of the folder was put back from a copy",
            next_step="put the whole folder of one run there",
        )
    if (then.get("data"), then.get("columns")) != (now["data"], now["columns"]):
        raise ConfigError(
            f"the dataset is not the one that the run in {folder.path} began with",
            expected=(
                "the same data: what was spent was spent on them, and on other data other steps are a run of"
                " their own"
            ),
            cause=(
                "the file was changed, or what the dataset's code reads, or a name in data: path, inputs,"
                " target or id"
            ),
            next_step="put the data back, or begin a run of its own with another --output",
        )
    return then


def require_same_code(folder: PrivateRunFolder, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError where code, the model's modules, or tensors of it that no checkpoint has are
    others.
    """
    was, found = (
        {f"the tensor {name}": digest for name, digest in each["attributes"].items()}
        | {key: value for key, value in flat(each).items() if _is_compared(key)}
        for each in (then, now)
    )
    require_same(
        was, {key: found.get(key) for key in {**was, **found}}, f"the run in {folder.path}", show=False
    )


def _is_compared(line: str) -> bool:
    """Not what the checkpoint brings, parameters and buffers, nor versions, which each line of the ledger
    has.
    """
    return line != "model (its weights)" and not line.startswith("version of ")


def weights_note(header: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A sentence where the factory gives other weights than the run began with."""
    if header.get("weights_sha256") == now["weights"]:
        return None
    return (
        "the model comes with other weights than the run began with: all of them are replaced by those of the"
        " checkpoint, and what its factory reads besides is not known"
    )


_STEP_FORMAT = 1
_LATER = "computed when a run of steps has ended"


def software() -> dict[str, str]:
    """The versions of what a step is computed and accounted with."""
    return {
        "psgrad": version("psgrad"),
        "torch": torch.__version__,
        "dp_accounting": version("dp-accounting"),
    }


def ledger_header(setup: PrivateSetup, base: float) -> dict[str, Any]:
    """What a run keeps to from its first step to its last; a resumed run must say the same."""
    privacy, run = setup.privacy, setup.run
    return {
        "command": "dp-step",
        "planned_steps": privacy.steps,
        "delta": privacy.delta,
        "target_epsilon": privacy.noise.target_epsilon,
        "noise_multiplier": base,
        "schedule": schedule_of(privacy).describe(),
        "mechanism": privacy.noise.mechanism,
        "generator": privacy.noise.generator,
        "seed": privacy.noise.seed,
        "relation": privacy.relation,
        "unit": unit_in_words(privacy),
        "unit_config": None if privacy.unit is None else privacy.unit.model_dump(),
        "augmentation": None if privacy.augmentation is None else privacy.augmentation.model_dump(),
        "sampling": setup.sampling.describe(),
        "expected_batch_size": privacy.expected_batch_size,
        "clipping": setup.clipping.describe(),
        "adaptive": None if privacy.clipping.adaptive is None else privacy.clipping.adaptive.model_dump(),
        "optimizer": privacy.optimizer.model_dump(),
        "trainable": setup.trainable,
        "model": {
            **model_of(setup),
            "checkpoint_sha256": run.loaded.sha256,
            "architecture_sha256": architecture_hash(run.model),
        },
        "loss": run.config.loss.model_dump(),
        "dtype": run.config.engine.dtype,
    }


def why_no_number(epsilon: Epsilon) -> str | None:
    """Why a file has no number for this epsilon; None where it has one. JSON knows no infinity."""
    return "infinite, as a step had no noise" if epsilon.value == math.inf else epsilon.why_not


def architecture_hash(model: nn.Module) -> str:
    """The SHA-256 of the names, types and shapes of all parameters and buffers."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors_of(model).items()}
    return hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()


def _grid_of(deviation: float) -> float | None:
    return grid_of(deviation) if deviation else None


class Statement:
    """A run's words, from its config and its ledger."""

    def __init__(self, setup: PrivateSetup, base: float, generator: Generator) -> None:
        self.setup, self.base, self.generator = setup, base, generator
        self.planned = planned_events(setup.privacy, base)

    def ledger_line(self, event: StepEvent, training: PrivateTraining) -> dict[str, Any]:
        """One step's line: all that epsilon can be computed from again, and what was done."""
        privacy = self.setup.privacy
        clipping, noise = training.mechanism()
        sensitivity = clipping.sensitivity(privacy.relation)
        line = {
            "step": training.taken + 1,
            **event.line(),
            "delta": privacy.delta,
            "unit": unit_in_words(privacy),
            "sensitivity": sensitivity,
            "noise_std": noise.standard_deviation(sensitivity),
            "noise_grid": (
                clipping.grid
                if clipping.grid is not None
                else _grid_of(noise.standard_deviation(sensitivity))
            ),
            "expected_batch_size": privacy.expected_batch_size,
            "clipping_sha256": clipping.hash(),
            "generator": self.generator.name,
            "secure": self.generator.secure,
            "versions": software(),
        }
        if training.adaptive is not None:
            line["bound"] = training.adaptive.bound
            line["sum_noise_multiplier"] = noise.multiplier
            line["count_noise_multiplier"] = training.adaptive.count_multiplier
        return line

    def step(self, ledger: Ledger, *, final: bool, model_sha256: str | None = None) -> dict[str, Any]:
        """The content of public/step.json, of all that the ledger has. Without `final` the slow
        accountant is left out.

        model_sha256: of the weights that go with it, public/model.safetensors.
        """
        privacy, lines = self.setup.privacy, ledger.steps
        spent = tuple(merged((event_of(line), 1) for line in lines).items())
        rdp = epsilon_rdp(spent, privacy.delta)
        pld = epsilon_pld(spent, privacy.delta) if final else Epsilon(None, _LATER)
        planned_rdp = epsilon_rdp(self.planned, privacy.delta)
        planned_pld = (
            pld
            if final and len(lines) == privacy.steps
            else epsilon_pld(self.planned, privacy.delta)
            if final
            else pld
        )
        latest = lines[-1] if lines else self._before_any_step()
        why_not = {"epsilon_rdp": why_no_number(rdp), "epsilon_pld": why_no_number(pld)}
        step = StepStatement(
            format=_STEP_FORMAT,
            versions=software(),
            guarantee=None,  # said below, of the rest
            steps=len(lines),
            planned_steps=privacy.steps,
            epsilon_rdp=rdp.value,
            epsilon_pld=pld.value,
            delta=privacy.delta,
            relation=privacy.relation,
            unit=unit_in_words(privacy),
            scheme=self.setup.sampling.scheme,
            sample_rate=self.setup.sampling.sample_rate,
            noise_multiplier=latest["noise_multiplier"],
            sensitivity=latest["sensitivity"],
            noise_std=latest["noise_std"],
            expected_batch_size=privacy.expected_batch_size,
            mechanism=privacy.noise.mechanism,
            rounding=self._rounding(lines),
            generator=self.generator.name,
            insecure_deterministic=privacy.noise.seed is not None,
            clipping=ledger.header["clipping"],
            adaptive=ledger.header["adaptive"],
            sampling=self.setup.sampling.describe(),
            schedule=schedule_of(privacy).describe(),
            optimizer=privacy.optimizer.model_dump(),
            trainable=self.setup.trainable,
            target_epsilon=privacy.noise.target_epsilon,
            planned_epsilon_rdp=planned_rdp.value,
            planned_epsilon_pld=planned_pld.value,
            rdp_order=rdp.order,
            why_not={key: reason for key, reason in why_not.items() if reason is not None},
            accounting_notes={
                key: found.note
                for key, found in (("epsilon_rdp", rdp), ("epsilon_pld", pld))
                if found.note is not None
            },
            moved=sum(bool(line.get("moved")) for line in ledger.lines),
            ledger=ledger.mark(),
            model_sha256=model_sha256,
        )
        return {**step.content(), "guarantee": guarantee(step.content())}

    def _rounding(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """The grid of the latest step's released numbers and how it follows, and what floating point may add
        to epsilon; None for none.
        """
        latest = lines[-1] if lines else self._before_any_step()
        noised = [line for line in lines if line["noise_multiplier"] > 0]
        if self.setup.clipping.grid is not None:
            return {
                "grid": self.setup.clipping.grid,
                "formula": "clipping.grid",
                "residual_epsilon": 0.0,
                "unrounded_steps": 0,
            }
        released = self.setup.trainable["parameters"] + (self.setup.adaptive is not None)
        return {
            "grid": _grid_of(latest["noise_std"]),
            "formula": f"2^(floor(log2(noise_std)) - {GRID_BITS})",
            "residual_epsilon": residual_epsilon(released * len(noised), self.setup.privacy.delta),
            "unrounded_steps": sum("noise_grid" not in line for line in noised),  # psgrad 0.1 took them
        }

    def _before_any_step(self) -> dict[str, float]:
        privacy = self.setup.privacy
        sensitivity = self.setup.clipping.sensitivity(privacy.relation)
        noise = self.setup.noise(self.base)(0)
        deviation = noise.standard_deviation(sensitivity)
        return {"noise_multiplier": noise.multiplier, "sensitivity": sensitivity, "noise_std": deviation}
