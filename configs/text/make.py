"""Make the text example's checkpoint again.

    python configs/text/make.py

trains the transformer on its passages and writes `model.safetensors` beside itself. It takes under a minute.
The weights depend on the text of the Python that runs this, and differ in their last digits from machine to
machine.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from data import passages
from model import build
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import default_collate

FOLDER = Path(__file__).parent
SEED = 0
EPOCHS = 40
BATCH_SIZE = 16
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1


def train(tokens: Tensor, targets: Tensor) -> nn.Module:
    """The transformer after `EPOCHS` passes of AdamW; tokens and targets [n, t]."""
    torch.manual_seed(SEED)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * -(-len(tokens) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(tokens)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[batch]).flatten(0, 1), targets[batch].flatten())
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1} of {EPOCHS}: {total / len(tokens):.3f} nats a byte", flush=True)
    return model.eval()


def main() -> None:
    data = passages()
    columns = default_collate([data[index] for index in range(len(data))])
    model = train(columns["bytes"], columns["next_bytes"])
    save_file(model.state_dict(), FOLDER / "model.safetensors")


if __name__ == "__main__":
    main()
