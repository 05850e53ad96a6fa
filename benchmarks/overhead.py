"""What psgrad itself takes: whole runs over networks so small that their kernels take no time.

    python benchmarks/overhead.py [--chunks 8 64 512] [--rounds 21] [--only gpt2 mlp] [--json FILE]

Each network's rows are written to a file, and `psgrad.analyze` runs over two chunks of four rows, and over
more: what each further chunk takes is the difference, recordings of programs included. It is processor time,
of one thread, and all that a run does is in it: reading, norms, tables. Beside it, in the same process and
right before and after:

    plain        forward and backward of a chunk's mean loss, by autograd
    torch.func   vmap(grad) of the one-sample loss, then the norms

then the clipped sum of a chunk, by a program of the first three, beside torch.func's (the gradients, their
norms, the sum of the clipped ones); and for the networks that Opacus takes, private steps of four rows in
expectation, gradients, noise and update, as benchmarks/dp_step.py has them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dp_contenders import RIVALS, Training, plain
from dp_contenders import psgrad as psgrad_step
from norms import machine
from script import command_line, print_facts, write_json
from tiny import NAMES, ROWS, Tiny, tiny_networks
from torch import Tensor

import psgrad
from psgrad.engine.execution.chunk_replay import NOT_REPLAYED
from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import SquareNorms, per_sample_weighted_sum
from psgrad.engine.privacy.sum_programs import SumPrograms

# At most so many times torch.func's and plain's time, for each further chunk of a run of so many chunks.
BARS: dict[int, dict[str, tuple[float | None, float | None]]] = {
    64: {
        "gpt2": (0.6, 1.8),
        "llama": (0.6, 1.8),
        "mlp": (1.0, None),
        "cnn": (1.0, None),
        "bert": (None, 2.0),
    },
    512: {
        "gpt2": (0.42, 1.3),
        "llama": (0.42, 1.3),
        "mlp": (0.6, None),
        "cnn": (0.6, None),
        "bert": (None, 1.4),
    },
}

_LONG = 100  # chunks of a run that is measured once


def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def seconds(way: Callable[[], Any]) -> float:
    """Processor time of one call, all threads."""
    start = time.process_time()
    way()
    return time.process_time() - start


def median_of(way: Callable[[], Any], rounds: int) -> float:
    way(), way()
    return statistics.median(seconds(way) for _ in range(rounds))


def run_seconds(case: Tiny, chunks: int) -> float:
    """Processor time of `psgrad.analyze` over so many chunks."""
    count = chunks * ROWS
    columns = {
        name: np.resize(x.numpy(), (count, *x.shape[1:]))
        for name, x in [*((f"input_{place}", x) for place, x in enumerate(case.inputs)), ("y", case.target)]
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        np.savez(path, **columns)  # type: ignore[arg-type]
        config = {
            "data": {"path": str(path), "inputs": [name for name in columns if name != "y"], "target": "y"},
            "engine": {"chunk_size": ROWS, "device": "cpu", "verify": 0},
        }
        return seconds(
            lambda: psgrad.analyze(
                config, model=case.model, loss=loss_of_one, output=Path(folder) / "run", report=False
            )
        )


def run_median(case: Tiny, chunks: int, runs: int) -> float:
    return statistics.median(run_seconds(case, chunks) for _ in range(runs))


def plain_pass(case: Tiny) -> Callable[[], Any]:
    def way() -> None:
        case.model.zero_grad(set_to_none=True)
        output = case.model(*case.inputs)
        F.cross_entropy(output.flatten(0, -2), case.target.flatten()).backward()

    return way


def torch_func_gradients(case: Tiny) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]:
    """(vmap(grad) of the one-sample loss, the parameters)"""
    parameters = {name: parameter.detach() for name, parameter in case.model.named_parameters()}
    buffers = dict(case.model.named_buffers())

    def loss(parameters: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        batch = tuple(x[None] for x in inputs)
        return F.cross_entropy(
            torch.func.functional_call(case.model, (parameters, buffers), batch)[0], target
        )

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0)), parameters


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def torch_func_norms(case: Tiny) -> Callable[[], Any]:
    gradients, parameters = torch_func_gradients(case)
    return lambda: norms_of(gradients(parameters, case.inputs, case.target))


def clipped_sums(case: Tiny, rounds: int) -> dict[str, float]:
    """Seconds of a chunk's clipped sum, psgrad's by a program."""
    objective = Objective(case.model, loss_of_one)

    def weights(norms: SquareNorms) -> Tensor:
        return (1 / norms.square_norms().sqrt()).clamp(max=1)

    def compute(inputs: tuple[Tensor, ...], target: Tensor) -> dict[str, Tensor]:
        loss, params = objective.loss, objective.params
        return per_sample_weighted_sum(loss, params, inputs, target, weights=weights, has_aux=True).sums

    programs = SumPrograms()
    ways = {"psgrad": lambda: programs("clipped", lambda: False, compute, case.inputs, case.target)}
    if case.in_torch_func:
        gradients, parameters = torch_func_gradients(case)

        def theirs() -> dict[str, Tensor]:
            found = gradients(parameters, case.inputs, case.target)
            factors = (1 / norms_of(found)).clamp(max=1)
            return {name: torch.einsum("n,n...->...", factors, g) for name, g in found.items()}

        ways["torch.func"] = theirs
    with torch.no_grad():
        for _ in range(NOT_REPLAYED):
            ways["psgrad"]()
        found = {name: median_of(way, rounds) for name, way in ways.items()}
    if not programs.chunks:
        raise RuntimeError("no clipped sum was replayed")
    return found


def measured(case: Tiny, chunks: list[int], rounds: int) -> dict[str, Any]:
    """Seconds of each further chunk, and of the rivals' chunk."""
    ways = {"plain": plain_pass(case)}
    if case.in_torch_func:
        ways["torch.func"] = torch_func_norms(case)
    run_seconds(case, 2)  # imports, and what is made once
    before = {name: median_of(way, rounds) for name, way in ways.items()}
    short = run_median(case, 2, 5)
    further = {
        str(count): (run_median(case, count, 1 if count > _LONG else 5) - short) / (count - 2)
        for count in chunks
    }
    after = {name: median_of(way, rounds) for name, way in ways.items()}
    rivals = {name: statistics.mean([before[name], after[name]]) for name in ways}
    return {"two chunks": short, "each further chunk": further, **rivals}


