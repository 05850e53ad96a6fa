"""Function transforms of our own: vmap, grad and their kin, with the semantics of torch.func."""

from psgrad.engine.transforms.differentiate import grad as grad
from psgrad.engine.transforms.differentiate import grad_and_value as grad_and_value
from psgrad.engine.transforms.differentiate import vjp as vjp
from psgrad.engine.transforms.functional import functional_call as functional_call
from psgrad.engine.transforms.vectorize import vmap as vmap

__all__ = ["functional_call", "grad", "grad_and_value", "vjp", "vmap"]
