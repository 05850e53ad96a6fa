"""Models with frozen weights in half precision, from the config to the numbers of each command."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.private_workplace import EXACT, PrivateWorkplace
from tests.workplace import Workplace

HALF = """\
class Model(nn.Sequential):
    def __init__(self, wide=False):
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
        self.float() if wide else self
"""


@pytest.fixture
def workplace(workplace: Workplace) -> Workplace:
    workplace.use_model(HALF)
    workplace.config["analyze"] = {"trainable": ["2.*"], "measures": []}
    return workplace


@pytest.mark.long
def test_analyze_gives_the_numbers_of_the_wide_model(workplace: Workplace) -> None:
    workplace.succeeded()
    workplace.config["model"]["kwargs"] = {"wide": True}
    workplace.succeeded("--output", "wide")
    narrow, wide = workplace.samples(), workplace.samples("wide")
    assert np.array_equal(narrow["grad_norm"], wide["grad_norm"])
    assert workplace.manifest()["model"]["trainable"] == 18
    assert workplace.manifest()["model"]["parameters"] == 43


def test_analyze_trainable_without_a_match(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"trainable": ["3.*"]}
    workplace.refused(2, "analyze.trainable: no parameter matches '3.*'")


@pytest.mark.long
def test_dp_step_gives_the_numbers_of_the_wide_model(workplace: Workplace) -> None:
    from safetensors.torch import load_file

    private = PrivateWorkplace(workplace)
    private.config["engine"] = {"verify": 0}
    private.privacy.update({**EXACT, "trainable": ["2.*"], "steps": 2})
    private.succeeded()
    private.config["model"]["kwargs"] = {"wide": True}
    private.config["output"] = "wide"
    private.succeeded()
    narrow, wide = (
        load_file(next((workplace.folder / output).glob("**/*.safetensors"))) for output in ("out", "wide")
    )
    assert narrow.keys() == wide.keys()
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in wide)
