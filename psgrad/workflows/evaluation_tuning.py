"""Dampings that are chosen by the linear datamodeling score, on subsets and queries that are not reported."""

from __future__ import annotations

from psgrad.config import TuningConfig
from psgrad.engine.influence.evaluation.lds import lds_mean
from psgrad.engine.influence.evaluation.scored import damped, has_damping, score_matrix
from psgrad.errors import InfluenceError
from psgrad.workflows.evaluation_bench import Array, Bench, Fits

Curves = dict[str, dict[float, float]]


def tune(bench: Bench, fits: Fits, tuning: TuningConfig, subsets: Array, outcomes: Array, asked: Array) -> tuple[Curves, dict[str, float]]:
    """(name -> damping -> score, name -> the best damping), of the methods that have one; `fits` has them with it afterwards.

    A damping with which the curvature has no inverse is named, and no candidate. A compared method without any candidate is left out; the
    config's raises InfluenceError.
    """
    curves: Curves = {}
    best: dict[str, float] = {}
    for name in [name for name, (method, _) in fits.items() if has_damping(method)]:
        curve = _curve(bench, name, fits, tuning, subsets, outcomes, asked)
        if not curve:
            if name == bench.main:
                raise InfluenceError(
                    f"with none of the candidate dampings {name} has scores",
                    next_step="add larger ones to influence.evaluate.tuning.dampings",
                )
            del fits[name]
            bench.notes.append(f"left out: {name}, which has no scores with any of the candidate dampings")
            continue
        curves[name] = curve
        best[name] = max(curve, key=lambda damping: curve[damping])
        method, fitted = fits[name]
        fits[name] = damped(method, fitted, bench.places(), best[name])
        if len(curve) > 1 and best[name] in (min(curve), max(curve)):
            bench.notes.append(f"the best damping of {name} is at the end of the candidates: {best[name]:g}")
    return curves, best


def _curve(bench: Bench, name: str, fits: Fits, tuning: TuningConfig, subsets: Array, outcomes: Array, asked: Array) -> dict[float, float]:
    """damping -> score of one method."""
    (method, fitted), queries = fits[name], bench.queries(asked)
    normalize, curve = bench.normalize if name == bench.main else None, {}
    for damping in sorted(set(tuning.dampings)):
        try:
            changed, there = damped(method, fitted, bench.places(), damping)
            curve[damping] = lds_mean(score_matrix(changed, there, queries, normalize), subsets, outcomes)
        except InfluenceError as error:
            bench.notes.append(f"no candidate for {name}: damping {damping:g}, as {error.arrived}")
    return curve
