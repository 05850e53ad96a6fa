"""`psgrad review` against real training on the changed data.

    python benchmarks/review.py [--seeds 8] [--changes 40] [--json FILE]

Convex: a logistic regression of 1,100 digits, changed by up to 15 % of the rows (flipped labels, removed
rows, new rows, the same rows again), and trained again to the minimum: the correlation and the slope of the
predicted and the real change of 360 queries' losses.

Network: a network of two layers on the same digits, trained again from `--seeds` fresh starts a change.
The predicted change of the mean margin, from three checkpoints of one run without any further training,
should tell harmful changes (wrong labels) from harmless ones, and rank as the real change does.

Language: a small language model that has learnt facts. A third more rows come, of which 2 % of all rows say
false things: how many of these are among the first 3 % of the changed rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from norms import machine
from review_models import LENGTH, PEOPLE, PLACES, WORDS, Sentences, network
from safetensors.torch import save_file
from scipy.stats import spearmanr
from script import command_line, print_facts, write_json
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import psgrad

ROWS, QUERIES, DECAY = 1100, 360, 1e-3
COLUMNS = 2048  # of an index
EPOCHS, CHECKPOINTS, RATE, BATCH = 60, (6, 20, 60), 3e-3, 64
MODELS = Path(__file__).with_name("review_models.py")
Array = np.ndarray[Any, Any]
Rows = tuple[Array, Array, Array]  # inputs, labels, ids


def digits() -> tuple[Rows, Rows, Rows]:
    """(training rows, queries, rows that come later)."""
    inputs, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs, labels = (inputs[order] / 16).astype(np.float64), labels[order].astype(np.int64)
    ids = np.array([f"digit-{place:04d}" for place in order])
    ends = [slice(0, ROWS), slice(ROWS, ROWS + QUERIES), slice(ROWS + QUERIES, None)]
    return tuple((inputs[each], labels[each], ids[each]) for each in ends)  # type: ignore[return-value]


KINDS = (
    "flipped",
    "one class flipped",
    "removed",
    "of one class removed",
    "new",
    "new and wrong",
    "again",
    "noise",
)
HARMFUL = {"flipped", "one class flipped", "new and wrong"}


def changed(train: Rows, later: Rows, kind: str, count: int, seed: int) -> Rows:
    """The training rows after a change of `count` rows."""
    draw = np.random.default_rng([seed, count, KINDS.index(kind)])
    inputs, labels, ids = (each.copy() for each in train)
    rows = draw.choice(len(labels), count, replace=False)
    if "one class" in kind:
        label = draw.integers(10)
        rows = draw.permutation(np.flatnonzero(labels == label))[:count]
    if kind.endswith("removed"):
        kept = np.setdiff1d(np.arange(len(labels)), rows)
        return inputs[kept], labels[kept], ids[kept]
    if kind == "noise":
        inputs[rows] = np.clip(inputs[rows] + draw.normal(0, 0.15, inputs[rows].shape), 0, 1)
    elif kind.endswith("flipped"):
        apart = 3 if "one class" in kind else draw.integers(1, 10, len(rows))
        labels[rows] = (labels[rows] + apart) % 10
    if kind in ("noise", "flipped", "one class flipped"):
        return inputs, labels, ids
    source = train if kind == "again" else later
    taken = draw.choice(len(source[1]), count, replace=False)
    extra = source[1][taken]
    if kind == "new and wrong":
        extra = (extra + draw.integers(1, 10, count)) % 10
    names = np.array([f"new-{place:04d}" for place in range(count)])
    return (
        np.concatenate([inputs, source[0][taken]]),
        np.concatenate([labels, extra]),
        np.concatenate([ids, names]),
    )


def write(path: Path, rows: Rows) -> str:
    np.savez(path, input=rows[0], label=rows[1], id=rows[2])
    return str(path)


def config_of(folder: Path, build: str, checkpoints: list[str], indexed: bool, dtype: str) -> dict[str, Any]:
    """The config of a review of base.npz. indexed: by an index of the training gradients."""
    content: dict[str, Any] = {
        "version": 1,
        "model": {"factory": f"{MODELS}:{build}", "checkpoint": checkpoints[-1]},
        "loss": {"name": "cross_entropy"},
        "data": {"path": str(folder / "base.npz"), "inputs": "input", "target": "label", "id": "id"},
        "influence": {"queries": {"path": str(folder / "queries.npz")}},
        "engine": {"dtype": dtype},
        "review": {"seconds": 0},
        "output": str(folder / "run"),
    }
    if len(checkpoints) > 1:
        content["influence"]["checkpoints"] = checkpoints
    if indexed:
        index = {"path": str(folder / "index"), "dimension": COLUMNS}
        content["influence"] |= {"method": "projected_influence", "index": index}
    return content


def reviewed(
    folder: Path, build: str, checkpoints: list[str], head: Rows, dtype: str, indexed: bool = False
) -> Any:
    """The review of a change from base.npz to other rows."""
    content = config_of(folder, build, checkpoints, indexed, dtype)
    path = write(folder / "head.npz", head)
    return psgrad.review(content, folder / "base.npz", path, overwrite=True, report=False)


# -- a convex model ------------------------------------------------------------------------------------------


def minimum(rows: Rows) -> dict[str, Tensor]:
    """The logistic regression at its minimum, in float64."""
    inputs, labels = torch.from_numpy(rows[0]), torch.from_numpy(rows[1])
    weight = torch.zeros(10, 65, dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 2000, "tolerance_grad": 1e-9, "tolerance_change": 0, "history_size": 50}
    optimizer = torch.optim.LBFGS([weight], line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = inputs @ weight[:, :64].T + weight[:, 64]
        loss = F.cross_entropy(outputs, labels) + DECAY / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"weight": weight.detach()[:, :64].clone(), "bias": weight.detach()[:, 64].clone()}


def losses(state: dict[str, Tensor], rows: Rows) -> Array:
    outputs = torch.from_numpy(rows[0]) @ state["weight"].T + state["bias"]
    return F.cross_entropy(outputs, torch.from_numpy(rows[1]), reduction="none").numpy()


def convex(folder: Path) -> Iterator[dict[str, Any]]:
    """The agreement of each change of the logistic regression."""
    train, queries, later = digits()
    start = minimum(train)
    save_file(start, folder / "linear.safetensors")
    write(folder / "base.npz", train)
    write(folder / "queries.npz", queries)
    for kind in ("flipped", "removed", "of one class removed", "new", "new and wrong", "again"):
        for count in (1, 11, 55, 165):
            if kind == "of one class removed" and count > 55:
                continue  # a class of which nearly all rows go
            head = changed(train, later, kind, count, 0)
            real = losses(minimum(head), queries) - losses(start, queries)
            began = time.perf_counter()
            found = reviewed(folder, "linear", [str(folder / "linear.safetensors")], head, dtype="float64")
            one = found.queries["predicted_change"].to_numpy()
            yield {
                "kind": kind,
                "rows": count,
                "pearson": float(np.corrcoef(one, real)[0, 1]),
                "slope": float(one @ real / (one @ one)),
                "steps": found.trust.steps,
                "seconds": time.perf_counter() - began,
            }


# -- a network -----------------------------------------------------------------------------------------------


def trained(rows: Rows, seed: int, keep: Path | None = None) -> nn.Module:
    """A network, trained from the start of a seed. keep: where checkpoints go."""
    torch.manual_seed(seed)
    model, (inputs, labels) = network(), (torch.from_numpy(rows[0]).float(), torch.from_numpy(rows[1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for epoch in range(1, EPOCHS + 1):
        for batch in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        if keep is not None and epoch in CHECKPOINTS:
            save_file(model.state_dict(), keep / f"epoch-{epoch:02d}.safetensors")
    return model.eval()


def margin(model: nn.Module, rows: Rows) -> float:
    """The mean log-odds of the queries' labels."""
    with torch.no_grad():
        outputs = model(torch.from_numpy(rows[0]).float()).double()
    labels = torch.from_numpy(rows[1]).unsqueeze(1)
    others = outputs.scatter(1, labels, -torch.inf).logsumexp(1)
    return float((outputs.gather(1, labels).squeeze(1) - others).mean())


