"""Native kernels as functions over torch tensors, registered as `torch.ops.helicore.*`."""

import torch

from helicore import _core
from helicore.ops.moe import RouterConfig, moe_block, moe_forward, route
from helicore.ops.nn import (
    add_rms_norm,
    batched_linear,
    embedding,
    linear,
    linear_slice,
    mlp,
    pack_linear,
    rms_norm,
    silu_mul,
    unpack_linear,
)
from helicore.ops.quant import dequantize_fp8_block, quantize_fp8_block
from helicore.ops.row_quant import (
    AllReduceFusion,
    FusedNorm,
    RowFormat,
    ScaleLayout,
    dequantize_rows,
    fused_norm_quantize,
    quantize_rows,
    scale_view,
)
from helicore.ops.sampling import (
    apply_logit_bias,
    apply_penalties,
    log_softmax_gather,
    mask_tokens,
    sample,
    top_logprobs,
)


def set_num_threads(num_threads: int) -> None:
    """Set the threads of the native kernels and of torch. ValueError unless 1..1024."""
    _core.core.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)


__all__ = [
    "AllReduceFusion",
    "FusedNorm",
    "RouterConfig",
    "RowFormat",
    "ScaleLayout",
    "add_rms_norm",
    "apply_logit_bias",
    "apply_penalties",
    "batched_linear",
    "dequantize_fp8_block",
    "dequantize_rows",
    "embedding",
    "fused_norm_quantize",
    "linear",
    "linear_slice",
    "log_softmax_gather",
    "mask_tokens",
    "mlp",
    "moe_block",
    "moe_forward",
    "pack_linear",
    "quantize_fp8_block",
    "quantize_rows",
    "rms_norm",
    "route",
    "sample",
    "scale_view",
    "set_num_threads",
    "silu_mul",
    "top_logprobs",
    "unpack_linear",
]

if hasattr(_core, "attention"):
    from helicore.ops.attention import *  # noqa: F403
