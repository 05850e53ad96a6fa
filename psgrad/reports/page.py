"""What every page shares: its template's environment, its pictures and texts, all bounded, and what it says
of the run.

Arrays -> small pictures.

Tables of the page: headings that say what a column is, cells in words, and the sample that a row is about.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from PIL import Image

from psgrad.reports.drawing import Plot
from psgrad.reports.words import MISSING, brief, label, number, values_line
from psgrad.results import TopSample
from psgrad.wording import LOSSES_IN_NATS

Array = np.ndarray[Any, Any]

# Bad pixels get a colour that no scaling yields: a grey would pass for data.
NONFINITE_COLOUR = (255, 0, 200)


def to_rgb(image: Array) -> Array:
    """An image [H, W] or [C, H, W] of any value range as uint8 [H, W, 3].

    Bytes are taken as they are, floats within 0..1 as fractions of white; anything else is scaled to its own
    range. One channel is grey, three are RGB, the fourth of four (alpha) is dropped; of any other number the
    mean is shown.

    Raises:
        ValueError: the array is no image.
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"an image has shape [H, W] or [C, H, W], not {list(np.shape(image))}")
    channels = array[:3] if len(array) in (3, 4) else array
    values = channels.astype(np.float64)
    finite = np.isfinite(values)
    scaled = _scale(np.where(finite, values, 0.0), array.dtype, values[finite])
    if len(scaled) != 3:
        scaled = np.broadcast_to(scaled.mean(axis=0), (3, *scaled.shape[1:]))
    pixels = np.clip(np.round(scaled * 255), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    pixels[~finite.all(axis=0)] = NONFINITE_COLOUR
    return pixels


def thumbnail(image: Array, side: int) -> Image.Image:
    """The picture, no side longer than `side` pixels: large ones are averaged down, small ones are left for
    the viewer to enlarge.
    """
    picture = Image.fromarray(to_rgb(image))
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.BOX)
    return picture


def to_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _scale(values: Array, dtype: np.dtype[Any], finite: Array) -> Array:
    if dtype == np.uint8:
        return values / 255
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if np.issubdtype(dtype, np.floating) and low >= 0 and high <= 1:
        return values
    return (values - low) / (high - low) if high > low else np.full_like(values, 0.5)


TEXT_LIMIT = 400
TEXT_LINES = 8
FACT_LIMIT = 300
MAX_NOTES = 20

