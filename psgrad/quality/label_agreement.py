"""How many of the labels the model agrees with: what makes another order of the classes, other weights or
another scaling of the inputs seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from psgrad.run.results.manifest import LabelFacts

Array = npt.NDArray[np.int64]

_RATE = 1e-3  # how often another order may be found by chance
_MOST = 2000  # classes of which an order is looked for: it takes the cube of their number
_LEAST = 30  # rows from which it is told that the model is no better than chance


def label_facts(labels: Array, predictions: Array) -> LabelFacts:
    """The facts of labels [n] and predicted classes [n]."""
    n, order = len(labels), better_order(labels, predictions)
    agree = int((labels == predictions).sum())
    if order:
        right = np.array([order.get(label, label) for label in labels.tolist()]) == predictions
        return LabelFacts(n, agree, order=list(order.items()), agree_in_order=int(right.sum()))
    mean, deviation = by_chance(labels, predictions)
    low = n >= _LEAST and len(np.unique(labels)) > 1 and agree <= mean + deviation and 2 * agree < n
    return LabelFacts(n, agree, chance=mean if low else None)


def better_order(labels: Array, predictions: Array) -> dict[int, int] | None:
    """label -> the output that stands for it, where that is another one; None where no other order of the
    classes agrees far better.

    The order with the most agreement is found on every second row, and counted on the others, for which it
    was not chosen. Of classes that change places with each other it is taken if of their rows there at least
    half agree with it, and twice as many as without it, by a margin that the sign test finds by chance less
    than once in 1,000 times, for all such groups of classes together.
    """
    if not len(labels):
        return None
    known, codes = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    if len(known) > _MOST:
        return None
    label, predicted = codes[: len(labels)], codes[len(labels) :]
    order = _assigned(label[::2], predicted[::2], len(known))
    cycles, label, predicted = list(_cycles(order)), label[1::2], predicted[1::2]
    if not cycles:
        return None
    from scipy.stats import binomtest

    of, before, after = (
        np.bincount(label[chosen], minlength=len(known))
        for chosen in (slice(None), label == predicted, order[label] == predicted)
    )
    found: dict[int, int] = {}
    for cycle in cycles:
        rows, now, then = (int(each[cycle].sum()) for each in (of, before, after))
        if not then or 2 * then < rows or then < 2 * now:
            continue
        if binomtest(then, then + now, alternative="greater").pvalue * len(cycles) < _RATE:
            found |= {int(known[place]): int(known[order[place]]) for place in cycle}
    return found or None


def _assigned(labels: Array, predictions: Array, classes: int) -> Array:
    """[classes]: the output of each label, so that most are predicted; its own where nothing is won."""
    counts = np.eye(classes) / (2 * classes)
    np.add.at(counts, (labels, predictions), 1)
    own = np.arange(classes)
    if (counts.argmax(1) == own).all():
        return own
    from scipy.optimize import linear_sum_assignment

    found: Array = linear_sum_assignment(counts, maximize=True)[1]
    return found


def _cycles(order: Array) -> Iterator[list[int]]:
    """The groups of classes that change places with each other."""
    left = {place for place, output in enumerate(order.tolist()) if place != output}
    while left:
        cycle = [min(left)]
        while (after := int(order[cycle[-1]])) != cycle[0]:
            cycle.append(after)
        left -= set(cycle)
        yield cycle


def by_chance(labels: Array, predictions: Array) -> tuple[float, float]:
    """(the mean, the standard deviation) of how many labels agree, were the same predictions dealt out to the
    rows at random.
    """
    n = len(labels)
    if n < 2:
        return float(n), 0.0
    known, codes = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    a, b = (np.bincount(each, minlength=len(known)).astype(np.float64) for each in (codes[:n], codes[n:]))
    both = float(a @ b)
    variance = (both**2 - n * float((a * b) @ (a + b)) + n**2 * both) / (n**2 * (n - 1))
    return both / n, math.sqrt(max(variance, 0.0))
