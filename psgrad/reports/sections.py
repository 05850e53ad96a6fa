"""The content of a page: facts about its run (the title, when it was made and by which version, where numbers
come from), and typed parts in order, which page.html renders by their type.

A page is a list of sections, and a section a title with parts: text, facts, tables, figures, cards. A
command's module says which sections its result has. The terminal prints the same tables and facts. Texts are
escaped in HTML, unless they are `Markup`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from psgrad.reports.tables import Pairs, Table, TableColumn
from psgrad.reports.words import FACT_LIMIT, brief, number
from psgrad.run.results.manifest import RunManifest, SelfCheckFacts

if TYPE_CHECKING:
    import jinja2

    from psgrad.reports.drawing import Plot


@dataclass(frozen=True)
class Text:
    """A paragraph. style: 'quiet', 'failed', 'differs' or 'loud'."""

    words: str
    style: str = ""
    id: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]
    style: str = ""


@dataclass(frozen=True)
class Subtitle:
    """A heading inside a section. style: 'quiet', 'helps' or 'hurts'."""

    words: str
    style: str = ""


@dataclass(frozen=True)
class Facts:
    """Pairs of (name, value)."""

    pairs: Pairs


@dataclass(frozen=True)
class Meanings:
    """What columns say, and their units, to be unfolded."""

    columns: Sequence[TableColumn]


@dataclass(frozen=True)
class Image:
    """A figure with its words. source: a data URI, or an SVG as Markup. plate: whether it has a white ground.
    title: empty where the section's title is that of the figure.
    """

    title: str
    caption: str
    source: str
    alt: str
    plate: bool = False


def data_uri(kind: str, data: bytes) -> str:
    """Bytes of a file, to stand where a page names one."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def image(plot: Plot) -> Image:
    """A plot, closed as an image: nothing inside it reaches the page."""
    if plot.vector:
        return Image(plot.title, plot.caption, data_uri("image/svg+xml", plot.adaptive_svg()), plot.alt)
    source = data_uri("image/png", plot.png(dpi=130, titled=False))
    return Image(plot.title, plot.caption, source, plot.alt, plate=True)


@dataclass(frozen=True)
class Card:
    """An input of the model: a picture (a data URI) or a text, with words below. sample: its row. original:
    the picture as it is in the dataset.
    """

    words: str = ""
    picture: str | None = None
    alt: str = ""
    text: str | None = None
    sample: int | None = None
    original: str | None = None


@dataclass(frozen=True)
class Cards:
    """Cards side by side."""

    cards: Sequence[Card]

    @property
    def pictures(self) -> bool:
        return any(card.picture for card in self.cards)


@dataclass(frozen=True)
class Fold:
    """Parts to be unfolded by a click on their summary."""

    summary: str
    parts: Sequence[Part]
    style: str = ""


@dataclass(frozen=True)
class Beside:
    """Parts in a narrow column on the left, and others on the right of it."""

    left: Sequence[Part]
    right: Sequence[Part]


Part = Text | Bullets | Subtitle | Facts | Table | Meanings | Image | Card | Cards | Fold | Beside


@dataclass(frozen=True)
class Section:
    """A box with a title. contents: how the page's list of contents names it, by its anchor; empty: not at
    all.
    """

    title: str
    parts: Sequence[Part]
    anchor: str = ""
    contents: str = ""


@dataclass(frozen=True)
class Page:
    """A page. what: what it shows; private: what it reveals; made: when, and by which version. headline:
    figures, (value, what it is). partial: which part of the dataset was analysed, if not all. interactive:
    whether it has the script that sorts, filters and links.
    """

    title: str
    what: str
    private: str
    headline: Pairs
    sections: Sequence[Section | Text]
    made: str = ""
    partial: str = ""
    interactive: bool = False


def render(page: Page) -> str:
    """The page as HTML that needs nothing else and opens offline."""
    script, digest = _script()
    return render_template("page.html", page=page, script=script, digest=digest)


