"""Names of ATen operators by what they do to the features that values come from."""

from __future__ import annotations

# Which arguments hold the values that are moved; the others are sizes, dimensions and indices.
MOVES: dict[str, tuple[int, ...]] = dict.fromkeys(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze"),
        *("select", "slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"),
        *("unbind", "cat", "stack", "index", "index_select", "gather", "flip", "roll", "repeat", "diagonal", "tril", "triu"),
        *("constant_pad_nd", "masked_select", "unfold", "as_strided", "repeat_interleave", "take", "diag_embed", "alias", "detach"),
        *("transpose_", "squeeze_", "unsqueeze_", "t_", "split_copy", "unbind_copy", "select_copy", "slice_copy", "view_copy"),
        *("permute_copy", "expand_copy", "movedim", "narrow", "rot90", "split_with_sizes_copy", "pixel_shuffle", "channel_shuffle"),
    ),
    (0,),
)
MOVES |= {"where": (1, 2), "index_put": (0, 2), "scatter": (0, 3), "masked_fill": (0, 2), "masked_scatter": (0, 2)}
MOVES |= {"index_put_": (0, 2), "scatter_": (0, 3), "masked_fill_": (0, 2), "copy_": (0, 1), "fill_": (0, 1), "copy": (0, 1)}
MOVES |= {"slice_scatter": (0, 1), "select_scatter": (0, 1), "index_copy": (0, 3), "masked_scatter_": (0, 2)}
MOVES |= {"_index_put_impl_": (0, 2)}
SAME = ("clone", "_to_copy", "contiguous", "lift_fresh", "lift_fresh_copy", "zero_")
# They take the shape of what they are given and nothing else.
LIKE = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isinf", "bitwise_not")
NONLINEAR = (
    *("sigmoid", "relu", "tanh", "gelu", "silu", "hardsigmoid", "hardswish", "hardtanh", "exp", "leaky_relu", "elu", "softplus"),
    *("prelu", "_prelu_kernel", "mish", "log_sigmoid", "log_sigmoid_forward", "threshold", "clamp", "clamp_min", "selu", "celu"),
)
NORMS = (
    *("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("cudnn_batch_norm", "native_group_norm", "_batch_norm_with_update", "batch_norm", "_fused_rms_norm", "rms_norm"),
)
REDUCTIONS = (
    *("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "prod", "logsumexp", "linalg_vector_norm"),
    *("norm", "nansum", "median", "mode", "any", "all", "argmax", "argmin", "count_nonzero"),
)
ALONG = ("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "sort", "topk", "logcumsumexp")
ATTENTION = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
