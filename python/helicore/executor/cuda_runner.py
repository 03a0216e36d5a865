"""Runs the model on a GPU: one upload per step, decode steps replayed as CUDA graphs.

A decode step of few sequences is hundreds of kernels of microseconds each, which take longer to
launch than to run. Its shapes are known beforehand: one token of each of `bucket` sequences. So the
model is captured once per bucket and replayed; a batch between two buckets is padded with rows that
read no cache and write none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from helicore.executor.runner import Runner
from helicore.models.base import CausalLM, ForwardBatch

_ALIGNMENT = 256
_MAX_BUCKET = 256
_PARTS = ("token_ids", "positions", "cu_q", "kv_len", "block_table", "slots", "logits_rows")


def bucket_of(num_sequences: int, max_sequences: int) -> int | None:
    """Sequences of the graph that runs so many; None where none does."""
    if num_sequences > min(max_sequences, _MAX_BUCKET):
        return None
    for bucket in (1, 2, 4, 8):
        if num_sequences <= bucket:
            return min(bucket, max_sequences)
    return min(-(-num_sequences // 16) * 16, max_sequences)


def pad_decode(batch: ForwardBatch, bucket: int) -> ForwardBatch:
    """The decode batch with rows up to `bucket` that see nothing and write nothing."""
    extra = bucket - batch.token_ids.shape[0]
    if extra == 0:
        return batch

    def pad(part: Tensor, value: int) -> Tensor:
        return torch.cat([part, part.new_full((extra, *part.shape[1:]), value)])

    iota = torch.arange(bucket + 1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=pad(batch.token_ids, 0),
        positions=pad(batch.positions, 0),
        slots=pad(batch.slots, -1),
        cu_q=iota,
        kv_len=pad(batch.kv_len, 0),
        block_table=pad(batch.block_table, 0),
        num_absorbed=bucket,
        num_absorbed_tokens=bucket,
        logits_rows=iota[:bucket].to(torch.int64),
        cache_format=batch.cache_format,
    )


class Uploads:
    """Host batches to the GPU: gathered in pinned memory, moved by one asynchronous copy.

    Parts lie one after another, so equal shapes always have equal addresses. The pinned memory is
    written again by the next call: the caller has waited for its step by then.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._pinned = torch.empty(max_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.empty(max_bytes, dtype=torch.uint8, device=device)

    def upload(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch on the GPU, in memory that the next upload overwrites."""
        parts: dict[str, Tensor] = {}
        begin = 0
        for name in _PARTS:
            part: Tensor = getattr(batch, name)
            num_bytes = part.numel() * part.element_size()
            end = begin + num_bytes
            staged = self._pinned[begin:end].view(part.dtype).view(part.shape)
            staged.copy_(part)
            parts[name] = self._device[begin:end].view(part.dtype).view(part.shape)
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._device[:begin].copy_(self._pinned[:begin], non_blocking=True)
        return ForwardBatch(
            **parts,
            num_absorbed=batch.num_absorbed,
            num_absorbed_tokens=batch.num_absorbed_tokens,
            host_cu_q=batch.cu_q,
            host_kv_len=batch.kv_len,
            cache_format=batch.cache_format,
        )


def upload_bytes(max_tokens: int, max_sequences: int, max_pages: int) -> int:
    """Bytes that hold any step of so many tokens and sequences."""
    rows = max_tokens + max_sequences
    per_part = (4 * rows, 4 * rows, 4 * (max_sequences + 1), 4 * max_sequences)
    table = 4 * max_sequences * max_pages
    return sum(per_part) + table + 2 * 8 * rows + len(_PARTS) * _ALIGNMENT


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    batch: ForwardBatch
    """What it reads; kept alive and in place."""


class CudaRunner(Runner):
    """A model on a GPU with the caches that it reads and writes.

    All work goes to one stream, which is current inside `active()`.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[Tensor],
        *,
        max_tokens: int,
        max_sequences: int,
        max_pages: int,
        stream: torch.cuda.Stream,
    ) -> None:
        super().__init__(model, caches)
        self._stream = stream
        self._max_sequences = max_sequences
        size = upload_bytes(max_tokens, max_sequences, max_pages)
        with torch.cuda.stream(stream):
            self._uploads = Uploads(stream.device, size)
        self._graphs: dict[int, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._seen: set[int] = set()

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def run(self, batch: ForwardBatch) -> Tensor:
        """fp32 logits [n, vocab_size] on the GPU, valid until the next run."""
        num_tokens = batch.token_ids.shape[0]
        is_decode = num_tokens == batch.kv_len.shape[0] == batch.logits_rows.shape[0]
        bucket = bucket_of(num_tokens, self._max_sequences) if is_decode else None
        if bucket is None:
            return super().run(self._uploads.upload(batch))
        on_device = self._uploads.upload(pad_decode(batch, bucket))
        known = self._graphs.get(bucket)
        if known is None and bucket not in self._seen:
            # Run once as it is: libraries set themselves up, which a capture could not hold.
            self._seen.add(bucket)
            return super().run(on_device)[:num_tokens]
        if known is None:
            known = self._graphs[bucket] = self._capture(on_device)
        known.graph.replay()
        return known.logits[:num_tokens]

    def _capture(self, batch: ForwardBatch) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held back: the cache manager goes on copying pages.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = super().run(batch)
        return _Graph(graph, logits, batch)

    def close(self) -> None:
        self._stream.synchronize()
        self._graphs.clear()
        super().close()
