"""What labels mean, and how many of them the model agrees with, in words: on the terminal, the page and in
`psgrad validate --deep`.
"""

from __future__ import annotations

from collections.abc import Sequence

from psgrad.reports.words import LABEL_LIMIT, brief, percent
from psgrad.run.results.manifest import LabelFacts

_ALL, _FIRST = 12, 5  # so many classes are all listed; of more the first ones and the last


def label_words(facts: LabelFacts, names: Sequence[str] | None) -> str:
    """The names of the classes with their numbers, and the agreement; empty where neither is known."""
    parts = [_listed(names)] if names else []
    if facts.rows:
        share = percent(facts.agree / facts.rows, 0)
        parts.append(f"the model agrees with {share} of {facts.rows:,} {facts.of}")
    return "; ".join(parts)


def label_warning(facts: LabelFacts, names: Sequence[str] | None) -> str:
    """A sentence where another order of the classes would agree far better, or where the model agrees with no
    more labels than by chance; else empty.
    """
    if facts.order and facts.agree_in_order:
        now, then = (percent(each / facts.rows, 0) for each in (facts.agree, facts.agree_in_order))
        return (
            f"the model agrees with {now} of the labels, and would agree with {then} were its outputs in"
            f" another order: {_order_words(facts.order, names)}"
            f"{'; data.class_names has the names in the order of the outputs' if names else ''}"
        )
    if facts.chance is None:
        return ""
    now, chance = (percent(each / facts.rows, 0) for each in (facts.agree, facts.chance))
    return (
        f"the model agrees with {now} of the labels, and would by chance with {chance}: its weights may be"
        " others, its inputs scaled otherwise, or its classes in another order"
    )


def _listed(names: Sequence[str]) -> str:
    named = [_named(number, name) for number, name in enumerate(names)]
    if len(named) <= _ALL:
        return ", ".join(named)
    return f"{', '.join(named[:_FIRST])}, …, {named[-1]} ({len(named):,} classes)"


def _named(number: int, name: str) -> str:
    return f"{number} {brief(name, LABEL_LIMIT)}"


def _order_words(order: Sequence[Sequence[int]], names: Sequence[str] | None) -> str:
    """Which label each of the outputs is that are not those of their own number."""
    moved = sorted((output, label) for label, output in order)
    known = names if names and max(label for _, label in moved) < len(names) else None
    words = [
        f"{output} is label {label}" if known is None else _named(output, known[label])
        for output, label in moved
    ]
    return ", ".join(words[:_ALL]) + (f" and {len(words) - _ALL} more" if len(words) > _ALL else "")