templates = jinja2.Environment(
    loader=jinja2.PackageLoader("psgrad.reports", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters["number"] = number


def picture_uri(sample: TopSample, side: int) -> str | None:
    """A sample's picture, no side longer than `side` pixels; None where it is none."""
    return None if sample.image is None else data_uri("image/png", to_png(thumbnail(sample.image, side)))


def plot_uri(plot: Plot) -> str:
    """A figure, closed as an image: nothing inside it reaches the page."""
    return (
        data_uri("image/svg+xml", plot.adaptive_svg())
        if plot.vector
        else data_uri("image/png", plot.png(dpi=130, titled=False))
    )


def shown_text(sample: TopSample) -> str | None:
    """A sample's text, or the values of its row on a line; None for a picture."""
    return sample.text if sample.text is not None else values_line(sample.values)


def excerpt(text: str | None) -> str | None:
    """The beginning of a sample's text."""
    if text is None:
        return None
    start = brief(text, TEXT_LIMIT, keep="\n\t")
    lines = start.split("\n")
    return start if len(lines) <= TEXT_LINES else "\n".join([*lines[:TEXT_LINES], "…"])


def title_of(manifest: dict[str, Any], otherwise: str) -> str:
    """The title that the config gives the report."""
    title = at(manifest, "config", "report", "title")
    return brief(str(title), 120) if title else otherwise


def notes_of(manifest: dict[str, Any]) -> list[str]:
    """What was noted when the model was loaded."""
    return [brief(str(note), FACT_LIMIT) for note in at(manifest, "model", "notes") or []][:MAX_NOTES]


def facts_of(manifest: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Where the numbers come from. What the manifest does not hold is left out."""
    versions = at(manifest, "versions") or {}
    timings = at(manifest, "timings") or {}
    check = at(manifest, "self_check") or {}
    loss = at(manifest, "config", "loss")
    revision = at(manifest, "revision")
    candidates = [
        ("Made", made_words(manifest)),
        ("Command", at(manifest, "command_line")),
        (
            "Revision",
            revision
            and f"{revision}, the commit in the config's folder; changes that are not committed are not seen",
        ),
        ("Model", at(manifest, "model", "factory")),
        ("Parameters", _counted(at(manifest, "model", "parameters"))),
        ("Trainable parameters", _counted(at(manifest, "model", "trainable"))),
        ("Checkpoint", at(manifest, "model", "checkpoint")),
        ("Checkpoint SHA-256", at(manifest, "model", "sha256")),
        ("Modules imported", ", ".join(at(manifest, "model", "modules_imported") or [])),
        ("Loss", loss.get("name") if isinstance(loss, dict) else loss),
        ("Data", at(manifest, "data", "source")),
        ("Data SHA-256", at(manifest, "data", "fingerprint")),
        ("Device", at(manifest, "engine", "device")),
        ("Arithmetic", at(manifest, "engine", "dtype")),
        ("Chunk size", at(manifest, "engine", "chunk_size")),
        ("Self-check", _check_words(check)),
        # How long the page itself takes is not known when it is made.
        (
            "Time",
            ", ".join(
                f"{phase} {number(seconds)} s" for phase, seconds in timings.items() if phase != "report"
            ),
        ),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        # As the config names it: the page made again elsewhere is the same page.
        ("Run folder", at(manifest, "config", "output") or folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in candidates if value]


def made_words(manifest: dict[str, Any]) -> str:
    """When the run was made and by which version: 2025-11-22 10:31 UTC by psgrad 0.1.0; empty where neither
    is known.
    """
    created, version = at(manifest, "created"), at(manifest, "versions", "psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    return " ".join(part for part in (when, brief(f"by psgrad {version}", 60) if version else "") if part)


UNKNOWN_UNIT = "unit of the loss"


def loss_unit(manifest: dict[str, Any]) -> str:
    """The unit of a loss: nats for psgrad's own cross-entropies; of any other one the unit is not known."""
    loss = at(manifest, "config", "loss")
    name = loss.get("name") if isinstance(loss, dict) else loss
    return "nats" if name in LOSSES_IN_NATS else UNKNOWN_UNIT


def _check_words(check: dict[str, Any]) -> str | None:
    if not check.get("samples"):
        return None
    return (
        f"{check['samples']} samples compared with a plain one-sample gradient; "
        f"worst relative error {number(check.get('worst_relative_error'))}"
    )


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def at(content: Any, *keys: str) -> Any:
    """The value at a path in nested dicts, or None where the path ends early."""
    for key in keys:
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content


def data_uri(kind: str, data: bytes) -> str:
    """Bytes of a file, to stand where a page names one."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


CELL_LIMIT = 120
CLASS_COLUMNS = ("class", "other_class")  # of measures' tables: classes by their numbers


@dataclass(frozen=True)
class Heading:
    """A column's heading. key: by which the filter knows it; meaning: what it says, with its unit; sorted:
    whether the rows are in its order.
    """

    key: str
    words: str
    numeric: bool = False
    meaning: str = ""
    sorted: bool = False


@dataclass(frozen=True)
class TableRow:
    """Cells in words, one a heading. sample: the row of the dataset that it is about. only: (key, words),
    what of the table of samples belongs to it. differs: places of cells that are set off.
    """

    cells: Sequence[str]
    sample: int | None = None
    only: tuple[str, str] | None = None
    differs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DataTable:
    """A table. name: unlike those of all others on the page; caption: what it holds, for who can't see it;
    note: what is left out.
    """

    name: str
    caption: str
    headings: Sequence[Heading]
    rows: Sequence[TableRow]
    note: str = ""


def table_of(
    name: str,
    caption: str,
    frame: pd.DataFrame,
    limits: tuple[int, int],
    class_names: Sequence[str] | None = None,
) -> DataTable:
    """Any frame as a table: its first (rows, columns), and how many there are. Classes have their names,
    where these are known.
    """
    rows, columns = limits
    shown = frame.iloc[:rows, :columns]
    classes = [class_names is not None and each in CLASS_COLUMNS for each in shown.columns]
    numeric = [
        pd.api.types.is_numeric_dtype(shown.dtypes.iloc[place]) and not classes[place]
        for place in range(shown.shape[1])
    ]
    headings = [
        Heading(key_of(each), words_of(each), is_number)
        for each, is_number in zip(shown.columns, numeric, strict=True)
    ]
    cells = [
        [
            label(value, class_names) if classes[place] else cell(value)
            for value in shown.iloc[:, place].tolist()
        ]
        for place in range(shown.shape[1])
    ]
    left_out = [
        f"{there:,} {what}"
        for there, most, what in ((len(frame), rows, "rows"), (frame.shape[1], columns, "columns"))
        if there > most
    ]
    note = (
        f"The first {rows if len(frame) > rows else len(frame):,} rows of {' and '.join(left_out)} are shown."
        if left_out
        else ""
    )
    return DataTable(
        name, caption, headings, [TableRow(list(each)) for each in zip(*cells, strict=True)], note
    )


def cell(value: Any) -> str:
    """A value in words."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) or value is None or value is pd.NA or value is pd.NaT:
        return number(value)
    if isinstance(value, list | tuple | np.ndarray):
        return listed(value, cell)
    return brief(str(value), CELL_LIMIT) or MISSING


def listed(values: Any, words: Callable[[Any], str], most: int = 12) -> str:
    """The first of several values, and how many more there are."""
    items = list(values)
    shown = ", ".join(words(each) for each in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def key_of(name: Any) -> str:
    """A column's name as the filter takes it: without spaces."""
    return "_".join(brief(str(name), 60).split())


def words_of(name: Any) -> str:
    """A column's or key's name as words."""
    return brief(str(name).replace("_", " "), 60)
