"""Which datasets count as neighbours: half of what a privacy guarantee says."""

from __future__ import annotations

from typing import Literal

Relation = Literal["add_or_remove_one", "replace_one", "zero_out"]
"""add_or_remove_one: one record more or less. replace_one: one record is another. zero_out: one record's gradient is zero."""
