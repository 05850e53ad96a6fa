"""How well the released model does on digits that it was not trained on: python configs/digits-dp/accuracy.py
runs/digits-dp

The test set is data of its own, which no guarantee of the run covers: a number such as this one is published
as any other is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))


def main(run: str) -> None:
    from model import build

    model = build().eval()
    model.load_state_dict(load_file(Path(run) / "public" / "model.safetensors"))
    with np.load(FOLDER / "test.npz") as data:
        images, labels = torch.from_numpy(data["image"]).float(), torch.from_numpy(data["label"])
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    print(f"{right} of {len(labels)} held-out digits right ({right / len(labels):.1%})")


if __name__ == "__main__":
    main(sys.argv[1])
