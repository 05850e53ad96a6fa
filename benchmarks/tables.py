"""How long check, report and diff take on the finished runs of a million samples, and how much memory.

    python benchmarks/tables.py [--rows 1000000] [--repeats 3] [--json benchmarks/results/tables-cpu.json]

Two run folders are made as psgrad analyze leaves them, without a model: the columns are drawn at random, ids
are text, a hundredth of the samples is listed, some are not finite, and in the second run some have gone and
come. Each command runs as a process of its own, from its start to its end, a few times; the slowest counts.
Memory is the most that the process has resident.

The bars: 20 s and 2 GiB for each command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SECONDS, BYTES = 20.0, 2 << 30
REPEATS = 3


def samples(rows: int, first: int, seed: int) -> pd.DataFrame:
    """A judged table of `rows` samples, the first of which is sample `first`: its columns are those of
    samples.parquet.
    """
    from psgrad.quality.judging import rank_samples

    random = np.random.default_rng(seed)
    number = np.arange(first, first + rows)
    # What a sample is stays; how it was measured differs between runs.
    nature = np.random.default_rng(0).normal(size=first + rows)[first:]
    norm = np.exp(1.5 * nature + 0.3 * random.normal(size=rows))
    norm[random.random(rows) < 1e-5] = np.nan
    norm[random.random(rows) < 1e-4] = 0.0
    frame = pd.DataFrame(
        {
            "id": [f"sample-{each:08d}" for each in number],
            "index": np.arange(rows),
            "fingerprint": [f"{each * 0x9E3779B97F4A7C15 % (1 << 128):032x}" for each in number.tolist()],
            "target": number % 10,
            "prediction": (number + (random.random(rows) < 0.05)) % 10,
            "confidence": random.random(rows),
            "loss": np.abs(nature + random.normal(size=rows)),
            "grad_norm": norm,
        }
    )
    return rank_samples(frame, 0.01)


def run_folder(folder: Path, frame: pd.DataFrame) -> Path:
    """A finished run with this table."""
    from psgrad.run import RunFolder

    run = RunFolder.create(folder)
    run.write_table("samples.parquet", frame)
    layers = [f"layer{place}.weight" for place in range(20)]
    shares = np.full(len(layers), 1 / len(layers))
    numbers = dict.fromkeys(("mean_norm", "std_norm", "min_norm", "q05", "median", "q95", "max_norm"), shares)
    names = {
        "parameter": layers,
        "module": [name.rpartition(".")[0] for name in layers],
        "shape": "8x8",
        "numel": 64,
    }
    run.write_table(
        "parameters.parquet", pd.DataFrame({**names, **numbers, "share": shares, "computed_as": "factors"})
    )
    run.write_measures({})
    counts = {
        "samples": len(frame),
        "nonfinite": int((frame["status"] == "nonfinite").sum()),
        "in_dataset": len(frame),
    }
    manifest = {
        "version": 1,
        "command": "analyze",
        "state": "finished",
        "config": {"data": {"path": "data.parquet"}},
        "counts": counts,
    }
    run.write_manifest({**manifest, "timings": {}, "versions": {}, "outliers": {"decided_by": "review list"}})
    return folder


def measured(words: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Seconds, seconds of a processor and peak bytes of a command, its start included; of several times the
    most.
    """
    seconds, busy, peak = 0.0, 0.0, 0
    for _ in range(repeats):
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "psgrad", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = max(seconds, time.perf_counter() - start)
        busy, peak = max(busy, used.ru_utime + used.ru_stime), max(peak, 1024 * used.ru_maxrss)
        if process.returncode not in (0, 1):  # a gate that fails is an answer, too
            raise SystemExit(
                f"psgrad {' '.join(words)} ended with {process.returncode}: {said.decode()[-500:]}"
            )
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(busy, 2),
        "bytes": peak,
        "passed": seconds < SECONDS and peak < BYTES,
    }


def measure(rows: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Each command on runs of so many samples."""
    import psgrad

    found: dict[str, Any] = {
        "rows": rows,
        "repeats": repeats,
        "cores": os.cpu_count(),
        "psgrad": psgrad.__version__,
        "commands": {},
    }
    with tempfile.TemporaryDirectory() as name:
        a, b = (
            str(run_folder(Path(name) / which, samples(rows, first, 1 + first)))
            for which, first in (("A", 0), ("B", rows // 100))
        )
        baseline = f"{name}/baseline.json"
        for words in (
            ("check", a),
            ("check", a, "--format", "sarif"),
            ("baseline", "save", a, "--output", baseline),
            ("check", b, "--baseline", baseline),
            ("report", a),
            ("diff", a, b),
        ):
            shown = " ".join(word.replace(f"{name}/", "") for word in words)
            each = found["commands"][shown] = measured(words, repeats)
            verdict = "pass" if each["passed"] else "FAIL"
            busy, size = each["processor_seconds"], each["bytes"] / 2**20
            print(
                f"psgrad {shown}: {each['seconds']:.1f} s ({busy:.1f} s of a processor), {size:.0f} MiB:"
                f" {verdict}",
                flush=True,
            )
        found["findings.jsonl"] = (Path(a) / "findings.jsonl").stat().st_size
        found["report.html"] = (Path(a) / "report.html").stat().st_size
    found["passed"] = all(each["passed"] for each in found["commands"].values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.rows, options.repeats)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
