"""Latent attention in float64, written to be read: loops over tokens, no engine import.

Two forms that must agree: `absorbed` works on the latents as keys and values, `expanded` makes keys
and values of every head first. Scores carry the softmax scale; statistics are in base 2.
"""

import math

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    if weight is None:
        return x
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def rope(x: Tensor, cos_sin_row: Tensor, interleaved: bool) -> Tensor:
    """Rotate one vector [dr]; the result is half-split."""
    half = x.shape[-1] // 2
    x, row = x.double(), cos_sin_row.double()
    cos, sin = row[:half], row[half:]
    first, second = (x[0::2], x[1::2]) if interleaved else (x[:half], x[half:])
    return torch.cat((first * cos - second * sin, second * cos + first * sin))


def cos_sin_table(max_pos: int, dim: int, theta: float = 10000.0) -> Tensor:
    """[max_pos, dim] float32: dim / 2 cosines, then dim / 2 sines."""
    half = dim // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    angle = torch.arange(max_pos, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


def gather(cache: Tensor, pages: Tensor, num_tokens: int) -> Tensor:
    """Rows of the first num_tokens tokens of one request, [num_tokens, R + dr], as float64."""
    page_size = cache.shape[1]
    rows = [cache[int(pages[t // page_size]), t % page_size] for t in range(num_tokens)]
    if not rows:
        return torch.zeros((0, cache.shape[2]), dtype=torch.float64)
    return torch.stack(rows).double()


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """One query row: output, m, l."""
    if keys.shape[0] == 0:
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf, 0.0
    scores = (keys @ q.double()) * scale * LOG2E
    m = scores.max()
    weights = torch.exp2(scores - m)
    total = weights.sum()
    return weights @ values / total, float(m), float(total)


def visible(cu_q: Tensor, kv_len: Tensor, request: int, token: int) -> int:
    """Cached tokens that token `token` of `request` sees by the causal rule."""
    num_q = int(cu_q[request + 1] - cu_q[request])
    return max(0, int(kv_len[request]) - num_q + token + 1)


def absorbed(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    scale: float,
    rank: int,
    kv_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H, R + dr] over the latents: out [T, H, R] and stats [T, H, 2], float64."""
    out = torch.zeros((q.shape[0], q.shape[1], rank), dtype=torch.float64)
    stats = torch.zeros((q.shape[0], q.shape[1], 2), dtype=torch.float64)
    for b in range(kv_len.shape[0]):
        for i in range(int(cu_q[b + 1] - cu_q[b])):
            t = int(cu_q[b]) + i
            bound = visible(cu_q, kv_len, b, i) if kv_bound is None else int(kv_bound[t])
            rows = gather(cache, block_table[b], bound)
            for h in range(q.shape[1]):
                out[t, h], stats[t, h, 0], stats[t, h, 1] = attend(
                    q[t, h], rows, rows[:, :rank], scale
                )
    return out, stats


def expanded(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_q: Tensor,
    kv_len: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    expanded_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """q [T, H, dn + dr] with w_uk [H, dn, R], w_uv [H, dv, R]: out [T, H * dv] and stats.

    Keys and values are rounded to expanded_dtype, as by an engine that keeps them so.
    """
    heads, rank = w_uk.shape[0], w_uk.shape[2]
    out = torch.zeros((q.shape[0], heads, w_uv.shape[1]), dtype=torch.float64)
    stats = torch.zeros((q.shape[0], heads, 2), dtype=torch.float64)
    for b in range(kv_len.shape[0]):
        rows = gather(cache, block_table[b], int(kv_len[b]))
        for h in range(heads):
            latent = rows[:, :rank]
            nope = (latent @ w_uk[h].double().T).to(expanded_dtype).double()
            keys = torch.cat((nope, rows[:, rank:]), dim=1)
            values = (latent @ w_uv[h].double().T).to(expanded_dtype).double()
            for i in range(int(cu_q[b + 1] - cu_q[b])):
                t = int(cu_q[b]) + i
                n = visible(cu_q, kv_len, b, i)
                out[t, h], stats[t, h, 0], stats[t, h, 1] = attend(
                    q[t, h], keys[:n], values[:n], scale
                )
    return out.flatten(1), stats


def merge(o_a: Tensor, stats_a: Tensor, o_b: Tensor, stats_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge of two partials, row by row; a side without keys is not read."""
    out, stats = torch.zeros_like(o_a.double()), torch.zeros_like(stats_a.double())
    for index in torch.cartesian_prod(*[torch.arange(n) for n in o_a.shape[:-1]]).view(
        -1, o_a.ndim - 1
    ):
        key = tuple(int(i) for i in index)
        sides = [
            (o[key].double(), s[key].double())
            for o, s in ((o_a, stats_a), (o_b, stats_b))
            if float(s[key][1]) > 0.0
        ]
        m = max((float(s[0]) for _, s in sides), default=-math.inf)
        weights = [float(s[1]) * 2.0 ** (float(s[0]) - m) for _, s in sides]
        total = sum(weights)
        for (o, _), w in zip(sides, weights, strict=True):
            if w > 0.0:
                out[key] += w / total * o
        stats[key][0], stats[key][1] = m, total
    return out, stats
