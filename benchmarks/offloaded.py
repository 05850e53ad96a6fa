"""Norms under a model whose weights stay in their file, beside the same with all weights in memory.

    python benchmarks/offloaded.py [--layers 48] [--width 1600] [--passes 3] [--type bfloat16] [--json FILE]
                                   [--depths 4 8 16 32 48] [--small]

**Weights in a file.** A checkpoint of GPT-2 XL's shape (1.5 billion parameters) with random weights is
written to a temporary folder, and the norms of all its parameters' gradients are computed for 8 rows of 128
tokens, three ways, each in a process of its own:

    resident             all weights in memory
    resident, recompute  the same, each block run again in the backward pass
    offloaded            weights read from the file when an operator needs them, blocks run again; under a
                         limit of 2 GiB on the process's memory (RLIMIT_DATA: all but mappings of files)

*Peak* is the most anonymous memory that the process has had (RssAnon), libraries and Python included. The
bars: 2 GiB, at most 1.3 times the resident way's time, and the same norms to 1e-5.

**Depth.** The peak of a pass over models of the same width and more and more layers, with and without blocks
that run again, as the allocator counts it, beside what `psgrad plan` predicts.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
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
LIMIT = 2 << 30
TIMES, APART = 1.3, 1e-5
WAYS = {
    "resident": ("resident", False),
    "resident, recompute": ("resident", True),
    "offloaded": ("offloaded", True),
}


def make(folder: Path, layers: int, width: int, dtype: str) -> None:
    """A folder as save_pretrained writes it, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=max(1, width // HEADS))
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0 if "ln" in name and name.endswith("weight") else 0.0)
    model.save_pretrained(folder)


def measured(folder: Path, way: str, passes: int) -> Facts:
    """The norms of a way, in this process."""
    from psgrad.config import ModelConfig
    from psgrad.engine.execution.objective import Forward, Objective
    from psgrad.engine.execution.placement import place
    from psgrad.engine.execution.recompute import Recompute
    from psgrad.engine.execution.stored import Supply
    from psgrad.engine.gradients.per_sample import per_sample_square_norms
    from psgrad.inputs.models.factory import load_model

    where, again = WAYS[way]
    device, offloaded = torch.device("cpu"), where == "offloaded"
    if offloaded:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    peak = Peak()
    loaded = load_model(ModelConfig(pretrained=str(folder), task="causal-lm"), Path(), in_files=offloaded)
    supply = Supply(device, 128 << 20) if offloaded else None
    model = place(loaded.model, device, torch.float32, "as-saved", supply)
    Recompute(again).add(model)
    objective = Objective(
        model,
        lambda logits, ids: F.cross_entropy(logits[:-1], ids[1:]),
        forward=Forward(pick=loaded.pick),
    )
    torch.manual_seed(1)
    ids = torch.randint(0, loaded.model.config.vocab_size, (ROWS, TOKENS))
    seconds, moved = [], 0
    for _ in range(passes):
        before = 0 if supply is None else supply.moved
        began = time.perf_counter()
        found = per_sample_square_norms(
            objective.loss, objective.params, (ids,), ids, in_dims=(0, 0), has_aux=True
        )
        seconds.append(time.perf_counter() - began)
        moved = 0 if supply is None else supply.moved - before
    norms = torch.stack(list(found.by_parameter.values())).sum(0).sqrt()
    return {
        "seconds": statistics.median(seconds),
        "peak_bytes": peak.bytes,
        "moved_bytes": moved,
        "norms": norms.tolist(),
    }


