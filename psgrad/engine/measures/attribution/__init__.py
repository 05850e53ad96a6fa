"""What a sample's loss, or one of its logits, owes to each part of its input."""

from psgrad.engine.measures.attribution.attribution import Attribution as Attribution
from psgrad.engine.measures.attribution.points import Point as Point

__all__ = ["Attribution", "Point"]
