"""Make the digits example again: flip labels, train the network on them, and tell how well norm and loss find
the flipped ones.

    python configs/digits/make.py

writes beside itself `digits.npz` (image float32 [1797, 1, 8, 8] in 0..1, label int64 [1797], id [1797]),
`flipped.json` (id, true label and given label of each flipped digit) and `model.safetensors`. It takes a few
seconds. The data come out the same everywhere; the weights differ in their last digits from machine to
machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import build
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

FOLDER = Path(__file__).parent
SEED = 0
FLIPPED_FRACTION = 0.03
CLASSES = 10
EPOCHS = 12
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
# Enough to keep the network from learning the flipped labels by heart, so that they still stand out when it
# is trained.
WEIGHT_DECAY = 0.05


def flip_labels(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give `FLIPPED_FRACTION` of the labels another class, each of the other classes equally likely."""
    random = np.random.default_rng(SEED)
    chosen = random.choice(len(labels), size=round(FLIPPED_FRACTION * len(labels)), replace=False)
    given = labels.copy()
    given[chosen] = (labels[chosen] + random.integers(1, CLASSES, size=len(chosen))) % CLASSES
    return given


def train(images: Tensor, labels: Tensor, seed: int = SEED) -> nn.Module:
    """The network after `EPOCHS` passes of AdamW over all the images, flipped labels included."""
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def losses_and_norms(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [n] and gradient norm [n] of each sample, one backward pass at a time."""
    losses, norms = [], []
    for image, label in zip(images, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    return torch.stack(losses), torch.stack(norms)


def found(score: Tensor, flipped: Tensor, fraction: float) -> int:
    """How many of the flipped samples are among the `fraction` with the largest score."""
    return int(flipped[score.topk(round(fraction * len(score))).indices].sum())


def main() -> None:
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    true = digits.target.astype(np.int64)
    given = flip_labels(true)
    ids = np.array([f"digit-{index:04d}" for index in range(len(true))])
    flipped = given != true

    np.savez_compressed(FOLDER / "digits.npz", image=images, label=given, id=ids)
    records = [
        {"id": str(ids[i]), "true": int(true[i]), "given": int(given[i])} for i in np.flatnonzero(flipped)
    ]
    (FOLDER / "flipped.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")

    model = train(torch.from_numpy(images), torch.from_numpy(given))
    save_file(model.state_dict(), FOLDER / "model.safetensors")

    losses, norms = losses_and_norms(model, torch.from_numpy(images), torch.from_numpy(given))
    for name, score in (("gradient norm", norms), ("loss", losses)):
        counts = [found(score, torch.from_numpy(flipped), fraction) for fraction in (0.03, 0.1)]
        print(
            f"{name}: {counts[0]} of {flipped.sum()} flipped digits in the top 3 %, "
            f"{counts[1]} in the top 10 %"
        )


if __name__ == "__main__":
    main()
