"""Branches on data inside a batched function: taken where all samples agree, and the batch split by the outcome where they do not."""

from __future__ import annotations

from typing import Any

import torch


class Divergence(BaseException):
    """Samples of a level disagree on a number that the function's Python code asks for.

    Whoever runs the function runs it again, for the samples of each outcome. Not an Exception: the function's own error handling must not
    catch it. One that catches everything is found out, as the level remembers.
    """

    def __init__(self, level: Any, outcomes: list[Any], where: str) -> None:
        super().__init__(f"samples disagree: {outcomes}{where}")
        self.level = level
        level.diverged = outcomes, where
        self.outcomes = outcomes
        self.where = where

    def groups(self, device: torch.device) -> list[torch.Tensor]:
        """For each outcome the numbers of its samples, int64, in ascending order."""
        found: dict[Any, list[int]] = {}
        for sample, outcome in enumerate(self.outcomes):
            found.setdefault(outcome, []).append(sample)
        return [torch.tensor(samples, device=device) for samples in found.values()]


class WriteWatch:
    """Whether arguments were written to since: what a function changed, it can't be run on again."""

    def __init__(self, tensors: list[Any]) -> None:
        self.versions = [(x, x._version) for x in tensors if isinstance(x, torch.Tensor) and not x.is_inference()]

    def saw_a_write(self) -> bool:
        return any(x._version != version for x, version in self.versions)
