"""docs/benchmarks.md: psgrad beside its rivals, a table a command, from the stored results of benchmarks/.

`python -m tools.pages` writes it. No figure is written by hand.
"""

from __future__ import annotations

import json
import math
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
    "norms": "Norms",
    "clipped": "Clipped sums",
    "materialised": "Gradients, materialised",
}
CASES = {
    "exact": "small network, exact",
    "ten": "small network, exact, ten checkpoints",
    "ekfac": "large network, EK-FAC",
    "dual": "large network, dual form",
    "sampled": "small network, ten checkpoints, a random row for each example",
    "dual, sampled": "large network, dual form, a random row for each example",
}
"""The cases of benchmarks/influence_bars.py, in words."""
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
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([lines[0], f"|---{'|---:' * (len(head) - 1)}|\n", *lines[1:]])


def marked(text: str, worse: bool) -> str:
    """In bold where psgrad is the worse one."""
    return f"**{text}**" if worse else text


def median(seconds: Mapping[str, Any], way: str) -> float:
    return float(seconds[way]["median"])


def ours(seconds: Mapping[str, Any], target: float) -> list[str]:
    """psgrad's milliseconds and multiple of the plain step, in bold where that is over the target."""
    time, plain = median(seconds, "psgrad"), median(seconds, "plain")
    return [f"{1e3 * time:.1f}", marked(f"{time / plain:.2f}", time > target * plain)]


def rival(case: Content, ways: Iterable[str]) -> str:
    """How many times as long as psgrad a library takes, by the fastest of its ways. Raises KeyError where no
    way was timed or refused.
    """
    seconds = case["seconds"]
    timed = [median(seconds, way) for way in ways if way in seconds]
    if not timed:
        if not any(way in case["refused"] for way in ways):
            raise KeyError(f"no result of {', '.join(ways)}")
        return "no"
    ratio = min(timed) / median(seconds, "psgrad")
    return marked(f"{ratio:.2f}", ratio < 1)


def library() -> str:
    cases = stored("rivals-cpu")["cases"]
    head = ["network", "psgrad, ms", "x plain step", *(f"{name}, x psgrad" for name in RIVALS)]
    targets = stored("cpu-2-cores")["bars"]
    tables = []
    for query, title in QUERIES.items():
        rows = []
        for name, words in NETWORKS.items():
            case = cases[name][query]
            others = [rival(case, ways) for ways in RIVALS.values()]
            rows.append([words, *ours(case["seconds"], targets.get(query, math.inf)), *others])
        target = f" Target: {targets[query]} x the plain step." if query in targets else ""
        tables.append(f"{title}.{target}\n\n{table(head, rows)}")
    return section(
        "The library",
        "Time of one batch: psgrad's, and how many times as long the fastest way of each other library takes."
        " `no`: refused, or a wrong number.",
        "rivals-cpu",
        "python benchmarks/rivals.py",
        *tables,
    )


def analyze() -> str:
    found = stored("issues-cpu")
    rows = []
    for name, content in found["sets"].items():
        for noise, scores in content["noise"].items():
            precision = scores["precision"]
            ways = ("checkpoints", "folds", "out of sample")
            checkpoints, folds, held = (precision[f"psgrad, {way}"] for way in ways)
            cleanlab = max(value for way, value in precision.items() if way.startswith("cleanlab"))
            others = [precision["loss"], precision["norm"], folds, held, cleanlab]
            cells = [marked(over_seeds(each), each[0] > checkpoints[0]) for each in (checkpoints, *others)]
            rows.append(
                [
                    f"{name}, {noise}",
                    *cells,
                    *(flags(scores, way) for way in ("checkpoints", "out of sample")),
                ]
            )
    worse = sum("**" in "".join(row) for row in rows)
    head = ["data, changed labels", "checkpoints", "loss", "norm", "folds", "cross-validation", "cleanlab"]
    return section(
        "`psgrad analyze`: wrong labels",
        "Average precision of scores of labels that were changed on purpose, mean±half the range of"
        f" {len(found['seeds'])} seeds: psgrad's over checkpoints, loss, norm, psgrad's by folds, its and"
        " cleanlab's best with probabilities of cross-validation. Flags: the share that is right / the share"
        f" of changed labels that is flagged. Bold: better than over checkpoints, in {worse} of"
        f" {len(rows)} cases. The machine was not stored.\n\n{measures()}",
        "issues-cpu",
        "python benchmarks/issues.py",
        table([*head, "flags, checkpoints", "flags, cross-validation"], rows),
    )


def over_seeds(value: Sequence[float]) -> str:
    """The mean, and half of the range, of (mean, smallest, largest)."""
    mean, smallest, largest = value
    return f"{mean:.3f}±{(largest - smallest) / 2:.3f}"


