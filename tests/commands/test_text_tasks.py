"""psgrad analyze on texts and pretrained models, from a short YAML file: norms are those of the library's own
loss on each row alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import psgrad
from psgrad.commands.setup import PADDING_NOTE
from psgrad.errors import ConfigError
from tests.text_tasks import CASES


@pytest.mark.long
@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float64") for name in CASES),
        *((name, "float32") for name in ("classification", "completion")),
    ],
)
def test_analyze_task_norms_are_those_of_the_librarys_loss_on_each_row_alone(
    name: str, dtype: str, tmp_path: Path
) -> None:
    path = CASES[name].write(tmp_path, dtype=dtype)

    found = psgrad.analyze(path, report=False).samples.sort_values("index")

    expected = CASES[name].norms(tmp_path, getattr(torch, dtype))
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    norms = torch.from_numpy(found["grad_norm"].to_numpy(copy=True)).double()
    torch.testing.assert_close(norms, expected, rtol=tolerance, atol=0)
    assert (found["status"] == "ok").all()


@pytest.mark.long
def test_analyze_rows_of_equal_length_together_where_padding_changes_the_loss(tmp_path: Path) -> None:
    path = CASES["last token"].write(tmp_path)
    manifest = psgrad.analyze(path, report=False).manifest
    assert PADDING_NOTE in manifest.data.notes
    assert any("rows are padded with </s>" in note for note in manifest.data.notes)
    other = CASES["classification"].write(tmp_path / "other")
    assert psgrad.analyze(other, report=False).manifest.data.notes == []


def test_analyze_keeps_a_row_whose_completion_was_cut_away(tmp_path: Path) -> None:
    path = CASES["completion"].write(tmp_path)
    path.write_text(
        path.read_text().replace("prompt: prompt", "max_length: 8, truncation: right, prompt: prompt")
    )
    samples = psgrad.analyze(path, report=False).samples.sort_values("index")
    cut = samples["length"] == 0
    assert 0 < cut.sum() < len(samples)
    assert (samples["status"] == np.where(cut, "skipped", "ok")).all()
    assert (samples["loss"][cut] == 0).all()
    assert (samples["reasons"][cut] == "not judged: no position of it counts in the loss").all()


def test_analyze_refuses_the_loss_of_one_label_for_a_task_with_one_for_each_token(tmp_path: Path) -> None:
    """Of rows with as many tokens as classes it would be a number, of another thing."""
    path = CASES["tokens"].write(tmp_path, extra="loss: cross_entropy")
    with pytest.raises(ConfigError, match="token-classification has a label for each token, and the loss"):
        psgrad.analyze(path, report=False)
