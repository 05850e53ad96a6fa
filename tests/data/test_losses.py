"""Losses of one sample, against torch's batched losses, and the targets that they can't use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.config import LossConfig
from psgrad.config.plugin_names import OWN
from psgrad.data.loss import Criterion, resolve_loss
from psgrad.data.targets import check_targets
from psgrad.engine.transforms import grad, grad_and_value, vmap
from psgrad.errors import EXIT_RUNTIME, ConfigError, DataError, LossError

CLASSES = 4
WEIGHT = [0.3, 2.0, 0.0, 1.0]  # 0.3 is another number in float32


def criterion(name: str, **options: Any) -> Criterion:
    return resolve_loss(LossConfig(name=name, **options), Path())


def losses(name: str, output: Tensor, target: Tensor, **options: Any) -> Tensor:
    function = criterion(name, **options).function
    return torch.stack([function(*sample) for sample in zip(output, target, strict=True)])


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


# -- Values --------------------------------------------------------------------------------------------------


def test_every_name_has_a_function_and_a_kind() -> None:
    kinds = {name: criterion(name).kind for name in OWN["losses"]}
    assert kinds == {
        "cross_entropy": "class",
        "token_cross_entropy": "token",
        "nll": "class",
        "bce_with_logits": "binary",
        "mse": "value",
        "l1": "value",
        "huber": "value",
    }


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"weight": WEIGHT}, {"weight": WEIGHT, "label_smoothing": 0.2}]
)
def test_cross_entropy_is_torchs_without_the_mean(options: dict[str, Any]) -> None:
    output, target = torch.randn(6, CLASSES).double(), labels(6)
    tensors = (
        {**options, "weight": torch.tensor(WEIGHT, dtype=torch.float64)} if "weight" in options else options
    )
    got = losses("cross_entropy", output, target, **options)
    expected = F.cross_entropy(output, target, reduction="none", **tensors)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_cross_entropy_of_positions_is_their_mean() -> None:
    output, target = torch.randn(3, CLASSES, 2, 5), labels(3, 2, 5)
    expected = F.cross_entropy(output, target, reduction="none").mean(dim=(1, 2))
    torch.testing.assert_close(losses("cross_entropy", output, target), expected)
    # As many classes as positions: torch itself would read such a sample as a batch.
    output, target = torch.randn(3, CLASSES, CLASSES), labels(3, CLASSES)
    torch.testing.assert_close(
        losses("cross_entropy", output, target), F.cross_entropy(output, target, reduction="none").mean(dim=1)
    )


def test_cross_entropy_of_probabilities() -> None:
    output, target = torch.randn(3, CLASSES), torch.rand(3, CLASSES)
    torch.testing.assert_close(
        losses("cross_entropy", output, target), F.cross_entropy(output, target, reduction="none")
    )


def test_token_cross_entropy_is_the_mean_over_the_tokens_that_count() -> None:
    output, target = torch.randn(3, 5, CLASSES), labels(3, 5)
    target[0, 2:] = -100
    target[1] = -100
    got = losses("token_cross_entropy", output, target)

    torch.testing.assert_close(got[0], F.cross_entropy(output[0, :2], target[0, :2]))
    assert got[1] == 0
    torch.testing.assert_close(got[2], F.cross_entropy(output[2], target[2]))


@pytest.mark.parametrize("kind", ["label", "positions", "weight", "tokens", "probabilities", "binary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_confident_sample_keeps_its_digits(kind: str, dtype: torch.dtype) -> None:
    """p - 1 in the logits' own type is zero, or has few digits, from a margin of 17 on."""
    torch.manual_seed(0)
    for margin in (3, 9, 14, 17, 20, 26):
        target = labels()
        if kind == "positions":
            target = labels(3)
        elif kind == "tokens":
            target = labels(5)
        one_hot = F.one_hot(target, CLASSES)
        one_hot = one_hot.t() if kind == "positions" else one_hot
        output = (torch.randn(one_hot.shape) + margin * one_hot).to(dtype)
        name, options = {
            "weight": ("cross_entropy", {"weight": [0.5, 2.0, 3.0, 1.0]}),
            "tokens": ("token_cross_entropy", {}),
        }.get(kind, ("cross_entropy", {}))
        if kind == "probabilities":
            target = one_hot.to(torch.float32)
        elif kind == "binary":
            name, target = "bce_with_logits", one_hot.to(torch.float32)
            output = (margin * (2.0 * one_hot - 1)).to(dtype)
        function = criterion(name, **options).function
        (loss, gradient), (exact_loss, exact) = (
            _loss_and_gradient(function, logits, target) for logits in (output, output.double())
        )
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            gradient.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
        )
        assert float(exact_loss) > 0


