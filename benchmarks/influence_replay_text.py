"""What the derivative of a training run costs for a language model of ten million parameters.

    python benchmarks/influence_replay_text.py [--small] [--subsets 2] [--json FILE]

A transformer of eight blocks of width 320 (9.9 million parameters) learns passages of Python's standard
library, 32 bytes each, for 500 steps of AdamW with eight passages a step.  Timed
are the run itself, and the derivatives of one query's loss after it with respect to the weights of all
training passages. Then the run is made again without random twentieths of the passages: `changes` has what
the derivatives predict for the query's loss, and what it does.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from influence_ours import examples
from script import command_line, write_json
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.methods.replay import measured
from psgrad.engine.influence.training_run import TrainingRun

LENGTH, BATCH, STEPS = 32, 8, 500
PASSAGES = 400


def token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Of one passage: logits [t, 256], bytes [t]."""
    return nn.functional.cross_entropy(output, target)


def posed(small: bool) -> tuple[TrainingRun, LoadedRows]:
    """(the run, one query)"""
    sys.path.append(str(Path(__file__).parents[1] / "configs" / "text"))
    from data import passages
    from model import build

    found = passages(PASSAGES + 1, LENGTH)
    tokens, targets = (
        torch.stack([found[place][name] for place in range(PASSAGES + 1)]) for name in ("bytes", "next_bytes")
    )
    torch.manual_seed(0)
    model = (
        build(width=32, layers=2, heads=2, positions=LENGTH)
        if small
        else build(width=320, layers=8, heads=8, positions=LENGTH)
    )
    objective = Objective(model, token_cross_entropy)
    initial = {name: value.detach().clone() for name, value in objective.params.items()}
    epochs = 1 if small else STEPS * BATCH // PASSAGES
    recipe = Recipe("adamw", epochs, BATCH, learning_rate=1e-4, schedule="cosine", weight_decay=0.1)
    rows = LoadedRows((tokens[:-1],), targets[:-1])
    return TrainingRun(objective, rows, recipe, 0, initial), LoadedRows((tokens[-1:],), targets[-1:])


def clocked(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, processor = time.perf_counter(), time.process_time()
    found = run()
    return found, {
        "seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
    }


def main() -> None:
    parser = command_line("Derivatives of the training of a language model of ten million parameters.")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that the script runs")
    parser.add_argument(
        "--subsets", type=int, default=2, help="runs without a twentieth (default: %(default)s)"
    )
    arguments = parser.parse_args()
    run, rows = posed(arguments.small)
    content: dict[str, Any] = {
        "parameters": sum(value.numel() for value in run.initial.values()),
        "steps": len(run.batches),
    }
    final, content["training"] = clocked(lambda: run.final)
    print(
        f"{content['parameters']:,} parameters, {content['steps']} steps: {content['training']}",
        flush=True,
    )
    assert rows.target is not None
    query = examples(run.objective.model, rows.inputs[0], rows.target, token_cross_entropy)
    query.objective.params = final
    gradients = query.flat.split(query.materialise())
    found, content["derivatives"] = clocked(lambda: run.weight_derivatives(gradients)[0])
    times = content["derivatives"]["processor_seconds"] / content["training"]["processor_seconds"]
    print(f"derivatives of one query: {content['derivatives']}, {times:.1f} times the training", flush=True)
    left_out = torch.zeros(arguments.subsets, len(run.rows), dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    for each in left_out:
        each[torch.randperm(len(each), generator=generator)[: len(each) // 20]] = True
    at_end = measured(query, rows, {name: value.unsqueeze(0) for name, value in final.items()})
    actual = torch.from_numpy(measured(query, rows, run.retrained(~left_out)) - at_end).flatten()
    predicted = -(left_out.double() @ found)
    content["changes"] = {"predicted": predicted.tolist(), "actual": actual.tolist()}
    print(f"without twentieths: predicted {predicted.tolist()}, actual {actual.tolist()}")
    content |= {
        "times": times,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    write_json(arguments, content)


if __name__ == "__main__":
    main()
