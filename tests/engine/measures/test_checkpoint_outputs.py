"""The passes over checkpoints, against a plain loop over checkpoints and samples; together or one after
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor, nn

from psgrad.engine.execution.chunk_replay import NOT_REPLAYED
from psgrad.engine.gradients import SquareNorms
from psgrad.engine.gradients.terms.numerics import current_flags, samples_to_recompute
from psgrad.engine.measures import checkpoint_passes
from psgrad.engine.measures.builtin import over_checkpoints
from psgrad.engine.measures.builtin.over_checkpoints import (
    CheckpointColumns,
    CheckpointOutputs,
    EL2NOverCheckpoints,
    GraNd,
)
from psgrad.engine.measures.checkpoint_history import History, disagreement, rank_correlation
from psgrad.engine.measures.checkpoint_passes import grouped, plan_together
from psgrad.errors import MeasureError
from tests.engine.measures.checkpoints import (
    WithBuffers,
    gathered,
    in_groups,
    of_checkpoints,
    perceptron,
    plain_norms,
    rows_of,
)

NAMES = ["epoch-0", "epoch-1", "epoch-2"]


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 6, 6, dtype=torch.float64), torch.randint(3, (n,))


def vectors(n: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3,), (2, 1)])
def test_checkpoints_columns_equal_the_loop(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_checkpoints, "grouped", in_groups(*sizes))
    models = [WithBuffers(seed) for seed in range(3)]
    x, y = images(7)
    rows = rows_of(of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3, targets=y))
    history = History.of(NAMES, rows)
    losses, norms = plain_norms(models, F.cross_entropy, x, y)
    torch.testing.assert_close(history["loss"], losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(history["grad_norm"], norms, rtol=1e-10, atol=0)
    outputs = torch.stack([model(x) for model in models], 1).detach()
    probabilities = outputs.softmax(-1)
    of_label = probabilities[torch.arange(7), :, y]
    torch.testing.assert_close(history["confidence"], of_label, rtol=1e-10, atol=0)
    assert torch.equal(history["prediction"], outputs.argmax(-1).double())
    assert torch.equal(history["right"], (outputs.argmax(-1) == y[:, None]).double())
    errors = (probabilities - F.one_hot(y, 3)[:, None]).norm(dim=-1)
    torch.testing.assert_close(history["el2n"], errors, rtol=1e-10, atol=0)


@pytest.mark.long
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_checkpoints_independent_of_chunks_and_resume(
    n: int, chunk_size: int, start: int, together: bool
) -> None:
    models = [perceptron(seed) for seed in range(3)]
    x, y = vectors(n)
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3, targets=y)
    start = min(start, n - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_checkpoints, "grouped", in_groups(*((3,) if together else (1, 1, 1))))
        whole, part = rows_of(setting, n), rows_of(setting, chunk_size, start)
    for name, column in whole.items():
        torch.testing.assert_close(part[name], column[start:], rtol=1e-12, atol=1e-14)


def test_checkpoints_grouped_equals_single_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [WithBuffers(seed).float() for seed in range(3)]
    x, y = images(8)
    result = []
    for sizes in ((3,), (1, 1, 1)):
        monkeypatch.setattr(over_checkpoints, "grouped", in_groups(*sizes))
        result.append(
            History.of(
                NAMES,
                rows_of(of_checkpoints(models, F.cross_entropy, (x.float(),), y, kind="class", classes=3)),
            )
        )
    for name in result[0].values:
        torch.testing.assert_close(result[0][name], result[1][name], rtol=1e-5, atol=1e-6)


def test_checkpoints_imprecise_norm_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every norm that doubts are only noted of is wrong, and in doubt is the first model's first sample
    alone.
    """
    monkeypatch.setattr(over_checkpoints, "grouped", in_groups(3))
    models = [WithBuffers(seed) for seed in range(3)]
    x, y = images(6)
    losses, norms = plain_norms(models, F.cross_entropy, x, y)
    plain, spoilt = checkpoint_passes.per_sample_square_norms, []

    def doubted(*arguments: Any, **options: Any) -> Any:
        result = plain(*arguments, **options)
        if current_flags() is None:
            return result
        samples_to_recompute((result.losses - losses[0, 0]).abs() < 1e-9)
        spoilt.append(True)
        return SquareNorms(
            {name: 4 * each for name, each in result.by_parameter.items()},
            result.losses,
            result.aux,
            result.computed_as,
        )

    monkeypatch.setattr(checkpoint_passes, "per_sample_square_norms", doubted)
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3)
    result = History.of(NAMES, rows_of(setting, 3))["grad_norm"]
    assert spoilt
    torch.testing.assert_close(result[:3], norms[:3], rtol=1e-10, atol=0)
    torch.testing.assert_close(
        result[3:], 2 * norms[3:], rtol=1e-10, atol=0
    )  # a chunk without a doubt is as it was


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1)])
def test_checkpoints_nonfinite_at_one_checkpoint(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_checkpoints, "grouped", in_groups(*sizes))
    models = [perceptron(seed) for seed in range(3)]
    with torch.no_grad():
        models[1][2].weight.mul_(torch.inf)  # type: ignore[operator,union-attr]
    x, y = vectors()
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3, targets=y)
    history = History.of(NAMES, rows_of(setting))
    losses, norms = plain_norms([models[0], models[2]], F.cross_entropy, x, y)
    torch.testing.assert_close(history["loss"][:, [0, 2]], losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(history["grad_norm"][:, [0, 2]], norms, rtol=1e-10, atol=0)
    assert not history.finite[:, 1].any()
    assert history.nonfinite() == {"epoch-1": 7}
    assert history["right"][:, 1].isnan().all()
    assert history["prediction"][:, 1].isnan().all()
    result = gathered(GraNd(), setting)
    assert result.columns["grand"].isnan().all()


def test_checkpoints_nonfinite_sample() -> None:
    models = [perceptron(seed) for seed in range(3)]
    x, y = vectors()
    x[3] = torch.nan
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3, targets=y)
    norms = gathered(GraNd(), setting).columns["grand"]
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(
        norms[others], plain_norms(models, F.cross_entropy, x, y)[1].mean(1)[others], rtol=1e-10, atol=0
    )
    assert norms[3].isnan()


