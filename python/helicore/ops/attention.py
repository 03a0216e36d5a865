"""Latent attention (MLA) over a paged cache.

Shapes: T query tokens packed over B requests, H heads, R kv_lora_rank, dr rope width (0 allowed),
dn nope width, dv value width. Every width is a multiple of 4. Tensors are contiguous, bfloat16 or
float32; sums are float32.

The cache of one layer is `[num_pages, page_size, R + dr]`; its first dimension may be strided. A
row holds the normalised latent and the rotated key. Rotated vectors are stored half-split, for
queries and keys alike, whatever the order of the raw ones (`interleaved`). A quantised cache is
uint8 `[num_pages, page_size, cache_row_bytes(...)]`, with `cache_format` "fp8" (one scale for all,
`cache_scale`), "fp8_ds_mla" (a float32 scale in the row for each 128 latents) or "nvfp4" (planes of
codes, scales for each 16 latents, rope; `cache_scale` is a power of two); "auto" is the dtype's.

Softmax statistics are float32 `[T, H, 2]`: m = max of scale * q.k * log2(e), l = sum of 2^(s - m).
A row that sees no key gives output 0 and statistics (-inf, 0).

On a CPU the bits of a row depend neither on the other requests of the call nor on the number of
threads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from helicore._core import attention as _attention
from helicore.ops import _cuda_attention as _cuda
from helicore.ops._registry import register_op
from helicore.ops.nn import pack_linear


class MlaWeights(NamedTuple):
    """The up-projections of the latent, packed per head.

    Attributes:
        w_absorb: W_UK transposed, [R, dn] per head: for `mla_absorb`.
        w_uk: W_UK, [dn, R] per head: for `mla_prefill`.
        w_uv: W_UV, [dv, R] per head: for `mla_project_v` and `mla_prefill`.
    """

    w_absorb: Tensor
    w_uk: Tensor
    w_uv: Tensor


def pack_mla_weights(kv_b: Tensor, num_heads: int, nope_dim: int, v_dim: int) -> MlaWeights:
    """Pack a checkpoint's `kv_b_proj` weight [H * (dn + dv), R], rows of a head together."""
    rank = kv_b.shape[-1]
    if kv_b.shape != (num_heads * (nope_dim + v_dim), rank):
        raise ValueError(
            f"kv_b must be [num_heads * (nope_dim + v_dim), R] = "
            f"[{num_heads * (nope_dim + v_dim)}, R], got {list(kv_b.shape)}"
        )
    heads = kv_b.detach().view(num_heads, nope_dim + v_dim, rank)
    w_uk = heads[:, :nope_dim].contiguous()
    w_uv = heads[:, nope_dim:].contiguous()
    return MlaWeights(
        w_absorb=pack_linear(w_uk.transpose(1, 2).contiguous()),
        w_uk=pack_linear(w_uk),
        w_uv=pack_linear(w_uv),
    )


def _packed_in_features(packed: Tensor) -> int:
    if packed.ndim == 3:  # on a GPU, as it is
        return packed.shape[-1]
    return packed.shape[-3] * 2 if packed.dtype == torch.bfloat16 else packed.shape[-2]


