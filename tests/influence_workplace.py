"""The workplace's folder with queries beside the training data, and `psgrad influence` to run on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn

from psgrad.commands.influence import influence
from psgrad.config import load_config
from psgrad.engine.execution.ranks import OneProcess
from tests.workplace import CLASSES, FEATURES, Outcome, Workplace

QUERIES = 5


class InfluenceWorkplace(Workplace):
    """`config["influence"]` is a section with queries of their own."""

    def prepare(self) -> None:
        random = np.random.default_rng(1)
        self.queries: dict[str, Any] = {
            "x": random.normal(size=(QUERIES, FEATURES)).astype(np.float32),
            "y": random.integers(0, CLASSES, QUERIES),
            "uid": np.array([f"query-{row}" for row in range(QUERIES)]),
        }
        self.save_queries()
        self.config["influence"] = {
            "queries": {"path": "queries.npz", "inputs": "x", "target": "y", "id": "uid"},
            "method": "gradient_dot",
        }

    @property
    def section(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["influence"]
        return found

    def save_queries(self, **arrays: Any) -> None:
        self.queries.update(arrays)
        np.savez(self.folder / "queries.npz", **self.queries)

    def save_checkpoint(self, name: str, seed: int, hidden: int = 5) -> None:
        torch.manual_seed(seed)
        save_file(
            nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)).state_dict(),
            self.folder / name,
        )

    def influence(self, *options: str, config: str = "config.yaml") -> Outcome:
        """`psgrad influence config.yaml` with these options, in this process."""
        return self._run("influence", config, *options)

    def index(self, *options: str) -> Outcome:
        """`psgrad influence index config.yaml`."""
        return self._run("influence", "index", "config.yaml", *options)

    def first_of_two(self) -> None:
        """What rank 0 of two does at the beginning, until it needs the other one."""

        class FirstOfTwo(OneProcess):
            size = 2

        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        influence(load_config(self.folder / "config.yaml"), report=False, processes=FirstOfTwo())

    def _run(self, *arguments: str) -> Outcome:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        return self.command(*arguments)

    def ranked(self, *options: str) -> pd.DataFrame:
        """The table of a run that ends well."""
        self.influence(*options).succeeded()
        return self.table("scores")

    def table(self, name: str) -> pd.DataFrame:
        """scores, self_influence, queries, groups or contrasts of the last run in out/."""
        return pd.read_parquet(self.folder / "out" / f"{name}.parquet")

    def matrix(self, *options: str) -> dict[str, np.ndarray]:
        """matrix.safetensors of a run that ends well."""
        self.ranked("--matrix", "--overwrite", *options)
        return load_file(self.folder / "out" / "matrix.safetensors")

    def products(self, model: nn.Module | None = None) -> np.ndarray:
        """[n, m]: the inner products of gradients, by a loop, of the workplace's model or another one."""
        model = self.model if model is None else model
        training = loop_of_gradients(model, self.arrays["x"], self.arrays["y"])
        return (training @ loop_of_gradients(model, self.queries["x"], self.queries["y"]).T).numpy()

    def samples_of_queries(self) -> list[int]:
        """The query_index of each row of the last run's table."""
        found: list[int] = self.table("scores")["query_index"].tolist()
        return found


def loop_of_gradients(model: nn.Module, inputs: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """[n, p] float64: the gradient of each row's cross-entropy, one by one."""
    model = model.double()
    rows = []
    for x, y in zip(torch.tensor(inputs).double(), torch.tensor(labels), strict=True):
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(model(x[None]), y[None]), list(model.parameters())
        )
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)
