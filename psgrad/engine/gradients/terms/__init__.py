"""The kinds of terms that a per-sample gradient is a sum of."""

from psgrad.engine.gradients.terms.base import BLOCK_BYTES as BLOCK_BYTES
from psgrad.engine.gradients.terms.base import CANCELLATION as CANCELLATION
from psgrad.engine.gradients.terms.base import Term as Term
from psgrad.engine.gradients.terms.base import accumulating as accumulating
from psgrad.engine.gradients.terms.base import accumulating_dtype as accumulating_dtype
from psgrad.engine.gradients.terms.base import blocks as blocks
from psgrad.engine.gradients.terms.base import square_norm as square_norm
from psgrad.engine.gradients.terms.base import sum_of_products as sum_of_products
from psgrad.engine.gradients.terms.convolution import Convolution as Convolution
from psgrad.engine.gradients.terms.elementwise import Dense as Dense
from psgrad.engine.gradients.terms.elementwise import Hadamard as Hadamard
from psgrad.engine.gradients.terms.elementwise import Multiples as Multiples
from psgrad.engine.gradients.terms.product import Product as Product
from psgrad.engine.gradients.terms.rows import Rows as Rows