def flags(scores: Content, way: str) -> str:
    right, found = (scores[what][f"psgrad, {way}"][0] for what in ("right", "found"))
    return f"{right:.0%} / {found:.0%}"


def measures() -> str:
    """What all measures of the one pass cost."""
    found = stored("measures-cpu")
    ratio = median(found["seconds"], "all: one pass") / median(found["seconds"], "norms")
    return (
        f"All {len(found['kinds']['one pass'])} measures of one pass together take"
        f" {marked(f'{ratio:.2f}', ratio > found['bar'])} times the pass of norms alone (target:"
        f" {found['bar']}; `python benchmarks/measures.py`, {machine_words(found['machine'])})."
    )


def influence() -> str:
    scores = [
        row for row in stored("influence-quality-cpu")["rows"] if not row["method"].startswith("control")
    ]
    rows: dict[tuple[str, int], list[str]] = {}
    for row in sorted(scores, key=lambda row: (row["tuned"] is not None, -row["mean"])):
        cells = rows.setdefault((row["method"], row["models"]), [row["method"], str(row["models"])])
        cells += [marked(f"{row['mean']:.3f}", unmatched(row, scores)), f"{row['seconds']:.1f}"]
    head = ["method", "models", "score", "seconds", "tuned: score", "seconds, with tuning"]
    versions = sorted(
        {f"{each['library']} {each['version']}" for each in stored("influence-agreement-cpu")["comparisons"]}
    )
    speed = stored("influence-speed-cpu")
    times = []
    for method in ("gradient_dot", "ekfac"):
        seconds = speed[method]["seconds"]
        times += [
            [
                f"{method}: {way}",
                marked(f"{1e3 * median(seconds, way):.0f}", median(seconds, way) < median(seconds, "psgrad")),
            ]
            for way in seconds
        ]
    return (
        "## `psgrad influence`\n\nDatamodeling score: the rank correlation of predictions with retraining on"
        " half of the data, with each method's default settings and with the best of several dampings. Bold:"
        " no method of psgrad scores as much in as little time with as many models. The machine was not"
        f" stored; {', '.join(versions)}. Other networks and settings:"
        " [influence methods beside retraining](../benchmarks/influence-truth.md).\n\n"
        "    python benchmarks/influence_quality.py\n\n"
        + table(head, [[*cells, *[""] * (len(head) - len(cells))] for cells in rows.values()])
        + f"\nTime of the scores alone, on {machine_words(speed['machine'])}:\n\n"
        + "    python benchmarks/influence_speed.py\n\n"
        + table(["scores by", "ms"], times)
        + targets()
    )


def unmatched(row: Content, rows: Sequence[Content]) -> bool:
    """Whether a row is a rival's, and no row of psgrad with as many models has its score in its time."""
    return not row["method"].startswith("psgrad") and not any(
        other["method"].startswith("psgrad")
        and other["models"] == row["models"]
        and (other["tuned"] is None) == (row["tuned"] is None)
        and other["mean"] >= row["mean"]
        and other["seconds"] <= row["seconds"]
        for other in rows
    )


def targets() -> str:
    """Seconds of scores with their targets."""
    found = stored("influence-bars-cpu")
    rows = []
    for name, case in found["cases"].items():
        seconds = case["seconds"]
        other = f"{seconds['torch.func']:.1f}" if "torch.func" in seconds else ""
        rows.append(
            [CASES[name], marked(f"{seconds['psgrad']:.1f}", not case["reached"]), f"{case['bar']:g}", other]
        )
    return (
        f"\nSeconds of all scores on the digits, {found['threads']} threads, torch {found['torch']}. Bold:"
        " over the target.\n\n    python benchmarks/influence_bars.py\n\n"
        + table(["scores", "psgrad", "target", "torch.func"], rows)
    )


def private() -> str:
    found = stored("dp-step-cpu")
    ways = RIVALS["Opacus"]
    rows = []
    for name, words in NETWORKS.items():
        case, size = found["cases"][name], found["cases"][name]["bytes"]
        cells = [*ours(case["seconds"], found["bars"]["time"]), *(rival(case, [way]) for way in ways)]
        more = size["psgrad"] / size["plain"]
        rows.append([words, *cells, marked(f"{more:.2f}", more > found["bars"]["memory"])])
    head = ["network", "psgrad, ms", "x plain step", *(f"{way}, x psgrad" for way in ways), "memory"]
    accuracy = stored("dp-utility-cpu")
    gap = accuracy["difference"]
    return section(
        "`psgrad dp-step`",
        "One private step: sampling, clipped sum, noise, update. psgrad adds in float64 and draws noise on a"
        " grid from a secret stream, which [the guarantee](explanation/dp.md) needs; Opacus adds in float32."
        f" Memory: the peak, times that of a plain step. Targets: {found['bars']['time']} x the plain step,"
        f" {found['bars']['memory']} x its memory.",
        "dp-step-cpu",
        "python benchmarks/dp_step.py",
        table(head, rows),
        f"Accuracy after {accuracy['settings']['steps']} steps, psgrad's less that of Opacus:"
        f" {gap['mean']:+.2f} points, with a standard error of {gap['standard_error']:.2f}"
        " (`python benchmarks/dp_utility.py`).\n",
    )


