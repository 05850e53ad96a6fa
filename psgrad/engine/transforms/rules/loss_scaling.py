"""An operator that scales cotangents alone: the identity of its argument, whose cotangent is multiplied by a
factor. Cotangents in float16 keep digits that way that would be lost below its smallest number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from psgrad.engine.transforms.rules.families import elementwise_batch
from psgrad.engine.transforms.rules.registry import define

_library = torch.library.Library("psgrad", "FRAGMENT")
_library.define("with_scaled_cotangent(Tensor x, float factor) -> Tensor")
with_scaled_cotangent = torch.ops.psgrad.with_scaled_cotangent.default


def _copy(x: Tensor, factor: float) -> Tensor:
    return x.clone()


_library.impl("with_scaled_cotangent", _copy, "CompositeExplicitAutograd")
define(
    with_scaled_cotangent,
    vjp={0: lambda out, x, factor: lambda g: g * factor},
    jvp={0: lambda out, x, factor: lambda t: t},
    batch=elementwise_batch,
)
