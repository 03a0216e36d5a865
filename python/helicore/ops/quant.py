"""FP8 E4M3 weights with one float32 scale for each 128 x 128 block."""

import torch
from torch import Tensor

from helicore._core import quant as _quant
from helicore.ops._registry import register_op

FP8_BLOCK_SIZE: int = _quant.FP8_BLOCK_SIZE


def _dequantize_fake(w: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return w.new_empty(w.shape, dtype=dtype)


@register_op("dequantize_fp8_block", fake=_dequantize_fake)
def dequantize_fp8_block(
    w: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """w * scale of its block: the product in float32, rounded once.

    Args:
        w: [N, K] float8_e4m3fn (or uint8 codes).
        scale_inv: float32 [ceil(N / 128), ceil(K / 128)]; despite the name it multiplies.
        dtype: bfloat16 or float32.
    """
    out = torch.empty(w.shape, dtype=dtype)
    _quant.dequantize_fp8_block(w, scale_inv, out)
    return out


def _quantize_fake(w: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (-(-w.shape[0] // FP8_BLOCK_SIZE), -(-w.shape[1] // FP8_BLOCK_SIZE))
    return (
        w.new_empty(w.shape, dtype=torch.float8_e4m3fn),
        w.new_empty(blocks, dtype=torch.float32),
    )


@register_op("quantize_fp8_block", fake=_quantize_fake)
def quantize_fp8_block(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [N, K] and float32 scales for w [N, K]: max|w| / 448 per block."""
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    blocks = (-(-w.shape[0] // FP8_BLOCK_SIZE), -(-w.shape[1] // FP8_BLOCK_SIZE))
    scale_inv = torch.empty(blocks, dtype=torch.float32)
    _quant.quantize_fp8_block(w, codes, scale_inv)
    return codes, scale_inv
