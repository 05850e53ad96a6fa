"""`psgrad diff A B`: which samples came, went, rose and fell between two finished runs, without torch."""

from __future__ import annotations

from pathlib import Path

from psgrad.errors import DataError
from psgrad.quality.references import changed_keys, code_changes, measured_as
from psgrad.quality.run_comparison import changes_of, counts_of, matched, spearman
from psgrad.run.finished import finished_manifest, read_samples
from psgrad.run.results.check import Comparison
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import short_repr

# Digits of a hash that are shown.
_DIGITS = 12
_COLUMNS = ("id", "index", "fingerprint", "status", "is_outlier_issue")


def diff(a: Path, b: Path, *, top: int = 20) -> Comparison:
    """Compare two finished runs; `top` is how many samples of each change are named.

    Raises DataError for a folder that holds no finished run, and for two runs that have no sample in common.
    """
    theirs, ours = finished_manifest(a), finished_manifest(b)
    (score_a, tail_a), (score, tail) = map(_judged_by, (theirs, ours))
    warnings = []
    if (score_a, tail_a) != (score, tail):
        warnings.append(
            f"the runs are judged by different scores, {score_a} ({tail_a}) and {score} ({tail}): their lists"
            " can't be compared"
        )
        score, tail = ("grad_norm", "upper")
    warnings += _differences(theirs, ours)
    before, after = (read_samples(run, _COLUMNS, (score,)) for run in (a, b))
    if score not in before or score not in after:
        warnings.append(f"not both runs have the column {score}: gradient norms are compared")
        score, tail = "grad_norm", "upper"
        before, after = (read_samples(run, (*_COLUMNS, score)) for run in (a, b))
    both = matched(before, after, score, tail)
    counts = counts_of(both)
    if not counts["common"]:
        raise DataError(
            f"{a} and {b} have no sample in common; expected two runs on the same dataset, or on versions"
            " of it",
            hint=(
                "other data, or a data.id in one config alone: samples are matched by their id where"
                " there is one, else by content; run psgrad analyze on both with the same data.id"
            ),
        )
    common = both[both["row_a"].notna() & both["row_b"].notna()]
    return Comparison(
        a=str(a),
        b=str(b),
        score=score,
        tail=tail,
        counts=counts,
        spearman=spearman(common["score_a"], common["score_b"]),
        changes=changes_of(both, tail, top),
        warnings=tuple(warnings),
    )


def _judged_by(run: RunManifest) -> tuple[str, str]:
    return run.score, run.setting("analyze", "outliers", "tail") or "upper"


def _differences(a: RunManifest, b: RunManifest) -> list[str]:
    """What of the two runs is not the same, so that scores may differ for another reason than the data."""
    before, after = measured_as(a), measured_as(b)
    shown = [key for key in changed_keys(before, after) if key not in ("weights", "modules", "code")]
    changed = [f"{key}: {short_repr(before[key], 70)} and {short_repr(after[key], 70)}" for key in shown]
    changed += [f"code: {words}" for words in code_changes(before, after)]
    words = [f"the runs were measured with something else each: {'; '.join(changed)}"] if changed else []
    for what, there, here in (
        ("models differ: the hashes of their weights are", before["weights"], after["weights"]),
        ("data differ: their hashes are", _data_of(a), _data_of(b)),
    ):
        words += (
            [f"the {what} {there[:_DIGITS]} (A) and {here[:_DIGITS]} (B)"]
            if there and here and there != here
            else []
        )
    for name, manifest in (("A", a), ("B", b)):
        if manifest.partial:
            words.append(f"{name} is PARTIAL: it {manifest.partial}")
    return words


def _data_of(run: RunManifest) -> str:
    """The hash of what the rows of a run hold, or of its data's file."""
    return str((run.identity or {}).get("data (its content)") or run.data.fingerprint or "")