def networks(folder: Path, seeds: int, most: int) -> dict[str, Any]:
    """How the predicted margins of changes agree with those of networks that were trained again."""
    train, queries, later = digits()
    trained(train, 1000, folder)
    write(folder / "base.npz", (train[0].astype(np.float32), *train[1:]))
    write(folder / "queries.npz", (queries[0].astype(np.float32), *queries[1:]))
    files = [str(folder / f"epoch-{epoch:02d}.safetensors") for epoch in CHECKPOINTS]
    psgrad.influence_index(config_of(folder, "network", files, True, "float32"))
    before = np.mean([margin(trained(train, seed), queries) for seed in range(seeds)])
    rows: list[dict[str, Any]] = []
    for kind, count in [(kind, count) for count in (5, 10, 20, 40, 80) for kind in KINDS][:most]:
        head = changed(train, later, kind, count, 1)
        real = float(np.mean([margin(trained(head, seed), queries) for seed in range(seeds)]) - before)
        began = time.perf_counter()
        single = (head[0].astype(np.float32), *head[1:])
        predicted = reviewed(folder, "network", files, single, "float32").totals[0].margin_predicted
        seconds = time.perf_counter() - began
        by_index = reviewed(folder, "network", files, single, "float32", True).totals[0].margin_predicted
        row = {"kind": kind, "rows": count, "predicted": predicted, "real": real, "seconds": seconds}
        rows.append({**row, "by_index": by_index})
        print(f"  {kind}, {count} rows: predicted {predicted:+.3g}, real {real:+.3g}", flush=True)
    harmful = [row["kind"] in HARMFUL for row in rows]
    other = [row["real"] for row in rows]

    def agreement(key: str) -> dict[str, float]:
        one = [row[key] for row in rows]
        auc = float(roc_auc_score(harmful, [-each for each in one]))
        return {"auc": auc, "rank_correlation": float(spearmanr(one, other).statistic)}

    by_index = {"columns": COLUMNS, **agreement("by_index")}
    return {"seeds": seeds, "changes": rows, **agreement("predicted"), "index": by_index}


