"""Make the influence example again: split the digits, train the network until it knows every training digit,
keep its weights.

    python configs/digits-influence/make.py

writes beside itself `train.npz` (1437 digits) and `test.npz` (360), each with image float16 [n, 1, 8, 8]
(sixteenths from 0 to 1, so that no digit is lost), label int64 [n] and id [n], and `model.safetensors`. It
takes a few seconds. The data come out the same everywhere; the weights differ in their last digits from
machine to machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import build
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

FOLDER = Path(__file__).parent
SEED = 0
EPOCHS = 120
BATCH_SIZE = 64
LEARNING_RATE = 3e-3


def train(images: Tensor, labels: Tensor, seed: int = SEED) -> nn.Module:
    """The network after `EPOCHS` passes of Adam."""
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def main() -> None:
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    ids = np.array([f"digit-{index:04d}" for index in range(len(labels))])
    train_rows, test_rows = train_test_split(
        np.arange(len(labels)), test_size=360, stratify=labels, random_state=SEED
    )
    for name, rows in (("train", np.sort(train_rows)), ("test", np.sort(test_rows))):
        np.savez_compressed(
            FOLDER / f"{name}.npz", image=images[rows].astype(np.float16), label=labels[rows], id=ids[rows]
        )
    rows = np.sort(train_rows)
    model = train(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]))
    save_file(model.state_dict(), FOLDER / "model.safetensors")
    with torch.no_grad():
        for name, chosen in (("train", rows), ("test", np.sort(test_rows))):
            right = (model(torch.from_numpy(images[chosen])).argmax(1).numpy() == labels[chosen]).mean()
            print(f"{name}: {right:.2%} right")


if __name__ == "__main__":
    main()
