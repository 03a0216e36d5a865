"""Number formats: quantise and dequantise."""

from __future__ import annotations
import torch

__all__: list[str] = [
    "FP8_BLOCK_SIZE",
    "decode_e4m3",
    "dequantize_fp8_block",
    "encode_e4m3",
    "quantize_fp8_block",
]

def decode_e4m3(code: int) -> float:
    """Value of one FP8 E4M3 code (0..255)."""

def dequantize_fp8_block(w: torch.Tensor, scale_inv: torch.Tensor, out: torch.Tensor) -> None:
    """out = w * scale of its 128 x 128 block. See helicore.ops.dequantize_fp8_block."""

def encode_e4m3(value: float) -> int:
    """Nearest FP8 E4M3 code, ties to even, saturating at 448."""

def quantize_fp8_block(w: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """Codes and scales of w. See helicore.ops.quantize_fp8_block."""

FP8_BLOCK_SIZE: int = 128
