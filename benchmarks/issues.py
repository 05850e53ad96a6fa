"""How well the issue table finds labels that were changed on purpose, beside cleanlab on equal probabilities.

    pip install cleanlab
    python benchmarks/issues.py [--seeds 5] [--json FILE]

Three sets: scikit-learn's digits (1,797 pictures of ten classes) and breast cancer (569 rows of a table, two
classes), and 1,500 passages of Python's standard library, of four lines each, whose class is the package that
they are from (asyncio, concurrent and multiprocessing; email; tkinter; unittest; xml; json and logging).
A share of the labels is changed: to any other class (symmetric); or, of the first half of the classes alone,
to the next one (asymmetric).

A network with one hidden layer of 64 is trained for 20 epochs on all rows with these labels; every second
epoch is a checkpoint. `psgrad analyze` makes the issue table of the last one and of all ten. Out of sample
are the probabilities of five networks, each trained without a fifth of the rows; psgrad's folds trains such
networks by itself.

`precision` is the average precision of a ranking. Of flags there are the share of them that is right, and the
share of the changed labels that is flagged. Each is the mean over the seeds, with the smallest and largest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from script import command_line, write_json
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.metrics import average_precision_score
from torch import nn

import psgrad

Array = npt.NDArray[Any]
EPOCHS, HIDDEN, FOLDS = 20, 64, 5
WORDS, PASSAGES = 1024, 250
PACKAGES = (
    ("asyncio", "concurrent", "multiprocessing"),
    ("email",),
    ("tkinter",),
    ("unittest",),
    ("xml",),
    ("json", "logging"),
)
OURS = ("checkpoints", "out of sample", "folds", "one model")
NOISE = [(kind, share) for kind in ("symmetric", "asymmetric") for share in (0.03, 0.1)]
MODEL = """from torch import nn


def build(inputs, classes):
    return nn.Sequential(nn.Linear(inputs, {hidden}), nn.ReLU(), nn.Linear({hidden}, classes))
