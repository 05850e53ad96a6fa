"""Attribution to the parts of an input: overlays on pictures, and highlighted pieces of text. Signed numbers
are colours: orange raises, blue lowers. The two stay apart for every kind of colour vision, and in grey they
are dark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from markupsafe import Markup
from PIL import Image

from psgrad.reports.drawing import REVIEW, Array
from psgrad.reports.pictures import picture_uri, to_png, to_rgb
from psgrad.reports.sections import data_uri
from psgrad.reports.words import count, identifier, number, printable
from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample
from psgrad.run.results.manifest import UNKNOWN_UNIT

LEVELS = 6  # shades on either side of nothing
RAISES, LOWERS = REVIEW, "#2b66b0"

# How much of the full colour lies over a picture, and behind dark letters, at the end of the scale.
_OVER_PICTURE = 0.9
_BEHIND_TEXT = {1: 0.7, -1: 0.6}


def scale_of(values: Array) -> float:
    """What full colour stands for: the largest magnitude; 0 where there is nothing but zeros."""
    return float(np.abs(values).max(initial=0.0))


def overlaid(grey: Array, values: Array) -> Array:
    """uint8 [H, W, 3]: a picture's greys [H, W], 0 to 255, under the colours of values [H, W], full at the
    largest magnitude.
    """
    scale = scale_of(values)
    share = (np.abs(values) / scale if scale else np.zeros(values.shape)) * _OVER_PICTURE
    colours = np.where((values >= 0)[..., None], _rgb(RAISES), _rgb(LOWERS))
    # No black, no white: both colours are seen on all of it.
    paper = np.repeat((70 + grey * (170 / 255))[..., None], 3, axis=2)
    mixed = paper * (1 - share[..., None]) + colours * share[..., None]
    rounded: Array = np.round(mixed).astype(np.uint8)
    return rounded


def level_of(value: float, scale: float) -> int:
    """Which of the shades, -LEVELS to LEVELS."""
    return int(np.clip(round(LEVELS * value / scale), -LEVELS, LEVELS)) if scale else 0


def shade(level: int) -> str:
    """The background '#rrggbb' of a level on white paper: so light that INK is read on it."""
    mixed = 255 * (1 - _share(level)) + _rgb(_side(level)) * _share(level)
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def style_of(level: int) -> str:
    """CSS of a level: a background that lets light or dark paper through, so that the page's own ink is read
    on it; empty for nothing.
    """
    red, green, blue = _rgb(_side(level)).astype(int)
    return f"background:rgba({red},{green},{blue},{_share(level):.3g})" if level else ""


def _side(level: int) -> str:
    return RAISES if level >= 0 else LOWERS


def _share(level: int) -> float:
    return _BEHIND_TEXT[1 if level >= 0 else -1] * abs(level) / LEVELS


def _rgb(colour: str) -> Array:
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)


MAX_POSITIONS = 160


@dataclass(frozen=True)
class Span:
    """Neighbouring pieces of one shade. level: -6 to 6, 0 for nothing. counts: whether they have a loss of
    their own; a prompt and padding have none. special: whether they are special tokens of a tokenizer.
    """

    text: str
    level: int
    counts: bool = True
    special: bool = False


@dataclass(frozen=True)
class Passage:
    """One sample's ids under one measure. title: of the measure. scale: what full colour is. note: what is
    left out, if anything.
    """

    title: str
    spans: list[Span]
    scale: str
    note: str

    @property
    def html(self) -> Markup:
        """The pieces, each on the background of its shade."""
        return Markup().join(
            Markup("<span{}{}>{}</span>").format(_classes(span), _style(span), span.text)
            for span in self.spans
        )


def _classes(span: Span) -> Markup:
    names = [
        *(["quiet"] if not span.counts and not span.level else []),
        *(["special"] if span.special else []),
    ]
    return Markup(' class="{}"').format(" ".join(names)) if names else Markup("")


def _style(span: Span) -> Markup:
    return Markup(' style="{}"').format(style_of(span.level)) if span.level else Markup("")


def pieces_of(ids: Array, text: str | None) -> tuple[list[str], list[int]]:
    """(pieces of text, how many positions each stands for): characters, UTF-8 bytes or words of the text,
    whichever there are as many of as positions [t]; else the ids themselves, each behind its position.
    """
    positions = len(ids)
    if text is not None:
        if len(text) == positions:
            return list(text), [1] * positions
        sizes = [len(letter.encode("utf-8", "surrogatepass")) for letter in text]
        if sum(sizes) == positions:
            return list(text), sizes
        words = re.findall(r"^\s*\S+\s*|\S+\s*", text)
        if len(words) == positions:
            return words, [1] * positions
    return _numbered(ids), [1] * positions


def _numbered(ids: Array) -> list[str]:
    return [f"{position}:{value} " for position, value in enumerate(ids.tolist())]


def _apart(tokens: list[str], alone: list[bool]) -> list[str]:
    """Each token with a mark behind it, unless it ends in a space or the next begins with one: of tokens in a
    row none tells where it ends. The mark is a space for tokens without spaces of their own, and beside those
    that are no part of a word, `alone`; else it is a dot, as a space would make two words of one.
    """
    with_spaces = any(token[:1].isspace() or token[-1:].isspace() for token in tokens)
    following = [*zip(tokens[1:], alone[1:], strict=True), (" ", True)]
    return [
        token
        if token[-1:].isspace() or after[:1].isspace()
        else f"{token}{' ' if not with_spaces or own or other else '·'}"
        for token, own, (after, other) in zip(tokens, alone, following, strict=True)
    ]


def unpadded(ids: Array, padding: int | None = None) -> tuple[int, int, int | None]:
    """(start, stop, padding id) of the positions that are no padding: a run at either end of the id
    `padding`, where that is known, or else of one id, three times or more.
    """
    positions = len(ids)
    for step in (-1, 1):  # nearly all models pad at the end
        edge = ids[::step]
        alike = int((np.cumprod(edge == edge[0]) if positions else np.empty(0)).sum())
        if positions > alike > 0 and (edge[0] == padding or (padding is None and alike > 2)):
            return (0, positions - alike, int(edge[0])) if step < 0 else (alike, positions, int(edge[0]))
    return 0, positions, None


def spans_of(
    ids: Array,
    weights: Array,
    text: str | None,
    vocabulary: Mapping[int, str] | None = None,
    padding: int | None = None,
    counted: Array | None = None,
    special: AbstractSet[int] = frozenset(),
) -> tuple[list[Span], float, str]:
    """(spans, what full colour stands for, what is left out) of positions [t]; a piece of several positions
    has their sum. counted: [t] bool, which positions have a loss of their own; None for all.
    special: the ids of special tokens.

    Ids that are no characters, bytes or words of the text are shown by their own texts, `vocabulary`, where
    these are known, and without padding.
    """
    pieces, sizes = pieces_of(ids, text)
    counted = np.ones(len(ids), bool) if counted is None else counted
    notes = []
    if pieces == _numbered(ids):
        start, stop, filler = unpadded(ids, padding)
        if filler is not None:
            rest = np.delete(weights, np.s_[start:stop])
            share = f", which together have {number(float(rest.sum()))}" if np.any(rest) else ""
            notes.append(f"{count(len(rest), 'position')} of padding (id {filler}) left out{share}")
        ids, weights, counted = ids[start:stop], weights[start:stop], counted[start:stop]
        pieces, sizes = pieces_of(ids, text)
        if pieces == _numbered(ids):
            if vocabulary:
                named = [vocabulary.get(int(each), f"[{each}]") for each in ids.tolist()]
                pieces = _apart(named, [each in special or each not in vocabulary for each in ids.tolist()])
            else:
                notes.append(
                    "position:id, as the dataset has neither tokens(ids) nor a tokenizer that tells the words"
                )
    ends = np.cumsum([0, *sizes])
    totals = np.array([weights[start:end].sum() for start, end in pairwise(ends)], dtype=np.float64)
    shown = int(np.searchsorted(ends, MAX_POSITIONS, side="right")) - 1
    scale = scale_of(totals)
    counts = [bool(counted[start:end].any()) for start, end in pairwise(ends)]
    are_special = [int(ids[start]) in special and end - start == 1 for start, end in pairwise(ends)]
    shades = [
        (level_of(value, scale), counts[place], are_special[place])
        for place, value in enumerate(totals[:shown].tolist())
    ]
    spans = [
        Span(printable("".join(piece for _, piece in group), "\n\t"), *shade)
        for shade, group in groupby(zip(shades, pieces, strict=False), key=lambda each: each[0])
    ]
    if shown < len(pieces):
        notes.append(f"the first {ends[shown]:,} of {len(ids):,} positions")
    return spans, scale, "; ".join(notes)


# In the order of a page; and of those, the ones whose parts add up to a whole.
MEASURES = (
    "input_gradient",
    "gradient_x_input",
    "integrated_gradients",
    "smooth_grad",
    "token_loss",
    "token_share",
)
ADDITIVE = ("gradient_x_input", "integrated_gradients", "token_loss", "token_share")

# With pictures of noise these are some 0.4 MB of a page.
MAX_CARDS = 6
PICTURE_SIDE = 96
_COLOURS = 64

ATTRIBUTION_NOTE = (
    "Which parts of the input the loss (or the logit that was asked for) depends on. Orange raises it, blue"
    " lowers it; the colour is full at the largest magnitude in the sample, which stands beside it, so shades"
    " compare parts of one sample, not samples. Channels of a picture are added up. For tokens, gradients are"
    " shown by their size alone, which has no sign. A strong colour says what the model looks at, not whether"
    " it is right to. Token losses and token shares are numbers of the tokens themselves; grey tokens"
    " have no loss of their own, and small ones are special tokens of the tokenizer. A dot divides tokens of"
    " one word."
)


@dataclass(frozen=True)
class Overlay:
    """A picture under one measure's colours. uri: a small PNG. scale: what full colour is, with its unit."""

    measure: str
    title: str
    uri: str
    alt: str
    scale: str


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
    measures = attribution_measures(result)
    cards = []
    for row in shown_rows(measures)[:MAX_CARDS]:
        shown = input_of(result, row)
        overlays = [
            overlay for measure in measures if (overlay := _overlay(result, measure, row, shown)) is not None
        ]
        passages = [passage for measure in measures for passage in passages_of(result, measure, row, shown)]
        if overlays or passages:
            rank = result.samples["rank"].iloc[row]
            picture = picture_uri(shown, PICTURE_SIDE) if overlays else None
            cards.append(AttributionCard(identifier(shown.id), str(rank), picture, overlays, passages))
    return cards


