"""Norms, small-batch linear layers, activations, sampling."""

from __future__ import annotations
import torch
import typing

__all__: list[str] = [
    "add_rms_norm",
    "apply_logit_bias",
    "apply_penalties",
    "batched_linear",
    "cuda_rms_norm",
    "cuda_silu_mul",
    "embedding",
    "linear",
    "mask_tokens",
    "mlp",
    "pack_linear",
    "packed_numel",
    "rms_norm",
    "sample",
    "silu_mul",
    "top_logprobs",
    "unpack_linear",
]

def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """residual += x in place, then RMS norm of the sum."""

def apply_logit_bias(
    logits: torch.Tensor, row_ptr: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> None:
    """logits[row, id] += value in place."""

def apply_penalties(
    logits: torch.Tensor,
    prompt_row_ptr: torch.Tensor,
    prompt_ids: torch.Tensor,
    output_row_ptr: torch.Tensor,
    output_ids: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalties in place. See helicore.ops.apply_penalties."""

def batched_linear(x: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """out[t, h] = x[t, h] times the packed matrix of head h."""

def cuda_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """rms_norm, or add_rms_norm with a residual, on CUDA tensors."""

def cuda_silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """silu_mul on CUDA tensors."""

def embedding(ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = table[ids[i]]; an id out of range is a ValueError."""

def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    out: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
) -> None:
    """out [T, N] = x [T, K] times a packed weight. See helicore.ops.linear."""

def mask_tokens(logits: torch.Tensor, row_ptr: torch.Tensor, ids: torch.Tensor) -> None:
    """logits[row, id] = -inf in place."""

def mlp(
    x: torch.Tensor,
    packed_gate_up: torch.Tensor,
    packed_down: torch.Tensor,
    out: torch.Tensor,
    intermediate: int,
    residual: torch.Tensor | None = None,
) -> None:
    """Gated MLP. See helicore.ops.mlp."""

def pack_linear(weight: torch.Tensor, packed: torch.Tensor, groups: int = 1) -> None:
    """Pack weight [..., N, K] into packed. See helicore.ops.pack_linear."""

def packed_numel(weight: torch.Tensor, groups: int = 1) -> int:
    """Elements of the packed form of one [N, K] matrix of weight."""

def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """RMS norm of rows."""

def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor | None = None,
) -> None:
    """Draw one token per row. See helicore.ops.sample."""

def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up."""

def top_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """Log-probabilities, ranks and best tokens. See helicore.ops.top_logprobs."""

def unpack_linear(packed: torch.Tensor, weight: torch.Tensor, groups: int = 1) -> None:
    """The inverse of pack_linear."""