"""


def passages() -> tuple[Array, Array]:
    """(counts of words [n, WORDS], packages [n])."""
    texts, labels, root = [], [], Path(os.__file__).parent
    for label, names in enumerate(PACKAGES):
        files = [file for name in names for file in sorted((root / name).rglob("*.py"))]
        lines = [line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        long = [line for line in lines if len(line) > 20]
        found = [" ".join(long[at : at + 4]) for at in range(0, len(long) - 4, 4)]
        chosen = np.random.default_rng(0).permutation(len(found))[:PASSAGES]
        texts += [found[place] for place in chosen]
        labels += [label] * len(chosen)
    counter = HashingVectorizer(n_features=WORDS, alternate_sign=False, token_pattern="[A-Za-z_]+")
    return counter.transform(texts).toarray(), np.array(labels)


def sets() -> dict[str, tuple[Array, Array]]:
    """name -> (inputs [n, k], labels [n])."""
    digits, digit = load_digits(return_X_y=True)
    table, tumour = load_breast_cancer(return_X_y=True)
    return {
        "digits": (digits / 16, digit),
        "text": passages(),
        "table": ((table - table.mean(0)) / table.std(0), tumour),
    }


def changed(labels: Array, kind: str, share: float, seed: int) -> tuple[Array, Array]:
    """(labels, which are changed)."""
    draw, classes = np.random.default_rng(seed), labels.max() + 1
    rows = np.flatnonzero(labels < classes / 2) if kind == "asymmetric" else np.arange(len(labels))
    wrong = np.zeros(len(labels), bool)
    wrong[draw.choice(rows, round(share * len(labels)), replace=False)] = True
    steps = draw.integers(1, classes, len(labels)) if kind == "symmetric" else np.ones(len(labels), int)
    return np.where(wrong, (labels + steps) % classes, labels), wrong


def trained(inputs: Array, labels: Array, classes: int, seed: int) -> Iterator[nn.Module]:
    """The network after each epoch."""
    torch.manual_seed(seed)
    x, y = torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        yield model


def out_of_sample(inputs: Array, labels: Array, classes: int, seed: int) -> Array:
    """[n, classes], of each row by the network that was trained without it."""
    fold = np.random.default_rng(seed).permutation(len(inputs)) % FOLDS
    found = np.empty((len(inputs), classes), dtype=np.float32)
    for each in range(FOLDS):
        *_, model = trained(inputs[fold != each], labels[fold != each], classes, seed)
        with torch.no_grad():
            rows = torch.tensor(inputs[fold == each], dtype=torch.float32)
            found[fold == each] = torch.softmax(model(rows), 1).numpy()
    return found


def tables(inputs: Array, labels: Array, classes: int, seed: int, folder: Path) -> dict[str, Any]:
    """What `psgrad analyze` makes of one model, of its checkpoints, and of probabilities out of sample."""
    paths = []
    for epoch, model in enumerate(trained(inputs, labels, classes, seed)):
        if epoch % 2:
            paths.append(str(folder / f"{epoch:02d}.safetensors"))
            save_file(model.state_dict(), paths[-1])
    (folder / "model.py").write_text(MODEL.format(hidden=HIDDEN), encoding="utf-8")
    held = out_of_sample(inputs, labels, classes, seed)
    np.savez(folder / "data.npz", x=inputs.astype(np.float32), y=labels, probabilities=held)
    kwargs = {"inputs": inputs.shape[1], "classes": classes}
    config = {
        "version": 1,
        "model": {"factory": f"{folder}/model.py:build", "kwargs": kwargs, "checkpoint": paths[-1]},
        "loss": "cross_entropy",
        "data": {"path": str(folder / "data.npz"), "inputs": "x", "target": "y"},
        "output": str(folder / "run"),
    }
    over_checkpoints = {"measures": ["trajectory"], "checkpoints": paths}
    train = {"optimizer": "adam", "epochs": EPOCHS, "batch_size": 64, "learning_rate": 3e-3}
    config["influence"] = {"evaluate": {"train": train}}
    return {
        name: psgrad.analyze({**config, "analyze": part}, overwrite=True, report=False)
        for name, part in {
            "one model": {},
            "checkpoints": over_checkpoints,
            "out of sample": {"probabilities": "probabilities"},
            "folds": {"folds": FOLDS, "seed": seed},
        }.items()
    } | {"probabilities": held.astype(float)}


def compared(found: dict[str, Any], labels: Array, wrong: Array) -> dict[str, dict[str, float]]:
    """The average precision of each ranking, and of each way to flag which flags are right, and how many of
    the changed labels are flagged.
    """
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    samples, held = found["one model"].samples, found["probabilities"]
    scores = {name: found[name].issues["label_score"] for name in OURS}
    scores = {f"psgrad, {name}": -each.to_numpy() for name, each in scores.items()}
    scores |= {"loss": samples["loss"].to_numpy(), "norm": samples["grad_norm"].to_numpy()}
    scores["cross-validation, loss"] = -np.log(held[np.arange(len(labels)), labels] + 1e-12)
    for method in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
        name = f"cleanlab, cross-validation, {method.replace('_', ' ')}"
        scores[name] = -get_label_quality_scores(labels, held, method=method)
    flags = {f"psgrad, {name}": found[name].issues["is_label_issue"].to_numpy() for name in OURS}
    for rule in ("prune_by_noise_rate", "confident_learning"):
        name = f"cleanlab, cross-validation, {rule.replace('_', ' ')}"
        flags[name] = find_label_issues(labels, held, filter_by=rule, n_jobs=1)
    return {
        "precision": {name: average_precision_score(wrong, each) for name, each in scores.items()},
        "right": {name: float(wrong[each].mean()) if each.any() else 1.0 for name, each in flags.items()},
        "found": {name: float(each[wrong].mean()) for name, each in flags.items()},
    }


def main() -> None:
    parser = command_line("How well the issue table finds changed labels.")
    parser.add_argument("--seeds", type=int, default=5, help="draws of each noise (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"seeds": list(range(arguments.seeds)), "sets": {}}
    for name, (inputs, labels) in sets().items():
        classes = int(labels.max()) + 1
        content["sets"][name] = {"rows": len(labels), "classes": classes, "noise": {}}
        for kind, share in NOISE:
            rounds = []
            for seed in range(arguments.seeds):
                given, wrong = changed(labels, kind, share, seed)
                with tempfile.TemporaryDirectory() as folder:
                    found = tables(inputs, given, classes, seed, Path(folder))
                rounds.append(compared(found, given, wrong))
            summary = {
                what: {
                    way: [round(float(end), 4) for end in (np.mean(each), np.min(each), np.max(each))]
                    for way in rounds[0][what]
                    for each in [[one[what][way] for one in rounds]]
                }
                for what in rounds[0]
            }
            content["sets"][name]["noise"][f"{kind} {share:g}"] = summary
            print(f"{name}, {kind}, {share:g}", flush=True)
            for what, ways in summary.items():
                for way, (mean, low, high) in ways.items():
                    print(f"  {what:9}  {way:52}  {mean:.3f}  {low:.3f} to {high:.3f}", flush=True)
    write_json(arguments, content)


if __name__ == "__main__":
    main()
