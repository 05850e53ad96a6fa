"""`psgrad analyze` with the measures that make passes of their own, from a config."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from psgrad.run.finished import load_run
from tests.workplace import ROWS, Workplace

NAMES = [
    "hessian_trace",
    "hessian_top_eigenvalue",
    "input_gradient",
    "gradient_x_input",
    "integrated_gradients",
]

MEASURES = [
    {"name": "hessian_trace", "probes": 2},
    {"name": "hessian_top_eigenvalue", "iterations": 2},
    "input_gradient",
    "gradient_x_input",
    {"name": "integrated_gradients", "steps": 2},
]

# Its backward pass has no derivative.
CTC = """\
def loss(output, target):
    length = torch.tensor([2])
    output = output.reshape(4, 1, 3).log_softmax(2)
    return torch.nn.functional.ctc_loss(output, torch.tensor([[1, 2]]), 2 * length, length)
"""


@pytest.mark.sweep
def test_own_pass_columns_and_nonfinite_row(workplace: Workplace) -> None:
    x = workplace.arrays["x"].copy()
    x[5, 2] = np.nan
    workplace.save(x=x)
    workplace.config["analyze"] = {"measures": MEASURES}
    workplace.succeeded()
    samples, run = workplace.samples(), load_run(workplace.folder / "out")
    for name in NAMES:
        meant = [column for column in run.measures[name].meanings if "<" not in column]
        assert name in meant
        for column in meant:
            assert np.isnan(samples[column]).tolist() == [row == 5 for row in range(ROWS)], column
    assert 5 not in run.measures["input_gradient"].arrays["rows"]
    row = torch.tensor(x[0], requires_grad=True)
    loss = F.cross_entropy(workplace.model(row), torch.tensor(workplace.arrays["y"][0]))
    (gradient,) = torch.autograd.grad(loss, row)
    assert samples["input_gradient"][0] == pytest.approx(gradient.norm().item(), rel=1e-5)


@pytest.mark.sweep
def test_own_pass_no_maps_without_inputs(workplace: Workplace) -> None:
    workplace.config |= {"analyze": {"measures": ["gradient_x_input"]}, "report": {"include_inputs": False}}
    workplace.succeeded()
    assert not list((workplace.folder / "out" / "measures").glob("*.safetensors"))
    assert "gradient_x_input_l1" in workplace.samples()


def test_own_pass_options_refused(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": [{"name": "hessian_trace", "probes": 1}]}
    workplace.refused(2, "analyze.measures: hessian_trace: got 1 probes, expected at least 2")
    workplace.config["analyze"] = {"measures": [{"name": "input_gradient", "of": "tagret"}]}
    workplace.refused(2, "input_gradient.of: got 'tagret'", "did you mean target?")


def test_own_pass_without_second_derivative_refused(workplace: Workplace) -> None:
    workplace.use_model("def Model():\n    return nn.Linear(4, 12)\n")
    workplace.use_loss(CTC)
    workplace.config["analyze"] = {"measures": ["hessian_trace"]}
    err = workplace.analyze().err
    assert "the measure hessian_trace needs second derivatives" in err
    assert "aten::_ctc_loss_backward" in err
    assert "take hessian_trace out of analyze.measures" in err
    assert "Traceback" not in err