def render_template(name: str, **values: Any) -> str:
    """A page by the name of its template."""
    return _templates().get_template(name).render(**values)


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("psgrad.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["kind"] = lambda part: type(part).__name__
    return templates


@cache
def _script() -> tuple[Markup, str]:
    """The page's script, and the hash by which a browser knows it: the policy lets no other one run."""
    templates = _templates()
    assert templates.loader is not None
    source, _, _ = templates.loader.get_source(templates, "page.js")
    return Markup(source), base64.b64encode(hashlib.sha256(source.encode()).digest()).decode("ascii")


MAX_NOTES = 20


def title_of(manifest: RunManifest, otherwise: str) -> str:
    """The title that the config gives the report."""
    report = manifest.config.get("report")
    title = report.get("title") if isinstance(report, Mapping) else None
    return brief(str(title), 120) if title else otherwise


def made_words(manifest: RunManifest) -> str:
    """When the run was made and by which version: 2025-11-22 10:31 UTC by psgrad 0.1.0; empty where neither
    is known.
    """
    created, version = manifest.created, manifest.versions.get("psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    return " ".join(part for part in (when, brief(f"by psgrad {version}", 60) if version else "") if part)


def this_run(manifest: RunManifest, folder: Path, before: Pairs = ()) -> Section:
    """The last section of a page: the facts of the run behind those of its method, and what was noted when
    the model and the data were loaded.
    """
    said = [*manifest.model.notes, *manifest.data.notes]
    notes = [brief(str(note), FACT_LIMIT) for note in said][:MAX_NOTES]
    facts = Facts([*before, *facts_of(manifest, folder)])
    return Section("This run", [facts, *([Bullets(notes, "quiet")] if notes else [])])


def facts_of(manifest: RunManifest, folder: Path) -> list[tuple[str, str]]:
    """Where the numbers come from. What the manifest does not hold is left out."""
    model, revision = manifest.model, manifest.revision
    commit = "the commit in the config's folder; changes that are not committed are not seen"
    # How long the page itself takes is not known when it is made.
    timings = [f"{phase} {number(took)} s" for phase, took in manifest.timings.items() if phase != "report"]
    facts: list[tuple[str, Any]] = [
        ("Made", made_words(manifest)),
        ("Command", manifest.command_line),
        ("Revision", revision and f"{revision}, {commit}"),
        ("Model", model.name),
        ("Task", model.origin.task),
        ("Adapters", ", ".join(model.origin.adapters)),
        ("Parameters", _counted(model.parameters)),
        ("Trainable parameters", _counted(model.trainable)),
        ("Checkpoint", model.checkpoint),
        ("Checkpoint SHA-256", model.sha256),
        ("Modules imported", ", ".join(model.modules_imported)),
        ("Loss", manifest.loss),
        ("Data", manifest.data.source),
        ("Data SHA-256", manifest.data.fingerprint),
        ("Device", manifest.engine.device),
        ("Arithmetic", _arithmetic(manifest)),
        ("Chunk size", manifest.engine.chunk_size),
        ("Self-check", _check_words(manifest.self_check)),
        ("Time", ", ".join(timings)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        # As the config names it: the page made again elsewhere is the same page.
        ("Run folder", manifest.config.get("output") or folder),
    ]
    return [(name, brief(str(value), FACT_LIMIT)) for name, value in facts if value]


def _arithmetic(manifest: RunManifest) -> str | None:
    """The precision, and what half precision costs."""
    check = manifest.self_check
    if check.worst_norm_error_of_autocast is None:
        return manifest.engine.dtype
    return (
        f"{manifest.engine.dtype}; on {check.samples} samples norms differ from float32's by up to"
        f" {number(check.worst_norm_error_of_autocast)} of themselves"
    )


def _check_words(check: SelfCheckFacts) -> str | None:
    if not check.samples:
        return None
    return (
        f"{check.samples} samples compared with a plain one-sample gradient; "
        f"worst relative error {number(check.worst_relative_error)}"
    )


def _counted(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"
