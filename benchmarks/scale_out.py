"""The time of a run on many processes: measured with one and two, simulated for up to 512.

    python benchmarks/scale_out.py [--rows 768] [--rounds 3] [--json FILE] [--plot FILE] [--tiny]
    python benchmarks/scale_out.py --stored FILE [--json FILE] [--plot FILE]

First the constants of `psgrad.engine.execution.cluster` are measured on this machine: the time until a
process computes, of a chunk alone and beside a second process, of a request to the key-value store, the rate
of gloo between two processes, the time of tables and a report, by itself and for each row, and that of the
first look at a dataset: of a hash, of an image, and of an image's name. Then
`psgrad analyze` runs with one and with two processes of one thread each, and the simulation has to agree
within 15 %.

The three simulated jobs: norms of 10^8 tokens under a model of a billion parameters, norms of 10^7 images
under ResNet-50, an index of 10^9 rows. The time of one chunk of each is measured here, by one thread. What
this machine can't measure is assumed, and printed: see ASSUMED. The bars: efficiency 0.9 with 64 ranks, 0.8
with 512. The same jobs with ranks a thousand times as fast, as a GPU may be, show what holds up such ranks;
without bars.

`--stored` simulates the jobs again with the constants of an earlier run. Of them the first look at a dataset
is measured again, on this machine, in processor time, which other programs do not lengthen much. The JSON
file says on which day and machine what was measured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT
from norms import machine
from torch import Tensor, nn

from psgrad.config import DataConfig
from psgrad.config.config import LossConfig
from psgrad.engine.execution.cluster import Cluster, RankTimes, Workload, efficiencies, simulate
from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import Sparse, per_sample_gradients, per_sample_square_norms
from psgrad.inputs.image_samples import DIGEST, ImageSamples
from psgrad.inputs.loss import resolve_loss
from psgrad.inputs.sources.file_hashes import SAMPLE, SAMPLES, file_hashes
from psgrad.inputs.sources.load import load_data
from psgrad.inputs.sources.source_rows import SourceRows

RANKS = (1, 2, 8, 64, 512)
BARS = {64: 0.9, 512: 0.8}
AGREEMENT = 0.15
# A cluster that we do not have: 10 Gbit/s between hosts, a file system of 5 GB/s for all, eight ranks a host.
ASSUMED = {"network": 1.25e9, "latency": 1e-3, "storage": 5e9, "ranks_per_host": 8}
FASTER = 1000
CHUNK, TOKENS, VOCABULARY = 16, 128, 8192

MODEL = """
import sys
import torch
sys.path.insert(0, {folder!r})
from models import GPT

def build():
    torch.manual_seed(0)
    return GPT({vocabulary}, {tokens}, 128, 2, 4)

def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)

def next_token(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
"""
CONFIG = """
version: 1
model: {factory: model.py:build}
loss: model.py:next_token
data: {path: tokens.npz, inputs: tokens, target: target}
engine: {chunk_size: 16, verify: 1}
"""
SHORT_CONFIG = """
version: 1
model: {factory: model.py:linear}
loss: cross_entropy
data: {path: short.npz, inputs: x, target: y}
"""
SHORT_ROWS = 100_000


# -- runs of psgrad analyze ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Seconds of a run: from its start to its end, of its gradients alone, and of its tables and report."""

    seconds: float
    gradients: float
    tables: float


def prepare(folder: Path, rows: int) -> None:
    words = {"folder": str(Path(__file__).parent), "vocabulary": VOCABULARY, "tokens": TOKENS}
    (folder / "model.py").write_text(MODEL.format(**words), encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, TOKENS + 1))
    np.savez(folder / "tokens.npz", tokens=tokens[:, :-1], target=tokens[:, 1:])
    (folder / "short.yaml").write_text(SHORT_CONFIG, encoding="utf-8")
    x = np.random.default_rng(0).normal(size=(SHORT_ROWS, 4)).astype(np.float32)
    np.savez(folder / "short.npz", x=x, y=np.arange(SHORT_ROWS) % 3)


def begin(
    folder: Path, rows: int, processes: int, name: str, config: str = "config.yaml"
) -> subprocess.Popen[bytes]:
    words = ["analyze", config, "--limit", str(rows), "--output", name, "--overwrite", "--quiet"]
    words += ["--processes", str(processes)] if processes > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "psgrad", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def timed(folder: Path, rows: int, processes: int, config: str = "config.yaml") -> Run:
    """A run of the first rows."""
    start = time.perf_counter()
    if begin(folder, rows, processes, "run", config).wait():
        raise SystemExit("a run failed")
    seconds = time.perf_counter() - start
    spent = json.loads((folder / "run" / "manifest.json").read_text())["timings"]
    return Run(seconds, spent["gradients"], spent["tables"] + spent["report"])


