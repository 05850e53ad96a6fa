"""The samples of an analyze run as tables: the samples to look at, the values of the first ranks, and numbers
by class and by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.words import (
    MISSING,
    brief,
    cell,
    group_words,
    identifier,
    key_of,
    label,
    number,
    percent,
    percentile,
    value_words,
    words_of,
)
from psgrad.run.results import AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.run.results.manifest import OutlierFacts
from psgrad.wording import common_prefix, parameter_names

MAX_SAMPLES = 200
MAX_COLUMNS = 26
MAX_VALUE_ROWS, MAX_VALUES = 40, 40
MAX_PARAMETER_ROWS = 300
NAME_LIMIT = 100

# The names of the samples in orange: the first ranks, or those that differ from a reference.
LISTED, UNLIKE = "review list", "unlike the reference"

KNOWN: Mapping[str, tuple[str, str]] = {
    "rank": ("rank", "1 for the sample that is most unlike the others by the score that was asked for"),
    "id": ("id", "of the sample, as the dataset names it"),
    "target": ("label", "what the dataset says"),
    "prediction": ("prediction", "what the model says"),
    "confidence": ("confidence", "the model's probability of its prediction (%)"),
    "group": ("group", "that the sample was compared within"),
    "loss": ("loss", "the sample's own loss ({unit})"),
    "grad_norm": ("gradient norm", "L2 norm of the sample's gradient ({unit} per unit of parameter)"),
    "percentile": (
        "percentile",
        "percentage of samples, of its group where there are groups, that are not more suspect (%)",
    ),
    "p_value": (
        "p-value",
        "conformal: how often a sample of the reference is at least as unusual (probability)",
    ),
    "q_value": (
        "q-value",
        "the p-value after Benjamini and Hochberg: the false discovery rate at which it is named (share)",
    ),
    "outlier_score": ("outlier score", "0 to 1, low is bad (no unit)"),
    "reasons": ("reasons", "why the sample is on a list"),
}
"""The columns that come first, in this order, but for the last one: heading, and meaning."""

_WORDS = {"id", "target", "prediction", "group", "reasons"}  # columns that are no numbers
_NOT_SHOWN = {"index", "fingerprint", "log_norm", "is_outlier_issue", "status", "reasons"}


def score_words(facts: OutlierFacts) -> str:
    """The name of the score that samples are judged by, in words."""
    return "gradient norm" if facts.score in ("grad_norm", "log_norm") else words_of(facts.score)


def listed_words(result: AnalyzeResult) -> str:
    """What the samples in orange are called."""
    return UNLIKE if result.manifest.judged.referenced else LISTED


def nonfinite_ids(samples: pd.DataFrame) -> list[Any]:
    """The ids of the samples that are not finite."""
    return samples.loc[(samples["status"] == "nonfinite").to_numpy(), "id"].tolist()


def listed_samples(samples: pd.DataFrame) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked
    ones never appear.
    """
    ranked = samples[samples["rank"].notna().to_numpy()]
    issue = ranked["is_outlier_issue"].to_numpy(bool)
    issues = ranked[issue].nsmallest(MAX_SAMPLES, "rank")
    others = ranked[~issue].nsmallest(MAX_SAMPLES - len(issues), "rank")
    return pd.concat([issues, others]).sort_values("rank", kind="stable")


def shown_columns(samples: pd.DataFrame) -> list[str]:
    """The columns of the table, in order, as far as there is something in them."""
    present = [
        str(column)
        for column in samples
        if column not in _NOT_SHOWN
        and not (column == "group" and samples[column].nunique() < 2)
        and (column in ("target", "prediction") or samples[column].notna().any())
    ]
    known = [each for each in KNOWN if each in present and (each != "confidence" or has_classes(samples))]
    numeric = [each for each in present if each not in KNOWN and pd.api.types.is_numeric_dtype(samples[each])]
    return [*known, *numeric][:MAX_COLUMNS] + (["reasons"] if "reasons" in samples else [])


def sample_table(result: AnalyzeResult) -> Table:
    """The table of the samples to look at."""
    listed = listed_samples(result.samples)
    columns = [column_of(name, result) for name in shown_columns(result.samples)]
    rows = listed.assign(_differs=disagrees(listed)).to_dict("records")
    caption = "The samples to look at first"
    return table("samples", caption, columns, rows, lambda row: ("prediction",) if row["_differs"] else ())


