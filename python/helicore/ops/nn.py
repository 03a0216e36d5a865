"""Linear layers over packed weights, norms, activations and the gated MLP.

Shapes: T rows (tokens), K input and N output features. Tensors are bfloat16 or float32; sums are
float32. On a CPU the bits of a row do not depend on the rows computed with it nor on the number of
threads; on a GPU, where cuBLAS makes the products, they may.
"""

import torch
from torch import Tensor

from helicore._core import nn as _nn
from helicore.ops import _torch_nn
from helicore.ops._registry import register_op

# Results are made like an operand or with separate sizes: a third less of torch's time a call.
_CONTIGUOUS = torch.contiguous_format

_PACK_BLOCK = 16  # output features of one packed block


def pack_linear(weight: Tensor, groups: int = 1) -> Tensor:
    """Pack a linear weight for `linear`, `batched_linear`, `mlp` and the expert kernels.

    Args:
        weight: [..., N, K], bfloat16 or float32; leading dimensions (heads, experts) are kept.
        groups: 2 for a gate-and-up weight (gate rows, then up rows), else 1.

    Returns:
        [..., B, ceil(K / 2), 16, 2] for bfloat16 and [..., B, K, 16] for float32, where
        B = groups * ceil(N / groups / 16). Rows past N are zero. On a GPU, [..., N, K].
    """
    weight = weight.detach()
    n, k = weight.shape[-2:]
    if groups < 1 or n % groups:
        raise ValueError(f"groups must divide the {n} rows of weight, got {groups}")
    if weight.is_cuda:
        return _torch_nn.pack_linear(weight)
    blocks = groups * -(-(n // groups) // 16)
    tail = (blocks, -(-k // 2), 16, 2) if weight.dtype == torch.bfloat16 else (blocks, k, 16)
    packed = torch.empty((*weight.shape[:-2], *tail), dtype=weight.dtype)
    _nn.pack_linear(weight, packed, groups)
    return packed


def unpack_linear(packed: Tensor, out_features: int, in_features: int, groups: int = 1) -> Tensor:
    """The inverse of `pack_linear`: [..., N, K]."""
    if packed.is_cuda:
        return packed.clone()
    lead = packed.shape[: packed.ndim - (4 if packed.dtype == torch.bfloat16 else 3)]
    weight = torch.empty((*lead, out_features, in_features), dtype=packed.dtype)
    _nn.unpack_linear(packed, weight, groups)
    return weight


def _linear_fake(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    width = out_features // 2 if silu_mul else out_features
    return x.new_empty((x.shape[0], width), dtype=out_dtype or x.dtype)


@register_op("linear", fake=_linear_fake, cuda=_torch_nn.linear)
def linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T (+ bias) (+ residual), one rounding at the end.

    Args:
        x: [T, K]; rows may be strided. With a bfloat16 weight a float32 x is not rounded.
        packed: the weight [N, K] from `pack_linear`.
        out_features: N.
        bias: [N] or None.
        residual: [T, N] in the dtype of the result, or None.
        silu_mul: the weight holds gate and up rows (packed with groups=2) and the result is
            silu(gate) * up, [T, N / 2].
        out_dtype: default: that of x.
    """
    width = out_features // 2 if silu_mul else out_features
    out = torch.empty(x.shape[0], width, dtype=out_dtype or x.dtype)
    _nn.linear(x, packed, out, out_features, bias, residual, silu_mul)
    return out


def linear_slice(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    start: int,
    end: int,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Columns [start, end) of `linear`, with the same bits: [T, end - start], rows strided.

    No more than 30 columns beside them are computed. Arguments are those of `linear`.

    Raises:
        ValueError: not 0 <= start < end <= out_features.
    """
    if not 0 <= start < end <= out_features:
        raise ValueError(
            f"start and end must be a range within the {out_features} output features, "
            f"got {start} and {end}"
        )
    first, last = start, end
    if packed.is_cuda:
        part = packed[start:end]
    else:
        first, last = start // _PACK_BLOCK * _PACK_BLOCK, -(-end // _PACK_BLOCK) * _PACK_BLOCK
        last = min(last, out_features)
        part = packed[first // _PACK_BLOCK : -(-last // _PACK_BLOCK)]
    bias = None if bias is None else bias[first:last]
    out: Tensor = linear(x, part, last - first, bias, out_dtype=out_dtype)
    return out[:, start - first : end - first]


def _batched_linear_fake(
    x: Tensor, packed: Tensor, out_features: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    return x.new_empty((*x.shape[:2], out_features), dtype=out_dtype or x.dtype)


@register_op("batched_linear", fake=_batched_linear_fake, cuda=_torch_nn.batched_linear)
def batched_linear(
    x: Tensor, packed: Tensor, out_features: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """One product per head: out[t, h] = x[t, h] W[h]^T.

    Args:
        x: [T, H, K], last dimension contiguous.
        packed: the weights [H, N, K] from `pack_linear`.
        out_features: N.
        out_dtype: default: that of x.
    """
    out = torch.empty(x.shape[0], x.shape[1], out_features, dtype=out_dtype or x.dtype)
    _nn.batched_linear(x, packed, out)
    return out


def _mlp_fake(
    x: Tensor,
    packed_gate_up: Tensor,
    packed_down: Tensor,
    intermediate: int,
    out_features: int,
    residual: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


@register_op("mlp", fake=_mlp_fake, cuda=_torch_nn.mlp)
def mlp(
    x: Tensor,
    packed_gate_up: Tensor,
    packed_down: Tensor,
    intermediate: int,
    out_features: int,
    residual: Tensor | None = None,
) -> Tensor:
    """Gated MLP: down(silu(gate x) * up x) (+ residual), [T, D].

    Args:
        x: [T, D].
        packed_gate_up: gate rows then up rows [2 I, D], packed with groups=2.
        packed_down: [D, I], packed.
        intermediate: I.
        out_features: D.
        residual: [T, D] or None.
    """
    out = torch.empty(x.shape[0], out_features, dtype=x.dtype)
    _nn.mlp(x, packed_gate_up, packed_down, out, intermediate, residual)
    return out


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_op("rms_norm", fake=_rms_norm_fake, cuda=_torch_nn.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) per row, in float32, rounded before the weight as well.

    x [T, D] (rows may be strided), weight [D] of the same dtype; contiguous result [T, D].
    """
    out = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _nn.rms_norm(x, weight, eps, out)
    return out


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_op(
    "add_rms_norm",
    fake=_add_rms_norm_fake,
    mutates=("residual",),
    cuda=_torch_nn.add_rms_norm,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then the RMS norm of the sum as a new tensor. All [T, D]."""
    out = torch.empty_like(x, memory_format=_CONTIGUOUS)
    _nn.add_rms_norm(x, residual, weight, eps, out)
    return out


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@register_op("silu_mul", fake=_silu_mul_fake, cuda=_torch_nn.silu_mul)
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I] (gate columns, then up columns): [T, I]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _nn.silu_mul(gate_up, out)
    return out


def _embedding_fake(ids: Tensor, table: Tensor) -> Tensor:
    return table.new_empty((ids.shape[0], table.shape[1]))


@register_op("embedding", fake=_embedding_fake, cuda=_torch_nn.embedding)
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]: ids [T] int32 or int64, table [V, D]. An id outside the table is a ValueError."""
    out = torch.empty(ids.shape[0], table.shape[1], dtype=table.dtype)
    _nn.embedding(ids, table, out)
    return out
