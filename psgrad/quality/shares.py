"""Shares of a number of samples, counted as they are written."""

from __future__ import annotations

from fractions import Fraction


def share_of(fraction: float, count: int) -> Fraction:
    """`fraction` of `count`, exactly: 0.07 of 100 are 7, and 0.29 of 100 are 29, which 0.07 * 100 and 0.29 * 100 in floats are not."""
    return Fraction(str(float(fraction))) * count
