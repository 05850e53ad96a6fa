"""What per-sample norms and clipped sums take in memory, as a multiple of the ordinary forward and backward
pass.

    python benchmarks/memory.py [--only cnn gpt] [--json FILE] [--device cpu] [--at-peak 12]

Counted is what a pass allocates beyond what was there before it (parameters and the batch), at its highest,
and what it returns is in it: plain's summed gradients, the clipped sum. The ways are those of norms.py:

    plain        forward and backward of the batch's mean loss, from no `.grad`
    torch.func   vmap(grad) of the one-sample loss, then the norms
    norms        psgrad's norms
    clipped      psgrad's norms, and the sum of the gradients after each is clipped

Two witnesses. *Allocated* is what tensors take, from PyTorch's allocator: the profiler's timeline of
allocations on a CPU, `torch.cuda.max_memory_allocated` on a GPU; it is the same in every run, and the bar is
held against it. *Resident* is the process's own high-water mark on Linux, in a fresh process for each way: it
counts the libraries' workspaces and the system's pages in, and varies.

At the end, runs over a thousand, ten thousand and forty thousand rows of digits, chunk by chunk: their peaks
must not differ. A thousand rows stay below the others, as up to 65,536 norms wait for their distributions.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from norms import CASES, Contest, machine
from torch.profiler import ProfilerActivity, profile

from psgrad.engine.execution.loading import ChosenRows
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.ragged import Block

# At most so many times plain's peak.
BARS = {"norms": 1.35, "clipped": 1.35}
# The dataset's size may change the peak of a run by no more than this share: nothing but Python's own lists
# grows.
SAME_PEAK = 0.01
ROWS = (1_000, 10_000, 40_000)
MEGABYTE = 1e6


@dataclass(frozen=True)
class Peak:
    """Bytes beyond what was there before, at the highest point. resident: None where the system does not
    tell.
    """

    allocated: int
    resident: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Bytes that one operator took (above zero) or gave back at a moment of the timeline."""

    moment: int
    size: int
    operator: str


def timeline(way: Callable[[], Any]) -> tuple[list[Allocation], Any]:
    """What `way` allocates on the CPU and frees, in order, and what it returns, which is alive at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        kept = way()
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    operators = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.name() != "[memory]"
    )
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda change: change[0]
    )
    return list(_with_operators(changes, operators)), kept


def _with_operators(
    changes: list[tuple[int, int]], operators: list[tuple[int, int, str]]
) -> Iterator[Allocation]:
    """Each change beside the innermost operator that runs at its moment."""
    running: list[tuple[int, str]] = []
    place = 0
    for moment, size in changes:
        while place < len(operators) and operators[place][0] <= moment:
            running.append((operators[place][1], operators[place][2]))
            place += 1
        running = [(stop, name) for stop, name in running if stop >= moment]
        yield Allocation(moment, size, running[-1][1] if running else "")


def highest(changes: list[Allocation]) -> tuple[int, int]:
    """(bytes, place): the largest running sum of the changes, and how many of them lead to it."""
    total = peak = place = 0
    for number, change in enumerate(changes, 1):
        total += change.size
        if total > peak:
            peak, place = total, number
    return peak, place


def alive(changes: list[Allocation]) -> list[tuple[str, int, int]]:
    """(operator, bytes, how many) of what is not freed by the end of the changes, largest first; frees take
    the latest of their size.
    """
    open_: dict[int, list[str]] = {}
    for change in changes:
        if change.size > 0:
            open_.setdefault(change.size, []).append(change.operator)
        elif open_.get(-change.size):
            open_[-change.size].pop()
    counts = Counter((operator, size) for size, operators in open_.items() for operator in operators)
    return sorted(
        ((operator, size, count) for (operator, size), count in counts.items()),
        key=lambda row: -row[1] * row[2],
    )


def allocated(way: Callable[[], Any], device: torch.device) -> int:
    """The peak of one call, in bytes of tensors, beyond what was there before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        way()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return highest(timeline(way)[0])[0]


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return 1024 * int(found.group(1))


def resident(way: Callable[[], Any]) -> int:
    """How far one call lifts the process's high-water mark over what it held before. Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
    before = _status("VmRSS")
    way()
    return max(0, _status("VmHWM") - before)


def contest(name: str, device: torch.device) -> Contest:
    """The ways on a case's network and batch, with nothing run yet: what a median of norms would leave behind
    is not counted.
    """
    found = Contest(CASES[name], device)
    found.bound = torch.ones((), dtype=torch.float64, device=device)
    return found


def passes(found: Contest) -> dict[str, Callable[[], Any]]:
    """The ways, each returning what a caller would keep."""

    def plain() -> list[torch.Tensor | None]:
        found.plain()
        return [parameter.grad for parameter in found.model.parameters()]

    return found.ways() | {"plain": plain}


def one_resident(name: str, way: str) -> int:
    """The high-water mark of one way, for a process of its own: a pass over a single sample loads the code
    first.
    """
    found = contest(name, torch.device("cpu"))
    inputs, target = found.inputs, found.target
    found.inputs, found.target = inputs[:1], target[:1]
    passes(found)[way]()
    found.model.zero_grad()
    found.inputs, found.target = inputs, target
    return resident(passes(found)[way])


def in_a_process(*words: str) -> int | None:
    """What this script prints for a single measurement in a fresh process; None where there is no
    such mark.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(name: str, device: torch.device, *, own_process: bool) -> dict[str, Peak]:
    found = contest(name, device)
    peaks = {}
    for way, call in passes(found).items():
        call()  # what a first call leaves behind is not the pass's
        found.model.zero_grad()
        taken = allocated(call, device)
        found.model.zero_grad()
        peaks[way] = Peak(taken, in_a_process("--resident", name, way) if own_process else None)
    return peaks


