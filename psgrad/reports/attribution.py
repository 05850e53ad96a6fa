"""Attribution to the parts of an input: pictures under colours, and texts with coloured pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from psgrad.reports.page import data_uri
from psgrad.reports.pictures import picture_uri, to_png, to_rgb
from psgrad.reports.spans import LOWERS, RAISES, Array, Span, rgb, scale_of, spans_of
from psgrad.reports.words import identifier, number
from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample
from psgrad.run.results.manifest import UNKNOWN_UNIT

# In the order of a page; and of those, the ones whose parts add up to a whole.
MEASURES = (
    "input_gradient",
    "gradient_x_input",
    "integrated_gradients",
    "token_loss",
)
ADDITIVE = ("gradient_x_input", "integrated_gradients", "token_loss")

# With pictures of noise these are some 0.4 MB of a page.
MAX_CARDS = 6
PICTURE_SIDE = 96
_COLOURS = 64
_OVER_PICTURE = 0.9  # how much of the full colour lies over a picture, at the end of the scale


@dataclass(frozen=True)
class Overlay:
    """A picture under one measure's colours. uri: a small PNG. scale: what full colour is, with its unit."""

    title: str
    uri: str
    scale: str


@dataclass(frozen=True)
class Passage:
    """One sample's ids under one measure. title: of the measure. scale: what full colour is. note: what is
    left out, if anything.
    """

    title: str
    spans: list[Span]
    scale: str
    note: str


@dataclass(frozen=True)
class AttributionCard:
    """One sample under all measures of attribution. rank: of its gradient norm. picture: the plain input, a
    data URI; None for text.
    """

    id: str
    rank: str
    picture: str | None
    overlays: list[Overlay]
    passages: list[Passage]


def attribution_cards(result: AnalyzeResult) -> list[AttributionCard]:
    """The first samples by gradient norm whose maps were kept; none where inputs are not to be shown, and
    their maps were not kept.
    """
    found = [result.measures[name] for name in MEASURES if name in result.measures]
    measures = [measure for measure in found if "rows" in measure.arrays]
    inputs = {each.id: each for each in result.top_inputs}
    cards = []
    for row in measures[0].arrays["rows"].tolist()[:MAX_CARDS] if measures else []:
        identity = result.samples["id"].iloc[row]
        shown = inputs.get(identity, TopSample(identity))
        overlays = [each for measure in measures for each in overlays_of(result, measure, row, shown)]
        passages = [each for measure in measures for each in passages_of(result, measure, row, shown)]
        if overlays or passages:
            rank = str(result.samples["rank"].iloc[row])
            picture = picture_uri(shown, PICTURE_SIDE) if overlays else None
            cards.append(AttributionCard(identifier(shown.id), rank, picture, overlays, passages))
    return cards


def maps_of(measure: MeasureResult, row: int) -> dict[int, Array]:
    """input -> this row's map of it, its own shape; empty where none was kept, without those that are not
    finite.
    """
    places = np.flatnonzero(measure.arrays["rows"] == row)
    names = [name for name in measure.arrays if name.startswith("map_")]
    maps = (
        {int(name.removeprefix("map_")): measure.arrays[name][places[0]] for name in names}
        if len(places)
        else {}
    )
    return {place: each for place, each in sorted(maps.items()) if np.isfinite(each).all()}


def overlays_of(result: AnalyzeResult, measure: MeasureResult, row: int, shown: TopSample) -> list[Overlay]:
    """A row's picture under a measure's colours; empty where it is none."""
    image, values = shown.image, maps_of(measure, row).get(0)
    if image is None or values is None or values.shape != image.shape:
        return []
    flat = values.sum(0) if values.ndim == 3 else values
    picture = Image.fromarray(overlaid(to_rgb(image).mean(axis=2), flat))
    if max(picture.size) > PICTURE_SIDE:
        picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BOX)
    uri = data_uri("image/png", to_png(picture.quantize(_COLOURS)))
    return [Overlay(measure.title, uri, scale_words(result, measure, scale_of(flat)))]


def overlaid(grey: Array, values: Array) -> Array:
    """uint8 [H, W, 3]: a picture's greys [H, W], 0 to 255, under the colours of values [H, W], full at the
    largest magnitude.
    """
    scale = scale_of(values)
    share = (np.abs(values) / scale if scale else np.zeros(values.shape)) * _OVER_PICTURE
    colours = np.where((values >= 0)[..., None], rgb(RAISES), rgb(LOWERS))
    # No black, no white: both colours are seen on all of it.
    paper = np.repeat((70 + grey * (170 / 255))[..., None], 3, axis=2)
    mixed = paper * (1 - share[..., None]) + colours * share[..., None]
    rounded: Array = np.round(mixed).astype(np.uint8)
    return rounded


def passages_of(result: AnalyzeResult, measure: MeasureResult, row: int, shown: TopSample) -> list[Passage]:
    """A row's ids under a measure's colours, a passage an input of ids."""
    maps = maps_of(measure, row)
    ids = [place for place in maps if f"ids_{place}" in measure.arrays]
    found = []
    for place in ids:
        at = np.flatnonzero(measure.arrays["rows"] == row)[0]
        counted = measure.arrays.get(f"counted_{place}")
        # The dataset knows the words of the first input of ids.
        words = result.vocabulary if place == ids[0] else {}
        padding = (measure.numbers.get("padding_ids") or {}).get(str(place))
        here = measure.arrays[f"ids_{place}"][at].reshape(-1)
        length = int(np.flatnonzero(here >= 0).max(initial=-1)) + 1  # -1 behind the last token
        spans, scale, note = spans_of(
            here[:length],
            maps[place].reshape(-1)[:length],
            shown.text,
            words,
            padding,
            None if counted is None else counted[at][:length],
            result.special_tokens if place == ids[0] else frozenset(),
        )
        title = f"{measure.title}, input {place}" if len(ids) > 1 else measure.title
        found.append(Passage(title, spans, scale_words(result, measure, scale), note))
    return found


def scale_words(result: AnalyzeResult, measure: MeasureResult, scale: float) -> str:
    """What full colour stands for, with its unit."""
    of, known = measure.numbers.get("of", ""), result.manifest.loss_unit
    unit = {"target": "logit of the label's class", "prediction": "logit of the predicted class"}.get(of)
    unit = unit or ("loss" if known == UNKNOWN_UNIT else known)
    if measure.name not in ADDITIVE:
        unit += " per unit of input"
    return f"full colour: {number(scale)} {unit}"