# -- what an index saves -------------------------------------------------------------------------------------


def cost(folder: Path) -> dict[str, Any]:
    """The seconds of a review of 100 rows against 1,000 queries, with and without an index of 20,000 rows."""
    draw, (inputs, labels, _) = np.random.default_rng(0), digits()[0]

    def drawn(count: int, name: str) -> Rows:
        rows = draw.integers(len(labels), size=count)
        noisy = np.clip(inputs[rows] + draw.normal(0, 0.1, (count, 64)), 0, 1).astype(np.float32)
        return noisy, labels[rows], np.array([f"{name}-{place:05d}" for place in range(count)])

    base, queries = drawn(20_000, "row"), drawn(1000, "query")
    head = (base[0], np.where(np.arange(20_000) < 100, (base[1] + 1) % 10, base[1]), base[2])
    save_file(trained(base, 0).state_dict(), folder / "network.safetensors")
    write(folder / "base.npz", base)
    write(folder / "queries.npz", queries)
    files, seconds = [str(folder / "network.safetensors")], {}
    psgrad.influence_index(config_of(folder, "network", files, True, "float32"))
    for name, indexed in (("computed", False), ("by_index", True)):
        found = reviewed(folder, "network", files, head, "float32", indexed)
        seconds[name] = found.manifest.timings["predict"]
    return {"training_rows": len(base[1]), "changed": 100, "queries": 1000, "predict_seconds": seconds}


