"""Accuracy of private training on real data, psgrad's `dp-step` beside Opacus at the same settings.

    python benchmarks/dp_utility.py [--seeds 5] [--json FILE] [--plot docs/dp-accuracy.png]

The task is that of configs/digits-dp.yaml: scikit-learn's handwritten digits with their true labels, a small
convolutional network from scratch, epsilon = 3 at delta = 1e-5. For each seed the digits are split anew, a
fifth held out, and the network is drawn anew; both sides train on the same digits from the same network, with
the same sample rate, clipping bound, noise multiplier, number of steps, expected batch size and optimiser.
psgrad takes its steps by the workflow behind `psgrad dp-step`, some of them at a time and each time with
`--resume`, and what is tested is the model.safetensors that it releases. Opacus is told the noise multiplier
that psgrad found for the target.

The bar: the held-out accuracy, on average over the seeds, is within one point (a hundredth) of Opacus's.
Every side draws its own noise and its own batches, so that runs differ: the table has the standard deviation
over the seeds, and the standard error of the difference.

Needs opacus of requirements-rivals.txt, and all that psgrad needs itself.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from dp_contenders import Training, opacus
from norms import machine
from rivals import versions
from safetensors.torch import load_file, save_file
from script import command_line, write_json
from sklearn.datasets import load_digits
from torch import Tensor, nn

from psgrad.commands.dp_step import dp_step
from psgrad.config import load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "digits-dp.yaml"
HELD_OUT = 360
# Steps between two looks at the held-out digits.
EVERY = 15
# Points (hundredths) that psgrad's mean accuracy may be from Opacus's.
BAR = 1.0


@dataclass(frozen=True)
class Split:
    """Images float32 [n, 1, 8, 8] in 0..1 and labels int64 [n], to train on and held out."""

    images: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray  # bool [n]

    @classmethod
    def of(cls, seed: int) -> Split:
        digits = load_digits()
        held_out = np.zeros(len(digits.target), dtype=bool)
        held_out[np.random.default_rng(seed).permutation(len(digits.target))[:HELD_OUT]] = True
        return cls((digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64), held_out)

    def rows(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        rows = self.held_out == held_out
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


def network(seed: int) -> nn.Module:
    """The example's network, with weights drawn from the seed."""
    found = importlib.util.spec_from_file_location("digits_dp_model", CONFIG.with_suffix("") / "model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    torch.manual_seed(seed)
    model: nn.Module = module.build()
    return model


def accuracy(model: nn.Module, split: Split) -> float:
    """The share of held-out digits that are right, in hundredths."""
    images, labels = split.rows(held_out=True)
    with torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).double().mean())


