"""A training function of the user's: how it is called, and what is said of one that does something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psgrad.errors import ConfigError, ModelError
from psgrad.models.training_functions import resolve_training

HEAD = "import torch\nfrom torch import nn\n\n\n"


def resolved(folder: Path, source: str):  # type: ignore[no-untyped-def]
    (folder / "own.py").write_text(HEAD + source)
    return resolve_training("own.py:train", folder)


def called(folder: Path, source: str) -> nn.Module:
    found = resolved(folder, source)(nn.Linear(2, 1), (torch.ones(3, 2),), torch.zeros(3), 7)
    assert isinstance(found, nn.Module)
    return found


def test_it_gets_model_rows_labels_and_seed_and_returns_the_model(tmp_path: Path) -> None:
    found = called(
        tmp_path,
        "def train(model, inputs, target, seed):\n"
        "    assert inputs[0].shape == (3, 2) and target.shape == (3,)\n"
        "    nn.init.constant_(model.weight, seed)\n"
        "    return model\n",
    )
    assert found.weight.tolist() == [[7, 7]]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (
            "def train(model, inputs, target):\n    return model\n",
            ConfigError,
            ("can't be called as train(model, inputs, target, seed)",),
        ),
        ("def train(model, inputs, target, seed, *, epochs):\n    return model\n", ConfigError, ("epochs",)),
        ("train = 3\n", ConfigError, ("of type int",)),
        (
            "def train(model, inputs, target, seed):\n    pass\n",
            ModelError,
            ("an object of type NoneType", "expected the trained model"),
        ),
        (
            "def train(model, inputs, target, seed):\n    raise ValueError('no rows')\n",
            ModelError,
            ("ValueError: no rows", "own.py:6"),
        ),
        (
            "def train(model, inputs, target, seed):\n    return nn.Linear(2, 4)\n",
            ModelError,
            ("other weights than it was given: bias",),
        ),
        (
            (
                "def train(model, inputs, target, seed):\n    nn.init.constant_(model.bias, float('nan'))\n  "
                "  return model\n"
            ),
            ModelError,
            ("parameter bias is not finite", "diverged"),
        ),
    ],
    ids=["too few", "too many", "no function", "nothing returned", "raises", "another model", "diverged"],
)
def test_what_is_wrong_with_it_is_reported(
    tmp_path: Path, source: str, kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        called(tmp_path, source)
    for word in words:
        assert word in str(caught.value)
