"""The kinds of terms that a per-sample gradient is a sum of.

One file is one kind, with all its behaviour: norms, inner products, sums, projections, linear maps, prices.
Methods for a pair of kinds are in the file that imports the other one. A new kind is a new file and a line
here.
"""

from psgrad.engine.gradients.terms.convolution_gradient import Convolution as Convolution
from psgrad.engine.gradients.terms.dense import Dense as Dense
from psgrad.engine.gradients.terms.grouped_product import GroupedProduct as GroupedProduct
from psgrad.engine.gradients.terms.image import Image as Image
from psgrad.engine.gradients.terms.lookup import Lookup as Lookup
from psgrad.engine.gradients.terms.numerics import BLOCK_BYTES as BLOCK_BYTES
from psgrad.engine.gradients.terms.numerics import CANCELLATION as CANCELLATION
from psgrad.engine.gradients.terms.numerics import Workspace as Workspace
from psgrad.engine.gradients.terms.numerics import accumulating as accumulating
from psgrad.engine.gradients.terms.numerics import accumulating_dtype as accumulating_dtype
from psgrad.engine.gradients.terms.numerics import block_bytes as block_bytes
from psgrad.engine.gradients.terms.numerics import blocks as blocks
from psgrad.engine.gradients.terms.numerics import square_norm as square_norm
from psgrad.engine.gradients.terms.numerics import sum_of_products as sum_of_products
from psgrad.engine.gradients.terms.numerics import times_shared as times_shared
from psgrad.engine.gradients.terms.placed import narrow as narrow
from psgrad.engine.gradients.terms.product import Product as Product
from psgrad.engine.gradients.terms.term import OuterProducts as OuterProducts
from psgrad.engine.gradients.terms.term import Placed as Placed
from psgrad.engine.gradients.terms.term import Term as Term