def attribution_measures(result: AnalyzeResult) -> list[MeasureResult]:
    """The results of MEASURES that kept maps."""
    return [
        result.measures[name]
        for name in MEASURES
        if name in result.measures and "rows" in result.measures[name].arrays
    ]


def shown_rows(measures: list[MeasureResult]) -> list[int]:
    """The rows whose maps were kept, largest gradient norm first."""
    return measures[0].arrays["rows"].tolist() if measures else []


def input_of(result: AnalyzeResult, row: int) -> TopSample:
    """A row's input, as far as it was kept."""
    identity = result.samples["id"].iloc[row]
    return next((each for each in result.top_inputs if each.id == identity), TopSample(identity))


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


def picture_of(measure: MeasureResult, row: int, shown: TopSample) -> tuple[Array, Array] | None:
    """(uint8 [H, W, 3], the values [H, W] that it shows) of a picture under a measure's colours; None where
    it is none.
    """
    image, values = shown.image, maps_of(measure, row).get(0)
    if image is None or values is None or values.shape != image.shape:
        return None
    flat = values.sum(0) if values.ndim == 3 else values
    return overlaid(to_rgb(image).mean(axis=2), flat), flat


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


def unit_of(measure: MeasureResult) -> str:
    """What is attributed: the loss, or a logit."""
    return {"target": "logit of the label's class", "prediction": "logit of the predicted class"}.get(
        measure.numbers.get("of", ""), "loss"
    )


def unit_words(result: AnalyzeResult, measure: MeasureResult) -> str:
    """The unit of a map's numbers."""
    if measure.name == "token_share":
        return "of the squared norm"
    unit, known = unit_of(measure), result.manifest.loss_unit
    if unit == "loss" and known != UNKNOWN_UNIT:
        unit = known
    return unit + ("" if measure.name in ADDITIVE else " per unit of input")


def scale_words(result: AnalyzeResult, measure: MeasureResult, scale: float) -> str:
    """What full colour stands for."""
    return f"full colour: {number(scale)} {unit_words(result, measure)}"


def _overlay(result: AnalyzeResult, measure: MeasureResult, row: int, shown: TopSample) -> Overlay | None:
    found = picture_of(measure, row, shown)
    if found is None:
        return None
    picture = Image.fromarray(found[0])
    if max(picture.size) > PICTURE_SIDE:
        picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BOX)
    words = scale_words(result, measure, scale_of(found[1]))
    alt = (
        f"{measure.title} over the input of sample {identifier(shown.id)}: orange raises, blue lowers;"
        f" {words}"
    )
    return Overlay(
        measure.name, measure.title, data_uri("image/png", to_png(picture.quantize(_COLOURS))), alt, words
    )
