"""docs/reference/large-models.md: the tables of where weights live, by the planner.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from psgrad.engine.execution.memory import CHUNK_SHARE
from psgrad.engine.execution.placement import WeightsPlan, weights_plan
from tools.made_part import with_made_part

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "large-models.md"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
ROWS, TOKENS = 8, 2048
BYTES = 2  # of a weight and of a value, bfloat16
# The constants that the page names, with their sources.
PEAK, UTILISATION = 989e12, 0.40
HOST_LINK, DEVICE_LINK, NETWORK = 55e9, 450e9, 50e9
A_HOST = 8


@dataclass(frozen=True)
class Model:
    """The shape of a Llama 3 model."""

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    tied: bool = False
    keys: int = 8
    vocabulary: int = 128_256

    @property
    def _keys_width(self) -> int:
        return self.keys * self.width // self.heads

    @property
    def block(self) -> int:
        """Parameters of a block."""
        attention = 2 * self.width * (self.width + self._keys_width)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def largest(self) -> int:
        """Parameters of the largest weight, the table of tokens."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block + (1 if self.tied else 2) * self.largest + self.width

    @property
    def values(self) -> int:
        """Bytes of the values of a row: what goes into each block, a block's values and their cotangents."""
        of_block = 2 * (8 * self.width + 2 * self._keys_width + 4 * self.hidden)
        return BYTES * TOKENS * (self.layers * self.width + of_block)

    @property
    def operations(self) -> float:
        """Of the norms of all parameters' gradients for a row: forward, forward again, the cotangents of
        inputs, and two Gram matrices for each weight.
        """
        sides = self.layers * (6 * self.width + 2 * self._keys_width + 3 * (self.width + self.hidden))
        sides += self.vocabulary + self.width
        matrices = self.parameters - (0 if self.tied else self.largest)
        return 3 * 2.0 * matrices * TOKENS + 2.0 * TOKENS**2 * sides


MODELS = (
    Model("1 billion", 16, 2048, 8192, 32, tied=True),
    Model("8 billion", 32, 4096, 14336, 32),
    Model("70 billion", 80, 8192, 28672, 64),
    Model("405 billion", 126, 16384, 53248, 128),
)


def seconds_of_moving(plan: WeightsPlan) -> float:
    if plan.where == "offloaded":
        return plan.moved / HOST_LINK
    return plan.moved / (DEVICE_LINK if plan.group <= A_HOST else NETWORK)


def _rows_of_table(model: Model, memory: int) -> Iterator[str]:
    """A row of the table for each choice, with the numbers of GPUs that have it."""
    plans = {
        devices: weights_plan(
            BYTES * model.parameters, memory, devices, min(devices, A_HOST), BYTES * model.largest
        )
        for devices in DEVICES
    }
    for plan, some in groupby(DEVICES, plans.__getitem__):
        numbers = list(some)
        rows = min(ROWS, max(1, (memory - plan.held) // CHUNK_SHARE // model.values))
        computing, moving = rows * model.operations / (PEAK * UTILISATION), seconds_of_moving(plan)
        cells = (
            model.name,
            f"{numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else ""),
            plan.where + (f" over {plan.group}" if plan.group > 1 else ""),
            f"{plan.held / 1e9:.1f}",
            f"{rows}",
            f"{rows * model.values / 1e9:.1f}",
            f"{plan.moved / 1e9:,.0f}",
            f"{computing:.1f}",
            f"{moving:.1f}",
            f"{rows / max(computing, moving):.2f}",
        )
        yield "| " + " | ".join(cells) + " |"


def generated() -> str:
    """A table for each size of memory."""
    head = (
        "| parameters | GPUs | weights | held (GB) | rows a chunk | values (GB) | moved (GB) | computing (s)"
        " | moving (s) | rows a second |"
    )
    parts = []
    for memory in (80_000_000_000, 141_000_000_000):
        rows = [row for model in MODELS for row in _rows_of_table(model, memory)]
        parts.append("\n".join([f"## GPUs of {memory // 10**9} GB", "", head, "|---" * 10 + "|", *rows]))
    return "\n\n".join(parts) + "\n"


def page(text: str) -> str:
    """The page with its generated part made again."""
    return with_made_part(text, "large_models_page", f"\n{generated()}\n")
