"""Make the data of the private example again: scikit-learn's handwritten digits with their true labels, a
fifth of them held out.

    python configs/digits-dp/make.py

writes beside itself `train.npz` and `test.npz` (image float16 [n, 1, 8, 8], sixteenths from 0 to 1, label
int64 [n], id [n]). The same digits with some labels flipped on purpose are the example of `psgrad analyze`,
in configs/digits; nothing is learnt from those here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FOLDER = Path(__file__).parent
SEED = 0
HELD_OUT = 360


def main() -> None:
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    ids = np.array([f"digit-{index:04d}" for index in range(len(labels))])
    shuffled = np.random.default_rng(SEED).permutation(len(labels))
    for name, rows in (("test", shuffled[:HELD_OUT]), ("train", shuffled[HELD_OUT:])):
        rows = np.sort(rows)
        np.savez_compressed(
            FOLDER / f"{name}.npz", image=images[rows].astype(np.float16), label=labels[rows], id=ids[rows]
        )


if __name__ == "__main__":
    main()
