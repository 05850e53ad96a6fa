"""Norms under a model whose weights stay in their file, beside the same with all weights in memory.

    python benchmarks/offloaded.py [--layers 48] [--width 1600] [--passes 3] [--type bfloat16] [--json FILE]
                                   [--folder FOLDER]
                                   [--small]

A checkpoint of GPT-2 XL's shape (1.5 billion parameters) with random weights is
written to a temporary folder, and the norms of all its parameters' gradients are computed for 8 rows of 128
tokens, three ways:

    resident             all weights in memory
    resident, recompute  the same, each block run again in the backward pass
    offloaded            weights read from the file when an operator needs them, blocks run again,
                         in a process under a limit of 2 GiB on its memory (RLIMIT_DATA: all but mappings of
                         files)

The first needs about 17 GB at the full size; `--ways` leaves it out. What it gives back to the system is
slower to take for the way that follows (on a virtual machine by a tenth of the whole). The ways take turns,
and a ratio is of two passes of the same round. On a busy machine the ratio of processor seconds, of all
threads, says more than that of seconds.

*Peak* is the most anonymous memory that the process has had (RssAnon), libraries and Python included. The
bars: 2 GiB, at most 1.3 times the resident way's time, and the same norms to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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


def serve(folder: Path, where: str) -> None:
    """Computes the norms once for each line that comes in, and prints what that took. The words of a line:
    `recompute` or `none`, and how many rows.
    """
    from psgrad.config import ModelConfig
    from psgrad.engine.execution.objective import Forward, Objective
    from psgrad.engine.execution.placement import place
    from psgrad.engine.execution.recompute import Recompute
    from psgrad.engine.execution.weight_supply import Supply
    from psgrad.engine.gradients.per_sample import per_sample_square_norms
    from psgrad.models.factory import load_model

    device, offloaded = torch.device("cpu"), where != "resident"
    if offloaded:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    peak = Peak()
    supply = Supply(device, 128 << 20) if offloaded else None
    loaded = load_model(ModelConfig(pretrained=str(folder), task="causal-lm"), Path(), in_files=offloaded)
    model = place(loaded.model, device, torch.float32, "as-saved", supply)
    again = Recompute(False)
    again.add(model)
    objective = Objective(
        model,
        lambda logits, ids: F.cross_entropy(logits[:-1], ids[1:]),
        forward=Forward(pick=loaded.pick),
    )
    torch.manual_seed(1)
    ids = torch.randint(0, loaded.model.config.vocab_size, (ROWS, TOKENS))
    for line in sys.stdin:
        how, rows = line.split()
        again.on, some = how == "recompute", ids[: int(rows)]
        before = 0 if supply is None else supply.moved
        began, worked = time.perf_counter(), time.process_time()
        found = per_sample_square_norms(
            objective.loss, objective.params, (some,), some, in_dims=(0, 0), has_aux=True
        )
        facts = {
            "seconds": time.perf_counter() - began,
            "processor_seconds": time.process_time() - worked,
            "peak_bytes": peak.bytes,
            "moved_bytes": 0 if supply is None else supply.moved - before,
            "norms": torch.stack(list(found.by_parameter.values())).sum(0).sqrt().tolist(),
        }
        print(json.dumps(facts), flush=True)


class Server:
    """A process in which the weights live somewhere, and which computes the norms when it is asked to."""

    def __init__(self, folder: Path, where: str) -> None:
        self.where = where
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", where, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def norms(self, recompute: bool, rows: int) -> Facts:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("recompute" if recompute else "none", rows, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.where} failed with code {self.process.wait()}")
        return json.loads(answer)  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.communicate()


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


def ways(folder: Path, passes: int, chosen: Sequence[str]) -> list[Facts]:
    """What each way takes. The ways run in turn, so that what else runs on the machine slows all of them."""
    servers = {where: Server(folder, where) for where in dict.fromkeys(WAYS[way][0] for way in chosen)}
    runs: dict[str, list[Facts]] = {way: [] for way in chosen}
    for number in range(passes + 1):  # the first of each is not counted, and has one row
        for way in chosen:
            where, again = WAYS[way]
            facts = servers[where].norms(again, ROWS if number else 1)
            load = os.getloadavg()[0]
            print(
                f"{number or 'warm':>4} {way:<20} {facts['seconds']:7.1f} s, of processors"
                f" {facts['processor_seconds']:7.1f} s, load {load:.1f}",
                flush=True,
            )
            runs[way].append(facts | {"load": load})
    for server in servers.values():
        server.end()
    found = [summary(way, each, runs[chosen[0]]) for way, each in runs.items()]
    for each in found:
        print(
            f"{each['way']:<20} {each['seconds']:7.1f} s  {each['times']:5.2f} x"
            f"  (of processors {each['processor_times']:5.2f} x)  peak {each['peak_bytes'] / 2**30:5.2f} GiB"
            f"  moved {each['moved_bytes'] / 2**30:5.2f} GiB a pass  norms apart {each['apart']:.1e}"
        )
    return found


def summary(way: str, runs: list[Facts], first: list[Facts]) -> Facts:
    """The medians of a way's runs, and of their ratios to those of the first way in the same round."""

    def median(name: str) -> float:
        return statistics.median(each[name] for each in runs[1:])

    def times(name: str) -> float:
        return statistics.median(a[name] / b[name] for a, b in zip(runs[1:], first[1:], strict=True))

    return {
        "way": way,
        "seconds": median("seconds"),
        "times": times("seconds"),
        "processor_seconds": median("processor_seconds"),
        "processor_times": times("processor_seconds"),
        "load": median("load"),
        "peak_bytes": runs[-1]["peak_bytes"],
        "moved_bytes": runs[-1]["moved_bytes"],
        "apart": max(abs(a - b) / b for a, b in zip(runs[-1]["norms"], first[-1]["norms"], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--type", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--small", action="store_true", help="tiny shapes: shows that the script runs")
    parser.add_argument("--serve", choices=["resident", "offloaded"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, which stays there for the next time")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.folder, arguments.serve)
        return
    layers, width, passes = (
        (2, 64, 1) if arguments.small else (arguments.layers, arguments.width, arguments.passes)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        if not (folder / "config.json").exists():
            print(f"writing {layers} layers of width {width} in {arguments.type}", flush=True)
            make(folder, layers, width, arguments.type)
        if not passes:  # the checkpoint alone
            return
        found = ways(folder, passes, arguments.ways)
    last = found[-1]
    holds = last["times"] <= TIMES and last["peak_bytes"] <= LIMIT and last["apart"] <= APART
    print(f"bar, {TIMES} x, 2 GiB, norms to {APART}: {'met' if holds else 'missed'}")
    if arguments.json:
        facts = {
            "machine": machine(torch.device("cpu")),
            "type": arguments.type,
            "layers": layers,
            "ways": found,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
