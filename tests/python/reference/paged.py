"""A small paged cache that drives a model without the executor: shuffled pages, poisoned ends."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ABSURD_PAGE = 2_147_480_000


class PagedRequests:
    """Caches of several requests that share one pool of pages.

    Pages are handed out in random order, rows never written hold NaN, block tables end in ids
    that no kernel may follow, and the view of a layer has gaps between its pages. With
    `reuse_batches` a step of the same shape as the one before passes the same batch, filled anew.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_requests: int = 1,
        capacity: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        reuse_batches: bool = False,
        cache_format: str = "auto",
    ) -> None:
        self._model, self._page_size, self._format = model, page_size, cache_format
        per_request = -(-capacity // page_size)
        num_pages = num_requests * per_request + 1
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
        self._pages = order[: num_requests * per_request].view(num_requests, per_request)
        self.lengths = [0] * num_requests
        self._reuse, self._last = reuse_batches, None
        self.caches: list[Tensor] = []
        widths, poison = model.kv_layers(model.config, dtype), float("nan")
        if cache_format != "auto":  # every byte 0xff is NaN in each part of a row
            widths, dtype, poison = model.kv_row_bytes(model.config, cache_format), torch.uint8, 255
        for width in widths:
            pool = torch.full((num_pages, page_size * width + width), poison, dtype=dtype)
            pages = pool[:, : page_size * width]
            self.caches.append(pages.view(num_pages, page_size, width))

    def step(
        self,
        tokens: dict[int, Sequence[int]],
        *,
        expanded: bool = False,
        num_absorbed: int | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Runs new tokens of some requests in one step; returns logits of all rows (or `rows`).

        Every request runs the absorbed kernel, or none (`expanded`), or the first `num_absorbed`.
        """
        from helicore.models import ForwardBatch

        requests = list(tokens)
        table = torch.full((len(requests), self._pages.shape[1] + 1), ABSURD_PAGE)
        positions, slots, counts = [], [], []
        for b, r in enumerate(requests):
            at = torch.arange(self.lengths[r], self.lengths[r] + len(tokens[r]))
            positions.append(at)
            offset = at % self._page_size
            slots.append(self._pages[r][at // self._page_size] * self._page_size + offset)
            counts.append(len(tokens[r]))
            self.lengths[r] += len(tokens[r])
            used = -(-self.lengths[r] // self._page_size)
            table[b, :used] = self._pages[r][:used]
        if num_absorbed is None:
            num_absorbed = 0 if expanded else len(requests)
        total = sum(counts)
        batch = ForwardBatch(
            token_ids=torch.tensor([t for r in requests for t in tokens[r]], dtype=torch.int32),
            positions=torch.cat(positions).int(),
            slots=torch.cat(slots),
            cu_q=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            kv_len=torch.tensor([self.lengths[r] for r in requests], dtype=torch.int32),
            block_table=table.int(),
            num_absorbed=num_absorbed,
            num_absorbed_tokens=sum(counts[:num_absorbed]),
            logits_rows=torch.arange(total)
            if rows is None
            else torch.tensor(rows, dtype=torch.int64),
            cache_format=self._format,
        )
        if self._reuse:
            batch = self._reused(batch)
        with torch.inference_mode():
            logits: Tensor = self._model(batch, self.caches)
        return logits

    def _reused(self, batch: Any) -> Any:
        last, self._last = self._last, batch
        if last is None:
            return batch
        pairs = [(getattr(last, f), getattr(batch, f)) for f in batch.__slots__]
        for old, new in pairs:
            same = old.shape == new.shape if isinstance(new, Tensor) else old == new
            if not same:
                return batch
        for old, new in pairs:
            if isinstance(new, Tensor):
                old.copy_(new)
        self._last = last
        return last
