"""Make the digits-gate example again: some digits that a person has checked, and the others, whose labels
nobody has looked at.

    python configs/digits-gate/make.py
    psgrad analyze configs/digits-gate.yaml --output runs/checked \\
        --set data.path=digits-gate/checked.npz --set analyze.outliers.reference=null
    psgrad baseline save runs/checked --output configs/digits-gate/checked.json

reads `../digits/digits.npz` and `../digits/flipped.json`, and writes beside itself `checked.npz` (600 digits
that were not flipped, drawn at random; it is not shipped) and `unchecked.npz` (all others, the flipped ones
among them), with the columns of digits.npz; and the baseline of the checked ones. The network of ../digits
has been trained on both, so that sound digits of the one are like those of the other. The files come out the
same everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
DIGITS = FOLDER.parent / "digits"
SEED = 1  # with 0 the flips of ../digits were drawn
CHECKED = 600


def main() -> None:
    with np.load(DIGITS / "digits.npz") as file:
        columns = {name: file[name] for name in ("image", "label", "id")}
    columns["image"] = columns["image"].astype(np.float16)  # sixteenths: no digit is lost
    flipped = {each["id"] for each in json.loads((DIGITS / "flipped.json").read_text(encoding="utf-8"))}
    sound = np.flatnonzero([identifier not in flipped for identifier in columns["id"].tolist()])
    checked = np.zeros(len(columns["id"]), bool)
    checked[np.random.default_rng(SEED).choice(sound, CHECKED, replace=False)] = True
    for name, rows in (("checked", checked), ("unchecked", ~checked)):
        np.savez_compressed(
            FOLDER / f"{name}.npz", **{column: values[rows] for column, values in columns.items()}
        )
    print(f"{CHECKED} checked digits, {int((~checked).sum())} others, {len(flipped)} of which are flipped")


if __name__ == "__main__":
    main()