def absorbed_is_cheaper(
    num_q_tokens: int, kv_len: int, *, kv_lora_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> bool:
    """Whether the absorbed form costs less than `mla_prefill` for one request."""
    return _attention.absorbed_is_cheaper(
        num_q_tokens, kv_len, kv_lora_rank, nope_dim, rope_dim, v_dim
    )


def cache_row_bytes(cache_format: str, kv_lora_rank: int, rope_dim: int) -> int:
    """Bytes of a token's row, of one layer.

    Args:
        cache_format: "float32", "bfloat16", "fp8", "fp8_ds_mla" or "nvfp4".
        kv_lora_rank, rope_dim: R and dr.

    Raises:
        ValueError: rows of these widths have no such form.
    """
    if cache_format in ("float32", "bfloat16"):
        return (kv_lora_rank + rope_dim) * (4 if cache_format == "float32" else 2)
    return _attention.cache_row_bytes(cache_format, kv_lora_rank, rope_dim)


def _mla_append_fake(
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
    return None


@register_op("mla_append", fake=_mla_append_fake, mutates=("cache",), cuda=_cuda.mla_append)
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
    """Write the latent row of each token: RMS norm of c, rope of k_r, one store.

    Args:
        kv_a: [T, R + dr], the raw latent and the raw rope key.
        cache: [num_pages, page_size, R + dr], written.
        slots: [T] int64, page * page_size + offset, or -1 to write nothing; no slot twice.
        kv_lora_rank: R.
        positions: [T] int32, rows of cos_sin; needed with cos_sin.
        cos_sin: [max_pos, dr] float32, dr / 2 cosines then dr / 2 sines; None stores k_r as it is.
        norm_weight: [R]; None stores c as it is.
        eps: of the norm.
        interleaved: pairs of the raw k_r are (2i, 2i + 1), else (i, i + dr / 2).
        cache_format, cache_scale: how rows are coded. Values are quantised from float32; what is
            out of range saturates, NaN is stored as 0 (but kept where k_r is bfloat16).
    """
    _attention.mla_append(
        kv_a,
        cache,
        slots,
        kv_lora_rank,
        positions,
        cos_sin,
        norm_weight,
        eps,
        interleaved,
        cache_format,
        cache_scale,
    )


def _mla_absorb_fake(
    q: Tensor,
    w_absorb: Tensor,
    kv_lora_rank: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    interleaved: bool = True,
) -> Tensor:
    width = kv_lora_rank + q.shape[2] - _packed_in_features(w_absorb)
    return q.new_empty((q.shape[0], q.shape[1], width))


@register_op("mla_absorb", fake=_mla_absorb_fake, cuda=_cuda.mla_absorb)
def mla_absorb(
    q: Tensor,
    w_absorb: Tensor,
    kv_lora_rank: int,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    interleaved: bool = True,
) -> Tensor:
    """Query of absorbed attention: concat(q_n W_UK[h], rope(q_r)).

    Args:
        q: [T, H, dn + dr], not rotated.
        w_absorb: `MlaWeights.w_absorb`.
        kv_lora_rank: R.
        positions, cos_sin, interleaved: as in `mla_append`.

    Returns:
        [T, H, R + dr], dtype of q.
    """
    fused_q = _mla_absorb_fake(q, w_absorb, kv_lora_rank)
    _attention.mla_absorb(q, w_absorb, fused_q, kv_lora_rank, positions, cos_sin, interleaved)
    return fused_q


def _mla_project_v_fake(o_lat: Tensor, w_uv: Tensor, v_dim: int) -> Tensor:
    return o_lat.new_empty((o_lat.shape[0], o_lat.shape[1] * v_dim))


@register_op("mla_project_v", fake=_mla_project_v_fake, cuda=_cuda.mla_project_v)
def mla_project_v(o_lat: Tensor, w_uv: Tensor, v_dim: int) -> Tensor:
    """Values of absorbed attention: o_lat [T, H, R] times W_UV[h] transposed, [T, H * dv]."""
    out = _mla_project_v_fake(o_lat, w_uv, v_dim)
    _attention.mla_project_v(o_lat, w_uv, out)
    return out


def _rope_q_fake(q: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = True) -> None:
    return None


@register_op("rope_q", fake=_rope_q_fake, mutates=("q",), cuda=_cuda.rope_q)
def rope_q(q: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = True) -> None:
    """Rotate the last dr of q [T, H, dn + dr] in place: the query of `mla_prefill`."""
    _attention.rope_q(q, positions, cos_sin, interleaved)


def _mla_decode_fake(
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
    return q.new_empty((q.shape[0], q.shape[1], kv_lora_rank))


@register_op("mla_decode", fake=_mla_decode_fake, cuda=_cuda.mla_decode)
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
    """Absorbed attention with packed ragged queries.

    Token i of request b, of S_q = cu_q[b + 1] - cu_q[b], sees the first kv_len[b] - S_q + i + 1
    cached tokens.

    Args:
        q: [T, H, R + dr] from `mla_absorb`.
        cache: [num_pages, page_size, R + dr].
        block_table: [B, max_pages] int32; entries past a request's pages may be anything.
        cu_q: [B + 1] int32, 0 first and T last.
        kv_len: [B] int32, cached tokens with those of this call.
        scale: softmax scale of the model, positive.
        kv_lora_rank: R.
        kv_bound: [T] int32, tokens that each query sees, in place of the causal rule.
        cache_format, cache_scale: how rows are coded, as in `mla_append`.

    Returns:
        [T, H, R], dtype of q.
    """
    out = _mla_decode_fake(q, cache, block_table, cu_q, kv_len, scale, kv_lora_rank)
    coding = (cache_format, cache_scale)
    _attention.mla_decode(q, cache, block_table, cu_q, kv_len, scale, out, kv_bound, None, *coding)
    return out


def _mla_decode_stats_fake(
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
    out = q.new_empty((q.shape[0], q.shape[1], kv_lora_rank))
    return out, q.new_empty((q.shape[0], q.shape[1], 2), dtype=torch.float32)


@register_op("mla_decode_stats", fake=_mla_decode_stats_fake, cuda=_cuda.mla_decode_stats)
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
    """`mla_decode` that returns the softmax statistics [T, H, 2] as well."""
    out, stats = _mla_decode_stats_fake(q, cache, block_table, cu_q, kv_len, scale, kv_lora_rank)
    coding = (cache_format, cache_scale)
    _attention.mla_decode(q, cache, block_table, cu_q, kv_len, scale, out, kv_bound, stats, *coding)
    return out, stats


def _mla_prefill_fake(
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
    return q.new_empty((q.shape[0], q.shape[1] * v_dim))


@register_op("mla_prefill", fake=_mla_prefill_fake, cuda=_cuda.mla_prefill)
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
    """Expanded causal attention; the latents of the query tokens are in the cache already.

    Args:
        q: [T, H, dn + dr], rotated by `rope_q`.
        cache, block_table, cu_q, kv_len, scale, kv_lora_rank: as in `mla_decode`; cu_q and kv_len
            on the host, where the others are on a GPU, spare a wait for it.
        w_uk, w_uv: from `MlaWeights`.
        v_dim: dv.
        cache_format, cache_scale: how rows are coded, as in `mla_append`.

    Returns:
        [T, H * dv], dtype of q.
    """
    out = q.new_empty((q.shape[0], q.shape[1] * v_dim))
    weights = (w_uk, w_uv, kv_lora_rank)
    coding = (cache_format, cache_scale)
    _attention.mla_prefill(q, cache, block_table, cu_q, kv_len, *weights, scale, out, None, *coding)
    return out


def _mla_prefill_stats_fake(
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
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((q.shape[0], q.shape[1] * v_dim))
    return out, q.new_empty((q.shape[0], q.shape[1], 2), dtype=torch.float32)


@register_op("mla_prefill_stats", fake=_mla_prefill_stats_fake)
def mla_prefill_stats(
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
) -> tuple[Tensor, Tensor]:
    """`mla_prefill` that returns the softmax statistics [T, H, 2] as well."""
    out = q.new_empty((q.shape[0], q.shape[1] * v_dim))
    stats = q.new_empty((q.shape[0], q.shape[1], 2), dtype=torch.float32)
    weights = (w_uk, w_uv, kv_lora_rank)
    coding = (cache_format, cache_scale)
    _attention.mla_prefill(
        q, cache, block_table, cu_q, kv_len, *weights, scale, out, stats, *coding
    )
    return out, stats


def _merge_states_fake(
    o_a: Tensor, stats_a: Tensor, o_b: Tensor, stats_b: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(o_a), torch.empty_like(stats_a)


@register_op("merge_states", fake=_merge_states_fake, cuda=_cuda.merge_states)
def merge_states(
    o_a: Tensor, stats_a: Tensor, o_b: Tensor, stats_b: Tensor
) -> tuple[Tensor, Tensor]:
    """State of the union of two disjoint sets of keys; a side of weight 0 is skipped.

    Args:
        o_a, o_b: [..., width] normalised partial outputs.
        stats_a, stats_b: [..., 2] float32.

    Returns:
        The merged output and statistics; both sides empty give (0, (-inf, 0)).
    """
    out, stats = torch.empty_like(o_a), torch.empty_like(stats_a)
    _attention.merge_states(o_a, stats_a, o_b, stats_b, out, stats)
    return out, stats


__all__ = [
    "MlaWeights",
    "absorbed_is_cheaper",
    "cache_row_bytes",
    "merge_states",
    "mla_absorb",
    "mla_append",
    "mla_decode",
    "mla_decode_stats",
    "mla_prefill",
    "mla_prefill_stats",
    "mla_project_v",
    "pack_mla_weights",
    "rope_q",
]