def private_steps(case: Tiny, rounds: int) -> dict[str, float]:
    """Seconds of a private step, and of a step without privacy; of Opacus, its fastest way."""
    training = Training(case.model.train(), 64, ROWS / 64, bound=1.0, noise_multiplier=1.0)
    found = {}
    for name, build in {"plain": plain, "psgrad": psgrad_step, **RIVALS}.items():
        step = build(training)

        def way(step: Any = step) -> None:
            step.draw()
            step.update(case.inputs[0], case.target)

        found[name] = median_of(way, rounds)
    case.model.eval()
    return found


def print_network(name: str, found: dict[str, Any]) -> None:
    for count, each in found["each further chunk"].items():
        words = [f"{each * 1e3:8.2f} ms"]
        for place, rival in enumerate(("torch.func", "plain")):
            if rival not in found:
                continue
            ratio = each / found[rival]
            bar = BARS.get(int(count), {}).get(name, (None, None))[place]
            said = "" if bar is None else f" (at most {bar}: {'pass' if ratio <= bar else 'FAIL'})"
            words.append(f"{ratio:.2f} of {rival}{said}")
        print(f"  {name:<8}{count:>5} chunks  " + ", ".join(words), flush=True)
    for way, taken in found["clipped sums"].items():
        print(f"  {name:<8}clipped sum, {way}: {taken / found['plain']:.2f} of plain")
    for way, taken in found.get("private steps", {}).items():
        print(f"  {name:<8}private step, {way}: {taken / found['private steps']['plain']:.2f} of plain")


def parse_arguments() -> argparse.Namespace:
    parser = command_line("Time whole runs over tiny networks.", rounds=21, only=NAMES)
    parser.add_argument("--chunks", nargs="+", type=int, default=[8, 64, 512], metavar="N")
    parser.add_argument("--no-steps", action="store_true", help="without private steps, which need Opacus")
    return parser.parse_args()


def main() -> None:
    warnings.filterwarnings("ignore")
    arguments = parse_arguments()
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"))
    print_facts(facts, arguments)
    networks = {}
    for name, case in tiny_networks(tuple(arguments.only)):
        networks[name] = measured(case, arguments.chunks, arguments.rounds)
        networks[name]["clipped sums"] = clipped_sums(case, arguments.rounds)
        if case.in_opacus and not arguments.no_steps:
            networks[name]["private steps"] = private_steps(case, arguments.rounds)
        print_network(name, networks[name])
    write_json(arguments, {"machine": facts, "rounds": arguments.rounds, "networks": networks})


if __name__ == "__main__":
    main()
