"""The golden runs: small runs of the commands on each kind of data and model, and what each leaves, as
numbers and names. `python -m tests.golden_runs` writes what they leave now to golden_runs.json;
tests/test_golden_runs.py compares with it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from safetensors.numpy import load_file, save_file

from psgrad.cli import main
from psgrad.engine.privacy.snapshot import Snapshot

EXPECTED = Path(__file__).with_suffix(".json")
ROWS, FEATURES, CLASSES = 24, 4, 3
KILL = "GOLDEN_RUNS_KILL"  # where this is set, the measure below kills its process in the second pass

MODEL = """\
from torch import nn


def mlp(hidden=5):
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def pixels():
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 2))

"""
MEASURE = f"""\
import os
import signal
from dataclasses import dataclass

import torch

from psgrad.engine.measures.measure import Measure


@dataclass
class Aligned(Measure):
    \"\"\"The inner product with the sum of all gradients, which takes a second pass.\"\"\"

    name = "aligned"
    needs_second_pass = True

    def prepare(self, setting):
        self.total = {{name: torch.zeros_like(p) for name, p in setting.examples.params.items()}}
        self.chunk = {{}}

    def columns(self, gradients):
        self.chunk = gradients.weighted_sum(torch.ones_like(gradients.losses))
        return {{}}

    def keep(self):
        for name, value in self.chunk.items():
            self.total[name] += value
        self.chunk = {{}}

    def columns_again(self, gradients):
        if "{KILL}" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return {{"aligned": gradients.dot(self.total)}}

    def state(self):
        return self.total

    def restore(self, state):
        self.total = dict(state)

    def merge(self, state):
        for name, value in state.items():
            self.total[name] += value
"""
TEXTS = (
    "the cat sat on the mat",
    "a dog ran over the hill and far away",
    "never has a film been this dull",
    "what a fine day it was",
    "a fine day on the hill",
    "the dull dog sat",
)
MEASURES = ["cosine_to_mean", "projected_gradients", "el2n", "layer_norms", "signal_to_noise"]


class Place:
    """A folder in which a run's files are written, and the commands that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        random = np.random.default_rng(0)
        self.x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
        self.y = random.integers(0, CLASSES, ROWS)
        self.ids = [f"row-{row:02d}" for row in range(ROWS)]
        self.config: dict[str, Any] = {
            "version": 1,
            "model": {"factory": "model.py:mlp", "checkpoint": "model.safetensors"},
            "loss": "cross_entropy",
            "data": {"path": "data.npz", "inputs": "x", "target": "y", "id": "uid"},
            "output": "out",
        }
        shapes = {"0.weight": (5, FEATURES), "0.bias": (5,), "2.weight": (CLASSES, 5), "2.bias": (CLASSES,)}
        self.weights("model.safetensors", shapes)
        (folder / "model.py").write_text(MODEL)
        np.savez(folder / "data.npz", x=self.x, y=self.y, uid=np.array(self.ids))

    def weights(self, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        random = np.random.default_rng(1)
        save_file(
            {key: (random.normal(size=shape) / 2).astype(np.float32) for key, shape in shapes.items()},
            self.folder / name,
        )

    def frame(self) -> pd.DataFrame:
        columns = {f"x{column}": self.x[:, column] for column in range(FEATURES)}
        return pd.DataFrame({"uid": self.ids, **columns, "y": self.y})

    def columns(self, path: str) -> None:
        """The data of the config are this file's columns."""
        inputs = [f"x{column}" for column in range(FEATURES)]
        self.config["data"] = {"path": path, "inputs": inputs, "target": "y", "id": "uid"}

    def write_config(self) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))

    def command(self, *words: str, code: int = 0) -> None:
        """`psgrad` with these words, in this process; it leaves with this exit code."""
        self.write_config()
        sys.argv, said = ["psgrad", *words], io.StringIO()
        before, left = Path.cwd(), None
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main()
        except SystemExit as leave:
            left = leave.code
        finally:
            os.chdir(before)
        assert left == code, said.getvalue()


# -- the runs ------------------------------------------------------------------------------------------------


def with_measures(place: Place) -> None:
    (place.folder / "measure.py").write_text(MEASURE)
    place.config["analyze"] = {"measures": [*MEASURES, "measure.py:Aligned"]}
    place.write_config()


def npz_measures(place: Place) -> None:
    with_measures(place)
    place.command("analyze", "config.yaml")


def csv(place: Place) -> None:
    place.frame().to_csv(place.folder / "data.csv", index=False)
    place.columns("data.csv")
    place.command("analyze", "config.yaml", "--no-report")


def parquet(place: Place) -> None:
    place.frame().to_parquet(place.folder / "data.parquet")
    place.columns("data.parquet")
    place.command("analyze", "config.yaml", "--no-report")


