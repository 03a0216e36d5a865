"""Ragged requests over paged latents, with NaN in unused rows and absurd ids in unused entries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RAGGED = [(1, 1), (1, 63), (2, 64), (1, 65), (3, 1000), (1, 0), (8, 8), (1, 4097)]
"""(query tokens, cached tokens) of each request."""


@dataclass
class Batch:
    """A ragged batch over a poisoned pool: unused rows are NaN, unused table entries absurd ids."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    cu_q: Tensor
    kv_len: Tensor
    rank: int
    scale: float = 0.09

    def to(self, device: str) -> Batch:
        moved = [
            getattr(self, n).to(device) for n in ("q", "cache", "block_table", "cu_q", "kv_len")
        ]
        return Batch(*moved, rank=self.rank, scale=self.scale)

    def rows(self, begin: int, end: int) -> Batch:
        """Requests [begin, end) alone."""
        lo, hi = int(self.cu_q[begin]), int(self.cu_q[end])
        return Batch(
            self.q[lo:hi].contiguous(),
            self.cache,
            self.block_table[begin:end].contiguous(),
            (self.cu_q[begin : end + 1] - lo).contiguous(),
            self.kv_len[begin:end].contiguous(),
            self.rank,
            self.scale,
        )


def make_batch(
    lens: list[tuple[int, int]],
    *,
    heads: int = 16,
    rank: int = 512,
    rope: int = 64,
    page: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """lens: (query tokens, cached tokens) of each request."""
    g = torch.Generator().manual_seed(seed)
    pages = [-(-kv // page) for _, kv in lens]
    num_pages = sum(pages) + 3
    order = torch.randperm(num_pages, generator=g)
    cache = torch.full((num_pages, page, rank + rope), math.nan)
    table = torch.full((len(lens), max([*pages, 1]) + 2), 2_147_480_000, dtype=torch.int32)
    used = 0
    for b, (_, kv) in enumerate(lens):
        for i in range(pages[b]):
            table[b, i] = order[used]
            rows = min(page, kv - i * page)
            cache[order[used], :rows] = torch.randn(rows, rank + rope, generator=g)
            used += 1
    num_q = torch.tensor([0] + [n for n, _ in lens]).cumsum(0)
    q = torch.randn(int(num_q[-1]), heads, rank + rope, generator=g)
    return Batch(
        q.to(dtype),
        cache.to(dtype),
        table,
        num_q.to(torch.int32),
        torch.tensor([kv for _, kv in lens], dtype=torch.int32),
        rank,
    )