def test_checkpoints_grand_mean_and_deviation() -> None:
    models = [perceptron(seed) for seed in range(3)]
    x, y = vectors()
    norms = plain_norms(models, F.cross_entropy, x, y)[1].numpy()
    messages: list[str] = []
    setting = replace(
        of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3), say=messages.append
    )
    result = gathered(GraNd(), setting)
    np.testing.assert_allclose(result.columns["grand"], norms.mean(1), rtol=1e-10)
    np.testing.assert_allclose(result.columns["grand_std"], norms.std(1, ddof=1), rtol=1e-9)
    np.testing.assert_allclose(result.numbers["rank_correlation"], spearmanr(norms).statistic, rtol=1e-9)
    assert result.numbers["checkpoints"] == NAMES
    assert messages == ([result.numbers["warning"]] if result.numbers["warning"] else [])


def test_checkpoints_el2n_mean_and_deviation() -> None:
    models = [perceptron(seed) for seed in range(3)]
    x, y = vectors()
    result = gathered(
        EL2NOverCheckpoints(),
        of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3, targets=y),
    )
    errors = np.stack([(m(x).softmax(-1) - F.one_hot(y, 3)).norm(dim=-1).detach().numpy() for m in models], 1)
    np.testing.assert_allclose(result.columns["el2n_mean"], errors.mean(1), rtol=1e-10)
    np.testing.assert_allclose(result.columns["el2n_std"], errors.std(1, ddof=1), rtol=1e-9)


