"""Number formats: quantise and dequantise."""

from __future__ import annotations
import enum
import torch
import typing

__all__: list[str] = [
    "AllReduceFusion",
    "FP8_BLOCK_SIZE",
    "RowFormat",
    "ScaleLayout",
    "decode_e4m3",
    "dequantize_fp8_block",
    "dequantize_rows",
    "encode_e4m3",
    "fusion_traits",
    "norm_quantize",
    "quantize_fp8_block",
    "quantize_rows",
    "scale_shape",
]

class RowFormat(enum.Enum):
    """How rows of activations are quantised."""

    FP8_TENSOR = 0
    FP8_TOKEN = 1
    FP8_GROUP = 2
    FP8_GROUP_PACKED = 3
    NVFP4 = 4
    MXFP8 = 5

class ScaleLayout(enum.Enum):
    """Where the scales of rows lie."""

    ROWS = 0
    COLUMNS = 1
    SWIZZLED = 2

class AllReduceFusion(enum.Enum):
    """What follows a sum over ranks in the same call."""

    NONE = 0
    RMS_NORM = 1
    RESIDUAL_RMS_NORM = 2
    RESIDUAL_RMS_NORM_FP8 = 3
    RESIDUAL_RMS_NORM_FP8_TOKEN = 4
    RESIDUAL_RMS_NORM_FP8_BLOCK = 5
    RESIDUAL_RMS_NORM_FP8_PACKED = 6
    RESIDUAL_RMS_NORM_NVFP4 = 7
    RESIDUAL_RMS_NORM_NVFP4_ROWS = 8
    RESIDUAL_RMS_NORM_MXFP8 = 9

def decode_e4m3(code: int) -> float:
    """Value of one FP8 E4M3 code (0..255)."""

def dequantize_fp8_block(w: torch.Tensor, scale_inv: torch.Tensor, out: torch.Tensor) -> None:
    """out = w * scale of its 128 x 128 block. See helicore.ops.dequantize_fp8_block."""

def dequantize_rows(
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    format: RowFormat,
    layout: ScaleLayout,
    scale: float,
    leading_dim: int,
    out: torch.Tensor,
) -> None:
    """See helicore.ops.dequantize_rows."""

def encode_e4m3(value: float) -> int:
    """Nearest FP8 E4M3 code, ties to even, saturating at 448."""

def fusion_traits(fusion: AllReduceFusion) -> tuple[bool, bool, RowFormat | None, ScaleLayout]:
    """(has a norm, has a residual, format of its codes or None, layout of scales)."""

def norm_quantize(
    fusion: AllReduceFusion,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-06,
    leading_dim: int = 0,
) -> None:
    """See helicore.ops.fused_norm_quantize."""

def quantize_fp8_block(w: torch.Tensor, codes: torch.Tensor, scale_inv: torch.Tensor) -> None:
    """Codes and scales of w. See helicore.ops.quantize_fp8_block."""

def quantize_rows(
    x: torch.Tensor,
    format: RowFormat,
    layout: ScaleLayout,
    scale: float,
    leading_dim: int,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    """See helicore.ops.quantize_rows."""

def scale_shape(
    format: RowFormat, layout: ScaleLayout, rows: int, width: int, leading_dim: int = 0
) -> tuple[list[int], list[int], int, str]:
    """(shape, strides, elements to allocate, dtype) of the scales of [rows, width]."""

FP8_BLOCK_SIZE: int = 128
