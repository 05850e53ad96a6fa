"""How often intervals of a linear datamodeling score hold what they are intervals of, where that is known.

    python benchmarks/influence_intervals.py [--only NAME ...] [--repeats N] [--json FILE]

Predictions and outcomes of S subsets are normal with a known correlation, so that the rank correlation over
all subsets is known, too. Queries share the subsets: a part of the variance is common to all of them. A score
is the mean over queries of the rank correlation over the S subsets. Two numbers could be meant by its
interval:

    all     the rank correlation over infinitely many subsets
    such    the mean score over draws of S subsets, which is less: 3 (rho - tau) / (S + 1) less, tau being
            Kendall's correlation (Moran, 1948)

For each interval it prints how often it holds either of them, how far its middle is from either, in standard
errors, how often the score itself is outside, and its width in standard errors of the score (3.92 for a
normal one with a known error). What `psgrad influence --evaluate` takes is "jackknife, Fisher's z".
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from scipy import stats
from script import command_line, write_json

from psgrad.engine.influence.evaluation.statistics import (
    Array,
    Interval,
    interval_of,
    spearman,
)

SUBSETS, CORRELATIONS = (20, 50, 100, 200), (0.5, 0.77, 0.92)
QUERIES = {"one query": (1, 0.0), "20 queries": (20, 0.3)}
RESAMPLES, CONFIDENCE = 300, 0.95
_TAIL = (1 - CONFIDENCE) / 2


def drawn(count: int, queries: int, shared: float, correlation: float, random: np.random.Generator) -> Array:
    """[2, queries, count]: predictions and outcomes with this correlation; shared: of the variance."""
    one, other = (
        np.sqrt(shared) * random.standard_normal((1, count))
        + np.sqrt(1 - shared) * random.standard_normal((queries, count))
        for _ in range(2)
    )
    return np.stack([one, correlation * one + np.sqrt(1 - correlation**2) * other])


def scores(pairs: Array, counts: Array) -> Array:
    """[resamples]: the mean over queries of the rank correlation, each subset as often as `counts`
    [resamples, count] says.
    """
    drawn_rows = [np.repeat(np.arange(len(each)), each.astype(int)) for each in counts]
    return np.array(
        [np.nan_to_num(spearman(*pairs[:, :, rows].swapaxes(1, 2))).mean() for rows in drawn_rows]
    )


def intervals(pairs: Array, random: np.random.Generator) -> tuple[float, dict[str, Interval]]:
    """(the score, name -> its interval)."""
    count = pairs.shape[2]
    score = float(scores(pairs, np.ones((1, count)))[0])
    bootstrap = scores(pairs, random.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(float))
    halves = np.zeros((RESAMPLES, count))
    np.put_along_axis(halves, random.random(halves.shape).argsort(1)[:, : count // 2], 1.0, 1)
    by_halves = scores(pairs, halves)
    without = scores(pairs, 1 - np.eye(count))
    error = float(np.sqrt((count - 1) * without.var()))
    corrected = count * score - (count - 1) * float(without.mean())
    quantile = float(stats.t.ppf(1 - _TAIL, count - 1))
    low, high = np.quantile(bootstrap, [_TAIL, 1 - _TAIL])
    first, last = np.quantile(by_halves, [_TAIL, 1 - _TAIL])
    middle = float(by_halves.mean())
    return score, {
        "basic": (2 * score - high, 2 * score - low),
        "percentile": (low, high),
        "bca": _bca(score, bootstrap, without),
        "halves": (first, last),
        "halves, centred": (score + first - middle, score + last - middle),
        "jackknife": (score - quantile * error, score + quantile * error),
        "jackknife, Fisher's z": interval_of(score, without, correlation=True),
        "jackknife, bias-corrected": (corrected - quantile * error, corrected + quantile * error),
    }


def _bca(score: float, bootstrap: Array, without: Array) -> Interval:
    """As scipy.stats.bootstrap has it."""
    share = ((bootstrap < score).mean() + (bootstrap <= score).mean()) / 2
    shift = stats.norm.ppf(share)
    away = without.mean() - without
    skew = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    ends = []
    for tail in (_TAIL, 1 - _TAIL):
        moved = shift + stats.norm.ppf(tail)
        ends.append(np.quantile(bootstrap, stats.norm.cdf(shift + moved / (1 - skew * moved))))
    return float(ends[0]), float(ends[1])


def case(name: str, count: int, ranked: float, repeats: int) -> list[dict[str, Any]]:
    """The row of each interval. ranked: the rank correlation over all subsets."""
    random = np.random.default_rng([count, round(100 * ranked)])
    correlation = 2 * np.sin(np.pi * ranked / 6)
    kendall = 2 / np.pi * np.arcsin(correlation)
    targets = {"all": ranked, "such": ranked - 3 * (ranked - kendall) / (count + 1)}
    found = [intervals(drawn(count, *QUERIES[name], correlation, random), random) for _ in range(repeats)]
    values = np.array([score for score, _ in found])
    error = float(values.std(ddof=1))
    rows = []
    for kind in found[0][1]:
        low, high = np.array([each[kind] for _, each in found]).T
        row = {"queries": name, "subsets": count, "correlation": ranked, "interval": kind}
        row["excludes_score"] = float(((values < low) | (values > high)).mean())
        row["width"] = float((high - low).mean() / error)
        for target, value in targets.items():
            row[f"holds_{target}"] = float(((low <= value) & (value <= high)).mean())
            row[f"middle_{target}"] = float(((low + high) / 2 - value).mean() / error)
        row["bias"], row["error"] = float(values.mean() - ranked), error
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line("Coverage of intervals of linear datamodeling scores.", only=QUERIES)
    parser.add_argument("--repeats", type=int, default=300, help="samples of each case")
    arguments = parser.parse_args()
    rows = []
    for name, count, ranked in product(arguments.only, SUBSETS, CORRELATIONS):
        of_case = case(name, count, ranked, arguments.repeats)
        rows += of_case
        error, bias = of_case[0]["error"], of_case[0]["bias"]
        print(f"\n{name}, {count} subsets, {ranked}: error {error:.4f}, bias {bias:+.4f}")
        print(
            f"{'':<28}{'all':>7}{'such':>7}{'middle - all':>14}{'- such':>8}{'excluded':>10}{'width':>7}",
            flush=True,
        )
        for row in of_case:
            print(
                f"{row['interval']:<28}{row['holds_all']:>7.1%}{row['holds_such']:>7.1%}"
                f"{row['middle_all']:>14.2f}{row['middle_such']:>8.2f}{row['excludes_score']:>10.1%}{row['width']:>7.2f}",
                flush=True,
            )
    write_json(arguments, {"repeats": arguments.repeats, "resamples": RESAMPLES, "rows": rows})


if __name__ == "__main__":
    main()
