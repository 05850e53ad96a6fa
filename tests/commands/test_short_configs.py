"""One short YAML file for images and a pretrained model, and for sequences of unequal length and an LSTM:
analyze and influence. Norms are those of the library's own loss, or of PyTorch's, on each row alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from tests.hugging_face import tiny_model, transformers
from tests.workplace import run_command

IMAGES = """\
version: 1
model: {pretrained: vit, task: image-classification}
data: {images: photos}
influence: {queries: {rows: [0, 1, 2]}, method: METHOD}
engine: {dtype: float64, verify: 0}
output: runs/photos
"""
SEQUENCES = """\
version: 1
model: {factory: "model.py:tagger"}
loss: cross_entropy
data:
  path: SOURCE
  inputs: {words: words, lengths: {length_of: words}}
  target: kind
influence: {queries: {rows: [0, 1, 2]}, method: METHOD}
engine: {dtype: float64, verify: 0}
output: runs/sequences
"""
MODEL = """\
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 4), nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, words, lengths):
        words, lengths = self.words(words), lengths.cpu()
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


def tagger():
    torch.manual_seed(0)
    return Tagger()
"""
LENGTHS = (4, 9, 2, 4, 7, 9, 1, 4, 3, 2, 8, 4)
KINDS = ("b", "a", "c")
# Influence with a curvature takes up to a minute, and its numbers are tested elsewhere.
each_method = pytest.mark.parametrize(
    "method", ["gradient_dot", pytest.param("influence", marks=pytest.mark.sweep)]
)


def both_commands(
    folder: Path, config: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> pd.DataFrame:
    """The table of samples of analyze, after influence gave a score to each of the three queries."""
    assert len(config.splitlines()) <= 12
    (folder / "config.yaml").write_text(config)
    monkeypatch.chdir(folder)
    for command in ("analyze", "influence"):
        outcome = run_command(
            monkeypatch, capfd, command, "config.yaml", "--no-report", "--output", f"runs/{command}"
        )
        assert outcome.code == 0, outcome.err
    samples = pd.read_parquet(folder / "runs/analyze/samples.parquet").sort_values("index")
    scores = pd.read_parquet(folder / "runs/influence/scores.parquet")
    assert (scores["query_index"] >= 0).sum() == 3 * len(samples)
    assert scores["score"].notna().all()
    return samples


def norm_of(loss: torch.Tensor, model: Any) -> float:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(torch.cat([gradient.flatten() for gradient in gradients]).norm())


@pytest.mark.long
@each_method
def test_image_folder_and_pretrained_model(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"id2label": {0: "dog", 1: "cat"}, "label2id": {"dog": 0, "cat": 1}}
    model = tiny_model("image-classification", tmp_path / "vit", **names).double()
    processor = transformers.ViTImageProcessorPil(size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path / "vit")
    draw, paths = np.random.default_rng(0), []
    for row in range(8):
        paths.append(tmp_path / "photos" / ("cat" if row < 4 else "dog") / f"{row}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (9 + row, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels if row else pixels[:, :, 0]).save(paths[-1])

    samples = both_commands(tmp_path, IMAGES.replace("METHOD", method), monkeypatch, capfd)

    assert samples["id"].tolist() == [path.relative_to(tmp_path / "photos").as_posix() for path in paths]
    for path, norm in zip(paths, samples["grad_norm"], strict=True):
        inputs = processor(Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"].double()
        label = torch.tensor([names["label2id"][path.parent.name]])
        assert norm == pytest.approx(norm_of(model(inputs, labels=label).loss, model), rel=1e-9)


@pytest.mark.long
@each_method
@pytest.mark.parametrize("source", ["rows.parquet", "rows.jsonl"])
def test_sequences_of_unequal_length_and_lstm(
    source: str,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 20, length).tolist() for length in LENGTHS]
    kinds = [KINDS[row % 3] for row in range(len(rows))]
    table = pd.DataFrame({"words": rows, "kind": kinds})
    if source.endswith("parquet"):
        table.to_parquet(tmp_path / source)
    else:
        table.to_json(tmp_path / source, orient="records", lines=True)

    config = SEQUENCES.replace("SOURCE", source).replace("METHOD", method)
    samples = both_commands(tmp_path, config, monkeypatch, capfd)

    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    model: nn.Module = namespace["tagger"]().double()
    for words, kind, norm in zip(rows, kinds, samples["grad_norm"], strict=True):
        output = model(torch.tensor([words]), torch.tensor([len(words)]))
        loss = F.cross_entropy(output, torch.tensor([sorted(KINDS).index(kind)]))
        assert norm == pytest.approx(norm_of(loss, model), rel=1e-9)
