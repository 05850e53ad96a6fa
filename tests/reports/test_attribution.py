"""What a page shows of input attribution: pictures under colours, and pieces of text in them."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import psgrad.reports
from psgrad.reports.analyze_page import render
from psgrad.reports.attribution import MEASURES, attribution_cards, overlaid
from psgrad.reports.spans import (
    LEVELS,
    LOWERS,
    MAX_POSITIONS,
    RAISES,
    Span,
    level_of,
    pieces_of,
    rgb,
    spans_of,
)
from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample
from psgrad.run.results.manifest import read_manifest
from tests.reports.frames import MANIFEST, classification, parameters


def run(
    maps: np.ndarray[Any, Any], inputs: list[TopSample], names: tuple[str, ...] = MEASURES, **arrays: Any
) -> AnalyzeResult:
    """A run of twelve samples whose maps of the largest norms are these, [m, ...]."""
    samples = classification(12, nonfinite=0)
    rows = samples.sort_values("rank")["index"].to_numpy()[: len(maps)]
    kept = {"rows": rows, "map_0": maps.astype(np.float32)} | arrays
    measures = {
        name: MeasureResult(name, name.replace("_", " "), "f", "u", numbers={"of": "loss"}, arrays=kept)
        for name in names
    }
    ids = samples["id"].to_numpy()[rows]
    shown = [TopSample(identity, each.image, each.text) for identity, each in zip(ids, inputs, strict=False)]
    return AnalyzeResult(
        samples, parameters(), read_manifest(MANIFEST), Path("runs/made-up"), shown, measures=measures
    )


def pixels(uri: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")).astype(
        int
    )


# -- colours -------------------------------------------------------------------------------------------------


def test_orange_raises_blue_lowers_and_nothing_is_grey() -> None:
    found = overlaid(np.full((1, 4), 100.0), np.array([[2.0, -2.0, 0.0, 0.5]])).astype(int)[0]
    assert np.abs(found[0] - rgb(RAISES)).max() < 20
    assert np.abs(found[1] - rgb(LOWERS)).max() < 20
    assert np.ptp(found[2]) == 0
    assert np.ptp(found[3]) < np.ptp(found[0])
    assert found[3][0] > found[3][2]  # more red than blue


def test_no_attribution_at_all_is_the_grey_picture() -> None:
    found = overlaid(np.array([[0.0, 255.0]]), np.zeros((1, 2)))
    assert np.ptp(found, axis=2).max() == 0
    assert found[0, 0, 0] < found[0, 1, 0]
    assert level_of(0.0, 0.0) == 0


def luminance(colour: str) -> float:
    parts = rgb(colour) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("level", [level for level in range(-LEVELS, LEVELS + 1) if level])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_are_read_on_every_shade(level: int, theme: str) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5, with the page's own ink, on its own paper."""
    css = (Path(psgrad.reports.__file__).parent / "templates" / "page.css").read_text()
    dark = css.index("prefers-color-scheme: dark")
    rules = css[dark:] if theme == "dark" else css[:dark]
    ink, *papers = (
        re.search(rf"--{name}: (#[0-9a-f]+)", rules).group(1) for name in ("ink", "paper", "wash")
    )  # type: ignore[union-attr]
    *colour, share = map(
        float, re.fullmatch(r"background:rgba\((.+)\)", Span("", level).style).group(1).split(",")
    )  # type: ignore[union-attr]
    for paper in papers:
        mixed = share * np.array(colour) + (1 - share) * rgb(
            paper if len(paper) == 7 else "#" + "".join(2 * x for x in paper[1:])
        )
        assert contrast("#" + "".join(f"{round(part):02x}" for part in mixed), ink) >= 4.5


# -- pictures ------------------------------------------------------------------------------------------------


