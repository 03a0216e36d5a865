"""Quantising rows of activations, alone or after a residual and an RMS norm.

Shapes: T rows (tokens) of H columns, bfloat16 or float32. docs/design/quantisers.md has formats,
layouts of scales and the rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from helicore._core import quant as _quant
from helicore._core.quant import AllReduceFusion, RowFormat, ScaleLayout

__all__ = [
    "AllReduceFusion",
    "FusedNorm",
    "RowFormat",
    "ScaleLayout",
    "dequantize_rows",
    "fused_norm_quantize",
    "quantize_rows",
    "scale_view",
]


class FusedNorm(NamedTuple):
    """What a fusion gives; None where it has no such output."""

    norm: Tensor | None
    residual: Tensor | None
    codes: Tensor | None
    scales: Tensor | None


def quantize_rows(
    x: Tensor,
    format: RowFormat,
    layout: ScaleLayout = ScaleLayout.ROWS,
    *,
    scale: float = 1.0,
    leading_dim: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of x [T, H]; rows may be strided.

    Args:
        format: how rows are quantised.
        layout: where scales lie; see `scale_view`.
        scale: of FP8_TENSOR, the value of a code 1; of NVFP4 the global scale, by convention
            448 * 6 / absmax of the tensor.
        leading_dim: of COLUMNS, at least T; 0 takes T rounded up to 4.

    Returns:
        Codes float8_e4m3fn [T, H] (NVFP4: uint8 [T, H / 2], first value in the low bits), and the
        memory of the scales, one-dimensional with padding zeroed; None for FP8_TENSOR.

    Raises:
        ValueError: the format has no such layout, H is no multiple of its group, or scale <= 0.
    """
    codes, scales = _outputs(x, format, layout, leading_dim)
    _quant.quantize_rows(x, format, layout, scale, leading_dim, codes, scales)
    return codes, scales


def dequantize_rows(
    codes: Tensor,
    scales: Tensor | None,
    format: RowFormat,
    layout: ScaleLayout = ScaleLayout.ROWS,
    *,
    scale: float = 1.0,
    leading_dim: int = 0,
) -> Tensor:
    """The values of what `quantize_rows` gave: float32 [T, H]."""
    rows, width = codes.shape
    if format == RowFormat.NVFP4:
        width *= 2
    out = torch.empty((rows, width))
    _quant.dequantize_rows(codes, scales, format, layout, scale, leading_dim, out)
    return out


def scale_view(
    scales: Tensor,
    format: RowFormat,
    layout: ScaleLayout,
    rows: int,
    width: int,
    *,
    leading_dim: int = 0,
) -> Tensor:
    """Scales of [rows, width] as [T, groups], without a copy; of FP8_GROUP_PACKED the int32 words
    [T, ceil(groups / 4)]. Not of SWIZZLED scales, whose order no strides describe.

    Raises:
        ValueError: SWIZZLED.
    """
    if layout == ScaleLayout.SWIZZLED:
        raise ValueError("layout must not be SWIZZLED: no strides describe it")
    shape, strides, _, _ = _quant.scale_shape(format, layout, rows, width, leading_dim)
    return scales.as_strided(tuple(shape), tuple(strides))


def fused_norm_quantize(
    x: Tensor,
    fusion: AllReduceFusion,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    leading_dim: int = 0,
    with_norm: bool = True,
) -> FusedNorm:
    """x (+ residual), RMS norm, and codes of the norm: what a fused all-reduce does with its sum.

    On the CPU, or on a GPU with rows of at most 64 KiB; all tensors on one device.

    Args:
        x: [T, H].
        fusion: which outputs; not NONE.
        weight: [H] in the dtype of x.
        residual: [T, H], needed exactly by the fusions that have one.
        eps: of the norm.
        scale, leading_dim: as in `quantize_rows`.
        with_norm: also give the norm itself where there are codes.

    Raises:
        ValueError: naming what is missing, not used or misshapen.
    """
    has_norm, has_residual, format, layout = _quant.fusion_traits(fusion)
    if not has_norm:
        raise ValueError("fusion must not be NONE")
    norm = torch.empty_like(x) if with_norm or format is None else None
    residual_out = torch.empty_like(x) if has_residual else None
    codes, scales = None, None
    if format is not None:
        codes, scales = _outputs(x, format, layout, leading_dim)
    _quant.norm_quantize(
        fusion,
        x,
        residual=residual,
        residual_out=residual_out,
        weight=weight,
        norm=norm,
        codes=codes,
        scales=scales,
        scale=scale,
        eps=eps,
        leading_dim=leading_dim,
    )
    return FusedNorm(norm, residual_out, codes, scales)


def _outputs(
    x: Tensor, format: RowFormat, layout: ScaleLayout, leading_dim: int
) -> tuple[Tensor, Tensor | None]:
    if x.ndim != 2:
        raise ValueError(f"x must be [T, H], got {list(x.shape)}")
    rows, width = x.shape
    _, _, num_elements, dtype = _quant.scale_shape(format, layout, rows, width, leading_dim)
    if format == RowFormat.NVFP4:
        codes = torch.empty((rows, width // 2), dtype=torch.uint8, device=x.device)
    else:
        codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    if format == RowFormat.FP8_TENSOR:
        return codes, None
    return codes, torch.empty(num_elements, dtype=getattr(torch, dtype), device=x.device)
