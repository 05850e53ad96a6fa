"""What may happen to deferred values on their way to a parameter: linear operators, carried out on the factors."""

from __future__ import annotations

from typing import Any

from psgrad.engine.gradients.deferral.on_the_way.parts import PARTS
from psgrad.engine.gradients.deferral.on_the_way.products import PRODUCTS
from psgrad.engine.gradients.deferral.on_the_way.shapes import SHAPES
from psgrad.engine.gradients.deferral.on_the_way.sums import SUMS
from psgrad.engine.transforms.operators import Op

# Each is given the level's Batch, the operator, for each argument its deferred value or None, the arguments, and those by name. It
# returns a DeferredGradient, or NotImplemented where the values have to be written out first.
ON_THE_WAY: dict[Op, Any] = {**SHAPES, **PARTS, **SUMS, **PRODUCTS}
