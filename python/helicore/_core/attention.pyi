"""MLA: append, decode, prefill, merge."""

from __future__ import annotations
import torch
import typing

__all__: list[str] = [
    "absorbed_is_cheaper",
    "cache_row_bytes",
    "cuda_decode_workspace_bytes",
    "cuda_gather_rows",
    "cuda_merge_states",
    "cuda_mla_append",
    "cuda_mla_decode",
    "cuda_rope_q",
    "merge_states",
    "mla_absorb",
    "mla_append",
    "mla_decode",
    "mla_prefill",
    "mla_project_v",
    "rope_q",
]

def absorbed_is_cheaper(
    num_q_tokens: int, kv_len: int, kv_lora_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> bool:
    """Whether mla_decode costs less than mla_prefill for one request."""

def cache_row_bytes(cache_format: str, kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of a token's row in a quantised format. See helicore.ops.cache_row_bytes."""

def cuda_decode_workspace_bytes(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    out: torch.Tensor,
    fixed_splits: int = 0,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> int:
    """Bytes of workspace that cuda_mla_decode needs for tensors of these shapes."""

def cuda_gather_rows(
    cache: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
    kv_lora_rank: int,
    cache_format: str,
    cache_scale: float,
) -> None:
    """out[i] = the row of token i of a request whose pages are given, of a quantised cache."""

def cuda_merge_states(
    o_a: torch.Tensor,
    stats_a: torch.Tensor,
    o_b: torch.Tensor,
    stats_b: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """merge_states on CUDA tensors, on torch's current stream."""

def cuda_mla_append(
    kv_a: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_lora_rank: int,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-06,
    interleaved: bool = True,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    """mla_append on CUDA tensors, on torch's current stream."""

def cuda_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    kv_bound: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    fixed_splits: int = 0,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    """
    Absorbed paged attention on CUDA tensors, on torch's current stream.

    fixed_splits > 0 makes a row's bits independent of its batch.
    """

def cuda_rope_q(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = True
) -> None:
    """rope_q on CUDA tensors, on torch's current stream."""

def merge_states(
    o_a: torch.Tensor,
    stats_a: torch.Tensor,
    o_b: torch.Tensor,
    stats_b: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
) -> None:
    """Merge two partial results. See helicore.ops.merge_states."""

def mla_absorb(
    q: torch.Tensor,
    w_absorb: torch.Tensor,
    fused_q: torch.Tensor,
    kv_lora_rank: int,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = True,
) -> None:
    """Query of absorbed attention. See helicore.ops.mla_absorb."""

def mla_append(
    kv_a: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_lora_rank: int,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-06,
    interleaved: bool = True,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    """Write latent rows to the cache. See helicore.ops.mla_append."""

def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    kv_bound: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    """Absorbed paged attention. See helicore.ops.mla_decode."""

def mla_prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
    out: torch.Tensor,
    stats: torch.Tensor | None = None,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    """Expanded paged attention. See helicore.ops.mla_prefill."""

def mla_project_v(o_lat: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor) -> None:
    """Latent output to values. See helicore.ops.mla_project_v."""

def rope_q(
    q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = True
) -> None:
    """Rotate the rope part of q in place. See helicore.ops.rope_q."""
