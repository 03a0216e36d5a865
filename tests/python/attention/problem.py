"""Ragged paged problems: pages in random order, NaN where no token lies, absurd ids elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

ABSURD_PAGE = 2_147_480_000


@dataclass
class Problem:
    q: Tensor
    cache: Tensor
    block_table: Tensor
    cu_q: Tensor
    kv_len: Tensor
    scale: float
    rank: int

    @property
    def ragged(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.cache, self.block_table, self.cu_q, self.kv_len


def make_cache(
    kv_len: list[int], page_size: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """A strided cache view whose owned rows are random, and its block table."""
    gen = torch.Generator().manual_seed(seed)
    pages = [-(-n // page_size) for n in kv_len]
    num_pages = sum(pages) + 3
    # Pages of two layers inside one pool slot: the view is strided, the other half stays NaN.
    pool = torch.full((num_pages, 2, page_size, width), torch.nan, dtype=dtype)
    cache = pool[:, 1]
    table = torch.full((len(kv_len), max([*pages, 0]) + 2), ABSURD_PAGE, dtype=torch.int32)
    order = torch.randperm(num_pages, generator=gen)
    used = 0
    for b, n in enumerate(kv_len):
        ids = order[used : used + pages[b]]
        used += pages[b]
        table[b, : pages[b]] = ids.int()
        for i, page in enumerate(ids):
            rows = min(page_size, n - i * page_size)
            cache[page, :rows] = torch.randn((rows, width), generator=gen).to(dtype)
    return cache, table


def make_problem(
    *,
    num_q: list[int],
    kv_len: list[int],
    heads: int,
    rank: int,
    rope_dim: int,
    page_size: int,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    q_width: int | None = None,
    seed: int = 0,
) -> Problem:
    gen = torch.Generator().manual_seed(seed + 1000)
    width = rank + rope_dim
    cache, table = make_cache(kv_len, page_size, width, cache_dtype, seed)
    tokens = sum(num_q)
    cu_q = torch.tensor([0, *torch.tensor(num_q).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn((tokens, heads, q_width or width), generator=gen).to(q_dtype)
    return Problem(
        q=q,
        cache=cache,
        block_table=table,
        cu_q=cu_q,
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        scale=1.5 * (q_width or width) ** -0.5,
        rank=rank,
    )
