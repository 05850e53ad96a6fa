"""The measures, one file each: a module here with a subclass of Measure is a measure that configs may
name.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from psgrad.engine.measures.measure import Measure


@cache
def known_measures() -> dict[str, type[Measure]]:
    """name -> class, of all measures in this package, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    ]
    classes = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Measure)
    }
    return {kind.name: kind for kind in sorted(classes, key=lambda kind: kind.name) if kind.name}