def test_checkpoints_ignored_positions() -> None:
    output, target = torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(5, (6, 4))
    target[0, :2], target[1] = -100, -100
    summary = over_checkpoints.checkpoint_summary("token")
    for z, y in zip(output, target, strict=True):
        said, counted = summary(z, y), y != -100
        p = z.softmax(-1)[counted]
        of_label = p[torch.arange(len(p)), y[counted]]
        torch.testing.assert_close(said["confidence"], of_label.mean(), equal_nan=True)
        torch.testing.assert_close(
            said["right"], (p.argmax(-1) == y[counted]).double().mean(), equal_nan=True
        )
    assert "prediction" not in said


def test_checkpoints_columns_by_kind_of_target() -> None:
    binary, value = (
        over_checkpoints.checkpoint_summary("binary"),
        over_checkpoints.checkpoint_summary("value"),
    )
    said = binary(torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.0]))
    assert said["confidence"] == pytest.approx(1 - 1 / (1 + np.exp(-0.7)), rel=1e-6)
    assert (said["right"], set(said)) == (0, {"confidence", "right", "prediction"})
    assert set(value(torch.tensor([0.7]), torch.tensor([0.0]))) == {"prediction"}
    assert over_checkpoints.checkpoint_summary("class")(torch.randn(3), torch.tensor([0.2, 0.3, 0.5])) == {}
    assert over_checkpoints.checkpoint_summary("custom")(torch.randn(3), torch.tensor(1)) == {}


@pytest.mark.sweep
def test_checkpoints_grouping_of_models() -> None:
    x, y = vectors()
    examples = of_checkpoints([perceptron(0)], F.cross_entropy, (x,), y, kind="class").examples
    together = grouped(examples, examples.objective, 8, 4)
    assert together.sizes == [8]
    assert "8 checkpoints at a time" in together.why
    x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    wide = nn.Sequential(
        nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 3)
    ).eval()
    examples = of_checkpoints([wide], F.cross_entropy, (x,), y, kind="class").examples
    alone = grouped(examples, examples.objective, 3, 64)
    assert alone.sizes == [1, 1, 1]
    assert "one checkpoint after another: priced" in alone.why


@pytest.mark.long
def test_checkpoints_grouping_by_memory() -> None:
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    setting = of_checkpoints([perceptron(0).float()], F.cross_entropy, (x,), y, kind="class")

    def sizes(memory: int) -> list[int]:
        examples = replace(setting.examples, options={"memory": memory})
        return grouped(examples, examples.objective, 20, 8).sizes

    assert sizes(1 << 26) == [20]
    assert sizes(1 << 8) == [1] * 20
    all_of_them = plan_together(setting.examples, setting.examples.objective, 20, 8)
    weights = 20 * sum(p.numel() * p.element_size() for p in setting.examples.params.values())
    assert sizes(all_of_them.input_bytes + (all_of_them.peak_bytes + weights) // 2) == [10, 10]


def test_checkpoints_grouping_of_random_and_branching_models() -> None:
    x, y = vectors()

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if bool(x.sum() > 0) else 2 * self.linear(x)  # type: ignore[no-any-return]

    models = [Branching().eval() for _ in range(2)]
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3)
    assert grouped(setting.examples, setting.examples.objective, 2, 4).sizes == [1, 1]
    norms = plain_norms(models, F.cross_entropy, x, y)[1]
    torch.testing.assert_close(
        History.of(NAMES[:2], rows_of(setting))["grad_norm"], norms, rtol=1e-10, atol=0
    )
    drawing = of_checkpoints([perceptron(0).train()], F.cross_entropy, (x,), y, kind="class")
    assert "draws at random" in grouped(drawing.examples, drawing.examples.objective, 2, 4).why


def test_checkpoints_grouping_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_checkpoints, "grouped", in_groups(2, 1))
    x, y = vectors()
    setting = of_checkpoints(
        [perceptron(seed) for seed in range(3)], F.cross_entropy, (x,), y, kind="class", classes=3
    )
    measure = CheckpointOutputs()
    measure.prepare(setting)
    assert [own.name for own in measure.passes()] == ["checkpoints-0-to-1", "checkpoint-2"]
    assert measure.gather(rows_of(setting)).numbers == {
        "checkpoints": NAMES,
        "way": "as the test says",
        "nonfinite": {},
    }