def by_psgrad(seed: int, split: Split, folder: Path, **changes: Any) -> Iterator[dict[str, Any]]:
    """What is public after every few steps (the content of step.json), with the accuracy of what was
    released.

    changes: to the example's section `privacy`.
    """
    model = network(seed)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "start.safetensors"
    )
    images, labels = split.rows(held_out=False)
    np.savez(folder / "train.npz", image=images.numpy(), label=labels.numpy())
    content = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    content["model"] = {
        "factory": f"{CONFIG.with_suffix('') / 'model.py'}:build",
        "checkpoint": "start.safetensors",
    }
    content["data"] = {"path": "train.npz", "inputs": "image", "target": "label"}
    content["output"] = str(folder / "run")
    content["privacy"] |= changes
    (folder / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    config = load_config(folder / "config.yaml")
    planned = content["privacy"]["steps"]
    for taken in range(0, planned, EVERY):
        dp_step(config, steps=min(EVERY, planned - taken), resume=taken > 0)
        public = folder / "run" / "public"
        model.load_state_dict(load_file(public / "model.safetensors"))
        yield {
            **json.loads((public / "step.json").read_text(encoding="utf-8")),
            "accuracy": accuracy(model, split),
        }


def by_opacus(seed: int, split: Split, noise_multiplier: float, steps: int) -> list[float]:
    """The accuracy after every few steps."""
    privacy = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["privacy"]
    images, labels = split.rows(held_out=False)
    training = Training(
        network(seed),
        records=len(images),
        sample_rate=privacy["sampling"]["sample_rate"],
        bound=privacy["clipping"]["norm"],
        noise_multiplier=noise_multiplier,
        learning_rate=privacy["optimizer"]["kwargs"]["lr"],
        momentum=privacy["optimizer"]["kwargs"]["momentum"],
    )
    assert training.expected_batch_size == privacy["expected_batch_size"]
    torch.manual_seed(1000 + seed)  # of its batches and its noise
    step = opacus("hooks")(training)
    tested, found = copy.deepcopy(training.model), []
    for taken in range(1, steps + 1):
        rows = step.draw()
        step.update(images[rows], labels[rows])
        if taken % EVERY == 0 or taken == steps:
            with torch.no_grad():
                for ours, theirs in zip(tested.parameters(), step.parameters, strict=True):
                    ours.copy_(theirs)
            found.append(accuracy(tested, split))
    return found


def opacus_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """What Opacus's own accountant says of these steps."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    return float(accountant.get_epsilon(delta))


def compare(seeds: int) -> dict[str, Any]:
    """Both sides for each seed. Prints a line a seed."""
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    public: list[dict[str, Any]] = []
    for seed in range(seeds):
        split = Split.of(seed)
        with tempfile.TemporaryDirectory() as folder:
            public = list(by_psgrad(seed, split, Path(folder)))
        ours.append([step["accuracy"] for step in public])
        theirs.append(by_opacus(seed, split, public[-1]["noise_multiplier"], public[-1]["steps"]))
        print(f"  seed {seed}: psgrad {ours[-1][-1]:.2f} %, Opacus {theirs[-1][-1]:.2f} %", flush=True)
    last = public[-1]
    differences = [one[-1] - other[-1] for one, other in zip(ours, theirs, strict=True)]
    mean = statistics.mean(differences)
    return {
        "settings": {
            key: last[key]
            for key in (
                "steps",
                "sample_rate",
                "noise_multiplier",
                "expected_batch_size",
                "delta",
                "relation",
            )
        },
        "epsilon": {
            "psgrad, rdp": last["epsilon_rdp"],
            "psgrad, pld": last["epsilon_pld"],
            "opacus, rdp": opacus_epsilon(
                last["noise_multiplier"], last["sample_rate"], last["steps"], last["delta"]
            ),
        },
        "steps": [step["steps"] for step in public],
        "epsilon_after": [step["epsilon_pld"] for step in public],
        "accuracy": {"psgrad": ours, "opacus": theirs},
        "difference": {
            "mean": mean,
            "standard_error": (
                statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
            ),
            "bar": BAR,
            "kept": abs(mean) <= BAR,
        },
    }


def print_table(found: dict[str, Any]) -> None:
    settings, epsilon, difference = found["settings"], found["epsilon"], found["difference"]
    print(", ".join(f"{name} {value}" for name, value in settings.items()))
    print("epsilon: " + ", ".join(f"{name} {value:.4f}" for name, value in epsilon.items()))
    print(
        f"\n  {'steps':>6}{'epsilon':>9}{'psgrad':>18}{'Opacus':>18}   held-out accuracy in %, mean and"
        " standard deviation of seeds"
    )
    for place, (steps, spent) in enumerate(zip(found["steps"], found["epsilon_after"], strict=True)):
        columns = ""
        for name in ("psgrad", "opacus"):
            values = [run[place] for run in found["accuracy"][name]]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            columns += f"{statistics.mean(values):>10.2f} ± {spread:4.2f} "
        print(f"  {steps:>6}{spent:>9.3f}{columns}")
    error = (
        f" ± {difference['standard_error']:.2f} (standard error)"
        if difference["standard_error"] is not None
        else ""
    )
    outcome = "pass" if difference["kept"] else "FAIL"
    print(
        f"\npsgrad minus Opacus: {difference['mean']:+.2f}{error} points; within {difference['bar']:.0f}:"
        f" {outcome}"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Accuracy against epsilon: the mean over the seeds, and a band of one standard deviation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    spent = np.array(found["epsilon_after"])
    for name, label, colour, dash in (
        ("psgrad", "psgrad dp-step", "#1f6fb4", "-"),
        ("opacus", "Opacus", "#c8551b", "--"),
    ):
        values = np.array(found["accuracy"][name])
        middle, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else 0 * values[0]
        axes.plot(spent, middle, dash, color=colour, marker="o", markersize=3, label=label)
        axes.fill_between(spent, middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)
    settings, seeds = found["settings"], len(found["accuracy"]["psgrad"])
    axes.set_xlabel(f"ε spent at δ = {settings['delta']:g} (add or remove one digit, Poisson sampling)")
    axes.set_ylabel("held-out digits right, %")
    axes.set_title(
        f"Digits from scratch: mean and standard deviation of {seeds} seeds", fontsize=11, loc="left"
    )
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = command_line("Held-out accuracy of private training on digits: psgrad's dp-step beside Opacus.")
    parser.add_argument(
        "--seeds", type=int, default=5, help="splits, networks and runs (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw accuracy against epsilon to this file"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", message="Full backward hook")  # Opacus's own, of every first layer
    facts = machine(torch.device("cpu")) | {"opacus": versions()["opacus"]}
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + f", {arguments.seeds} seeds")
    found = compare(arguments.seeds)
    print_table(found)
    write_json(arguments, {"machine": facts, **found})
    if arguments.plot is not None:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