def factory(place: Place) -> None:
    place.weights(
        "wide.safetensors", {"0.weight": (7, FEATURES), "0.bias": (7,), "2.weight": (3, 7), "2.bias": (3,)}
    )
    model = {"factory": "model.py:mlp", "kwargs": {"hidden": 7}, "checkpoint": "wide.safetensors"}
    place.config |= {"model": model, "engine": {"dtype": "float64"}}
    place.command("analyze", "config.yaml", "--no-report", "--limit", "10")


def image_folder(place: Place) -> None:
    from PIL import Image

    random = np.random.default_rng(2)
    for row in range(6):
        path = place.folder / "images" / ("cat", "dog")[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    place.weights(
        "pixels.safetensors",
        {"0.weight": (2, 3, 3, 3), "0.bias": (2,), "3.weight": (2, 2 * 6 * 6), "3.bias": (2,)},
    )
    place.config["model"] = {"factory": "model.py:pixels", "checkpoint": "pixels.safetensors"}
    place.config["data"] = {"images": "images"}
    place.command("analyze", "config.yaml")


def pretrained(place: Place, task: str, rows: list[dict[str, str]]) -> None:
    """A tiny model with its tokenizer in `model`, with weights of numpy's, and the rows as jsonl."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.hugging_face import tiny_model

    words = ["[PAD]", "[UNK]", "</s>", *sorted({word for text in TEXTS for word in text.split()})]
    known = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>"
    ).save_pretrained(place.folder / "model")
    tiny_model(task, place.folder / "model")
    redraw(place.folder / "model" / "model.safetensors")
    (place.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del place.config["loss"]
    place.config["model"] = {"pretrained": "model", "task": task}


def redraw(path: Path) -> None:
    """Give the tensors of a file values that are the same with each version of PyTorch."""
    random = np.random.default_rng(3)
    drawn = {
        name: (random.normal(size=old.shape) / 4).astype(np.float32)
        for name, old in sorted(load_file(path).items())
    }
    save_file(drawn, path, metadata={"format": "pt"})


def jsonl_text(place: Place) -> None:
    pretrained(
        place,
        "sequence-classification",
        [{"text": text, "label": f"LABEL_{row % 2}"} for row, text in enumerate(TEXTS)],
    )
    place.config["data"] = {"path": "rows.jsonl", "text": "text", "target": "label"}
    place.command("analyze", "config.yaml", "--no-report")


def adapter(place: Place) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    rows = [dict(zip(("prompt", "completion"), text.split(" ", 1), strict=True)) for text in TEXTS]
    pretrained(place, "causal-lm", rows)
    made = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    base = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    peft.get_peft_model(base, made).save_pretrained(place.folder / "lora")
    redraw(place.folder / "lora" / "adapter_model.safetensors")
    place.config["model"]["adapter"] = "lora"
    place.config["data"] = {"path": "rows.jsonl", "prompt": "prompt", "completion": "completion"}
    place.command("analyze", "config.yaml", "--no-report")


def reference_and_gate(place: Place) -> None:
    random = np.random.default_rng(4)
    np.savez(
        place.folder / "checked.npz",
        x=random.normal(size=(40, FEATURES)).astype(np.float32),
        y=random.integers(0, CLASSES, 40),
        uid=np.array([f"checked-{row}" for row in range(40)]),
    )
    place.config["data"]["path"] = "checked.npz"
    place.command("analyze", "config.yaml", "--no-report", "--output", "checked")
    place.config["data"]["path"] = "data.npz"
    place.config["analyze"] = {"outliers": {"reference": "checked", "fdr": 0.5}}
    place.config["gate"] = {"max_outliers": 0, "nonfinite": "error"}
    np.savez(
        place.folder / "data.npz",
        x=place.x * np.where(np.arange(ROWS) < 4, 8, 1)[:, None].astype(np.float32),
        y=place.y,
        uid=np.array(place.ids),
    )
    place.command("analyze", "config.yaml", "--check", code=1)


def queries(place: Place, **section: Any) -> None:
    random = np.random.default_rng(5)
    np.savez(
        place.folder / "queries.npz",
        x=random.normal(size=(3, FEATURES)).astype(np.float32),
        y=random.integers(0, CLASSES, 3),
        uid=np.array(["query-0", "query-1", "query-2"]),
    )
    place.config["influence"] = {
        "queries": {"path": "queries.npz", "inputs": "x", "target": "y", "id": "uid"},
        **section,
    }


def influence(place: Place) -> None:
    queries(place)
    place.command("influence", "config.yaml")


def index(place: Place) -> None:
    queries(place, method="gradient_dot", index={"path": "index"})
    place.command("influence", "index", "config.yaml")
    place.command("influence", "config.yaml", "--no-report")


def evaluate(place: Place) -> None:
    """A convex model that Newton's method trains, so that retraining is the same everywhere."""
    (place.folder / "model.py").write_text(
        "from torch import nn\n\n\ndef linear():\n    return nn.Linear(4, 3)\n"
    )
    place.weights("linear.safetensors", {"weight": (3, 4), "bias": (3,)})
    place.config["model"] = {"factory": "model.py:linear", "checkpoint": "linear.safetensors"}
    place.config["engine"] = {"dtype": "float64"}
    train = {"optimizer": "newton", "weight_decay": 0.05}
    queries(
        place,
        method="gradient_dot",
        evaluate={"train": train, "subsets": 8, "removals": 5, "ks": [2, 4, 8], "seeds": 2},
    )
    for kind in ("loo", "lds", "removal"):
        place.command("influence", "config.yaml", "--evaluate", kind)


def dp_step(place: Place) -> None:
    """Without noise and with every record in the batch, so that the step is the same each time."""
    place.config["privacy"] = {
        "steps": 20,
        "delta": 0.01,
        "expected_batch_size": ROWS,
        "sampling": {"scheme": "poisson", "sample_rate": 1.0},
        "clipping": {"norm": 0.5},
        "noise": {"multiplier": 0.0},
        "optimizer": {"name": "SGD", "kwargs": {"lr": 1.0}},
    }
    place.command("dp-step", "config.yaml", "--steps", "2")


RUNS: tuple[Callable[[Place], None], ...] = (
    npz_measures,
    csv,
    parquet,
    factory,
    image_folder,
    jsonl_text,
    adapter,
    reference_and_gate,
    influence,
    index,
    evaluate,
    dp_step,
)


# -- what a run leaves ---------------------------------------------------------------------------------------

# Of a run's JSON files, those with numbers of the run; and in them what differs between two runs.
OF_NUMBERS = ("measures.json", "evaluation.json", "step.json")
DIFFERS = re.compile(r"second|time|version|hash|fingerprint|way|bytes|seed|run_id|machine|price")


def summary(folder: Path) -> dict[str, Any]:
    """What the runs in a folder have left: `files` by name, and of each table, page and file of numbers what
    is in it.
    """
    left: dict[str, Any] = {"files": []}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(("out", "index")) or "/logs/" in name or path.name.startswith("."):
            continue
        name = re.sub("[0-9a-f]{16,}", "*", name)
        left["files"].append(name)
        if path.suffix == ".parquet":
            left[name] = table(pd.read_parquet(path))
        elif path.suffix == ".html":
            left[name] = page(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors" and not name.startswith("index"):
            left[name] = {key: numbers(value) for key, value in load_file(path).items()}
        elif path.suffix == ".pt":
            kept = Snapshot.from_bytes(path.read_bytes()).tensors
            left[name] = {key: numbers(value.numpy()) for key, value in sorted(kept.items())}
        elif path.name in OF_NUMBERS:
            left[name] = dict(leaves(json.loads(path.read_text(encoding="utf-8"))))
    return left


def table(frame: pd.DataFrame) -> dict[str, Any]:
    """Each column: numbers in short, or the first and the last word."""
    found: dict[str, Any] = {"rows": len(frame)}
    for name in frame.columns.drop("fingerprint", errors="ignore"):
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            found[str(name)] = numbers(column.to_numpy(dtype=np.float64, na_value=np.nan))
        else:
            found[str(name)] = [str(column.iloc[0]), str(column.iloc[-1])] if len(frame) else []
    return found


def numbers(values: np.ndarray[Any, Any]) -> list[float]:
    """The first, the last, the mean, the mean square and how many are finite."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return [0]
    return [finite[0], finite[-1], finite.mean(), np.square(finite).mean(), finite.size]


def page(text: str) -> dict[str, list[str]]:
    def inside(tag: str) -> list[str]:
        found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, flags=re.DOTALL)
        return [" ".join(re.sub(r"<[^>]+>", " ", each).split()) for each in found]

    return {"headings": [*inside("h1"), *inside("h2"), *inside("h3")], "tables": inside("thead")}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in plain values, by path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if not DIFFERS.search(str(key)):
            yield from leaves(inner, f"{name}/{key}")
    if isinstance(value, int | float) and np.isfinite(value):
        yield name, value


def left_by(run: Callable[[Place], None], folder: Path) -> dict[str, Any]:
    run(Place(folder))
    return summary(folder)


def write() -> None:
    found = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[run.__name__] = left_by(run, Path(folder))
    lines = [
        f'"{run}": {{\n' + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in left.items()) + "\n}"
        for run, left in found.items()
    ]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