def _loss_and_gradient(
    function: Callable[..., Tensor], output: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Of a batch of one, by psgrad's own transforms."""
    gradients, values = vmap(lambda z, t: grad_and_value(function)(z, t))(output[None], target[None])
    return values[0], gradients[0]


def test_all_ignored_has_a_zero_gradient() -> None:
    for name, shape in (
        ("token_cross_entropy", (5, CLASSES)),
        ("cross_entropy", (CLASSES, 5)),
        ("cross_entropy", (CLASSES,)),
    ):
        output = torch.randn(*shape, requires_grad=True)
        target = torch.full((5,), 9) if len(shape) == 2 else torch.tensor(9)
        (gradient,) = torch.autograd.grad(criterion(name, ignore_index=9).function(output, target), output)
        assert (gradient == 0).all()


def test_nll() -> None:
    output, target = torch.randn(3, CLASSES).log_softmax(1), labels(3)
    torch.testing.assert_close(losses("nll", output, target), F.nll_loss(output, target, reduction="none"))
    output, target = torch.randn(3, CLASSES, 5).log_softmax(1), labels(3, 5)
    torch.testing.assert_close(
        losses("nll", output, target), F.nll_loss(output, target, reduction="none").mean(dim=1)
    )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mse", {}, F.mse_loss),
        ("l1", {}, F.l1_loss),
        ("huber", {"delta": 0.3}, lambda *x, **k: F.huber_loss(*x, delta=0.3, **k)),
        ("bce_with_logits", {}, F.binary_cross_entropy_with_logits),
    ],
)
def test_elementwise_losses_are_means_over_one_sample(
    name: str, options: dict[str, Any], expected: Callable[..., Tensor]
) -> None:
    output, target = torch.randn(4, 3), torch.rand(4, 3)
    torch.testing.assert_close(
        losses(name, output, target, **options), expected(output, target, reduction="none").mean(dim=1)
    )
    # One output per sample, targets without an axis of their own, of an integer type.
    output, target = torch.randn(4, 1), torch.tensor([0, 1, 1, 0])
    torch.testing.assert_close(
        losses(name, output, target, **options), expected(output[:, 0], target.float(), reduction="none")
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", sorted(OWN["losses"]))
def test_runs_inside_transforms(name: str, smoothing: float) -> None:
    output = torch.randn(4, 5, CLASSES) if name == "token_cross_entropy" else torch.randn(4, CLASSES)
    target = {"token": labels(4, 5), "class": labels(4)}.get(criterion(name).kind, torch.rand(4, CLASSES))
    options = (
        {"label_smoothing": smoothing, "weight": WEIGHT, "ignore_index": 1}
        if name in ("cross_entropy", "token_cross_entropy")
        else {}
    )
    function = criterion(name, **options).function

    got = vmap(grad(function))(output, target)

    for row in range(4):
        one = output[row].clone().requires_grad_()
        torch.testing.assert_close(got[row], torch.autograd.grad(function(one, target[row]), one)[0])


# -- Misfits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "output", "target"),
    [
        ("cross_entropy", (5, CLASSES), (5,)),
        ("cross_entropy", (), ()),
        ("token_cross_entropy", (CLASSES, 5), (5,)),
        ("token_cross_entropy", (CLASSES,), ()),
        ("nll", (CLASSES,), (1,)),
    ],
)
def test_shapes_of_labels_that_do_not_fit(
    name: str, output: tuple[int, ...], target: tuple[int, ...]
) -> None:
    with pytest.raises(LossError, match="of one sample don't go together in") as caught:
        criterion(name).function(torch.randn(output), torch.zeros(target, dtype=torch.int64))
    assert f"output {list(output)} and the target {list(target)}" in str(caught.value)


@pytest.mark.parametrize(("output", "target"), [((3,), ()), ((3,), (2,)), ((2, 3), (3, 2)), ((2, 3), (3,))])
def test_nothing_is_broadcast(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(LossError, match="the same shape, but for axes of size 1"):
        criterion("mse").function(torch.randn(output), torch.randn(target))


CUSTOM = """\
import torch
def scalar(output, target): return (output - target).square().sum()
def vector(output, target): return (output - target).square()
def one_element(output, target): return scalar(output, target)[None]
def number(output, target): return 3.0
def whole(output, target): return (output > target).sum()
class Module(torch.nn.Module): pass
raise_later = 3
"""


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("vector", r"a tensor of shape \[3\] and type torch.float32"),
        ("one_element", r"a tensor of shape \[1\] and type torch.float32"),
        ("number", "an object of type float"),
        ("whole", r"a tensor of shape \[\] and type torch.int64"),
    ],
)
def test_a_loss_that_does_not_return_one_scalar(tmp_path: Path, name: str, got: str) -> None:
    (tmp_path / "losses.py").write_text(CUSTOM)
    custom = resolve_loss(LossConfig(name=f"losses.py:{name}"), tmp_path)
    with pytest.raises(LossError, match=f"the loss losses.py:{name} returned {got} for one sample") as caught:
        custom.function(torch.randn(3), torch.randn(3))
    assert caught.value.exit_code == EXIT_RUNTIME


