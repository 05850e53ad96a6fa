"""Make the checkpoints example again: train a small network on the digits of `../digits`, flipped labels
included, and keep five moments.

    python configs/digits-checkpoints/make.py

writes beside itself `epoch-01.safetensors`, ..., each of 11 kB: the weights after that many epochs. It takes
a few seconds. The weights differ in their last digits from machine to machine.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

FOLDER = Path(__file__).parent
DIGITS = FOLDER.parent / "digits"
SEED = 0
KEPT_EPOCHS = (2, 5, 10, 20, 40)
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
SIZES = {"channels": 4, "hidden": 16}


def train(images: Tensor, labels: Tensor) -> dict[int, nn.Module]:
    """The network after each of `KEPT_EPOCHS` passes of Adam over all the images, by epoch."""
    torch.manual_seed(SEED)
    build = runpy.run_path(str(DIGITS / "model.py"))["build"]
    model: nn.Module = build(**SIZES)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    kept: dict[int, nn.Module] = {}
    for epoch in range(1, max(KEPT_EPOCHS) + 1):
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        if epoch in KEPT_EPOCHS:
            kept[epoch] = build(**SIZES)
            kept[epoch].load_state_dict(model.state_dict())
    return kept


def main() -> None:
    with np.load(DIGITS / "digits.npz") as data:
        images, labels = torch.from_numpy(data["image"]), torch.from_numpy(data["label"])
    for epoch, model in train(images, labels).items():
        save_file(model.state_dict(), FOLDER / f"epoch-{epoch:02d}.safetensors")
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean()
        print(f"after {epoch} epochs {right:.1%} of the given labels are predicted")


if __name__ == "__main__":
    main()
