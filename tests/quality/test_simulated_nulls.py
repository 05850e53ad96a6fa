"""The promise of the gate, simulated: of those that are flagged, at most the share that was asked for is
sound, on average.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from psgrad.quality.conformal import grouped_p_values, p_values, q_values
from psgrad.quality.judging import judge
from tests.quality.frames import Array, config, samples, trusted

SIMULATIONS = 500
Draw = Callable[[np.random.Generator, int], Array]

DRAWS: dict[str, Draw] = {
    "log-normal": lambda random, n: random.lognormal(sigma=1.5, size=n),
    "ties": lambda random, n: random.poisson(1.0, size=n).astype("float64"),
    "mostly zero": lambda random, n: np.maximum(random.normal(size=n) - 1.5, 0),
}


def false_share(flagged: Array, outlying: Array) -> float:
    return float((flagged & ~outlying).sum() / max(1, flagged.sum()))


@pytest.mark.parametrize("q", [0.05, 0.2])
@pytest.mark.parametrize(("tests", "known"), [(20, 500), (200, 200), (60, 2000)])
@pytest.mark.parametrize("kind", DRAWS)
def test_false_discovery_rate_below_q(kind: str, tests: int, known: int, q: float) -> None:
    random, draw = np.random.default_rng([tests, known, len(kind)]), DRAWS[kind]
    shares, hits = [], []
    for _ in range(SIMULATIONS):
        outlying = np.arange(tests) < tests // 4
        scores = np.where(outlying, 1e4 + draw(random, tests), draw(random, tests))
        flagged = q_values(p_values(scores, draw(random, known))) <= q
        shares.append(false_share(flagged, outlying))
        hits.append(flagged[outlying].mean())
    assert np.mean(shares) <= q
    assert np.mean(hits) > 0.9, "the rule sees outliers that stand apart"


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWS)
def test_false_discovery_rate_without_outliers(kind: str) -> None:
    """2,000 simulations: their mean is then within 0.02, three standard errors, of the rate, which may be
    just q.
    """
    random, draw = np.random.default_rng(5), DRAWS[kind]
    anyone = [(q_values(p_values(draw(random, 50), draw(random, 499))) <= 0.1).any() for _ in range(2000)]
    assert np.mean(anyone) <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 2000)


@pytest.mark.sweep
def test_false_discovery_rate_of_verdict_in_groups() -> None:
    """Classes whose norms differ tenfold, one of them rare; rows that are not finite; samples that are in the
    reference.
    """
    random, shares, whole, hits = np.random.default_rng(1), [], [], []
    chances = [0.5, 0.3, 0.17, 0.03]

    def drawn(n: int) -> tuple[Array, Array]:
        group = random.choice(4, size=n, p=chances)
        return group, 10.0**group * random.lognormal(size=n)

    for _ in range(SIMULATIONS):
        known_group, known = drawn(600)
        group, norms = drawn(80)
        outlying = np.arange(80) < 12
        norms = np.where(outlying, 1e9 * norms, norms)
        norms[-1] = np.nan
        known[0] = np.nan
        reference = trusted(known, known_group.astype(str))
        done = judge(samples(norms, target=group), config(group_by="class", fdr=0.2, min_group=30), reference)
        flagged = (done.frame["is_outlier_issue"] & (done.frame["status"] == "ok")).to_numpy(bool)
        shares.append(false_share(flagged, outlying))
        hits.append(flagged[outlying].mean())
        rare = group == 3
        whole.append(false_share(p_values(norms, known)[rare] <= 0.05, outlying[rare]))
    assert np.mean(shares) <= 0.2
    assert np.mean(hits) > 0.9
    assert np.mean(whole) > 0.5, "against all samples together, sound ones of the rare class would be flagged"


def test_p_values_valid_within_groups() -> None:
    random = np.random.default_rng(2)
    result = []
    for _ in range(SIMULATIONS):
        known = random.choice(3, size=150)
        labels = np.arange(3).astype(str).astype(object)
        scores = 10.0 ** np.arange(3) * random.exponential(size=3)
        result.append(
            grouped_p_values(
                scores, labels, 10.0**known * random.exponential(size=150), known.astype(str).astype(object)
            )
        )
    for t in (0.05, 0.1, 0.5):
        share = pd.DataFrame(result).le(t).mean()
        assert (share <= t + 3 * np.sqrt(t * (1 - t) / SIMULATIONS)).all()
        assert (share >= t - 0.03 - 3 * np.sqrt(t * (1 - t) / SIMULATIONS)).all(), (
            "and not needlessly careful"
        )
