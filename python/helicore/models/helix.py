"""What attention needs besides, where ranks split the sequence (docs/design/helix.md).

Tokens over the cache (decode, few new tokens): every rank of the group computes all heads of the
group over the rows that it keeps, and the partial results are merged, each rank for its own heads.
Prompts: a rank computes its own heads over the whole sequence; rows that others keep are gathered,
those of the step itself are computed by every rank anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helicore.models.base import ForwardBatch
from helicore.parallel.shards import Collectives, Shards


@dataclass(slots=True)
class GatheredPages:
    """The pages of requests that run the expanded kernel, in one piece of memory for all ranks'
    rows: page g of a request has positions g * block .. of the sequence."""

    num_pages: int
    block_table: Tensor
    """int32 [requests, pages]: numbers in the piece."""
    slots: Tensor
    """int64 [tokens]: where rows of the step go."""
    mine: Tensor
    """int64 [N]: pages of this rank that hold history, request by request."""
    source: Tensor
    """int64: which of the gathered pages [W * N] are of use, and where they go."""
    target: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, shards: Shards) -> GatheredPages:
        """Of the requests from `batch.num_absorbed` on; a loop over requests, once per step."""
        ledger = shards.ledger
        first, block, world = batch.num_absorbed, ledger.block, ledger.world
        cu_q, kv_len = batch.cu_q[first:].tolist(), batch.kv_len[first:].tolist()
        table = batch.block_table[first:]
        pages = [-(-length // block) for length in kv_len]
        new_table = torch.zeros((len(kv_len), max(pages)), dtype=torch.int32)
        slots, mine, source, target = [], [], [], []
        base, num_mine = 0, 0
        history = [n - (end - begin) for n, begin, end in zip(kv_len, cu_q, cu_q[1:], strict=False)]
        num_all = sum(-(-start // ledger.super_block) for start in history)
        for i, (start, end) in enumerate(zip(history, kv_len, strict=True)):
            new_table[i, : pages[i]] = torch.arange(base, base + pages[i])
            slots.append(torch.arange(base * block + start, base * block + end))
            super_blocks = -(-start // ledger.super_block)
            mine.append(table[i, :super_blocks].to(torch.int64))
            rank, turn = torch.meshgrid(
                torch.arange(world), torch.arange(super_blocks), indexing="ij"
            )
            page = turn * world + rank
            is_used = page * block < start
            source.append((rank * num_all + num_mine + turn)[is_used])
            target.append((base + page)[is_used])
            base, num_mine = base + pages[i], num_mine + super_blocks
        parts = (torch.cat(part) for part in (slots, mine, source, target))
        return cls(base, new_table, *parts)

    def gather(self, cache: Tensor, group: Collectives) -> Tensor:
        """[num_pages, block, width] with the history of all ranks; rows of the step are not in."""
        pages = cache.new_empty((self.num_pages, *cache.shape[1:]))
        if self.mine.numel():
            mine = cache.index_select(0, self.mine)
            gathered = mine.new_empty((group.world_size, *mine.shape))
            group.all_gather(mine, gathered)
            pages.index_copy_(0, self.target, gathered.flatten(0, 1).index_select(0, self.source))
        return pages


def gather_is_cheaper(
    num_q: int, num_cached: int, *, row_bytes: int, num_heads: int, head_bytes: int, ranks: int
) -> bool:
    """Whether the rows that others keep are fewer bytes than partial results of all heads.

    Args:
        num_q, num_cached: new tokens of a request, and those before them.
        row_bytes: of a token's cache row.
        num_heads: heads of the tensor-parallel group.
        head_bytes: of a head's partial result with its statistics.
        ranks: that split the sequence.
    """
    gathered = num_cached * (ranks - 1) // ranks * row_bytes
    exchanged = num_q * num_heads * (ranks - 1) // ranks * head_bytes
    return gathered <= exchanged
