"""The memory of a pass over models of one width and more and more layers, with and without blocks that run
again in the backward pass, beside what `psgrad plan` predicts.

    python benchmarks/depth.py [--depths 4 8 16 24 32 48] [--width 256] [--json FILE] [--small]

Of norms, of projections, and of clipped sums (without the sums themselves, which have the size of the
model), as the allocator counts it, beyond the weights and the batch. With blocks that run again a pass keeps
what goes into each block, `boundaries`, and the values of one block: beyond the boundaries the peak is flat
in depth.

The bars: the peak of norms beyond the boundaries grows by at most 5 % from the fewest layers to the most, and
no peak is more than 15 % away from its plan. The exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import allocated
from models import GPT
from norms import machine

Facts = dict[str, Any]
ROWS, TOKENS, HEADS = 8, 128, 64
FLAT, PLANNED = 0.05, 0.15
KEPT = "norms, all values kept"


def depth(layers: int, width: int, rows: int) -> Facts:
    """The peaks of passes over a model of so many layers, and those that their plans predict; of norms, of
    projections, and of clipped sums beside the sums themselves, which have the size of the model.
    """
    from psgrad.engine.execution.chunk_memory import peak_bytes
    from psgrad.engine.execution.objective import Objective
    from psgrad.engine.execution.recompute import Recompute
    from psgrad.engine.gradients import (
        TwoSided,
        per_sample_projections,
        per_sample_square_norms,
        per_sample_weighted_sum,
    )

    found: Facts = {"layers": layers, "boundaries": layers * rows * TOKENS * width * 4}
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (rows, TOKENS))
    model = GPT(100, TOKENS, width, layers, max(1, width // HEADS))
    again = Recompute(False)
    again.add(model)
    objective = Objective(model, lambda logits, ids: F.cross_entropy(logits[:-1], ids[1:]))
    sums = sum(parameter.nbytes for parameter in objective.params.values())
    queries: dict[str, Any] = {
        "norms": per_sample_square_norms,
        "projections": partial(per_sample_projections, projection=TwoSided(4, 4, seed=0)),
        "clipped sums": partial(
            per_sample_weighted_sum,
            weights=lambda norms: (1 / norms.square_norms().sqrt()).clamp(max=1),
            memory=0,
        ),
    }
    for query, how in queries.items():
        for recomputed in ("none", "blocks") if query == "norms" else ("blocks",):
            again.on = recomputed == "blocks"

            def computed(params: Any, inputs: Any, target: Any, how: Any = how) -> Any:
                return how(objective.loss, params, inputs, target, in_dims=(0, 0), has_aux=True)

            planned = None
            if query == "norms":  # the others look at values
                planned = peak_bytes(computed, objective.params, (ids,), ids)
            took = allocated(partial(computed, objective.params, (ids,), ids), torch.device("cpu"))
            results = sums if query == "clipped sums" else 0
            found[query if again.on else "norms, all values kept"] = {
                "peak_bytes": took - results,
                "planned_bytes": None if planned is None else planned - results,
            }
    print(
        f"{layers:3d} layers: "
        + ", ".join(
            f"{name} {each['peak_bytes'] / 2**20:.1f} MiB"
            + ("" if each["planned_bytes"] is None else f" (planned {each['planned_bytes'] / 2**20:.1f})")
            for name, each in found.items()
            if isinstance(each, dict)
        ),
        flush=True,
    )
    return found


def holds(found: list[Facts]) -> bool:
    """Whether both bars are met; prints by how much."""
    beyond = [each["norms"]["peak_bytes"] - each["boundaries"] for each in found]
    growth = beyond[-1] / beyond[0] - 1
    away = max(
        abs(each[name]["planned_bytes"] / each[name]["peak_bytes"] - 1)
        for each in found
        for name in ("norms", KEPT)
    )
    met = growth <= FLAT and away <= PLANNED
    print(
        f"beyond the boundaries the peak of norms grows by {growth:.1%} from {found[0]['layers']} to"
        f" {found[-1]['layers']} layers; plans are off by {away:.1%} at most: {'met' if met else 'missed'}"
    )
    return met


def plot(found: list[Facts], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    layers = [each["layers"] for each in found]
    styles = {KEPT: "o-", "norms": "s-", "projections": "x--", "clipped sums": "^-"}
    for name, style in styles.items():
        label = name if name == KEPT else f"{name}, blocks run again"
        axes.plot(layers, [each[name]["peak_bytes"] / 2**20 for each in found], style, label=label)
        if found[0][name]["planned_bytes"] is not None:
            axes.plot(layers, [each[name]["planned_bytes"] / 2**20 for each in found], "k:", zorder=3)
    axes.plot([], [], "k:", label="planned, of norms")
    axes.plot(
        layers, [each["boundaries"] / 2**20 for each in found], color="0.6", label="what goes into the blocks"
    )
    axes.set(xlabel="layers", ylabel="memory of a pass (MiB)", ylim=(0, None), xlim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 24, 32, 48])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures to this file, and the plot beside it")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script runs")
    arguments = parser.parse_args()
    depths, width = ([2, 4], 64) if arguments.small else (arguments.depths, arguments.width)
    found = [depth(each, width, ROWS) for each in depths]
    met = holds(found)
    if arguments.json:
        facts = {"machine": machine(torch.device("cpu")), "width": width, "depths": found, "met": met}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
        plot(found, arguments.json.with_suffix(".png"))
    sys.exit(0 if met or arguments.small else 1)


if __name__ == "__main__":
    main()