def test_checkpoints_model_is_loaded_when_its_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_checkpoints, "grouped", in_groups(1, 1, 1))
    x, y = vectors()
    setting = of_checkpoints(
        [perceptron(seed) for seed in range(3)], F.cross_entropy, (x,), y, kind="class", classes=3
    )
    loaded: list[str] = []

    def noted(checkpoint: Any) -> Callable[[], Any]:
        return lambda: (loaded.append(checkpoint.name), checkpoint.objective())[1]

    setting = replace(
        setting,
        checkpoints=[replace(checkpoint, objective=noted(checkpoint)) for checkpoint in setting.checkpoints],
    )
    measure = CheckpointOutputs()
    measure.prepare(setting)
    passes = list(measure.passes())
    assert loaded == []
    for count, own in enumerate(passes, 1):
        list(own.run(range(len(setting)), 4))
        assert len(loaded) == count


def test_checkpoints_ranking_disagreement() -> None:
    values = torch.tensor([[1.0, 1.0, 4.0], [2.0, 2.0, 3.0], [3.0, 3.0, 2.0], [4.0, 5.0, 1.0]])
    correlation = rank_correlation(values)
    np.testing.assert_allclose(correlation, [[1, 1, -1], [1, 1, -1], [-1, -1, 1]])
    assert "checkpoints epoch-0 and epoch-2 rank the samples differently" in str(
        disagreement(correlation, NAMES, "grand")
    )
    assert disagreement(rank_correlation(values[:, :2]), NAMES[:2], "grand") is None
    flat = rank_correlation(torch.ones(4, 2))
    assert np.isnan(flat).all()
    assert disagreement(flat, NAMES[:2], "grand") is None


def test_checkpoints_too_few_checkpoints_are_refused() -> None:
    x, y = vectors()
    setting = of_checkpoints([perceptron(0)], F.cross_entropy, (x,), y, kind="class", classes=3, targets=y)
    for measure in (GraNd(), EL2NOverCheckpoints()):
        with pytest.raises(
            MeasureError,
            match=(
                rf"{measure.name} looks at several checkpoints, and analyze\.checkpoints lists 1\n.*at"
                r" least 2"
            ),
        ):
            measure.prepare(setting)
    with pytest.raises(MeasureError, match=r"analyze\.checkpoints lists none"):
        GraNd().prepare(replace(setting, checkpoints=()))


def test_checkpoints_ensemble_replayed() -> None:
    """Chunks of several models together: the tracers' numbers, by programs from the fourth chunk on."""
    models, (x, y) = [perceptron(seed) for seed in range(3)], vectors(27)
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3)
    together = checkpoint_passes.StackedModels.of(setting.examples.objective, models)
    chunk, found = 4, []
    for capture in ("off", "auto"):
        stream = replace(setting.examples, options={"chunk_size": chunk, "capture": capture}).stream
        chunks = list(stream.run(len(x), [CheckpointColumns(0)], together.columns))
        found.append(torch.cat([each.values["moments.grad_norm.0"] for each in chunks]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
    assert stream.counts.replayed == len(x) // chunk - NOT_REPLAYED > 0


def test_checkpoints_ensemble_leaves_its_model_as_it_was() -> None:
    models = [WithBuffers(seed) for seed in range(2)]
    x, y = images(3)
    setting = of_checkpoints(models, F.cross_entropy, (x,), y, kind="class", classes=3)
    before = {name: value.clone() for name, value in models[1].state_dict().items()}
    together = checkpoint_passes.StackedModels.of(setting.examples.objective, models)
    together.columns(None, None, (x,), y)
    assert all(torch.equal(value, before[name]) for name, value in models[1].state_dict().items())