class Peak:
    """The most anonymous memory that this process has had since, looked at fifty times a second."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            self.bytes = max(self.bytes, int(status.split("RssAnon:")[1].split()[0]) * 1024)
            time.sleep(0.02)


def ways(layers: int, width: int, dtype: str, passes: int) -> list[Facts]:
    """What each way takes, each in a process of its own."""
    found: list[Facts] = []
    with tempfile.TemporaryDirectory() as name:
        print(f"writing {layers} layers of width {width} in {dtype}", flush=True)
        make(Path(name), layers, width, dtype)
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--folder", name, "--passes", str(passes)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                sys.exit(f"{way} failed:\n{ended.stderr[-3000:]}")
            facts = json.loads(ended.stdout.splitlines()[-1])
            first = found[0] if found else facts
            apart = max(abs(a - b) / b for a, b in zip(facts["norms"], first["norms"], strict=True))
            found.append({"way": way, **facts, "times": facts["seconds"] / first["seconds"], "apart": apart})
            print(
                f"{way:<20} {facts['seconds']:7.1f} s  {found[-1]['times']:5.2f} x"
                f"  peak {facts['peak_bytes'] / 2**30:5.2f} GiB"
                f"  moved {facts['moved_bytes'] / 2**30:5.2f} GiB a pass  norms apart {apart:.1e}",
                flush=True,
            )
    return found


def depth(layers: int, width: int, rows: int) -> Facts:
    """The peaks of a pass over a model of so many layers, and those that its plan predicts."""
    from psgrad.engine.execution.chunk_plan import plan_chunk
    from psgrad.engine.execution.objective import Objective
    from psgrad.engine.execution.recompute import Recompute
    from psgrad.engine.gradients.per_sample import per_sample_square_norms

    found: Facts = {"layers": layers}
    torch.manual_seed(0)
    ids = torch.randint(0, 100, (rows, TOKENS))
    for name, again in {"none": False, "blocks": True}.items():
        model = GPT(100, TOKENS, width, layers, max(1, width // HEADS))
        Recompute(again).add(model)
        objective = Objective(model, lambda logits, ids: F.cross_entropy(logits[:-1], ids[1:]))

        def norms(params: Any, inputs: Any, target: Any, loss: Any = objective.loss) -> Any:
            return per_sample_square_norms(loss, params, inputs, target, in_dims=(0, 0), has_aux=True)

        planned = plan_chunk(norms, objective.params, (ids,), ids).peak_bytes
        took = allocated(partial(norms, objective.params, (ids,), ids), torch.device("cpu"))
        found[name] = {"peak_bytes": took, "planned_bytes": planned}
    print(
        f"{layers:3d} layers: "
        + ", ".join(
            f"{name} {found[name]['peak_bytes'] / 2**20:.1f} MiB"
            f" (planned {found[name]['planned_bytes'] / 2**20:.1f})"
            for name in ("none", "blocks")
        ),
        flush=True,
    )
    return found


def plot(found: list[Facts], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, words in {"none": "all values kept", "blocks": "blocks run again"}.items():
        layers = [each["layers"] for each in found]
        axes.plot(layers, [each[name]["peak_bytes"] / 2**20 for each in found], "o-", label=words)
        axes.plot(layers, [each[name]["planned_bytes"] / 2**20 for each in found], "k:", lw=1)
    axes.plot([], [], "k:", lw=1, label="planned")
    axes.set(xlabel="layers", ylabel="memory of a pass (MiB)", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--type", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 8, 16, 32, 48])
    parser.add_argument("--json", type=Path, help="write the figures to this file, and the plot beside it")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script runs")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measured(arguments.folder, arguments.way, arguments.passes)))
        return
    layers, width, passes = (
        (2, 64, 1) if arguments.small else (arguments.layers, arguments.width, arguments.passes)
    )
    depths = [2, 4] if arguments.small else arguments.depths
    found = ways(layers, width, arguments.type, passes) if layers else []
    peaks = [depth(each, 64 if arguments.small else 256, ROWS) for each in depths]
    if found:
        last = found[-1]
        holds = last["times"] <= TIMES and last["peak_bytes"] <= LIMIT and last["apart"] <= APART
        print(f"bar, {TIMES} x, 2 GiB, norms to {APART}: {'met' if holds else 'missed'}")
    if arguments.json:
        facts = [{name: value for name, value in each.items() if name != "norms"} for each in found]
        facts = {"machine": machine(torch.device("cpu")), "ways": facts, "depths": peaks}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
        plot(peaks, arguments.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