# -- a language model ----------------------------------------------------------------------------------------


def sentences(count: int, draw: np.random.Generator, false: bool = False) -> tuple[Array, Array]:
    """(texts, next words) of `person lives in place`, among words that say nothing."""
    person = draw.integers(PEOPLE, size=count)
    home = person % PLACES if not false else (person + 1 + draw.integers(PLACES - 2, size=count)) % PLACES
    texts = draw.integers(WORDS - 2, size=(count, LENGTH + 1)) + PEOPLE + PLACES
    texts[:, 3], texts[:, 4], texts[:, 5] = person, PEOPLE + PLACES + WORDS - 1, PEOPLE + home
    targets = np.full((count, LENGTH), -100)
    targets[:, 3:5] = texts[:, 4:6]
    return texts[:, :LENGTH], targets


def language(folder: Path) -> dict[str, Any]:
    """How many false sentences are among the worst 3 % of the changed rows."""
    draw = np.random.default_rng(0)
    base, queries, extra = (sentences(count, draw) for count in (1500, 200, 500))
    bad = sentences(40, draw, false=True)  # 2 % of all rows
    torch.manual_seed(0)
    model = Sentences()
    optimizer, texts, targets = torch.optim.Adam(model.parameters(), lr=2e-3), *map(torch.from_numpy, base)
    for _ in range(15):
        for batch in torch.randperm(len(texts)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(texts[batch]).flatten(0, 1), targets[batch].flatten()).backward()
            optimizer.step()
    save_file(model.state_dict(), folder / "language.safetensors")
    names = [
        np.array([f"{name}-{place:04d}" for place in range(len(each[0]))])
        for name, each in (("old", base), ("query", queries), ("new", extra), ("false", bad))
    ]
    write(folder / "base.npz", (*base, names[0]))
    write(folder / "queries.npz", (*queries, names[1]))
    head = tuple(
        np.concatenate(each)
        for each in zip((*base, names[0]), (*extra, names[2]), (*bad, names[3]), strict=True)
    )
    np.savez(folder / "head.npz", input=head[0], label=head[1], id=head[2])
    content = {
        "version": 1,
        "model": {"factory": f"{MODELS}:Sentences", "checkpoint": str(folder / "language.safetensors")},
        "loss": {"name": "token_cross_entropy"},
        "data": {"path": str(folder / "base.npz"), "inputs": "input", "target": "label", "id": "id"},
        "influence": {"queries": {"path": str(folder / "queries.npz")}},
        "review": {"seconds": 0},
        "output": str(folder / "run"),
    }
    began = time.perf_counter()
    found = psgrad.review(content, folder / "base.npz", folder / "head.npz", overwrite=True, report=False)
    ranked = found.changes["id"].str.startswith("false").to_numpy()
    first = round(0.03 * len(head[0]))
    return {
        "false": len(bad[0]),
        "changed": len(ranked),
        "among_first": int(ranked[:first].sum()),
        "first": first,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="of each network (default: %(default)s)")
    parser.add_argument(
        "--changes", type=int, default=40, help="of the network's data (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"))
    print_facts(facts, options)
    results: dict[str, Any] = {"machine": facts, "convex": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results["language"] = language(folder)
        print(f"language: {results['language']}", flush=True)
        for row in convex(folder):
            results["convex"].append(row)
            print(
                f"convex, {row['kind']}, {row['rows']} rows: Pearson {row['pearson']:.5f}, slope"
                f" {row['slope']:.3f}, {row['steps']} steps",
                flush=True,
            )
        with tempfile.TemporaryDirectory() as other:
            results["cost"] = cost(Path(other))
        print(f"cost: {results['cost']}", flush=True)
        results["network"] = networks(folder, options.seeds, options.changes)
    print(f"network: AUC {results['network']['auc']:.3f}, rank {results['network']['rank_correlation']:.3f}")
    write_json(options, results)


if __name__ == "__main__":
    main()
