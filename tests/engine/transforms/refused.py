"""What of PyTorch's operator database is refused, and the words that each refusal must hold. Nothing else may be refused.

An entry stands here if any of its sample calls is refused; the others must be right. A test says so when one starts to work.
"""

from __future__ import annotations

# Operator without a rule -> the entries that end in it.
WITHOUT_RULE = {
    "aten::_fft_c2c": "fft.fft2 fft.fftn fft.ifft2 fft.ifftn",
    "aten::_fft_c2c aten::_fft_c2r": "fft.hfft2 fft.hfftn",
    "aten::_fft_c2r": "fft.hfft fft.irfft fft.irfft2 fft.irfftn",
    "aten::_fft_r2c": "stft fft.fft fft.rfft fft.rfft2 fft.rfftn fft.ifft fft.ihfft fft.ihfft2 fft.ihfftn",
    "aten::_histogramdd_bin_edges aten::_histogramdd_from_bin_tensors": "histogramdd",
    "aten::_linalg_det": "linalg.det",
    "aten::_linalg_eigh": "linalg.eigh linalg.eigvalsh linalg.matrix_rank.hermitian",
    "aten::_linalg_slogdet": "logdet linalg.slogdet",
    "aten::_linalg_solve_ex": "linalg.solve linalg.solve_ex linalg.tensorsolve",
    "aten::_linalg_svd": "svd norm.nuc linalg.cond linalg.matrix_norm linalg.matrix_rank linalg.svd linalg.svdvals",
    "aten::_to_sparse aten::_to_sparse.sparse_dim": "to_sparse",
    "aten::_upsample_bilinear2d_aa": "_upsample_bilinear2d_aa",
    "aten::angle": "angle",
    "aten::as_strided": "as_strided",
    "aten::as_strided_copy": "as_strided_copy",
    "aten::as_strided_scatter": "as_strided_scatter",
    "aten::cholesky": "cholesky",
    "aten::cholesky_inverse": "cholesky_inverse",
    "aten::cholesky_solve": "cholesky_solve",
    "aten::fractional_max_pool2d": "nn.functional.fractional_max_pool2d",
    "aten::fractional_max_pool3d": "nn.functional.fractional_max_pool3d",
    "aten::frexp.Tensor": "frexp",
    "aten::geqrf": "geqrf",
    "aten::grid_sampler_3d": "nn.functional.grid_sample grid_sampler_3d",
    "aten::hash_tensor": "hash_tensor",
    "aten::histogram.bin_ct aten::histogram.bins_tensor": "histogram",
    "aten::linalg_cholesky_ex": "linalg.cholesky linalg.cholesky_ex",
    "aten::linalg_eig": "linalg.eig linalg.eigvals",
    "aten::linalg_householder_product": "linalg.householder_product",
    "aten::linalg_inv_ex": "linalg.matrix_power linalg.inv linalg.inv_ex linalg.tensorinv",
    "aten::linalg_ldl_factor_ex": "linalg.ldl_factor linalg.ldl_factor_ex",
    "aten::linalg_ldl_solve": "linalg.ldl_solve",
    "aten::linalg_lstsq": "linalg.lstsq linalg.lstsq.grad_oriented",
    "aten::linalg_lu": "linalg.lu",
    "aten::linalg_lu_factor_ex": "lu linalg.lu_factor linalg.lu_factor_ex",
    "aten::linalg_lu_solve": "lu_solve linalg.lu_solve",
    "aten::linalg_matrix_exp": "matrix_exp",
    "aten::linalg_pinv.atol_rtol_tensor": "pinverse linalg.pinv linalg.pinv.singular linalg.pinv.hermitian",
    "aten::linalg_qr": "qr svd_lowrank pca_lowrank linalg.qr",
    "aten::linalg_solve_triangular": "linalg.solve_triangular",
    "aten::lu_unpack": "lu_unpack",
    "aten::mode": "mode",
    "aten::nextafter": "nextafter",
    "aten::nonzero_static": "nonzero_static",
    "aten::ormqr": "ormqr",
    "aten::triangular_solve": "triangular_solve",
    "aten::view_as_complex": "view_as_complex",
}

# They draw, which vmap refuses by default; tests/engine/transforms/test_semantics.py holds their draws against native ones.
RANDOM = (
    "cauchy exponential geometric log_normal normal.in_place uniform "
    "nn.functional.scaled_dot_product_attention randn_like rand_like randint_like multinomial normal "
    "normal.number_mean bernoulli nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d "
    "nn.functional.alpha_dropout nn.functional.feature_alpha_dropout.with_train "
    "nn.functional.multi_head_attention_forward "
)

# Under vmap they would need a Python number, a branch or a shape that differs between samples.
DEPENDS_ON_DATA = (
    "item allclose cov equal masked_select narrow tensor_split unique unique_consecutive "
    "histc nonzero argwhere nn.functional.gaussian_nll_loss repeat_interleave "
)

# Everything else -> words of the refusal, and why it is one.
OTHERWISE = {
    "sparse.sampled_addmm": "layout torch.sparse_csr",  # tracers are dense
    "sparse.mm.reduce": "layout torch.sparse_csr",
    "complex": "view_as_real",  # PyTorch writes it in place through a view that has another dtype
    "polar": "view_as_real",
    "resize_": "resize",
    "resize_as_": "resize",
    "native_batch_norm": "writes in place",  # the layer behind it, nn.functional.batch_norm, works: running statistics are arguments
    "_native_batch_norm_legit": "writes in place",
    "_batch_norm_with_update": "writes in place",
    "nn.functional.batch_norm": "batch norm copy_",  # running statistics from outside the function, updated
    "nn.functional.rrelu": "writes in place",  # draws into an argument
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
