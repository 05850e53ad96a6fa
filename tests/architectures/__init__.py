"""Small versions of the networks that people train, a file for each family, each with its loss and a way to
draw data.
"""

from __future__ import annotations

from tests import small_models as models
from tests.architectures import (
    convolutional,
    generative,
    graphs,
    multilayer,
    recurrent,
    representation,
    transformers,
    weights,
)

ARCHITECTURES = (
    *models.ARCHITECTURES,
    *multilayer.ARCHITECTURES,
    *convolutional.ARCHITECTURES,
    *transformers.ARCHITECTURES,
    *recurrent.ARCHITECTURES,
    *graphs.ARCHITECTURES,
    *representation.ARCHITECTURES,
    *generative.ARCHITECTURES,
    *weights.ARCHITECTURES,
)

__all__ = ["ARCHITECTURES"]
