"""psgrad: look at a PyTorch model one training example at a time.

The functions here are those of psgrad/api.py; docs/reference/api.md shows them. They are loaded when they are
asked for.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psgrad.api import *  # noqa: F403

try:
    __version__ = version("psgrad")  # of the last tag, when it was installed
except PackageNotFoundError:  # files that are not installed, such as a copied engine
    __version__ = "0.0"


def __getattr__(name: str) -> Any:
    is_module = find_spec(f"{__name__}.{name}") is not None  # `from psgrad import errors` asks here first
    if is_module or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = importlib.import_module("psgrad.api")
    names = ["__version__", *api.__all__]
    if name not in (*names, "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = names if name == "__all__" else getattr(api, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__getattr__("__all__")))
