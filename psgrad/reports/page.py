"""Pages: Jinja templates that hold their prose, rendered as HTML that needs nothing else and opens offline.

Texts are escaped, unless they are `Markup`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from psgrad.reports.words import (
    FACT_LIMIT,
    brief,
    cell,
    count,
    flat_words,
    identifier,
    label,
    number,
    percent,
    plural,
    words_of,
)
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import correlation

if TYPE_CHECKING:
    import jinja2

ABOUT_LIMIT = 600  # letters: a source has several papers, a warning two paths
MAX_NUMBERS = 40


def render_template(template: str, **values: Any) -> str:
    """The page of a template with these values."""
    return _templates().get_template(template).render(**values)


def data_uri(kind: str, data: bytes) -> str:
    """Bytes of a file, to stand where a page names one."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


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
    templates.filters |= {
        "about": lambda value: brief(str(value), ABOUT_LIMIT),
        "brief": lambda value, limit: brief(str(value), limit),
        "cell": cell,
        "correlation": correlation,
        "counted": count,
        "fact": lambda value: brief(str(value), FACT_LIMIT),
        "flat": lambda facts: flat_words(facts, ABOUT_LIMIT)[:MAX_NUMBERS],
        "identifier": identifier,
        "label": label,
        "number": number,
        "percent": percent,
        "plural": lambda n, noun: plural(n, noun),
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}",
        "thousands": lambda n: f"{n:,}",
        "words": words_of,
        "image": lambda plot: data_uri("image/svg+xml", plot.svg()),
    }
    assert templates.loader is not None
    script, _, _ = templates.loader.get_source(templates, "page.js")
    # The policy of a page knows its script by this hash, and lets no other one run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    templates.globals |= {"script": Markup(script), "digest": digest}
    return templates


def title_of(manifest: RunManifest, otherwise: str) -> str:
    """The title that the config gives the report."""
    report = manifest.config.get("report")
    title = report.get("title") if isinstance(report, Mapping) else None
    return brief(str(title), 120) if title else otherwise


def about_run(manifest: RunManifest, folder: Path) -> dict[str, Any]:
    """What a page says of its run, by the names in its template: the manifest, when and by which version it
    was made, and its folder as the config names it: the page made again elsewhere is the same page.
    """
    created, version = manifest.created, manifest.versions.get("psgrad")
    when = brief(str(created), 40).replace("T", " ").replace("+00:00", " UTC") if created else ""
    made = " ".join(filter(None, (when, brief(f"by psgrad {version}", 60) if version else "")))
    return {"manifest": manifest, "made": made, "folder": manifest.config.get("output") or folder}