def review() -> str:
    found = stored("review-cpu")
    convex, network, language = found["convex"], found["network"], found["language"]
    cost = found["cost"]
    changes, slopes = f"{len(convex)} changes of a logistic regression", [row["slope"] for row in convex]
    changed = f"{len(network['changes'])} changes of a network"
    among = f"{language['among_first']} in {language['first']} of {language['changed']}"
    times = "; ".join(f"{cost['predict_seconds'][way]:.1f}" for way in ("computed", "by_index"))
    rows = [
        [f"{changes}: least Pearson correlation", f"{min(row['pearson'] for row in convex):.3f}"],
        [f"{changes}: slopes", f"{min(slopes):.3f} to {max(slopes):.3f}"],
        [f"{changed}: harmful against harmless, AUC", f"{network['auc']:.3f}"],
        [f"{changed}: rank correlation with the retrained margin", f"{network['rank_correlation']:.3f}"],
        [f"{language['false']} false sentences for a language model: among the first", among],
        [
            f"seconds for {cost['changed']} changed rows, {cost['training_rows']:,} others,"
            f" {cost['queries']:,} queries: computed; by an index",
            times,
        ],
    ]
    return section(
        "`psgrad review`",
        "Predictions of what a change of the training data does, beside real training by plain PyTorch.",
        "review-cpu",
        "python benchmarks/review.py",
        table(["what", "value"], rows),
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
        "Every tenth step is measured. Bold: over the target of 15 %. The load of the machine was"
        f" {found['costs_load']:.0f}.",
        "monitor-cpu",
        "python benchmarks/monitor.py",
        table(["what", "value"], rows),
    )


def gpu() -> str:
    parts, machine = stored("gpu-h200")["parts"], stored("gpu-h200")["machine"]
    rows = []
    for name, words in NETWORKS.items():
        if name not in parts["networks"]:
            continue
        seconds, recorded = parts["networks"][name]["seconds"], parts["graphs"].get(name, {})
        cells = [milliseconds(seconds, way) for way in ("plain", "norms")]
        replayed = milliseconds(recorded, "recorded")
        rows.append([words, *cells, replayed, milliseconds(seconds, "torch.func", "norms")])
    networks = {name: each for name, each in parts["transformers"].items() if isinstance(each, dict)}
    halves = [
        case["seconds"][query]["ratio"]
        for name, case in networks.items()
        if not name.endswith("float32")
        for query in ("norms", "clipped")
    ]
    tables = [
        f"\n{QUERIES[query]}, pretrained shapes, no chunk recorded:\n\n" + transformers(networks, query)
        for query in ("norms", "clipped")
    ]
    return (
        f"## On a GPU\n\nMilliseconds of a batch on {machine_words(machine)}. `recorded`: a chunk that is"
        " replayed as one CUDA graph, which commands do from the fourth chunk of a shape on. Bold: faster"
        " than psgrad without a recorded chunk.\n\n    python benchmarks/gpu.py\n\nNorms:\n\n"
        + table(["network", "plain step", "psgrad", "psgrad, recorded", "torch.func"], rows)
        + "".join(tables)
        + f"\nIn TF32 and bfloat16 psgrad takes {min(halves):.1f} to {max(halves):.1f} times the plain step;"
        " others were not measured.\n"
    )


def transformers(networks: Mapping[str, Content], query: str) -> str:
    """Milliseconds of a query on each network, beside each library's."""
    ways = [f"{name}, {query}" for name in ("torch.func", "Opacus hooks", "Opacus ghost")]
    rows = []
    for name, case in networks.items():
        if not name.endswith("float32"):
            continue
        refused = case["rivals that are not timed"]
        others = ["no" if way in refused else milliseconds(case["seconds"], way, query) for way in ways]
        rows.append([name, *(milliseconds(case["seconds"], way) for way in ("plain", query)), *others])
    return table(["network", "plain step", "psgrad", *(way.rpartition(", ")[0] for way in ways)], rows)


def milliseconds(seconds: Mapping[str, Any], way: str, beside: str | None = None) -> str:
    """The time of a way, in bold if it is faster than the way `beside`."""
    if way not in seconds:
        return ""
    time = median(seconds, way)
    return marked(f"{1e3 * time:.2f}", beside is not None and time < median(seconds, beside))
