"""Datasets in feather, which is Arrow's own format under another name."""

from __future__ import annotations

from typing import ClassVar

from psgrad.inputs.sources.formats.arrow import Arrow


class Feather(Arrow):
    """A table of Arrow, as pandas' to_feather writes it."""

    name: ClassVar[str] = "feather"
