"""docs/benchmarks.md: psgrad beside its rivals, a table a command, from the stored results of benchmarks/.

`python -m tools.pages` writes it. No figure is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.made_part import with_made_part

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"

Content = dict[str, Any]
Row = Sequence[str]

NETWORKS = {
    "cnn": "CNN, batch 64",
    "mlp": "MLP, batch 256",
    "gpt": "GPT, tied head, 16 x 128 tokens",
    "gpt-untied": "GPT, own head, 16 x 128 tokens",
    "resnet": "ResNet-20, GroupNorm, batch 32",
}
QUERIES = {
    "norms": "Norms of all per-sample gradients",
    "clipped": "Clipped sums",
    "materialised": "All gradients, materialised",
}
# family -> the ways of a library that are timed; the table shows the fastest that gives the right numbers.
RIVALS = {
    "torch.func": ("torch.func", "torch.func, chunks"),
    "Opacus": ("Opacus hooks", "Opacus functorch", "Opacus ghost"),
    "BackPACK": ("BackPACK BatchGrad", "BackPACK BatchL2Grad"),
}


def page(text: str) -> str:
    """The page with its generated part made again."""
    parts = [library(), analyze(), influence(), private(), review(), monitor(), gpu()]
    return with_made_part(text, "benchmarks_page", "\n" + "\n".join(parts))


def stored(name: str) -> Content:
    content: Content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def section(title: str, words: str, name: str, command: str, *tables: str) -> str:
    """A heading, what was measured, where, by which command, and the tables."""
    machine = stored(name).get("machine")
    where = f" Measured on {machine_words(machine)}." if machine else ""
    return f"## {title}\n\n{words}{where}\n\n    {command}\n\n" + "\n".join(tables)


def machine_words(machine: Mapping[str, Any]) -> str:
    device = machine["device"] if machine["device"] != "cpu" else machine["processor"]
    versions = [f"{name} {machine[name]}" for name in machine if name in ("torch", "opacus")]
    versions += [f"BackPACK {machine['backpack-for-pytorch']}"] if "backpack-for-pytorch" in machine else []
    return f"{device}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}, {', '.join(versions)}"


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def marked(text: str, worse: bool) -> str:
    """In bold where psgrad is the worse one."""
    return f"**{text}**" if worse else text


def median(seconds: Mapping[str, Any], way: str) -> float:
    return float(seconds[way]["median"])


def beside(seconds: Mapping[str, Any]) -> list[str]:
    """psgrad's milliseconds and multiple of the plain step; how many times as long each rival takes."""
    ours = median(seconds, "psgrad")
    cells = [f"{1e3 * ours:.1f}", f"{ours / median(seconds, 'plain'):.2f}"]
    for ways in RIVALS.values():
        timed = [median(seconds, way) for way in ways if way in seconds]
        cells.append(marked(f"{min(timed) / ours:.2f}", min(timed) < ours) if timed else "not possible")
    return cells


def library() -> str:
    cases = stored("rivals-cpu")["cases"]
    head = ["network", "psgrad, ms", "x plain step", *(f"{name}, x psgrad" for name in RIVALS)]
    tables = []
    for query, title in QUERIES.items():
        rows = [[words, *beside(cases[name][query]["seconds"])] for name, words in NETWORKS.items()]
        tables.append(f"{title}:\n\n{table(head, rows)}")
    return section(
        "The library",
        "Time of one batch: psgrad's, and how many times as long the fastest way of each other library takes."
        " `not possible`: refused, or a wrong number.",
        "rivals-cpu",
        "python benchmarks/rivals.py",
        *tables,
    )


def analyze() -> str:
    sets = stored("issues-cpu")["sets"]
    ours = ("psgrad, checkpoints", "psgrad, out of sample", "psgrad, one model")
    rows = []
    for name, content in sets.items():
        for noise, found in content["noise"].items():
            precision = {way: value[0] for way, value in found["precision"].items()}
            others = {way: value for way, value in precision.items() if way not in ours}
            best = max(others, key=lambda way: others[way])
            cells = [f"{precision[way]:.3f}" if way in precision else "" for way in ours]
            worse = others[best] > max(precision[way] for way in ours if way in precision)
            rows.append([f"{name}, {noise}", *cells, marked(f"{others[best]:.3f}", worse), best])
    head = [
        "data, share of changed labels",
        "checkpoints",
        "out of sample",
        "one model",
        "best other",
        "which",
    ]
    return section(
        "`psgrad analyze`: wrong labels",
        "Average precision of the issue table's label scores on planted noise, mean of five seeds, beside"
        " loss, gradient norm, cross-validation and cleanlab.",
        "issues-cpu",
        "python benchmarks/issues.py",
        table(head, rows),
    )