def test_overlays_say_what_full_colour_is_and_show_it() -> None:
    maps = np.zeros((1, 1, 4, 4))
    maps[0, 0, 1, 2], maps[0, 0, 3, 0] = 0.25, -0.125
    result = run(maps, [TopSample("", np.full((1, 4, 4), 0.5, np.float32))])
    (card,) = attribution_cards(result)
    assert [overlay.title for overlay in card.overlays] == [name.replace("_", " ") for name in MEASURES]
    assert card.rank == "1"
    assert card.picture is not None
    assert card.overlays[0].scale == "full colour: 0.25 nats per unit of input"
    assert card.overlays[2].scale == "full colour: 0.25 nats"
    unknown = dataclasses.replace(
        result, manifest=read_manifest({**MANIFEST, "config": {"loss": {"name": "losses.py:own"}}})
    )
    assert attribution_cards(unknown)[0].overlays[0].scale == "full colour: 0.25 loss per unit of input"
    shown = pixels(card.overlays[2].uri)
    assert np.abs(shown[1, 2] - rgb(RAISES)).max() < 25
    assert shown[3, 0, 2] > shown[3, 0, 0]
    assert np.ptp(shown[0, 0]) == 0
    assert f"over the input of sample {card.id}: orange raises, blue lowers; full colour" in render(
        result, []
    )


def test_channels_are_added_up() -> None:
    maps = np.zeros((1, 3, 2, 2))
    maps[0, :, 0, 0] = 1, 2, -3  # nothing in all
    maps[0, :, 1, 1] = 1, 0, 1
    (card,) = attribution_cards(run(maps, [TopSample("", np.full((3, 2, 2), 0.5, np.float32))]))
    assert card.overlays[1].scale == "full colour: 2 nats"
    assert np.ptp(pixels(card.overlays[1].uri)[0, 0]) == 0


def test_maps_that_are_not_finite_or_do_not_fit_are_left_out() -> None:
    maps = np.ones((3, 1, 2, 2))
    maps[0, 0, 0, 0] = np.nan
    images = [TopSample("", np.ones((1, side, side), np.float32)) for side in (2, 3, 2)]
    assert [card.rank for card in attribution_cards(run(maps, images))] == ["3"]


def test_nothing_is_shown_where_no_map_was_kept() -> None:
    result = run(np.ones((1, 1, 2, 2)), [])
    bare = {name: MeasureResult(name, name, "f", "u") for name in MEASURES}
    without = AnalyzeResult(result.samples, result.parameters, result.manifest, result.folder, measures=bare)
    for each in (result, without):
        assert attribution_cards(each) == []


@pytest.mark.long
def test_pictures_of_noise_leave_room_on_the_page() -> None:
    rng = np.random.default_rng(0)
    images = [TopSample("", rng.random((3, 300, 300), np.float32)) for _ in range(12)]
    cards = attribution_cards(run(rng.normal(size=(12, 3, 300, 300)), images))
    assert len(cards) == 6
    assert sum(len(overlay.uri) for card in cards for overlay in card.overlays) < 500_000


# -- text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text", "pieces", "sizes"),
    [
        (3, "abc", ["a", "b", "c"], [1, 1, 1]),
        (6, "a\u00e9\u20ac", ["a", "\u00e9", "\u20ac"], [1, 2, 3]),
        (2, "neither of these", ["0:7 ", "1:8 "], [1, 1]),
        (2, None, ["0:7 ", "1:8 "], [1, 1]),
    ],
)
def test_positions_are_characters_bytes_or_themselves(
    count: int, text: str | None, pieces: list[str], sizes: list[int]
) -> None:
    assert pieces_of(np.arange(7, 7 + count), text) == (pieces, sizes)


def test_neighbours_of_one_shade_are_one_span_and_bytes_are_added_up() -> None:
    spans, scale, note = spans_of(np.arange(6), np.array([1.0, 0.5, 0.5, -0.2, -0.2, -0.1]), "a\u00e9\u20ac")
    assert [(span.text, span.level) for span in spans] == [("a\u00e9", 6), ("\u20ac", -3)]
    assert scale == 1
    assert note == ""


def test_special_tokens_are_marked() -> None:
    words = {1: "[CLS]", 5: "good", 6: "film", 2: "[SEP]"}
    spans, *_ = spans_of(np.array([1, 5, 6, 2]), np.array([0.0, 0.0, 1.0, 1.0]), None, words, special={1, 2})
    found = [(span.text.strip(), span.level > 0, span.special) for span in spans]
    assert found == [
        ("[CLS]", False, True),
        ("good", False, False),
        ("film", True, False),
        ("[SEP]", True, True),
    ]
    assert [(span.classes, bool(span.style)) for span in spans] == [
        ("special", False),
        ("", False),
        ("", True),
        ("special", True),
    ]


