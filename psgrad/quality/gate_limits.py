"""What a gate can decide, from the sizes of the data and of the reference, before any score is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from psgrad.config import GateConfig
from psgrad.config.analysis import OutlierConfig
from psgrad.quality.conformal import resolution, resolution_words
from psgrad.quality.findings import counts_of
from psgrad.quality.gates import evaluate
from psgrad.quality.references import ALL
from psgrad.run.results.manifest import OutlierCounts, OutlierFacts


def undecided_rules(
    gate: GateConfig, outliers: OutlierConfig, samples: int, trusted: int | None
) -> Iterator[str]:
    """A sentence for each rule that can't be passed: without a single outlier it would not be evaluable.

    trusted: the size of the reference, None without one. Samples in groups, and those that are in the
    reference themselves, are not known here, and then nothing is said.
    """
    if trusted is not None and outliers.group_by is not None:
        return
    smallest = resolution({ALL: samples}, {ALL: trusted or 0}, outliers.fdr).smallest
    judged = trusted is not None
    words = resolution_words(smallest, trusted, samples, outliers.fdr, 1)
    facts = OutlierFacts(
        fdr=outliers.fdr,
        decided_by="reference" if judged else "review list",
        evaluable=judged and smallest is not None,
        why_not=words if judged else None,
        smallest_flaggable=smallest,
        counts=OutlierCounts(samples=samples, tested=samples),
    )
    nothing = pd.DataFrame({name: pd.Series([], dtype=str) for name in ("rule", "state", "fingerprint")})
    for outcome in evaluate(gate, nothing, counts_of(nothing), facts, samples):
        if outcome.outcome == "not evaluable":
            yield f"gate.{outcome.rule} can't be passed (exit code 4): {outcome.message}"
