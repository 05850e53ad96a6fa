"""Random projections of per-sample gradients: sparse, and two-sided. Neither materialises a gradient or a
matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psgrad.engine.gradients.projections.projection import VERSION
from psgrad.engine.gradients.projections.projection import Projection as Projection
from psgrad.engine.gradients.projections.sparse import Sparse as Sparse
from psgrad.engine.gradients.projections.two_sided import TwoSided as TwoSided
from psgrad.errors import TransformArgumentError

_KINDS: dict[str, type[Projection]] = {kind.kind: kind for kind in (Sparse, TwoSided)}


def projection_from(description: Mapping[str, Any]) -> Projection:
    """The projection of a description by `Projection.describe`.

    Raises:
        TransformArgumentError: an unknown kind, wrong sizes, or numbers that this version would not
            reproduce.
    """
    values = dict(description)
    kind, version = values.pop("kind", None), values.pop("version", None)
    if kind not in _KINDS:
        raise TransformArgumentError(f"a projection of kind {kind!r}; expected one of {', '.join(_KINDS)}")
    if version != VERSION:
        raise TransformArgumentError(
            f"a projection of version {version!r}; expected version {VERSION}",
            hint=(
                "it was made by another version of psgrad, whose random numbers are others; project"
                " again, or use the version that projected"
            ),
        )
    try:
        return _KINDS[kind](**values)
    except TypeError as error:
        raise TransformArgumentError(
            f"a description of a {kind} projection with {sorted(values)}: {error}"
        ) from error
