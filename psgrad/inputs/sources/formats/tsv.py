"""Datasets in tsv: as csv, separated by tabs."""

from __future__ import annotations

from typing import ClassVar

from psgrad.inputs.sources.formats.csv import CSV


class TSV(CSV):
    """A table of text, separated by tabs, with the names of the columns in its first line."""

    name: ClassVar[str] = "tsv"
    delimiter: ClassVar[str] = "\t"
