"""An influence method of a config. Its options are its own, and checked where the method is known: see psgrad/engine/influence/methods."""

from __future__ import annotations

from psgrad.config.named import NamedSection


class MethodConfig(NamedSection):
    """A method by name, a file of `psgrad/engine/influence/methods` or `module:Class`, with its options. A bare string is the name; options
    without a name are those of `influence`."""

    name: str = "influence"
    """A known method, or module:Class; the other keys are its options."""
