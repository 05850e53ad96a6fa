"""Function transforms: vmap, grad and others, with the semantics of torch.func."""

from psgrad.engine.transforms import autograd_function as autograd_function
from psgrad.engine.transforms import private_torch as private_torch
from psgrad.engine.transforms import torch_autograd as torch_autograd
from psgrad.engine.transforms.capture import capture as capture
from psgrad.engine.transforms.checkpoint import checkpoint as checkpoint
from psgrad.engine.transforms.forward import jvp as jvp
from psgrad.engine.transforms.forward import linearize as linearize
from psgrad.engine.transforms.functional import functional_call as functional_call
from psgrad.engine.transforms.functional import stack_module_state as stack_module_state
from psgrad.engine.transforms.grad import grad as grad
from psgrad.engine.transforms.grad import grad_and_value as grad_and_value
from psgrad.engine.transforms.grad import vjp as vjp
from psgrad.engine.transforms.jacobians import hessian as hessian
from psgrad.engine.transforms.jacobians import jacfwd as jacfwd
from psgrad.engine.transforms.jacobians import jacrev as jacrev
from psgrad.engine.transforms.registration import register_rule as register_rule
from psgrad.engine.transforms.vmap import vmap as vmap

__all__ = [
    "capture",
    "checkpoint",
    "functional_call",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "linearize",
    "register_rule",
    "stack_module_state",
    "vjp",
    "vmap",
]
