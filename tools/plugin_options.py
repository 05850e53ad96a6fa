"""psgrad/config/plugin_options.json: psgrad's plugins with the JSON Schema of each option.

`python -m tools.pages` writes it.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from psgrad.config.plugin_options import FILE
from psgrad.plugins import KINDS, options_of, own_classes

PAGE = FILE


def page(text: str) -> str:
    """The whole file; nothing of its present `text` stays."""
    found = {
        kind.group: {name: described(plugin) for name, plugin in own_classes(kind).items()} for kind in KINDS
    }
    return json.dumps(found, indent=1) + "\n"


def described(plugin: type[Any]) -> dict[str, Any]:
    """The location of a plugin's class, and its options."""
    names = options_of(plugin)
    schema = TypeAdapter(plugin).json_schema() if names else {}
    options = {name: dict(schema["properties"][name]) for name in names}
    for each in options.values():
        each.pop("title")
    return {"location": f"{plugin.__module__}:{plugin.__qualname__}", "options": options}
