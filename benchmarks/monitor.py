"""The monitor of training loops: what it costs, and what it names.

    python benchmarks/monitor.py [--runs 10] [--steps 500] [--rounds 7] [--json FILE]

Names: clean trainings of a network of digits (SGD and Adam) and of a small language model, measured at each
step, in which no row may be named; and the same with one planted batch each: labels permuted, a picture whose
pixels are 0 to 255 in place of 0 to 1, a text of words at random. Each planted batch should be named, and the
rows in it that were changed.

Costs: a training with a monitor at every ten steps beside one without, round by round, in processor time of
one thread. The first steps, in which programs are recorded, are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from norms import machine
from script import command_line, print_facts, write_json
from sklearn.datasets import load_digits
from torch import Tensor, nn

import psgrad

BATCH, EVERY, WARM_UP = 32, 10, 60
COST_BAR = 0.15  # of the time of training, at every ten steps
PLANTED_FROM = 100  # the first step that may be planted
Batch = tuple[Tensor, Tensor]
Plant = Callable[[Batch, np.random.Generator], tuple[Batch, set[int]]]


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).flatten(1))


class Words(nn.Module):
    """A transformer of one layer over texts of one length, which predicts each next word."""

    def __init__(self, words: int, width: int = 32, layers: int = 1) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(words, width), nn.Embedding(256, width)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, texts: Tensor) -> Tensor:
        length = texts.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.embedding(texts) + self.place(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x).transpose(1, 2)


@dataclass
class Task:
    """A network, its data, its optimiser, and what is planted."""

    name: str
    data: Batch
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    plants: dict[str, Plant]


def permuted(batch: Batch, draw: np.random.Generator) -> tuple[Batch, set[int]]:
    order = torch.from_numpy(draw.permutation(len(batch[1])))
    return (batch[0], batch[1][order]), set(torch.nonzero(batch[1] != batch[1][order]).flatten().tolist())


def bytes_as_picture(batch: Batch, draw: np.random.Generator) -> tuple[Batch, set[int]]:
    row, pictures = int(draw.integers(len(batch[0]))), batch[0].clone()
    pictures[row] *= 255
    return (pictures, batch[1]), {row}


def garbage(batch: Batch, draw: np.random.Generator, words: int) -> tuple[Batch, set[int]]:
    row, texts = int(draw.integers(len(batch[0]))), torch.cat([batch[0], batch[1][:, -1:]], 1)
    texts[row] = torch.from_numpy(draw.integers(0, words, texts.shape[1]))
    return (texts[:, :-1], texts[:, 1:]), {row}


def tasks() -> list[Task]:
    pixels, labels = load_digits(return_X_y=True)
    digits = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    draw, words, used = np.random.default_rng(0), 200, 60
    following = draw.dirichlet(np.full(used, 0.05), size=used)
    texts = np.zeros((2000, 25), dtype=np.int64)
    texts[:, 0] = draw.integers(used, size=len(texts))
    for place in range(1, texts.shape[1]):
        texts[:, place] = [draw.choice(used, p=following[word]) for word in texts[:, place - 1]]
    chains = torch.from_numpy(texts)
    pictures: dict[str, Plant] = {"labels permuted": permuted, "picture of bytes": bytes_as_picture}
    return [
        Task("digits, SGD", digits, Pictures, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), pictures),
        Task("digits, Adam", digits, Pictures, lambda p: torch.optim.Adam(p, 3e-3), pictures),
        Task(
            "texts, AdamW",
            (chains[:, :-1], chains[:, 1:]),
            partial(Words, words),
            lambda p: torch.optim.AdamW(p, 3e-3),
            {"garbage text": partial(garbage, words=words)},
        ),
    ]


def batches(task: Task, seed: int) -> Iterator[Batch]:
    draw = np.random.default_rng(seed)
    while True:
        order = torch.from_numpy(draw.permutation(len(task.data[0])))
        for rows in order.split(BATCH)[:-1]:
            yield task.data[0][rows], task.data[1][rows]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def named(
    task: Task, seed: int, steps: int, plant: Plant | None
) -> tuple[dict[int, set[int]], int, set[int]]:
    """(step -> the places that the monitor named, the planted step or 0, the rows changed there)."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(1000 + seed)
    at = int(draw.integers(PLANTED_FROM, steps)) if plant else 0
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    found: dict[int, set[int]] = {}
    changed: set[int] = set()
    watcher = psgrad.monitor(model, F.cross_entropy, output=None)
    for step, batch in zip(range(1, steps + 1), batches(task, seed), strict=False):
        if plant and step == at:
            batch, changed = plant(batch, draw)
        result = watcher.step(batch)
        assert result is not None, watcher.stopped
        if result.spike:
            found[step] = {row.place for row in result.spike}
        step_of(model, optimizer, batch)
        if at and step == at + 20:
            break
    return found, at, changed


def cost(task: Task, rounds: int, steps: int = 200) -> dict[str, float]:
    """Processor seconds a step, with a monitor at every ten steps and without; and their ratio."""

    def seconds(watch: bool) -> float:
        torch.manual_seed(0)
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        watcher = psgrad.monitor(model, F.cross_entropy, output=None, every=EVERY) if watch else None
        began = 0.0
        for step, batch in zip(range(WARM_UP + steps), batches(task, 0), strict=False):
            if step == WARM_UP:
                began = time.process_time()
            if watcher is not None:
                watcher.step(batch)
            step_of(model, optimizer, batch)
        return (time.process_time() - began) / steps

    pairs = [(seconds(True), seconds(False)) for _ in range(rounds)]
    with_, without = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"with": with_, "without": without, "more": statistics.median(a / b for a, b in pairs) - 1}


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], rounds=7)
    parser.add_argument("--runs", type=int, default=10, help="of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of each run (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"))
    print_facts(facts, options)
    results: dict[str, Any] = {"machine": facts, "names": {}, "costs": {}}
    for task in tasks():
        clean = [named(task, seed, options.steps, None)[0] for seed in range(options.runs)]
        spikes = sum(map(len, clean))
        steps = options.runs * options.steps
        print(f"{task.name}: {spikes} spikes in {options.runs} clean runs, {steps:,} steps", flush=True)
        results["names"][task.name] = {"clean": {"runs": options.runs, "steps": steps, "spikes": spikes}}
        for name, plant in task.plants.items():
            found = [named(task, seed, options.steps, plant) for seed in range(options.runs)]
            hits = sum(at in spikes for spikes, at, _ in found)
            rows = [len(spikes.get(at, set()) & changed) / len(changed) for spikes, at, changed in found]
            others = sum(len(set(spikes) - {at}) for spikes, at, _ in found)
            share, of, about = statistics.mean(rows), len(found), "other steps"
            print(f"  {name}: {hits} of {of} named, {share:.0%} of the rows; {others} {about}", flush=True)
            about = {"named": hits, "of": of, "rows": share, "other_steps": others}
            results["names"][task.name][name] = about
    chains = tasks()[2]
    chains.name, chains.model = "texts, 4 layers of 128", partial(Words, 200, 128, 4)
    for task in [*tasks()[:1], chains]:
        found_cost = cost(task, options.rounds)
        results["costs"][task.name] = found_cost
        verdict = "met" if found_cost["more"] <= COST_BAR else "missed"
        print(
            f"{task.name}: {found_cost['more']:+.1%} at every {EVERY} steps (bar {COST_BAR:.0%}: {verdict})"
        )
    write_json(options, results)


if __name__ == "__main__":
    main()
