"""The pairs of texts on the page of an influence run, each token in the colour of its score."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from markupsafe import Markup

from psgrad.reports.attribution import Passage, spans_of
from psgrad.reports.influence_words import query_title, signed
from psgrad.reports.sections import Part, Section, Subtitle, Text
from psgrad.reports.tables import Column, Table, table
from psgrad.reports.words import MISSING, identifier, number
from psgrad.results import InfluenceResult
from psgrad.results.influence_tokens import Array, TokenPair, TokenText

PAIRS = 4  # of each query
STRONGEST = 10  # pairs of tokens in a table
_NOTE = (
    "Each token has the sum of its scores with all tokens of the other text. Orange: it helps; blue: it"
    " hurts; grey: it has no loss of its own. In a language model the score of a token is that of predicting"
    " it."
)


def token_sections(result: InfluenceResult) -> Iterator[Section]:
    """A section a query, with its strongest pairs; none where scores of tokens were not asked for."""
    for query, pairs in groupby(result.tokens, key=lambda pair: pair.query_index):
        strongest = sorted(pairs, key=lambda pair: -abs(float(pair.scores.sum())))[:PAIRS]
        parts: list[Part] = [Text(_NOTE, "quiet")]
        for pair in strongest:
            total = signed(float(pair.scores.sum()))
            parts.append(Subtitle(f"{identifier(pair.train_id)}, {total}", "quiet"))
            parts += [_coloured("Query", pair.query, pair.scores.sum(1))]
            parts += [_coloured("Training example", pair.train, pair.scores.sum(0))]
            parts.append(strongest_tokens(pair))
        yield Section(f"Token by token. {query_title(result, query)}", parts)


def _coloured(name: str, text: TokenText, values: Array) -> Text:
    weights = text.spread(values)
    counted = text.spread(values * 0 + 1).astype(bool)
    words = dict(zip(text.ids.tolist(), text.pieces, strict=False))
    spans, scale, note = spans_of(text.ids, weights, None, words, None, counted)
    passage = Passage("", "", spans, "", note)
    said = Markup("<b>{}</b> (full colour: {}) {}").format(name, number(scale), passage.html)
    return Text(said + (Markup(' <span class="quiet">{}</span>').format(note) if note else Markup()))


def strongest_tokens(pair: TokenPair) -> Table:
    """The strongest pairs of tokens."""
    columns = [
        Column("query token", lambda row: f"{row['query_token']}: {row['query_text'] or MISSING}"),
        Column("training token", lambda row: f"{row['train_token']}: {row['train_text'] or MISSING}"),
        Column("score", lambda row: signed(row["score"]), True),
    ]
    rows = pair.table().head(STRONGEST).to_dict("records")
    return table("", "The strongest pairs of tokens", columns, rows, tall=False)
