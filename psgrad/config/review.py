"""The config section of `psgrad review`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from psgrad.config.values import ConfigSection, Finite

Level = Literal["overall", "class", "group"]
_Limits = dict[Level, Annotated[Finite, Field(ge=0)]]


class ReviewConfig(ConfigSection):
    """`psgrad review`: what a change of the training data may do and still pass."""

    max_increase: _Limits = Field(default_factory=dict)
    """The largest rise of the mean loss of the queries that passes, overall, of a class, of a group."""
    max_margin_fall: _Limits = Field(default_factory=dict)
    """The largest fall of their mean margin: that tells harm where the loss is hidden by the seed."""
    max_suspect: Annotated[int, Field(ge=0)] | None = None
    """How many added rows may look wrong by themselves; null for any number."""
    group: str | None = None
    """The column of the queries whose values are groups."""
    seconds: Annotated[Finite, Field(ge=0)] = 60.0
    """The time for training on with and without the change, which checks the prediction; 0 for no check."""