def stream_over(rows: int, device: torch.device, chunk: int = 64) -> Callable[[], Any]:
    """A run over so many rows of digits, chunk by chunk, that keeps nothing but the norms, as the tool's
    shards do not either.
    """
    torch.manual_seed(0)
    from models import cnn

    objective = Objective(
        cnn(image_size=8, channels=(8, 16), hidden=32).to(device), torch.nn.functional.cross_entropy
    )
    images, target = torch.randn(512, 1, 8, 8), torch.randint(10, (512,))

    repeated = ChosenRows(Block((images,), target), torch.arange(rows) % len(images))

    def run() -> None:
        stream = Stream(objective.loss, objective.params, repeated, chunk_size=chunk, capture="off")
        for _ in stream.run(rows, [GradientNorms()]):
            pass

    return run


def print_table(name: str, peaks: dict[str, Peak], device: torch.device) -> None:
    print(
        f"\n{CASES[name].description}\n "
        f" {'':<12}{'allocated':>12}{'x plain':>9}{'resident':>13}{'x plain':>9}   bar"
    )
    plain = peaks["plain"]
    for way, peak in peaks.items():
        ratio = peak.allocated / plain.allocated
        bar = f"at most {BARS[way]}: {'pass' if ratio <= BARS[way] else 'FAIL'}" if way in BARS else ""
        line = f"  {way:<12}{peak.allocated / MEGABYTE:>9.1f} MB{ratio:>9.2f}"
        if peak.resident is not None and plain.resident:
            line += f"{peak.resident / MEGABYTE:>10.1f} MB{peak.resident / plain.resident:>9.2f}"
        else:
            line += " " * 22
        print(f"{line}   {bar}".rstrip(), flush=True)


def print_alive(name: str, rows: int) -> None:
    """What is alive at each way's peak, by the operator that made it."""
    found = contest(name, torch.device("cpu"))
    for way, call in passes(found).items():
        call()
        found.model.zero_grad()
        changes, _ = timeline(call)
        found.model.zero_grad()
        peak, place = highest(changes)
        print(f"\n{name}, {way}: {peak / MEGABYTE:.1f} MB at the peak, change {place} of {len(changes)}")
        for operator, size, count in alive(changes[:place])[:rows]:
            print(f"  {size * count / MEGABYTE:>8.1f} MB  {count:>3} x {size / MEGABYTE:.2f}  {operator}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Peak memory of per-sample norms and clipped sums against the ordinary backward pass."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        metavar="NAME",
        help=f"of {', '.join(CASES)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda (default: %(default)s)"
    )
    parser.add_argument(
        "--at-peak",
        type=int,
        metavar="K",
        help="in place of the table, the K largest that are alive at each peak (CPU)",
    )
    parser.add_argument("--no-resident", action="store_true", help="without the processes of their own")
    parser.add_argument(
        "--rounds", type=int, default=1, help="peaks do not vary; accepted beside the other scripts' option"
    )
    parser.add_argument(
        "--resident", nargs=2, help=argparse.SUPPRESS
    )  # one measurement, for a process of its own
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings(
        "ignore", message="There is a performance drop"
    )  # torch.func's loop over samples for attention on CPU
    if arguments.resident:
        print(one_resident(*arguments.resident))
        return
    if arguments.at_peak:
        for name in arguments.only:
            print_alive(name, arguments.at_peak)
        return
    device = arguments.device
    facts = machine(device)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    cases = {}
    for name in arguments.only:
        peaks = measure(name, device, own_process=device.type == "cpu" and not arguments.no_resident)
        print_table(name, peaks, device)
        cases[name] = {way: asdict(peak) for way, peak in peaks.items()}

    runs = {}
    for rows in ROWS:
        run = stream_over(rows, device)
        run()
        runs[rows] = allocated(run, device)
    print()
    for few, many in pairwise(ROWS):
        verdict = "pass" if runs[many] <= (1 + SAME_PEAK) * runs[few] else "FAIL"
        each = [f"of {rows} rows {runs[rows] / MEGABYTE:.2f} MB" for rows in (few, many)]
        print(f"norms {', '.join(each)}: {verdict}")
    if arguments.json is not None:
        content = {"machine": facts, "bars": BARS, "bytes": cases, "rows": runs}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
