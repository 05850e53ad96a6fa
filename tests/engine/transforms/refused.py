"""What of PyTorch's operator database is refused, and the words that each refusal must hold. Nothing else may
be refused.

An entry stands here if any of its sample calls is refused; the others must be right. A test says so when one
starts to work.
"""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why an entry is refused, and the words, one of which each of its refusals holds."""

    words: str
    reason: str
    rows: frozenset[str] | None = (
        None  # where it is; None: in every row, for an operator without derivative in every row under vmap
    )


# Operator without a rule -> the entries that end in it.
WITHOUT_RULE = {
    "aten::_histogramdd_bin_edges aten::_histogramdd_from_bin_tensors": "histogramdd",
    "aten::_to_sparse aten::_to_sparse.sparse_dim": "to_sparse",
    "aten::linalg_matrix_sqrth": "linalg.matrix_sqrth",
    "aten::linalg_polar": "linalg.polar",
}

# Not in the database of every supported PyTorch.
NEW_IN_2_15 = frozenset({"linalg.matrix_sqrth", "linalg.polar"})

# Under vmap they need a Python number, a branch or a shape from their data: both samples are the same, so
# that they agree on it.
AGREEING = (
    "item allclose cov equal masked_select narrow tensor_split unique unique_consecutive "
    "nonzero argwhere nn.functional.gaussian_nll_loss repeat_interleave "
)

# Of these, the ones that read data where psgrad can't check whether samples agree.
DEPENDS_ON_DATA = "unique unique_consecutive "

MAPPED = frozenset({"vmap(grad)", "vmap(vjp)", "vmap(jvp)", "vmap(vjp of vjp)", "vjp of vmap"})
ALL = MAPPED | {"vjp", "jvp", "vjp of vjp", "jvp of vjp"}

# Right as it is; in place it changes its target's shape.
SHAPE_IN_PLACE = "addbmm "

# Everything else.
OTHERWISE = {
    "as_strided_copy": Refusal(
        "as_strided with size",
        "reads memory; that of one sample has another layout",
        MAPPED - {"vjp of vmap"},
    ),
    "nn.functional.dropout3d": Refusal("squeeze_", "changes a shape in place", ALL - {"vjp of vmap"}),
    "nn.functional.scaled_dot_product_attention": Refusal(
        "can't draw the same", "with dropout", frozenset({"vjp of vmap"})
    ),
    "sparse.sampled_addmm": Refusal("layout torch.sparse_csr", "a traced value is dense"),
    "sparse.mm.reduce": Refusal("layout torch.sparse_csr", "a traced value is dense"),
    "resize_": Refusal("resize", "changes how much memory a tensor has", frozenset({"vjp", "vmap(vjp)"})),
    "resize_as_": Refusal("resize", "changes how much memory a tensor has"),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        Refusal("writes in place", "writes running statistics; `nn.functional.batch_norm` reads them"),
    ),
    "nn.functional.batch_norm": Refusal(
        "BatchNorm batch norm copy_", "in training mode it mixes samples, and writes running statistics"
    ),
}

REFUSED = {
    **{
        entry: Refusal(
            operators, f"no rule for {', '.join(f'`{operator}`' for operator in operators.split())}"
        )
        for operators, names in WITHOUT_RULE.items()
        for entry in names.split()
    },
    **dict.fromkeys(
        DEPENDS_ON_DATA.split(),
        Refusal("between samples", "a number, a branch or a shape that samples disagree on", MAPPED),
    ),
    **dict.fromkeys(SHAPE_IN_PLACE.split(), Refusal("in place", "changes a shape in place")),
    **OTHERWISE,
}

# What can't be judged, and why.
UNJUDGED = {
    "as_strided.partial_views": "reads memory around its argument; a traced value has no such memory",
    **{
        f"jiterator_{kind}": "compiles kernels for a GPU"
        for kind in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
}

# The same under vmap.
UNJUDGED_MAPPED = dict.fromkeys(
    ("sparse.sampled_addmm", "sparse.mm.reduce"), "sparse samples can't be stacked"
)

# The same for whatever is pulled back.
UNJUDGED_PULLED = {
    "as_strided_scatter": (
        "PyTorch's VJP returns the overwritten values, not the kept ones; ours is the transpose of its JVP"
    ),
}

# The same for the second derivative.
UNJUDGED_TWICE = {
    "native_layer_norm": "PyTorch has no second derivative of it without bias",
    "nn.functional.ctc_loss": "PyTorch has no second derivative of it",
    "nn.functional.linear_cross_entropy.chunked": (
        "PyTorch's omits the part of the inputs; ours is that of the plain loss"
    ),
    "nn.functional.linear_cross_entropy.chunked_none": "PyTorch has no second derivative of it",
    "sparse.sampled_addmm": "PyTorch has no second derivative of it",
    "linalg.norm.subgradients_at_zero": "PyTorch returns NaN where no derivative exists; ours is zero",
    "masked.logaddexp": "PyTorch returns NaN at masked places; ours is zero",
}
