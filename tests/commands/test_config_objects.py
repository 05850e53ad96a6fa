"""Objects of a program in place of sections of a config."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psgrad
from tests.private_workplace import PRIVACY
from tests.workplace import ROWS, Workplace


def plain_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def tensors_of(place: Workplace) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(place.arrays["x"]), torch.from_numpy(place.arrays["y"])


def norms(place: Workplace) -> list[float]:
    """Of each row's gradient, by autograd one at a time."""
    found = []
    for x, y in zip(*tensors_of(place), strict=True):
        loss = nn.functional.cross_entropy(place.model(x[None]), y[None])
        gradients = torch.autograd.grad(loss, list(place.model.parameters()))
        found.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
    return found


@pytest.mark.parametrize("form", ["dataset", "arrays", "path"])
def test_analyze_of_objects_is_that_of_autograd_and_leaves_them_alone(
    workplace: Workplace, form: str
) -> None:
    inputs, target = tensors_of(workplace)
    data: Any = {
        "dataset": TensorDataset(inputs, target),
        "arrays": (workplace.arrays["x"], workplace.arrays["y"]),
        "path": {"path": "data.npz", "inputs": "x", "target": "y"},
    }[form]
    model = workplace.model.train()
    before = copy.deepcopy(model.state_dict())
    run = psgrad.analyze(model=model, data=data, loss=plain_loss, report=False)
    assert run.samples["grad_norm"].to_numpy() == pytest.approx(norms(workplace), rel=1e-4)
    assert run.folder.is_dir()
    assert not run.folder.is_relative_to(workplace.folder)
    assert model.training
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in before.items())
    assert psgrad.load_run(run.folder).samples.shape == run.samples.shape


def test_config_has_the_keys_that_objects_leave_open(workplace: Workplace) -> None:
    workplace.config["analyze"] = {"measures": ["el2n"]}
    (workplace.folder / "config.yaml").write_text(yaml.safe_dump(workplace.config))
    by_file = psgrad.analyze("config.yaml", model=workplace.model, output="live", report=False)
    assert by_file.folder == Path("live")
    assert "el2n" in by_file.samples
    assert by_file.samples["id"].tolist() == workplace.arrays["uid"].tolist()
    plain = {"analyze": {"measures": ["el2n"]}, "data": workplace.config["data"], "loss": "cross_entropy"}
    by_mapping = psgrad.analyze(plain, model=lambda: copy.deepcopy(workplace.model), report=False)
    assert by_mapping.samples["el2n"].tolist() == by_file.samples["el2n"].tolist()


@pytest.mark.long
def test_influence_and_dp_step_and_plan_of_objects(workplace: Workplace) -> None:
    objects: dict[str, Any] = {
        "model": workplace.model,
        "data": TensorDataset(*tensors_of(workplace)),
        "loss": plain_loss,
    }
    queries = TensorDataset(torch.ones(2, 4), torch.tensor([0, 2]))
    section = {"influence": {"method": "gradient_dot", "measurement": "loss"}}
    found = psgrad.influence(section, queries=queries, report=False, **objects)
    assert len(found.queries) == 2
    with torch.no_grad():
        losses = nn.functional.cross_entropy(
            workplace.model(torch.ones(2, 4)), torch.tensor([0, 2]), reduction="none"
        )
    assert found.queries["measurement"].to_numpy() == pytest.approx(losses.numpy(), rel=1e-5)
    assert psgrad.plan(**objects).rows == ROWS
    step = psgrad.dp_step({"privacy": {**PRIVACY, "steps": 2}}, steps="all", **objects)
    assert len(step.steps) == 2
    assert (step.folder / "public" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"data": 3}, "data is of type int"),
        ({"data": DataLoader(TensorDataset(torch.ones(2, 4)))}, r"data=loader\.dataset"),
        ({"data": (np.ones((3, 4)), np.ones(2))}, "the arrays have 3, 2 rows"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss"),
        ({"model": 3}, "model is of type int"),
        ({"resume": True}, "resume was given together with objects"),
        ({"loss": None}, "loss: missing; it is required"),
    ],
)
def test_objects_that_do_not_fit_are_reported(
    workplace: Workplace, objects: dict[str, Any], words: str
) -> None:
    given = {"model": workplace.model, "data": TensorDataset(*tensors_of(workplace)), "loss": plain_loss}
    with pytest.raises(psgrad.PsgradError, match=words):
        psgrad.analyze(**{**given, **objects})


def test_run_of_objects_is_judged_again_but_not_run_again(workplace: Workplace) -> None:
    objects: Any = {"model": workplace.model, "data": tensors_of(workplace), "loss": plain_loss}
    run = psgrad.analyze(report=False, **objects)
    assert psgrad.check(run.folder).exit_code == 0
    again = {**run.manifest.config, "output": "again"}
    with pytest.raises(psgrad.PsgradError, match="objects that were given to psgrad in Python"):
        psgrad.analyze(again)


def test_results_are_short_as_text(workplace: Workplace) -> None:
    assert len(repr(psgrad.analyze(workplace.config, report=False))) < 1000