def timed_beside(folder: Path, rows: int, every: int, startup: float) -> Run:
    """A run of the first rows, while another process computes all."""
    other = begin(folder, every, 1, "other")
    time.sleep(startup)
    try:
        found = timed(folder, rows, 1)
        if other.poll() is not None:
            raise SystemExit("the other run ended early: use more --rows")
        return found
    finally:
        other.kill()
        other.wait()


def median(runs: list[Run]) -> Run:
    return Run(
        *(statistics.median(values) for values in zip(*(asdict(run).values() for run in runs), strict=True))
    )


@dataclass(frozen=True)
class Constants:
    """What runs of few rows show, in seconds. startup: alone, and in a group. chunk: alone, and beside a
    second process. table: of a row. report: of tables and a report, beside what each row takes.
    """

    startup: tuple[float, float]
    chunk: tuple[float, float]
    table: float
    report: float


def constants(folder: Path, rows: int, rounds: int) -> Constants:
    """From runs of a quarter of the rows, and of two chunks."""
    few, some = 2 * CHUNK, max(4 * CHUNK, rows // 4)
    alone, group, more = (
        median([timed(folder, count, processes) for _ in range(rounds)])
        for count, processes in ((few, 1), (few, 2), (some, 1))
    )
    startup = alone.seconds - alone.gradients - alone.tables
    busy = median([timed_beside(folder, some, rows, startup) for _ in range(rounds)])
    chunks = (some - few) / CHUNK
    table = table_seconds(folder, rounds)
    return Constants(
        startup=(startup, group.seconds - group.gradients - group.tables),
        chunk=((more.gradients - alone.gradients) / chunks, (busy.gradients - alone.gradients) / chunks),
        table=table,
        report=max(0.0, alone.tables - few * table),
    )


def table_seconds(folder: Path, rounds: int) -> float:
    """Of one row, beside what a report takes however few rows it has."""
    few, many = (
        median([timed(folder, rows, 1, "short.yaml") for _ in range(rounds)]).tables
        for rows in (SHORT_ROWS // 10, SHORT_ROWS)
    )
    return max(0.0, many - few) / (SHORT_ROWS - SHORT_ROWS // 10)


def compare(folder: Path, rows: int, rounds: int, found: Constants, cluster: Cluster) -> dict[str, Any]:
    """Measured and simulated seconds of one and two processes."""
    result: dict[str, Any] = {}
    print(f"\n{rows:,} rows: seconds, and those of the simulation")
    for place, processes in enumerate((1, 2)):
        measured = median([timed(folder, rows, processes) for _ in range(rounds)]).seconds
        work = Workload(
            rows, CHUNK, found.chunk[place], table_seconds=found.table, report_seconds=found.report
        )
        simulated = simulate(work, replace(cluster, startup=found.startup[place]), processes).seconds
        error = simulated / measured - 1
        passed = abs(error) <= AGREEMENT
        print(
            f"  {processes} processes {measured:7.2f} {simulated:7.2f}   {100 * error:+.1f} %,"
            f" at most {100 * AGREEMENT:.0f} %: {'pass' if passed else 'FAIL'}"
        )
        result[str(processes)] = {"measured": measured, "simulated": simulated, "passed": passed}
    return result


# -- the key-value store and the network ---------------------------------------------------------------------


def _rank(rank: int, port: int, queue: Any) -> None:
    """One of two processes that ask the store, and send each other 64 MiB."""
    store = dist.TCPStore("localhost", port, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    start, requests = time.perf_counter(), 3000
    for _ in range(requests):
        store.add("count", 1)
    dist.barrier()
    request = (time.perf_counter() - start) / (2 * requests)
    content, small = torch.ones(1 << 24), torch.ones(1)
    times = []
    for tensor in (small, content):
        start = time.perf_counter()
        for _ in range(5):
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.barrier()
        times.append((time.perf_counter() - start) / 5)
    if rank == 0:
        queue.put((request, content.nbytes / times[1]))
    dist.destroy_process_group()


def group_constants() -> tuple[float, float]:
    """(seconds of the store for a request when two processes ask it, bytes a second of gloo on this host)."""
    import multiprocessing
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    request, rate = queue.get(timeout=120)
    for rank in ranks:
        rank.join()
    return request, rate


# -- the first look at a dataset -----------------------------------------------------------------------------

IMAGE_BYTES = 110_000


@dataclass(frozen=True)
class Looks:
    """Seconds of a process for a dataset, before its first chunk.

    Attributes:
        byte: to hash a byte of a file.
        image: to read, hash and open an image of IMAGE_BYTES.
        name: for what each process does by itself with the name and the class of an image, in a folder.
    """

    byte: float
    image: float
    name: float

    def of_files(self, work: Workload) -> Workload:
        """The work with the hashes of files that have `work.read` bytes for each row."""
        size = work.rows * work.read
        sample = min(size, SAMPLES * SAMPLE)
        return replace(work, hashed_bytes=size, hash_seconds=size * self.byte, loaded=work.loaded + sample)

    def of_images(self, work: Workload) -> Workload:
        """The work with the looks at a folder of images. Rank 0 reads the names once more for the manifest,
        while the others wait.
        """
        return replace(
            work,
            hashed_bytes=work.rows * work.read,
            hash_seconds=work.rows * self.image,
            listing_seconds=2 * work.rows * self.name,
            broadcast_bytes=DIGEST * work.rows,
        )


def processor_seconds(compute: Callable[[], Any], rounds: int) -> float:
    """The fewest of several measurements."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        compute()
        times.append(time.process_time() - start)
    return min(times)


def looks(rounds: int, tiny: bool) -> Looks:
    """Of files that were just written, so that the time is that of the processor."""
    few, many, names, size = (5, 10, 100, 1 << 20) if tiny else (20, 220, 20_000, 1 << 26)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bytes").write_bytes(os.urandom(size))
        byte = processor_seconds(lambda: file_hashes([folder / "bytes"]), rounds) / size
        for count in (few, many):
            save_images(folder / f"images-{count}", count, image_bytes())
        images = [processor_seconds(partial(load_images, folder, f"images-{n}"), rounds) for n in (few, many)]
        for count in (names // 10, names):
            save_images(folder / f"names-{count}", count, image_bytes(8, 0))
        with looks_left_out():
            listed = [
                processor_seconds(partial(load_images, folder, f"names-{count}"), rounds)
                for count in (names // 10, names)
            ]
    a_name = max(0.0, listed[1] - listed[0]) / (names - names // 10)
    return Looks(byte, max(0.0, (images[1] - images[0]) / (many - few) - a_name), a_name)


def save_images(folder: Path, count: int, content: bytes) -> None:
    for number in range(count):
        path = folder / f"class-{number % 10}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def image_bytes(width: int = 224, size: int = IMAGE_BYTES) -> bytes:
    """A square image in so many bytes: what follows its end nobody decodes."""
    from PIL import Image

    content = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (width, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, "jpeg", quality=75)
    return content.getvalue().ljust(size, b"\0")


def load_images(folder: Path, name: str) -> Any:
    loss = resolve_loss(LossConfig(name="cross_entropy"), folder)
    return load_data(DataConfig(images=name), folder, criterion=loss)


@contextmanager
def looks_left_out() -> Iterator[None]:
    """Inside, the first image alone is looked at: what is left is what each process does by itself."""
    look = ImageSamples._look

    def look_at_first(self: ImageSamples, rows: SourceRows, part: range) -> bytes:
        return look(self, rows, range(1)) + bytes(DIGEST * (len(part) - 1))

    ImageSamples._look = look_at_first  # type: ignore[method-assign]
    try:
        yield
    finally:
        ImageSamples._look = look  # type: ignore[method-assign]


# -- three jobs ----------------------------------------------------------------------------------------------


def chunk_time(compute: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """(the median of a chunk's seconds, the standard deviation of their logarithm), after one that is not
    timed.
    """
    compute()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return statistics.median(times), float(np.std(np.log(times)))


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def norms_of(model: nn.Module, inputs: Tensor, target: Tensor, loss: Any) -> Callable[[], Any]:
    objective = Objective(model, loss)
    return lambda: per_sample_square_norms(
        objective.loss, objective.params, (inputs,), target, has_aux=True
    ).square_norms()


def language_model(tiny: bool) -> tuple[Workload, Callable[[], Any]]:
    """Norms of 10^8 tokens in rows of 128, under a model of a billion parameters."""
    model = GPT(1000, TOKENS, 64, 2, 4) if tiny else GPT(50_000, TOKENS, 2048, 18, 16)
    tokens = torch.randint(0, 1000, (2, TOKENS + 1))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    work = Workload(10**8 // TOKENS, 2, 0.0, read=4 * TOKENS, written=100, loaded=size)
    return work, norms_of(model, tokens[:, :-1], tokens[:, 1:], next_token)


def images(tiny: bool) -> tuple[Workload, Callable[[], Any]]:
    """Norms of 10^7 images of 224 x 224 under ResNet-50; a file of an image has IMAGE_BYTES."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 8, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **(small if tiny else {}))).eval()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: Tensor) -> Tensor:
            logits: Tensor = self.model(pixels).logits
            return logits

    n, width = 8, 32 if tiny else 224
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    work = Workload(10**7, n, 0.0, read=IMAGE_BYTES, written=100, loaded=size)
    return work, norms_of(
        Logits(), torch.randn(n, 3, width, width), torch.randint(0, 1000, (n,)), F.cross_entropy
    )


def index(tiny: bool) -> tuple[Workload, Callable[[], Any]]:
    """An index of 10^9 rows of 128 tokens under a GPT of 5 million parameters: 512 numbers of two bytes for
    each.
    """
    model = GPT(1000, TOKENS, 64, 2, 4) if tiny else GPT()
    n, wide = 16, 64 if tiny else 512
    tokens = torch.randint(0, 1000, (n, TOKENS + 1))
    objective = Objective(model, next_token)
    projection = Sparse(wide)

    def compute() -> Tensor:
        gradients = per_sample_gradients(
            objective.loss, objective.params, (tokens[:, :-1],), tokens[:, 1:], has_aux=True
        )
        return gradients.project(projection)

    return Workload(10**9, n, 0.0, read=4 * TOKENS, written=2 * wide), compute


JOBS = {
    "10^8 tokens, 10^9 parameters": language_model,
    "10^7 images, ResNet-50": images,
    "index of 10^9 rows": index,
}


def measured_jobs(rounds: int, tiny: bool, found: Constants) -> dict[str, tuple[Workload, float]]:
    """Of each job its work, without the first look at its dataset, and how much a chunk's time varies."""
    result = {}
    for name, job in JOBS.items():
        torch.manual_seed(0)
        work, compute = job(tiny)
        seconds, variation = chunk_time(compute, rounds)
        del compute
        if job is not index:  # which rank 0 finishes without a table
            work = replace(work, table_seconds=found.table, report_seconds=found.report)
        result[name] = replace(work, chunk_seconds=seconds), variation
    return result


def stored_jobs(stored: dict[str, Any]) -> dict[str, tuple[Workload, float]]:
    """The same, of an earlier run."""
    return {
        name: (Workload(**job["before_looks"]), job["cluster"]["variation"])
        for name, job in stored["jobs"].items()
    }


def extrapolate(jobs: dict[str, tuple[Workload, float]], look: Looks, cluster: Cluster) -> dict[str, Any]:
    """The times and efficiencies of each job, for each number of ranks."""
    result: dict[str, Any] = {}
    for name, (alone, variation) in jobs.items():
        work = look.of_images(alone) if JOBS[name] is images else look.of_files(alone)
        on = replace(cluster, variation=variation)
        print(f"\n{name}: {work.chunk_seconds:.3f} s for {work.chunk_size} rows, by one thread")
        print(
            f"  {work.hashed_bytes / 1e9:,.1f} GB are looked at, in {work.hash_seconds:,.0f} s of one thread;"
            f" each process lists for {work.listing_seconds:,.0f} s"
        )
        result[name] = {"before_looks": asdict(alone), "work": asdict(work), "cluster": asdict(on)}
        result[name]["ranks"] = simulated(work, on, BARS)
        print(f"  with ranks {FASTER:,} times as fast:")
        fast = replace(work, chunk_seconds=work.chunk_seconds / FASTER)
        result[name]["faster"] = simulated(fast, on, {})
    return result


def simulated(work: Workload, cluster: Cluster, bars: dict[int, float]) -> dict[str, Any]:
    """What the JSON has for each number of ranks; prints it."""
    result = {}
    for times, efficiency in efficiencies(work, cluster, RANKS):
        passed = efficiency >= bars.get(times.ranks, 0.0)
        print(f"  {_row(times, efficiency)}{_bar(times.ranks, passed) if times.ranks in bars else ''}")
        result[str(times.ranks)] = asdict(times) | {
            "efficiency": efficiency,
            "bottleneck": times.bottleneck,
            "passed": passed,
        }
    return result


def _row(times: RankTimes, efficiency: float) -> str:
    return (
        f"{times.ranks:>4} ranks {times.seconds:>14,.0f} s, efficiency {efficiency:.3f}, then"
        f" {times.bottleneck}: {times.parts[times.bottleneck]:,.0f} s"
    )


def _bar(ranks: int, passed: bool) -> str:
    return f"; at least {BARS[ranks]}: {'pass' if passed else 'FAIL'}"


# -- the plot ------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind readers can tell apart; the markers differ, too.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"))


def draw(found: dict[str, Any], path: Path) -> None:
    """On the left the efficiency of each job; on the right what the seconds beside computing are spent on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    for (colour, marker), (name, job) in zip(STYLES, found.items(), strict=True):
        for key, line in (("ranks", "-"), ("faster", ":")):
            values = [each["efficiency"] for each in job[key].values()]
            label = name if key == "ranks" else None
            left.plot(RANKS, values, line, color=colour, marker=marker, label=label)
    for ranks, least in BARS.items():
        left.plot(ranks, least, marker="_", markersize=22, color="#444444")
        left.annotate(f"at least {least}", (ranks, least), (-8, -14), textcoords="offset points", ha="right")
    left.set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.05))
    left.set_xticks(RANKS, labels=[str(count) for count in RANKS])
    left.set_title(f"efficiency, simulated; dotted: ranks {FASTER:,} times as fast")
    left.legend(frameon=False, loc="lower left")
    left.grid(True, color="#dddddd", linewidth=0.6)
    most = {name: job["faster"][str(RANKS[-1])] for name, job in found.items()}
    parts = [name for name in next(iter(most.values()))["parts"] if name != "computing"]
    places = np.arange(len(parts))
    for place, ((colour, _), (name, times)) in enumerate(zip(STYLES, most.items(), strict=True)):
        shares = [100 * times["parts"][part] / times["seconds"] for part in parts]
        right.barh(places + 0.27 * (place - 1), shares, 0.25, color=colour, label=name)
    right.set_yticks(places, labels=parts)
    right.invert_yaxis()
    right.set(xlabel="% of the run's time")
    right.set_title(f"time that is not computing: {RANKS[-1]} ranks, {FASTER:,} times as fast")
    right.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The time of a run on many processes, measured and simulated."
    )
    parser.add_argument("--rows", type=int, default=768, help="of the measured runs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models, to see the script run")
    parser.add_argument("--stored", type=Path, metavar="FILE", help="take what an earlier run has measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the efficiencies (PNG)")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The constants of this machine, and runs of one and two processes beside the simulation."""
    content: dict[str, Any] = {"machine": machine(torch.device("cpu")), "assumed": ASSUMED}
    request, rate = group_constants()
    cluster = Cluster(request=request, network=rate, latency=ASSUMED["latency"])
    print(f"a request to the store {1e6 * request:.0f} us, gloo on this host {rate / 1e6:,.0f} MB/s")
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), arguments.rows
        prepare(folder, rows)
        found = constants(folder, rows, arguments.rounds)
        print(
            f"startup {found.startup[0]:.2f} s, in a group {found.startup[1]:.2f} s; a chunk"
            f" {found.chunk[0]:.3f} s, beside another process {found.chunk[1]:.3f} s; tables"
            f" {found.report:.2f} s and {1e6 * found.table:.0f} us a row"
        )
        content |= {"constants": asdict(found) | {"request": request, "gloo": rate}}
        content["measured"] = compare(folder, rows, arguments.rounds, found, cluster)
    content["when"] = {"runs, constants and chunks": date.today().isoformat()}
    return content


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.stored is None:
        content = measured(arguments)
        known = {
            name: value for name, value in content["constants"].items() if name not in ("request", "gloo")
        }
        jobs = measured_jobs(arguments.rounds, arguments.tiny, Constants(**known))
    else:
        content = json.loads(arguments.stored.read_text(encoding="utf-8"))
        print(f"constants of {arguments.stored}: {content['machine']}")
        jobs = stored_jobs(content)
    look = looks(arguments.rounds, arguments.tiny)
    print(
        f"a look at a dataset: {1e-9 / look.byte:.2f} GB/s are hashed, an image takes"
        f" {1e6 * look.image:.0f} us, its name {1e6 * look.name:.1f} us"
    )
    content["looks"] = asdict(look) | {"machine": facts}
    content["when"] |= {"looks": date.today().isoformat()}
    startup, request = content["constants"]["startup"][1], content["constants"]["request"]
    print("\nassumed: " + ", ".join(f"{name} {value:,.3g}" for name, value in ASSUMED.items()))
    content["jobs"] = extrapolate(jobs, look, Cluster(startup=startup, request=request, **ASSUMED))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        draw(content["jobs"], arguments.plot)


if __name__ == "__main__":
    main()
