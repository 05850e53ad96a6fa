"""What of PyTorch's operator database is refused, and the words that each refusal must hold. Nothing else may be refused.

An entry stands here if any of its sample calls is refused; the others must be right. A test says so when one starts to work.
"""

from __future__ import annotations

# Operator without a rule -> the entries that end in it.
WITHOUT_RULE = {
    "aten::_histogramdd_bin_edges aten::_histogramdd_from_bin_tensors": "histogramdd",
    "aten::_to_sparse aten::_to_sparse.sparse_dim": "to_sparse",
    "aten::as_strided": "as_strided",
    "aten::as_strided_copy": "as_strided_copy",
    "aten::as_strided_scatter": "as_strided_scatter",
    "aten::frexp.Tensor": "frexp",
    "aten::hash_tensor": "hash_tensor",
    "aten::histogram.bin_ct aten::histogram.bins_tensor": "histogram",
}

# They draw, which vmap refuses by default; tests/engine/transforms/test_semantics.py holds their draws against native ones.
RANDOM = (
    "cauchy exponential geometric log_normal normal.in_place uniform "
    "nn.functional.scaled_dot_product_attention randn_like rand_like randint_like multinomial normal "
    "normal.number_mean bernoulli nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d "
    "nn.functional.alpha_dropout nn.functional.feature_alpha_dropout.with_train "
    "nn.functional.multi_head_attention_forward svd_lowrank pca_lowrank "
    "nn.functional.rrelu nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d "
)

# Under vmap they would need a Python number, a branch or a shape that differs between samples.
DEPENDS_ON_DATA = (
    "item allclose cov equal masked_select narrow tensor_split unique unique_consecutive "
    "nonzero argwhere nn.functional.gaussian_nll_loss repeat_interleave "
)

# Everything else -> words of the refusal, and why it is one.
OTHERWISE = {
    "stft": "transpose_",  # turns its result round in place
    "sparse.sampled_addmm": "layout torch.sparse_csr",  # tracers are dense
    "sparse.mm.reduce": "layout torch.sparse_csr",
    "resize_": "resize",
    "resize_as_": "resize",
    "native_batch_norm": "writes in place",  # the layer behind it, nn.functional.batch_norm, works: running statistics are arguments
    "_native_batch_norm_legit": "writes in place",
    "_batch_norm_with_update": "writes in place",
    "nn.functional.batch_norm": "batch norm copy_",  # running statistics from outside the function, updated
}

REFUSED = {
    **{entry: operator for operator, entries in WITHOUT_RULE.items() for entry in entries.split()},
    **dict.fromkeys(RANDOM.split(), "randomness='error'"),
    **dict.fromkeys(DEPENDS_ON_DATA.split(), "between samples"),
    **OTHERWISE,
}
"""Entry -> words, one of which each of its refusals holds."""

# What can't be judged, and why.
UNJUDGED = {
    "as_strided.partial_views": "speaks of memory around its argument, which a traced value has none of",
    **{
        f"jiterator_{kind}": "compiles kernels for a GPU"
        for kind in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
}

# The same for the second derivative.
UNJUDGED_TWICE = {
    "native_layer_norm": "PyTorch has no second derivative of it without bias",
    "nn.functional.ctc_loss": "PyTorch has no second derivative of it",
    "nn.functional.linear_cross_entropy.chunked": "PyTorch's leaves out what the inputs contribute; ours is that of the plain loss",
    "nn.functional.linear_cross_entropy.chunked_none": "PyTorch has no second derivative of it",
    "sparse.sampled_addmm": "PyTorch has no second derivative of it",
    "linalg.norm.subgradients_at_zero": "PyTorch says nan at a point where there is none; ours is zero",
    "masked.logaddexp": "PyTorch says nan at masked places; ours is zero",
}
