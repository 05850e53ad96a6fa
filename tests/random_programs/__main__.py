"""Runs many random programs: `python -m tests.random_programs --programs 20000 --seed 1`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from tests.random_programs import noticed
from tests.random_programs.checking import CRASHED, Outcome, check
from tests.random_programs.planting import written
from tests.random_programs.shrinking import shrunk
from tests.random_programs.writer import write


def _prepare() -> None:
    torch.set_num_threads(1)


def _work(seeds: Sequence[int], results: Connection) -> None:
    _prepare()
    for seed in seeds:
        results.send(check(write(seed)))


def run(first: int, programs: int, processes: int) -> tuple[Counter[str], list[tuple[int, Outcome]]]:
    """(how many came to what, the failures) of the programs of seeds `first`, `first + 1`, ...

    A program that ends its process is a failure, too: another process goes on behind it.
    """
    counts: Counter[str] = Counter()
    failures: list[tuple[int, Outcome]] = []
    left: dict[Connection, deque[int]] = {}
    context = multiprocessing.get_context("fork")

    def start(seeds: deque[int]) -> None:
        results, told = context.Pipe(duplex=False)
        context.Process(target=_work, args=(seeds, told), daemon=True).start()
        told.close()
        left[results] = seeds

    for number in range(processes):
        start(deque(range(first + number, first + programs, processes)))
    while left:
        for results in wait(list(left)):
            seeds = left[results]
            try:
                outcome = results.recv()
                seed = seeds.popleft()
            except EOFError:
                del left[results]
                if not seeds:
                    continue
                outcome, seed = Outcome(CRASHED, "the process ended"), seeds.popleft()
                start(seeds)
            counts[outcome.label] += 1
            if outcome.failed:
                failures.append((seed, outcome))
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument(
        "--seed", type=int, default=0, help="programs have the seeds SEED * 1,000,000, and on"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--show", type=int, default=10, help="how many failures are made small and printed")
    parser.add_argument("--json", type=Path, help="write how many came to what to this file")
    parser.add_argument("--one", type=int, help="the program of this very seed, alone")
    parser.add_argument("--plant", type=int, help="make noticed.py again, of so many programs")
    options = parser.parse_args()
    _prepare()
    if options.plant is not None:
        Path(noticed.__file__).write_text(written(options.plant))
        return 0
    if options.one is not None:
        program = write(options.one)
        outcome = check(program)
        print(program, outcome, sep="\n")
        if outcome.failed:
            print("\n# made small\n" + str(shrunk(program)))
        return int(outcome.failed)
    start = time.monotonic()
    counts, failures = run(options.seed * 1_000_000, options.programs, options.processes)
    seconds = time.monotonic() - start
    print(
        f"{sum(counts.values())} programs in {seconds:.0f} s, {sum(counts.values()) / seconds:.1f} a second"
    )
    for label, count in counts.most_common():
        print(f"{count:7} {label}")
    if options.json:
        found = {"seed": options.seed, "torch": torch.__version__, "outcomes": counts}
        options.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    for seed, outcome in sorted(failures, key=lambda failure: failure[0])[: options.show]:
        program = write(seed) if outcome.kind == CRASHED else shrunk(write(seed))
        print(f"\n# {outcome.kind}: {outcome.words}\n{program}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