def test_a_loss_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(CUSTOM)
    custom = resolve_loss(LossConfig(name="losses.py:scalar"), tmp_path)

    assert custom.function(torch.tensor([1.0, 2.0]), torch.zeros(2)) == 5
    assert (custom.kind, custom.modules_imported) == ("custom", ("losses.py",))
    check_targets(custom, None, None)
    with pytest.raises(ConfigError, match="is a class"):
        resolve_loss(LossConfig(name="losses.py:Module"), tmp_path)
    with pytest.raises(ConfigError, match="is of type int"):
        resolve_loss(LossConfig(name="losses.py:raise_later"), tmp_path)
    (tmp_path / "losses.py").write_text("1 / 0")
    with pytest.raises(LossError, match="ZeroDivisionError"):
        resolve_loss(LossConfig(name="losses.py:scalar"), tmp_path)


# -- Targets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cross_entropy", torch.tensor([0, 3, -100])),
        ("cross_entropy", torch.rand(3, CLASSES)),
        ("token_cross_entropy", torch.tensor([[0, 3, -100]])),
        ("nll", torch.tensor([0, 3])),
        ("bce_with_logits", torch.tensor([[0.0, 1.0], [0.5, float("nan")]])),
        ("bce_with_logits", torch.tensor([0, 1])),
        ("mse", torch.tensor([1e9, float("nan"), -float("inf")])),
    ],
)
def test_good_targets(name: str, target: Tensor) -> None:
    check_targets(criterion(name), target, CLASSES)


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("cross_entropy", torch.tensor([0, 1, 4, 9]), "row 12 has the label 4 (2 of 4 rows are out"),
        ("cross_entropy", torch.tensor([1, 2, 3, 4]), "row 13 has the label 4 [^|]*labels that count from 1"),
        ("cross_entropy", torch.tensor([0, -1]), "row 11 has the label -1"),
        ("nll", torch.tensor([-100, 5]), "row 11 has the label 5"),
        ("token_cross_entropy", torch.tensor([[0, 1], [1, 7]]), "row 11 has the label 7 (1 of 2 rows"),
        ("cross_entropy", torch.tensor([1.0, 2.5]), "the targets are of type torch.float32; row 10 holds"),
        ("cross_entropy", torch.tensor([True, False]), "the targets are of type torch.bool; row 10 holds"),
        ("nll", torch.rand(2, CLASSES), "the targets are of type torch.float32"),
        ("cross_entropy", torch.tensor([[0.0, 1.5]]), "row 10 has the target 1.5"),
        ("bce_with_logits", torch.tensor([0.0, 2.0]), "row 11 has the target 2"),
        ("bce_with_logits", torch.tensor([0, -1]), "row 11 has the target -1"),
    ],
)
def test_bad_targets_are_reported_with_their_row(name: str, target: Tensor, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        check_targets(criterion(name), target, CLASSES, lambda row: f"row {row + 10}")
    for part in expected.split("[^|]*"):
        assert part.strip() in str(caught.value)


def test_without_a_number_of_classes_only_negative_labels_are_wrong() -> None:
    check_targets(criterion("cross_entropy"), torch.tensor([0, 1000]), None)
    with pytest.raises(DataError, match="expected labels from 0, or -100"):
        check_targets(criterion("cross_entropy"), torch.tensor([0, -1]), None)


def test_another_ignored_label() -> None:
    check_targets(criterion("cross_entropy", ignore_index=255), torch.tensor([0, 255]), CLASSES)
    with pytest.raises(DataError, match="row 0 has the label -100"):
        check_targets(criterion("cross_entropy", ignore_index=255), torch.tensor([-100, 255]), CLASSES)


def test_a_missing_target() -> None:
    with pytest.raises(DataError, match="the loss mse needs a target, and the data has none"):
        check_targets(criterion("mse"), None, None)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_cross_entropy_reduction_is_over_the_positions_that_count(reduction: str) -> None:
    output, target = torch.randn(5, CLASSES), labels(5)
    target[1] = -100
    loss = criterion("token_cross_entropy", reduction=reduction)
    torch.testing.assert_close(
        loss.function(output, target), F.cross_entropy(output, target, reduction=reduction)
    )
    assert loss.unit == {"mean": "nats per token", "sum": "nats (sum over tokens)"}[reduction]
    assert criterion("cross_entropy").unit == "nats"
    assert criterion("mse").unit is None
