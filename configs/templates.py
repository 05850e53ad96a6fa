"""Make the data and the checkpoints of `psgrad init` again.

    python configs/templates.py

writes into `psgrad/cli/templates`: for image and tabular data of scikit-learn with a few labels flipped on
purpose, and for all three a model.safetensors, the weights of the model.py beside it, trained on these data.
It takes under a minute. The data come out the same everywhere; the weights differ in their last digits from
machine to machine.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn
from torch.utils.data import default_collate

TEMPLATES = Path(__file__).parent.parent / "psgrad" / "cli" / "templates"
SEED = 0
DIGITS = 600
FLIPPED_FRACTION = 0.02


def flip_labels(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Give `FLIPPED_FRACTION` of the labels another class, each of the other classes equally likely."""
    random = np.random.default_rng(SEED)
    chosen = random.choice(len(labels), size=round(FLIPPED_FRACTION * len(labels)), replace=False)
    given = labels.astype(np.int64)
    given[chosen] = (labels[chosen] + random.integers(1, classes, size=len(chosen))) % classes
    return given


def code(name: str) -> dict[str, Any]:
    """What a template's Python file defines."""
    return runpy.run_path(str(TEMPLATES / name))


def train(model: nn.Module, inputs: Tensor, targets: Tensor, epochs: int, rate: float) -> nn.Module:
    """The model after `epochs` passes of AdamW; targets [n], or [n, t] with the classes last in the
    output.
    """
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            output = model(inputs[batch])
            F.cross_entropy(output.flatten(0, -2), targets[batch].flatten()).backward()
            optimizer.step()
    return model.eval()


def image() -> None:
    digits = load_digits()
    images = (digits.images[:DIGITS, None] / 16).astype(np.float32)
    labels = flip_labels(digits.target[:DIGITS], 10)
    np.savez_compressed(
        TEMPLATES / "image" / "digits.npz",
        image=images,
        label=labels,
        id=[f"digit-{row:03d}" for row in range(DIGITS)],
    )
    torch.manual_seed(SEED)
    model = train(
        code("image/model.py.txt")["build"](), torch.from_numpy(images), torch.from_numpy(labels), 25, 2e-3
    )
    save_file(model.state_dict(), TEMPLATES / "image" / "model.safetensors")


def tabular() -> None:
    cells = load_breast_cancer(as_frame=True)
    frame = cells.data.iloc[:, :10]
    frame.columns = [str(name).removeprefix("mean ").replace(" ", "_") for name in frame.columns]
    labels = flip_labels(cells.target.to_numpy(), 2)
    ids = pd.Series([f"cell-{row:03d}" for row in range(len(frame))], name="id")
    pd.concat([ids, frame, pd.Series(labels, name="benign")], axis=1).to_csv(
        TEMPLATES / "tabular" / "cells.csv", index=False
    )
    torch.manual_seed(SEED)
    model = code("tabular/model.py.txt")["build"]()
    values = torch.tensor(frame.to_numpy(np.float32))
    model[0].mean.copy_(values.mean(0))
    model[0].deviation.copy_(values.std(0))
    train(model, values, torch.from_numpy(labels), 30, 3e-3)
    save_file(model.state_dict(), TEMPLATES / "tabular" / "model.safetensors")


def text() -> None:
    data = code("text/data.py.txt")["passages"]()
    columns = default_collate([data[index] for index in range(len(data))])
    torch.manual_seed(SEED)
    model = train(code("text/model.py.txt")["build"](), columns["bytes"], columns["next_bytes"], 60, 5e-3)
    save_file(model.state_dict(), TEMPLATES / "text" / "model.safetensors")


if __name__ == "__main__":
    image()
    tabular()
    text()