def values_table(result: AnalyzeResult) -> Table | None:
    """The inputs of the first ranks, where they are rows of a table: a column a value."""
    rows = top_samples(result.samples, len(result.top_inputs)).to_dict("records")
    known = {row["id"]: row for row in rows}
    shown = [each for each in result.top_inputs if each.values and each.id in known][:MAX_VALUE_ROWS]
    if not shown:
        return None
    names = list(dict.fromkeys(name for each in shown for name, _ in each.values))

    def value_of(name: str) -> Writer:
        return lambda row: value_words(row["_values"].get(name))

    about = [name for name in ("rank", "id", "target", "prediction") if name in result.samples]
    columns = [column_of(name, result) for name in about]
    columns += [
        TableColumn(brief(name, 60), value_of(name), True, key_of(name)) for name in names[:MAX_VALUES]
    ]
    things = [{**known[each.id], "_values": dict(each.values)} for each in shown]
    note = f"The first {MAX_VALUES} of {len(names):,} values are shown." if len(names) > MAX_VALUES else ""
    return table("values", "The values of the top samples", columns, things, note=note)


def column_of(name: str, result: AnalyzeResult) -> TableColumn:
    """A column of the table of samples by its name: its heading, and how its values are written."""
    manifest, names = result.manifest, result.class_names
    writers: dict[str, Writer] = {
        "id": identifier,
        "rank": str,
        "target": lambda value: label(value, names),
        "prediction": lambda value: label(value, names),
        "group": lambda value: group_words(value, manifest.judged.groups.by, names),
        "percentile": lambda value: MISSING if pd.isna(value) else percentile(value),
        "confidence": lambda value: MISSING if pd.isna(value) else percent(value),
        "reasons": lambda value: brief(value if isinstance(value, str) else cell(value), 160),
    }
    if name in KNOWN:
        words, meaning = KNOWN[name]
    else:
        brought = [each.meanings[name] for each in result.measures.values() if name in each.meanings]
        words, meaning = words_of(name), brief(brought[-1] if brought else "", 300)
    return TableColumn(
        words,
        lambda row: writers.get(name, number if name in KNOWN else cell)(row[name]),
        numeric=name not in _WORDS,
        key="label" if name == "target" else key_of(name),
        meaning=meaning.replace("{unit}", manifest.loss_unit),
    )


def class_statistics(samples: pd.DataFrame) -> pd.DataFrame:
    """A row a class, most listed samples first: samples, listed, share, nonfinite, median_norm, median_loss,
    differs (a share).
    """
    finite = samples["status"].to_numpy() != "nonfinite"
    frame = pd.DataFrame(
        {
            "target": samples["target"].to_numpy(),
            "norm": samples["grad_norm"].where(finite).to_numpy(),
            "loss": samples["loss"].where(finite).to_numpy(),
            "listed": samples["is_outlier_issue"].to_numpy(bool) & finite,
            "nonfinite": ~finite,
            "differs": disagrees(samples).to_numpy(bool),
        }
    )
    found = frame.groupby("target", observed=True).agg(
        samples=("norm", "size"),
        listed=("listed", "sum"),
        share=("listed", "mean"),
        nonfinite=("nonfinite", "sum"),
        differs=("differs", "mean"),
        median_norm=("norm", "median"),
        median_loss=("loss", "median"),
    )
    return found.sort_values(["listed", "median_norm"], ascending=False, kind="stable")


def shown_parameters(parameters: pd.DataFrame) -> tuple[list[dict[Any, Any]], str]:
    """(a row a parameter, in the order of the model, those with the largest shares where there are too many;
    the beginning that all names have, which is left out of them).
    """
    shown = parameters
    if len(parameters) > MAX_PARAMETER_ROWS:
        shown = parameters.loc[parameters["share"].fillna(0).nlargest(MAX_PARAMETER_ROWS).index.sort_values()]
    prefix = common_prefix(list(map(str, parameters["parameter"])))
    names = parameter_names(list(map(str, shown["parameter"])), NAME_LIMIT, prefix)
    return shown.assign(parameter=names).to_dict("records"), prefix
