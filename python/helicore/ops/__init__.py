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
    "RouterConfig",
    "add_rms_norm",
    "apply_logit_bias",
    "apply_penalties",
    "batched_linear",
    "dequantize_fp8_block",
    "embedding",
    "linear",
    "linear_slice",
    "log_softmax_gather",
    "mask_tokens",
    "mlp",
    "moe_block",
    "moe_forward",
    "pack_linear",
    "quantize_fp8_block",
    "rms_norm",
    "route",
    "sample",
    "set_num_threads",
    "silu_mul",
    "top_logprobs",
    "unpack_linear",
]

if hasattr(_core, "attention"):
    from helicore.ops.attention import *  # noqa: F403
