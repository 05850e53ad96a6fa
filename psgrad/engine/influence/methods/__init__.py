"""The methods, one file each: a module here with a subclass of Method is a method that configs may name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from psgrad.engine.influence.method import Method


@cache
def known_methods() -> dict[str, type[Method]]:
    """name -> class, of all methods in this package."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    ]
    classes = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Method)
    ]
    return {
        kind.name: kind
        for kind in sorted(classes, key=lambda kind: getattr(kind, "name", ""))
        if kind is not Method
    }
