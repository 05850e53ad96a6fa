"""Every operator of PyTorch's database: right in value, vjp and both under vmap, or refused by name. Never a wrong number."""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.transforms.rules import registry
from tests.engine.transforms.operators import entries, judge, judge_twice
from tests.engine.transforms.refused import REFUSED, UNJUDGED, UNJUDGED_TWICE

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated operators, which are in the database too
DATABASE = entries()

# What the networks and losses of the foundation reach, as the database calls it. None of it may ever be refused (but for draws,
# and for batch statistics).
FOUNDATION = """
    t mm addmm bmm mv matmul view view_as reshape flatten unflatten clone expand expand_as contiguous squeeze unsqueeze transpose permute
    mT movedim select split unbind chunk narrow_copy cat stack hstack repeat tile roll flip index_select gather scatter scatter_add
    nn.functional.linear
    add sub mul div.no_rounding_mode true_divide neg abs log log1p exp pow sqrt rsqrt reciprocal square sin cos tanh sigmoid erf
    sum mean var std var_mean amax amin max.reduction_with_dim min.reduction_with_dim maximum minimum clamp where masked_fill tril triu
    cumsum logsumexp softmax log_softmax norm linalg.norm linalg.vector_norm einsum outer eq ne lt le gt ge any all argmax logical_not
    zeros_like ones_like full_like new_zeros new_ones new_full copysign sgn sign xlogy
    nn.functional.relu nn.functional.relu6 nn.functional.gelu nn.functional.silu nn.functional.elu nn.functional.selu nn.functional.celu
    nn.functional.leaky_relu nn.functional.softplus nn.functional.softsign nn.functional.mish nn.functional.hardswish
    nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.glu nn.functional.prelu nn.functional.logsigmoid
    nn.functional.tanhshrink nn.functional.threshold nn.functional.cross_entropy nn.functional.mse_loss nn.functional.l1_loss
    nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
    nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.max_pool1d
    nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d
    nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d
    nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d nn.functional.pad.constant
    nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.circular nn.functional.layer_norm nn.functional.group_norm
    nn.functional.rms_norm nn.functional.instance_norm nn.functional.local_response_norm nn.functional.embedding
    nn.functional.normalize nn.functional.cosine_similarity nn.functional.unfold nn.functional.pixel_shuffle
"""


@pytest.mark.parametrize("name", [name for name in DATABASE if name not in REFUSED and name not in UNJUDGED])
def test_right(name: str) -> None:
    verdict = judge(DATABASE[name])
    assert verdict.wrong == []
    assert verdict.refusals == []


@pytest.mark.parametrize("name", [name for name in DATABASE if name in REFUSED])
def test_right_or_refused_by_name(name: str) -> None:
    verdict = judge(DATABASE[name])
    words = REFUSED[name].split()
    assert verdict.wrong == []
    assert verdict.refusals, "it works now: take it out of refused.py"
    assert [refusal for refusal in verdict.refusals if not any(word in refusal for word in words)] == []


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in DATABASE.items()
        if entry.supports_autograd and entry.supports_gradgrad and name not in {**UNJUDGED, **UNJUDGED_TWICE}
    ],
)
def test_right_in_the_second_derivative(name: str) -> None:
    verdict = judge_twice(DATABASE[name])
    assert verdict.wrong == []
    assert name in REFUSED or verdict.refusals == []


def test_the_tables_speak_of_the_database() -> None:
    assert {*REFUSED, *UNJUDGED, *UNJUDGED_TWICE, *FOUNDATION.split()} - set(DATABASE) == set()


def test_the_foundation_is_refused_nowhere() -> None:
    assert set(FOUNDATION.split()) & {*REFUSED, *UNJUDGED, *UNJUDGED_TWICE} == set()


# -- the checker itself -------------------------------------------------------------------------------------------------------------

SLIGHTLY = 1.001


def test_a_vjp_off_by_a_thousandth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.sin.default
    off = registry.DerivativeRule({0: lambda out, x: lambda g: g * torch.cos(x) * SLIGHTLY})
    monkeypatch.setitem(registry._derivatives, op, off)
    assert len(judge(DATABASE["sin"]).wrong) > 0
    assert len(judge_twice(DATABASE["sin"]).wrong) > 0


def test_a_vjp_off_by_a_thousandth_in_its_own_derivative_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.tanh_backward.default
    right = registry._derivatives[op].vjp
    off = registry.DerivativeRule({0: right[0], 1: lambda out, g, y: lambda h: right[1](out, g, y)(h) * SLIGHTLY})
    monkeypatch.setitem(registry._derivatives, op, off)
    assert judge(DATABASE["tanh"]).wrong == []
    assert len(judge_twice(DATABASE["tanh"]).wrong) > 0


def test_a_batching_off_by_a_thousandth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.sin.default
    monkeypatch.setitem(registry._batchings, op, lambda batch, op, x: op(batch.physical(x)) * SLIGHTLY)
    wrong = judge(DATABASE["sin"]).wrong
    assert len(wrong) > 0
    assert all("vmap" in what for what in wrong)


def test_a_sample_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.sin.default
    monkeypatch.setitem(registry._batchings, op, lambda batch, op, x: op(batch.physical(x)).flip(0))
    assert len(judge(DATABASE["sin"]).wrong) > 0


def test_an_error_without_a_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setitem(registry._batchings, torch.ops.aten.sin.default, fails)
    verdict = judge(DATABASE["sin"])
    assert len(verdict.wrong) > 0
    assert verdict.refusals == []
