"""How well rules find labels that were flipped on purpose, on scikit-learn's digits: conformal p-values
against trusted digits, the review list, and rules that need no reference.

    python benchmarks/outliers.py [--rounds 20] [--json FILE]

Each round draws the digits anew and trains the network of configs/digits by its recipe. Four settings, by
what the network has seen:

    both trained on      all digits, flipped ones included; 600 of the sound ones are the reference, all
    others are judged both held out        700 sound digits, none of which appears again; 500 sound ones are
    the reference, 597 are judged only the judged      all but the reference, which then looks worse than it
    should only the reference   the reference and 700 other sound digits: sound digits that are judged look
    worse than it

In the last two reference and samples are not exchangeable. A share of the judged labels is flipped, and each
rule says whom it flags. `flagged` is the share of the judged, `fdr` the mean share of sound digits among the
flagged (0 where none is), `worst` the largest of them, `precision` the mean over the rounds that flagged any.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.stats import median_abs_deviation
from script import command_line, write_json
from sklearn.datasets import load_digits

from psgrad.config.analysis import AnalyzeConfig
from psgrad.engine.transforms import functional_call, grad, vmap
from psgrad.quality.judging import judge
from psgrad.quality.references import Reference, reference_of

sys.path.insert(0, str(Path(__file__).parent.parent / "configs" / "digits"))
from make import CLASSES, train  # the example's own recipe

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

FDR = 0.1
SHARES = (0.0, 0.03, 0.1)
SETTINGS = ("both trained on", "both held out", "only the judged", "only the reference")
SIZES = {
    "both trained on": (0, 600),
    "both held out": (700, 500),
    "only the judged": (0, 500),
    "only the reference": (700, 500),
}
"""Setting to (sound digits that are only trained on, trusted digits)."""
CHUNK = 256


def mad(scores: Array) -> Mask:
    """z > 3.5 by median and MAD."""
    return np.asarray((scores - np.median(scores)) / median_abs_deviation(scores, scale="normal") > 3.5)


def fences(scores: Array) -> Mask:
    """Above the upper quartile by more than 1.5 interquartile ranges (Tukey)."""
    low, high = np.quantile(scores, [0.25, 0.75])
    return np.asarray(scores > high + 1.5 * (high - low))


def three_sigma(scores: Array) -> Mask:
    return np.asarray(scores > scores.mean() + 3 * scores.std())


RULES: dict[str, Callable[[Array], Mask]] = {
    "MAD, norm": mad,
    "MAD, log norm": lambda scores: mad(np.log(scores)),
    "Tukey's fences, norm": fences,
    "Tukey's fences, log norm": lambda scores: fences(np.log(scores)),
    "mean + 3 sigma, norm": three_sigma,
}


def measure(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> pd.DataFrame:
    """grad_norm and loss, a row a digit."""
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> Any:
        value = torch.nn.functional.cross_entropy(functional_call(model, params, (image[None],)), label[None])
        return value, value.detach()

    norms, losses = [], []
    for part, given in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
        gradients, values = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0))(params, part, given)
        norms.append(torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt())
        losses.append(values)
    frame = pd.DataFrame({"grad_norm": torch.cat(norms).numpy(), "loss": torch.cat(losses).numpy()})
    return frame.assign(index=range(len(frame)), fingerprint=[f"{row:032x}" for row in range(len(frame))])


def flags(judged: pd.DataFrame, trusted: pd.DataFrame) -> Iterator[tuple[str, Mask]]:
    """(rule, whom it flags) of the judged digits."""
    for score in ("grad_norm", "loss"):
        config = AnalyzeConfig.model_validate({"outliers": {"score": score, "fdr": FDR}})
        reference: Reference = reference_of(trusted, score, None, "trusted digits")
        yield f"conformal, {score}", judge(judged, config, reference).frame["is_outlier_issue"].to_numpy(bool)
        yield f"review list, {score}", judge(judged, config).frame["is_outlier_issue"].to_numpy(bool)
    for name, rule in RULES.items():
        yield name, rule(judged["grad_norm"].to_numpy("float64"))


def one_round(setting: str, share: float, number: int) -> dict[str, tuple[float, float | None, float | None]]:
    """Rule to (flagged share, precision, recall); None where nothing was flagged, or nothing flipped."""
    digits = load_digits()
    random = np.random.default_rng(number)
    order = random.permutation(len(digits.target))
    images = torch.from_numpy((digits.images[order, None] / 16).astype(np.float32))
    labels = digits.target[order].astype(np.int64)
    only_trained, trusted = SIZES[setting]
    first = only_trained + trusted
    flipped = np.zeros(len(labels), bool)
    flipped[
        first + random.choice(len(labels) - first, round(share * (len(labels) - first)), replace=False)
    ] = True
    given = torch.from_numpy(
        np.where(flipped, (labels + random.integers(1, CLASSES, len(labels))) % CLASSES, labels)
    )
    seen = {
        "both trained on": slice(None),
        "both held out": slice(only_trained),
        "only the judged": slice(first, None),
        "only the reference": slice(first),
    }[setting]
    model = train(images[seen], given[seen], seed=number)
    frame = measure(model, images, given)
    found = {}
    for rule, flagged in flags(frame[first:].reset_index(drop=True), frame[only_trained:first]):
        hits = int((flagged & flipped[first:]).sum())
        found[rule] = (
            float(flagged.mean()),
            hits / int(flagged.sum()) if flagged.any() else None,
            hits / int(flipped.sum()) if flipped.any() else None,
        )
    return found


def summary(rounds: list[tuple[float, float | None, float | None]]) -> dict[str, float | None]:
    """Means over the rounds."""
    precisions = [precision for _, precision, _ in rounds if precision is not None]
    recalls = [recall for *_, recall in rounds if recall is not None]
    false = [0.0 if precision is None else 1 - precision for _, precision, _ in rounds]
    return {
        "flagged": float(np.mean([flagged for flagged, *_ in rounds])),
        "fdr": float(np.mean(false)),
        "worst": max(false),
        "precision": float(np.mean(precisions)) if precisions else None,
        "recall": float(np.mean(recalls)) if recalls else None,
    }


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = command_line("Find flipped labels by conformal p-values, and by simpler rules.")
    parser.add_argument(
        "--rounds", type=int, default=20, help="of each setting and share (default: %(default)s)"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parse_arguments(words)
    content: dict[str, Any] = {"rounds": arguments.rounds, "fdr": FDR, "sizes": {}, "found": {}}
    for setting in SETTINGS:
        only_trained, trusted = SIZES[setting]
        content["sizes"][setting] = {
            "trusted": trusted,
            "judged": len(load_digits().target) - only_trained - trusted,
        }
        for share in SHARES if setting.startswith("both") else SHARES[:2]:
            rounds = [one_round(setting, share, number) for number in range(arguments.rounds)]
            print(
                f"\n{setting}, {share:.0%} flipped\n "
                f" {'':<26}{'flagged':>9}{'FDR':>7}{'worst':>7}{'precision':>11}{'recall':>8}"
            )
            for rule in rounds[0]:
                said = summary([each[rule] for each in rounds])
                content["found"].setdefault(setting, {}).setdefault(f"{share:g}", {})[rule] = said
                shown = ["-" if value is None else f"{value:.3f}" for value in said.values()]
                print(
                    f"  {rule:<26}{shown[0]:>9}{shown[1]:>7}{shown[2]:>7}{shown[3]:>11}{shown[4]:>8}",
                    flush=True,
                )
    write_json(arguments, content)


if __name__ == "__main__":
    main()
