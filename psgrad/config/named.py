"""Something that a config names, with options of its own, which are checked where the thing is known."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator

from psgrad.config.values import Section


class NamedSection(Section):
    """A name (a known one, or `module:Class`) with options. A bare string is the name alone."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str
    """A known name, or module:Class; the other keys are its options."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
