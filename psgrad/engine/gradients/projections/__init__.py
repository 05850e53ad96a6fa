"""Random projections of per-sample gradients: sparse, and two-sided. Neither materialises a gradient or a
matrix.
"""

from psgrad.engine.gradients.projections.projection import Projection as Projection
from psgrad.engine.gradients.projections.sparse import Sparse as Sparse
from psgrad.engine.gradients.projections.two_sided import TwoSided as TwoSided