def influence() -> str:
    quality = [row for row in stored("influence-quality-cpu")["rows"] if row["tuned"] is None]
    best = max(row["mean"] for row in quality if row["method"].startswith("psgrad") and row["models"] == 1)
    rows = [
        [
            row["method"],
            str(row["models"]),
            marked(
                f"{row['mean']:.3f}",
                row["mean"] > best and not row["method"].startswith("psgrad"),
            ),
            f"{row['seconds']:.1f}",
        ]
        for row in sorted(quality, key=lambda row: -row["mean"])
        if not row["method"].startswith("control")
    ]
    speed = stored("influence-speed-cpu")
    times = [
        [f"{method}: {way}", f"{1e3 * median(speed[method]['seconds'], way):.0f}"]
        for method in ("gradient_dot", "ekfac")
        for way in speed[method]["seconds"]
    ]
    return section(
        "`psgrad influence`",
        "Datamodeling score: the rank correlation of predictions with retraining on half of the data, each"
        " method with its own default settings (tuned ones are in"
        " [influence: measured results](../benchmarks/influence-results.md)); then the time of the scores.",
        "influence-speed-cpu",
        "python benchmarks/influence_quality.py && python benchmarks/influence_speed.py",
        table(["method", "models", "score", "seconds"], rows),
        table(["scores by", "ms"], times),
    )


def private() -> str:
    cases = stored("dp-step-cpu")["cases"]
    rows = []
    for name, words in NETWORKS.items():
        seconds, size = cases[name]["seconds"], cases[name].get("bytes", {})
        cells = beside(seconds)[:2]
        for way in RIVALS["Opacus"]:
            ratio = median(seconds, way) / median(seconds, "psgrad") if way in seconds else 0.0
            cells.append(marked(f"{ratio:.2f}", ratio < 1) if ratio else "not possible")
        cells.append(f"{size['psgrad'] / size['plain']:.2f}" if "psgrad" in size else "")
        rows.append([words, *cells])
    head = [
        "network",
        "psgrad, ms",
        "x plain step",
        *(f"{way}, x psgrad" for way in RIVALS["Opacus"]),
        "memory",
    ]
    return section(
        "`psgrad dp-step`",
        "One private step: sampling, clipped sum, noise, update. psgrad adds in float64 and draws noise on a"
        " grid from a secret stream, which [the guarantee](explanation/dp.md) needs; Opacus adds in float32."
        " Memory: the peak, times that of a plain step. The stored run is older than the float64 sums, which"
        " made the MLP's step slower than that of Opacus ghost.",
        "dp-step-cpu",
        "python benchmarks/dp_step.py",
        table(head, rows),
    )


def review() -> str:
    found = stored("review-cpu")
    convex, network, language = found["convex"], found["network"], found["language"]
    rows = [
        [
            "changes of a logistic regression",
            str(len(convex)),
            "least Pearson correlation",
            f"{min(row['pearson'] for row in convex):.3f}",
        ],
        [
            "",
            "",
            "slope, least and largest",
            f"{min(row['slope'] for row in convex):.3f} to {max(row['slope'] for row in convex):.3f}",
        ],
        [
            "changes of a network",
            str(len(network["changes"])),
            "harmful against harmless, AUC",
            f"{network['auc']:.3f}",
        ],
        ["", "", "rank correlation with the retrained margin", f"{network['rank_correlation']:.3f}"],
        [
            "false sentences for a language model",
            str(language["false"]),
            "of them among the first",
            f"{language['among_first']} in {language['first']} of {language['changed']}",
        ],
    ]
    return section(
        "`psgrad review`",
        "Predictions of what a change of the training data does, beside real training by plain PyTorch.",
        "review-cpu",
        "python benchmarks/review.py",
        table(["what", "count", "measure", "value"], rows),
    )


def monitor() -> str:
    found = stored("monitor-cpu")
    named = [
        (cause["named"], cause["of"])
        for training in found["names"].values()
        for what, cause in training.items()
        if what != "clean"
    ]
    clean = [training["clean"] for training in found["names"].values()]
    rows = [
        ["planted bad batches named", f"{sum(n for n, _ in named)} of {sum(of for _, of in named)}"],
        [
            "false spikes in clean runs",
            f"{sum(c['spikes'] for c in clean)} in {sum(c['steps'] for c in clean):,} steps",
        ],
        *(
            [f"more time, {name}", marked(f"{100 * cost['more']:+.0f} %", cost["more"] > 0.15)]
            for name, cost in found["costs"].items()
        ),
    ]
    return section(
        "`psgrad.monitor`",
        "Every tenth step is measured. Bold: over the target of 15 %.",
        "monitor-cpu",
        "python benchmarks/monitor.py",
        table(["what", "value"], rows),
    )


def gpu() -> str:
    parts = stored("gpu-h200")["parts"]
    rows = []
    for name, words in NETWORKS.items():
        if name not in parts["networks"]:
            continue
        seconds, recorded = parts["networks"][name]["seconds"], parts["graphs"].get(name, {})
        plain, eager, rival = (median(seconds, way) for way in ("plain", "norms", "torch.func"))
        replayed = median(recorded, "recorded") if "recorded" in recorded else None
        rows.append(
            [
                words,
                f"{1000.0 * plain:.2f}",
                f"{1000.0 * eager:.2f}",
                f"{1000.0 * replayed:.2f}" if replayed else "",
                marked(f"{1000.0 * rival:.2f}", rival < eager),
            ]
        )
    machine = machine_words(stored("gpu-h200")["machine"])
    return (
        f"## On a GPU\n\nNorms of one batch in milliseconds on {machine}. `recorded`: a chunk that is"
        " replayed as one CUDA graph, which commands do from the fourth chunk of a shape on. Bold: faster"
        " than psgrad without a recorded chunk.\n\n    python benchmarks/gpu.py\n\n"
        + table(["network", "plain step", "psgrad", "psgrad, recorded", "torch.func"], rows)
    )
