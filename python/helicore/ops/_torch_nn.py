"""The operators of `helicore.ops.nn` over tensors of a GPU: cuBLAS products, elementwise kernels.

Products read rows of weights as a checkpoint has them, so a weight on a GPU is "packed" by leaving
it as it is, [..., N, K]. Norms and gating are native kernels there; beside them stands the same
formula in torch, which runs on any device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from helicore._core import nn as _nn


def pack_linear(weight: Tensor) -> Tensor:
    return weight.contiguous()


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, K] times weight [N, K] transposed, summed in float32, rounded to `dtype` once."""
    if x.dtype == weight.dtype == dtype:
        return x @ weight.T
    if x.dtype == weight.dtype and x.is_cuda and dtype == torch.float32:
        return torch.mm(x, weight.T, out_dtype=dtype)
    return (x.float() @ weight.float().T).to(dtype)


def linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = out_dtype or x.dtype
    if bias is None and residual is None:
        out = _product(x, packed, dtype)
    else:
        total = _product(x, packed, torch.float32)
        for term in (bias, residual):
            if term is not None:
                total += term
        out = total.to(dtype)
    return _silu_mul(out) if silu_mul else out


def batched_linear(
    x: Tensor, packed: Tensor, out_features: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    dtype = out_dtype or x.dtype
    if x.dtype != packed.dtype or dtype != x.dtype:
        x, packed = x.float(), packed.float()
    product = torch.bmm(x.transpose(0, 1), packed.transpose(1, 2))
    return product.transpose(0, 1).to(dtype).contiguous()


def _silu_mul(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        _nn.cuda_silu_mul(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _silu_mul(gate_up)


def mlp(
    x: Tensor,
    packed_gate_up: Tensor,
    packed_down: Tensor,
    intermediate: int,
    out_features: int,
    residual: Tensor | None = None,
) -> Tensor:
    inner = linear(x, packed_gate_up, 2 * intermediate, silu_mul=True)
    return linear(inner, packed_down, out_features, residual=residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _nn.cuda_rms_norm(x, None, weight, eps, out)
        return out
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _nn.cuda_rms_norm(x, residual, weight, eps, out)
        return out
    residual += x
    return rms_norm(residual, weight, eps)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """An id outside the table is not seen here: reading it would wait for the GPU."""
    return F.embedding(ids, table)
