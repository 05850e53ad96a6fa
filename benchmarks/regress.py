"""Whether per-sample gradients have become slower since a commit.

    python benchmarks/regress.py COMMIT [--rounds 15] [--only cnn mlp]

The commit is checked out into a temporary folder. Each of the two checkouts runs the networks of its own
`norms.py` in a process of its own, with one thread. The two take turns, batch by batch, and take turns in who
goes first, so that other work on the machine falls on both. A time is processor time.

For each network and way, the ratios of a round (this checkout / the commit) give a median and a confidence
interval of the median of at least 95 %, from order statistics. A way is slower where the whole interval is
above 1.05: the loss is over 5 % and cannot be noise. Then the script ends with 1. `plain` is the same code in
both checkouts: its interval shows how noisy the machine is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scipy.stats import binom

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("plain", "norms", "clipped")
NETWORKS = ("cnn", "mlp", "gpt", "resnet")
ALLOWED_LOSS = 1.05

# What each checkout runs: it reads "network way" and answers with the seconds of one batch. Calls of a way
# are repeated until they take a tenth of a second.
WORKER = """
import sys, time, warnings
sys.path[:0] = ["benchmarks", "."]
warnings.filterwarnings("ignore")
answers, sys.stdout = sys.stdout, sys.stderr
import torch
torch.set_num_threads(1)
import norms
contests = {}
for line in sys.stdin:
    network, way = line.split()
    if network not in contests:
        contests = {network: norms.Contest(norms.CASES[network], torch.device("cpu"))}
    call = getattr(contests[network], way)
    start, calls = time.process_time(), 0
    while time.process_time() - start < 0.1 or not calls:
        call()
        calls += 1
    print((time.process_time() - start) / calls, file=answers, flush=True)
"""


class Checkout:
    """A process that times the ways of one checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, network: str, way: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(network, way, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.folder} cannot run {way} of {network}: see the lines above")
        return float(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
        if archive.returncode:
            sys.exit(f"{commit} is no commit here: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def interval_of_median(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """The shortest symmetric pair of order statistics that covers the median with at least this probability,
    whatever the distribution (Conover, Practical Nonparametric Statistics, 3.2). Fewer than six values have
    no such pair: then the smallest and the largest.
    """
    below = int(binom.ppf((1 - confidence) / 2, len(values), 0.5))
    ordered = sorted(values)
    first = max(below - 1, 0)
    return ordered[first], ordered[-1 - first]


def ratios(now: Checkout, then: Checkout, network: str, way: str, rounds: int) -> tuple[list[float], float]:
    """Seconds of this checkout over seconds of the commit, round by round; and the median seconds now."""
    now.seconds(network, way)  # the first call of each is warm-up
    then.seconds(network, way)
    found, times = [], []
    for turn in range(rounds):
        first, second = (now, then) if turn % 2 else (then, now)
        taken = {checkout: checkout.seconds(network, way) for checkout in (first, second)}
        found.append(taken[now] / taken[then])
        times.append(taken[now])
    return found, statistics.median(times)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what this checkout is compared with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    slower = []
    with checked_out(arguments.commit) as folder:
        now, then = Checkout(ROOT), Checkout(folder)
        try:
            print(f"{'':<16}{'ms now':>10}{'now / then':>12}{'95 % of the median':>22}")
            for network in arguments.only:
                for way in WAYS:
                    found, seconds = ratios(now, then, network, way, arguments.rounds)
                    low, high = interval_of_median(found)
                    lost = low > ALLOWED_LOSS and way != "plain"
                    slower += [f"{way} of {network}"] * lost
                    print(
                        f"{network + ' ' + way:<16}{1e3 * seconds:>10.2f}{statistics.median(found):>12.3f}"
                        f"{f'{low:.3f} to {high:.3f}':>22}{'   slower' if lost else ''}",
                        flush=True,
                    )
        finally:
            now.close()
            then.close()
    if slower:
        sys.exit(f"over 5 % slower than {arguments.commit}: {', '.join(slower)}")


if __name__ == "__main__":
    main()
