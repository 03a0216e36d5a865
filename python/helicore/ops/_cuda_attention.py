"""The operators of `helicore.ops.attention` over tensors of a GPU.

Append, rope, decode and merge are native kernels; the products by head go through cuBLAS, expanded
attention through torch's scaled_dot_product_attention. Of a latent weight the "packed" form is the
weight itself, as in `_torch_nn`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from helicore._core import attention as _attention

_MAX_EXPANDED_BYTES = 512 << 20
"""Keys and values of one request's history that are expanded at a time; heads are cut to fit."""


def mla_append(
    kv_a: Tensor,
    cache: Tensor,
    slots: Tensor,
    kv_lora_rank: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = True,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> None:
    norm = (norm_weight, eps)
    coding = (cache_format, cache_scale)
    _attention.cuda_mla_append(
        kv_a, cache, slots, kv_lora_rank, positions, cos_sin, *norm, interleaved, *coding
    )


def mla_absorb(
    q: Tensor,
    w_absorb: Tensor,
    kv_lora_rank: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    interleaved: bool = True,
) -> Tensor:
    nope = w_absorb.shape[-1]
    fused = q.new_empty((q.shape[0], q.shape[1], kv_lora_rank + q.shape[2] - nope))
    by_head = fused[..., :kv_lora_rank].transpose(0, 1)
    torch.bmm(q[..., :nope].transpose(0, 1), w_absorb.transpose(1, 2), out=by_head)
    fused[..., kv_lora_rank:] = q[..., nope:]
    if positions is not None and cos_sin is not None:
        _attention.cuda_rope_q(fused, positions, cos_sin, interleaved)
    return fused


def mla_project_v(o_lat: Tensor, w_uv: Tensor, v_dim: int) -> Tensor:
    out = o_lat.new_empty((o_lat.shape[0], o_lat.shape[1], v_dim))
    torch.bmm(o_lat.transpose(0, 1), w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out.view(o_lat.shape[0], -1)


def rope_q(q: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = True) -> None:
    _attention.cuda_rope_q(q, positions, cos_sin, interleaved)


def _decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_bound: Tensor | None,
    stats: Tensor | None,
    coding: tuple[str, float],
) -> Tensor:
    out = q.new_empty((q.shape[0], q.shape[1], kv_lora_rank))
    args = (q, cache, block_table, cu_q, kv_len)
    size = _attention.cuda_decode_workspace_bytes(*args, out, 0, *coding)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
    _attention.cuda_mla_decode(*args, scale, out, kv_bound, stats, workspace, 0, *coding)
    return out


def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_bound: Tensor | None = None,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> Tensor:
    coding = (cache_format, cache_scale)
    return _decode(q, cache, block_table, cu_q, kv_len, scale, kv_lora_rank, kv_bound, None, coding)


def mla_decode_stats(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    scale: float,
    kv_lora_rank: int,
    kv_bound: Tensor | None = None,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    stats = q.new_empty((q.shape[0], q.shape[1], 2), dtype=torch.float32)
    coding = (cache_format, cache_scale)
    args = (q, cache, block_table, cu_q, kv_len, scale, kv_lora_rank, kv_bound, stats)
    return _decode(*args, coding), stats


def mla_prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    kv_lora_rank: int,
    v_dim: int,
    cache_format: str = "auto",
    cache_scale: float = 1.0,
) -> Tensor:
    """cu_q and kv_len decide the shapes of the products; given on the host, nothing waits."""
    out = q.new_empty((q.shape[0], q.shape[1], v_dim))
    ends, lengths = cu_q.tolist(), kv_len.tolist()
    page_size = cache.shape[1]
    for request, length in enumerate(lengths):
        begin, end = ends[request], ends[request + 1]
        if begin == end:
            continue
        pages = block_table[request, : -(-length // page_size)]
        if cache_format == "auto":
            rows = cache.index_select(0, pages).view(-1, cache.shape[2])[:length]
        else:
            rows = q.new_empty((length, kv_lora_rank + q.shape[2] - w_uk.shape[1]))
            _attention.cuda_gather_rows(cache, pages, rows, kv_lora_rank, cache_format, cache_scale)
        out[begin:end] = _expanded(q[begin:end], rows, w_uk, w_uv, scale, kv_lora_rank)
    return out.view(q.shape[0], -1)


def _expanded(
    q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float, kv_lora_rank: int
) -> Tensor:
    """Causal attention of one request: q [S, H, dn + dr], rows [L, R + dr] -> [S, H, dv].

    As many heads at a time as keep the expanded keys and values small: no head needs another.
    """
    num_heads, length = q.shape[1], rows.shape[0]
    per_head = length * (q.shape[2] + w_uv.shape[1]) * rows.element_size()
    step = max(1, min(num_heads, _MAX_EXPANDED_BYTES // max(1, per_head)))
    latent, k_rope = rows[:, :kv_lora_rank], rows[:, kv_lora_rank:]
    bias = causal_lower_right(q.shape[0], length)
    parts = []
    for first in range(0, num_heads, step):
        heads = slice(first, min(first + step, num_heads))
        nope = torch.matmul(latent, w_uk[heads].transpose(1, 2))  # [h, L, dn]
        value = torch.matmul(latent, w_uv[heads].transpose(1, 2))
        key = torch.cat([nope, k_rope.expand(len(nope), -1, -1)], dim=-1)
        query = q[:, heads].transpose(0, 1)
        part = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=bias, scale=scale
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def merge_states(
    o_a: Tensor, stats_a: Tensor, o_b: Tensor, stats_b: Tensor
) -> tuple[Tensor, Tensor]:
    out, stats = torch.empty_like(o_a), torch.empty_like(stats_a)
    _attention.cuda_merge_states(o_a, stats_a, o_b, stats_b, out, stats)
    return out, stats
