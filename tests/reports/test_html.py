"""The page: self-contained, small for any number of samples, harmless whatever the data says, and
complete.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from psgrad.quality.judging import rank_samples
from psgrad.reports.analyze_page import render, write_report
from psgrad.reports.analyze_plots import norm_histogram
from psgrad.reports.analyze_terminal import summary
from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample, top_samples
from psgrad.run.results.manifest import read_manifest
from tests.reports import frames

LIMIT_BYTES = 2_000_000
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Every element, attribute and text of a page; tags must close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = self.script = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.script += data
        elif self._open[-1:] != ["style"]:
            self.text += data


def _page(result: AnalyzeResult) -> Page:
    html = written(result)["report.html"].decode()
    assert len(html.encode()) <= LIMIT_BYTES
    page = Page(html)
    assert page.tags.count("script") == 1
    assert not {"iframe", "object", "embed", "link", "form", "base", "foreignobject"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href"):
            assert value.startswith("#") or (tag == "image" and value.startswith("data:image/png;base64,"))
        if name == "src":
            assert value.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,"))
        if name == "alt":
            assert value
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    (policy,) = [
        value for tag, name, value in page.attributes if tag == "meta" and value.startswith("default-src")
    ]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert (
        policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src"
        f" 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "http" not in html.replace("http-equiv", "")
    return page


def written(result: AnalyzeResult) -> dict[str, bytes]:
    """All files of the report, by name."""
    files: dict[str, bytes] = {}
    write_report(result, files.__setitem__)
    return files


@pytest.mark.long
def test_rows_that_are_not_finite_are_counted_and_named() -> None:
    samples = frames.classification(nonfinite=3)
    text = _page(frames.result(samples)).text
    assert "3 samples have a loss or gradient that is not finite" in text
    assert "Not drawn: 3 with a loss or gradient that is not finite" in text
    for identifier in samples.loc[samples["status"] != "ok", "id"]:
        assert identifier in text


@pytest.mark.long
def test_markup_from_ids_classes_texts_and_the_manifest_stays_text() -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}"
    samples = frames.classification(40, nonfinite=2)
    samples["id"] = [f"a\x00\x1b[2J\u202e{evil}{index}" for index in range(40)]
    manifest = {
        "config": {"report": {"title": evil}},
        "model": {"factory": evil, "notes": [evil]},
        "timings": {evil: 1.0},
        "versions": {evil: evil},
        "data": {"source": evil},
    }
    result = AnalyzeResult(
        samples=samples,
        parameters=frames.parameters(3).assign(parameter=evil, computed_as=evil, shape=evil),
        manifest=read_manifest(manifest),
        folder=frames.result(samples).folder,
        top_inputs=[TopSample(identifier, text=evil) for identifier in top_samples(samples, 20)["id"]],
        class_names=[f"{evil}{index}" for index in range(10)],
    )
    page = _page(result)
    assert "<script>alert(1)</script>" in page.text
    assert "{{7*7}}" in page.text
    assert "a\\x00\\x1b[2J\\u202e" in page.text


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "result",
    [
        pytest.param(frames.result(frames.classification(1, nonfinite=0)), id="one row"),
        pytest.param(frames.result(frames.classification(1, nonfinite=1)), id="one row, not finite"),
        pytest.param(frames.result(frames.classification(50, nonfinite=50)), id="nothing finite"),
        pytest.param(frames.result(frames.classification(200, classes=1)), id="one class"),
        pytest.param(
            frames.result(frames.classification(5000, classes=300), class_names=["$x^$ \\frac{ 漢"] * 300),
            id="300 classes",
        ),
        pytest.param(frames.result(frames.classification(200), layers=300), id="300 layers"),
        pytest.param(frames.result(frames.classification(200), layers=0), id="no layers"),
        pytest.param(frames.result(frames.classification(200), inputs=None), id="no inputs"),
        pytest.param(frames.result(frames.regression(), inputs=None), id="regression"),
        pytest.param(frames.result(frames.regression(), inputs="text"), id="text"),
        pytest.param(frames.result(frames.classification(200), manifest={}), id="empty manifest"),
        pytest.param(
            frames.result(rank_samples(frames.regression(9).assign(grad_norm=0.0, loss=0.0), 0.01)),
            id="all zero",
        ),
        pytest.param(
            frames.result(rank_samples(frames.regression(9).assign(loss=-1.0), 0.01)), id="one negative loss"
        ),
        pytest.param(
            frames.result(rank_samples(frames.regression(9000).assign(loss=lambda f: f["loss"] - 1), 0.6)),
            id="many, negative",
        ),
        pytest.param(
            frames.result(frames.regression(9).assign(target=None, prediction=None)), id="no targets"
        ),
        pytest.param(
            frames.result(frames.regression(9).drop(columns=["target", "prediction"])), id="no target columns"
        ),
        pytest.param(
            frames.result(frames.regression(3).assign(target=[np.ones(4)] * 3, prediction=[np.ones(4)] * 3)),
            id="vectors",
        ),
        pytest.param(
            frames.result(frames.classification(90).astype({"target": str, "prediction": str})),
            id="classes by name",
        ),
        pytest.param(
            frames.result(frames.classification(90).astype({"target": "Int64"}).assign(prediction=pd.NA)),
            id="missing predictions",
        ),
    ],
)
def test_every_shape_of_result_makes_a_page(result: AnalyzeResult) -> None:
    assert "This run" in _page(result).text


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["image", "text"])
def test_the_page_is_small_with_the_largest_inputs(kind: str) -> None:
    rng = np.random.default_rng(0)
    samples = frames.classification(400)
    samples["id"] = samples["id"] + "x" * 5000
    inputs = [
        (
            TopSample(identifier, image=rng.integers(0, 256, (3, 256, 320), dtype=np.uint8))
            if kind == "image"
            else TopSample(identifier, text="ü" * 10**6)
        )
        for identifier in top_samples(samples, 300)["id"]
    ]
    manifest = {
        **frames.MANIFEST,
        "timings": {f"phase {index}": 0.1 for index in range(10_000)},
        "model": {"notes": ["n" * 9999] * 999},
    }
    names = ["c" * 5000] * 10
    run = frames.result(samples, manifest=manifest)
    _page(AnalyzeResult(samples, frames.parameters(300), run.manifest, run.folder, inputs, names))


@pytest.mark.sweep
def test_a_million_samples_take_less_than_ten_seconds_and_two_megabytes() -> None:
    result = frames.result(frames.classification(1_000_000))
    files: dict[str, bytes] = {}
    began = time.process_time()
    write_report(result, files.__setitem__)
    assert time.process_time() - began < 10
    assert len(files["report.html"]) <= LIMIT_BYTES
    assert sum(map(len, files.values())) <= 2 * LIMIT_BYTES


@pytest.mark.long
def test_the_same_result_gives_the_same_page() -> None:
    result = frames.result(frames.classification(300))
    assert written(result) == written(result)


def test_the_orders_by_norm_and_by_loss_are_compared_on_the_page_and_on_the_terminal() -> None:
    words = "rank correlation of grad_norm and loss 0.9964; 12 of the first 18 by the one are so by the other"
    agreement = {"other": "loss", "spearman": 0.99645, "top": 18, "shared": 12, "words": words}
    facts = {"decided_by": "review list", "score": "grad_norm", "loss_agreement": agreement}
    run = frames.result(frames.classification(60), manifest={**frames.MANIFEST, "outliers": facts})
    assert words in summary(run).splitlines()
    page = page_of(run)
    assert f"R{words[1:]}." in page
    assert "12 of 18" in page
    assert "--set analyze.outliers.score=loss" in page
    agreement = {**agreement, "other": "grad_norm"}
    by_loss = {**frames.MANIFEST, "outliers": {**facts, "score": "loss", "loss_agreement": agreement}}
    page = page_of(frames.result(frames.classification(60), manifest=by_loss))
    assert "Which training examples are first by loss?" in page
    assert "--set analyze.outliers.score=loss" not in page


VALUES = (("age", 39.0), ("hours per week", 40), ("ids", "3 17 22"), ("missing", None))


def page_of(result: AnalyzeResult) -> str:
    """The page with one figure, which is soon drawn."""
    return render(result, [norm_histogram(result.samples)])


def test_rows_of_a_table_are_shown_with_their_values() -> None:
    samples = frames.classification(60)
    inputs = [TopSample(identity, values=VALUES) for identity in top_samples(samples, 5)["id"]]
    page = page_of(replace(frames.result(samples, inputs=None), top_inputs=inputs))
    table = page.split('id="values"')[1].split("</table>")[0]
    for words in ("age", "hours per week", "39", "40", "3 17 22", "–"):
        assert f">{words}<" in table
    assert table.count("<tr>") == 6
    assert '<a href="#inputs">' in page


def test_classes_of_measures_have_their_names() -> None:
    table = pd.DataFrame(
        {"class": [0, 1], "other_class": [1, 0], "samples": [3, 4], "mean_cosine": [0.5, 0.99996]}
    )
    measure = MeasureResult("cosine", "Cosine", "f", "u", tables={"classes": table})
    facts = {
        "groups": {"by": "class", "each": {"0": {"samples": 3}, "1": {"samples": 4}}},
        "score": "grad_norm",
    }
    samples = frames.classification(60, classes=2).assign(group=lambda frame: frame["target"].astype(str))
    run = frames.result(samples, class_names=["cat", "dog"], manifest={**frames.MANIFEST, "outliers": facts})
    page = page_of(replace(run, measures={"cosine": measure}))
    shown = page.split('id="measure-0-0"')[1].split("</table>")[0]
    assert ">cat<" in shown
    assert ">dog<" in shown
    assert ">0.99996<" in shown
    groups = page.split('id="groups"')[1].split("</table>")[0]
    assert ">cat<" in groups
    assert ">dog<" in groups


@pytest.mark.parametrize(
    ("loss", "unit"),
    [("cross_entropy", "nats"), ("token_cross_entropy", "nats per token"), ("mse", "unit of the loss")],
)
def test_losses_have_the_unit_that_they_have(loss: str, unit: str) -> None:
    page = page_of(
        frames.result(
            frames.classification(60), manifest={**frames.MANIFEST, "config": {"loss": {"name": loss}}}
        )
    )
    assert f"the sample&#39;s own loss ({unit})" in page
    assert f"{unit} per unit of parameter" in page
    assert ("unit of the loss" in page) == (loss == "mse")
