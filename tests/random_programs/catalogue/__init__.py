"""The operators that random programs are made of, by kind; each writes one line (see writer.py)."""

from __future__ import annotations

from tests.random_programs.catalogue.elementwise import ELEMENTWISE, REDUCTIONS
from tests.random_programs.catalogue.indexing import INDEXING
from tests.random_programs.catalogue.layers import LAYERS
from tests.random_programs.catalogue.losses import LOSSES
from tests.random_programs.catalogue.views import VIEWS
from tests.random_programs.catalogue.writes import WRITES
from tests.random_programs.writer import Operator

# How often each kind is picked, and its operators.
KINDS: dict[str, tuple[float, tuple[Operator, ...]]] = {
    "views": (5, VIEWS),
    "writes": (6, WRITES),
    "elementwise": (3, ELEMENTWISE),
    "reductions": (2, REDUCTIONS),
    "indexing": (2, INDEXING),
    "layers": (3.5, LAYERS),
    "losses": (1.5, LOSSES),
}