def test_long_texts_are_cut_and_say_so() -> None:
    spans, scale, note = spans_of(np.arange(1000), np.arange(1000.0), "x" * 1000)
    assert sum(len(span.text) for span in spans) == MAX_POSITIONS
    assert scale == 999  # of the whole sample
    assert note == "the first 160 of 1,000 positions"


def test_nasty_texts_are_spelled_out_and_escaped() -> None:
    text = "<b>\x1b[31m\u202e\"'&"
    result = run(np.ones((1, len(text))), [TopSample("", None, text)], ids_0=np.arange(len(text))[None])
    (card,) = attribution_cards(result)
    shown = "".join(span.text for span in card.passages[0].spans)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    html = render(result, []).split('id="attribution"')[1].split("</section>")[0]
    assert "<b>" not in html
    assert "&lt;b&gt;" in html


def test_ids_without_a_text_are_shown_by_position() -> None:
    ids = np.array([[101, 7, 102]])
    (card,) = attribution_cards(run(np.array([[0.0, 1.0, 0.2]]), [], ids_0=ids))
    assert "".join(span.text for span in card.passages[1].spans) == "0:101 1:7 2:102 "
    assert card.picture is None
    assert not card.overlays


# -- ids -----------------------------------------------------------------------------------------------------


def shown(ids: list[int], weights: list[float], *known: Any) -> tuple[str, str]:
    """(the pieces in one text, the note) of ids."""
    spans, _, note = spans_of(np.array(ids), np.array(weights), *(known or (None,)))
    return "".join(span.text for span in spans), note


def test_ids_are_shown_as_words_where_the_dataset_knows_them() -> None:
    words, note = shown([5, 6, 9], [1.0, 2.0, 3.0], None, {5: "good ", 6: "film"})
    assert words == "good film[9]"
    assert note == ""


def test_padding_is_left_out_and_counted() -> None:
    words, note = shown([5, 6, 0, 0, 0, 0], [1.0, 2.0, 0, 0, 0, 0], None, {0: "[PAD]", 5: "good ", 6: "film"})
    assert words == "good film"
    assert note == "4 positions of padding (id 0) left out"
    assert "which together have 0.3" in shown([5, 6, 0, 0, 0], [1.0, 2.0, 0.1, 0.1, 0.1])[1]
    assert shown([0, 0, 0, 5, 6], [0, 0, 0, 1.0, 2.0])[0] == "0:5 1:6 "  # at the front
    assert (
        shown([5, 6, 7], [1.0, 2.0, 0.0], None, {5: "a", 6: "b", 7: "<pad>"}, 7)[0] == "a b "
    )  # one, where its id is known
    assert shown([5, 6, 6], [1.0, 2.0, 0.0], None, {5: "a", 6: "b"})[0] == "a b b "  # words may be said twice
    assert shown([4, 4, 4], [1.0, 2.0, 0.0])[0] == "0:4 1:4 2:4 "  # nothing else is there


def test_a_text_is_matched_without_the_padding_behind_it() -> None:
    assert shown([1, 2, 3, 0, 0, 0], [1.0, 0, 2.0, 0, 0, 0], "abc")[0] == "abc"
    assert shown([1, 2, 0, 0, 0], [1.0, 0, 0, 0, 0], "aa   ")[0] == "aa   "  # five characters for five ids


def test_ids_of_an_unknown_vocabulary_say_what_they_are() -> None:
    words, note = shown([5, 6], [1.0, 2.0])
    assert words == "0:5 1:6 "
    assert note == "position:id, as the dataset has no tokenizer that tells the words"


def test_tokens_are_distinguished() -> None:
    """Whether a tokenizer's pieces carry their spaces in front, behind, or not at all."""
    ids, weights = [5, 6, 7], [1.0, 1.0, 1.0]
    for vocabulary, expected in (
        ({5: "a", 6: "long", 7: "film"}, "a long film "),
        ({5: "a", 6: " long", 7: " film"}, "a long film"),
        ({5: "a ", 6: "long ", 7: "film "}, "a long film "),
        ({5: "bor", 6: "##ing", 7: "[SEP]"}, "bor ##ing [SEP] "),
        ({5: "a", 6: " bor", 7: "ing"}, "a boring"),
        ({5: "bor", 6: "ing ", 7: "film"}, "boring film"),
    ):
        assert shown(ids, weights, None, vocabulary)[0] == expected
