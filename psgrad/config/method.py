"""An influence method of a config. Its options are its own, and checked where the method is known: see psgrad/engine/influence/methods."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator

from psgrad.config.values import Section


class MethodConfig(Section):
    """A method by name, a file of `psgrad/engine/influence/methods` or `module:Class`, with its options. A bare string is the name; options
    without a name are those of `influence`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = "influence"

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
