"""Builds the inputs of one step in buffers that live as long as the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from helicore.executor.lanes import Ints, Lanes
from helicore.executor.steps import Chunk, Step
from helicore.models.base import ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.helix import gather_is_cheaper
from helicore.ops import absorbed_is_cheaper
from helicore.parallel.shards import Shards

Int32s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
AbsorbedRule: TypeAlias = Callable[[int, int], bool]
"""(query tokens, cached tokens with them) -> the absorbed kernel is the one to run."""


def absorbed_rule(
    model: ModelConfig, shards: Shards, *, row_bytes: int, deterministic: bool
) -> AbsorbedRule:
    """The cheaper kernel for each chunk; always the absorbed one where results must not depend
    on how a prompt was cut, for the two kernels round differently. Where ranks split the sequence
    the cheaper one is that which exchanges fewer bytes.

    row_bytes: of a token in the cache of one layer.
    """
    if deterministic:
        return lambda num_q, kv_len: True
    if shards.context_size > 1:
        head_bytes = model.kv_lora_rank * model.dtype.itemsize + 8
        return lambda num_q, kv_len: (
            not gather_is_cheaper(
                num_q,
                kv_len - num_q,
                row_bytes=row_bytes,
                num_heads=len(shards.group_heads(model.num_attention_heads)),
                head_bytes=head_bytes,
                ranks=shards.context_size,
            )
        )
    return partial(
        absorbed_is_cheaper,
        kv_lora_rank=model.kv_lora_rank,
        nope_dim=model.qk_nope_head_dim,
        rope_dim=model.qk_rope_head_dim,
        v_dim=model.v_head_dim,
    )


@dataclass(slots=True)
class StepInputs:
    """A batch and which of its logits mean what.

    The first len(sampled) rows of the logits choose the next token of those lanes; the rest are
    rows of prompts whose log-probabilities are wanted, chunk by chunk in `prompt_chunks`.
    """

    forward: ForwardBatch
    sampled: Ints
    prompt_chunks: list[Chunk]


class _Shape(NamedTuple):
    """All that decides which parts of the buffers a batch is made of."""

    num_tokens: int
    num_requests: int
    num_absorbed: int
    num_absorbed_tokens: int
    num_rows: int
    is_dense: bool
    """The decode lanes are 0..n-1 and alone: the manager's table serves as it is."""


class BatchBuilder:
    """Turns a Step into a ForwardBatch with a fixed number of vector operations per decode step.

    Tensors of the result are views of this object's buffers: valid until the next build.
    """

    def __init__(
        self,
        lanes: Lanes,
        block_table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
        page_size: int,
        max_tokens: int,
        is_absorbed: AbsorbedRule,
        *,
        cache_format: str = "auto",
        shards: Shards | None = None,
    ) -> None:
        """page_size: tokens of a page, over all ranks that split the sequence."""
        num_lanes = len(lanes.sequences)
        self._lanes = lanes
        self._table = block_table
        self._table_tensor = torch.from_numpy(block_table)
        self._page_size = page_size
        self._is_absorbed = is_absorbed
        self._cache_format = cache_format
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._slots = np.zeros(max_tokens, np.int64)
        self._cu_q = np.zeros(num_lanes + 1, np.int32)
        self._kv_len = np.zeros(num_lanes, np.int32)
        self._rows = np.zeros(max_tokens + num_lanes, np.int64)
        self._split = None
        if shards is not None and shards.context_size > 1:
            self._split = _SplitRows(shards, max_tokens, num_lanes)
        self._batch_table = np.zeros_like(block_table)
        self._batch_table_tensor = torch.from_numpy(self._batch_table)
        self._iota = np.arange(num_lanes + 1, dtype=np.int32)
        self._previous: _Shape | None = None
        self._forward: ForwardBatch | None = None

    def build(self, step: Step) -> StepInputs:
        decode = step.decode
        num_decode = len(decode)
        chunks, num_absorbed = self._order(step.chunks) if step.chunks else ([], 0)
        num_absorbed += num_decode
        self._put_decodes(decode)
        self._put_chunks(chunks, num_decode)
        if self._split is not None:
            self._split.fill(self._positions, self._slots, self._cu_q, num_decode + len(chunks))
        sampled, prompt_chunks, num_rows = self._put_rows(decode, chunks)
        is_dense = not chunks and num_decode > 0 and int(decode[-1]) == num_decode - 1
        num_requests = num_decode + len(chunks)
        if not is_dense:
            lanes = np.concatenate([decode, [c.sequence.lane for c in chunks]]).astype(np.int64)
            np.take(self._table, lanes, axis=0, out=self._batch_table[:num_requests], mode="clip")
        shape = _Shape(
            num_tokens=int(self._cu_q[num_requests]),
            num_requests=num_requests,
            num_absorbed=num_absorbed,
            num_absorbed_tokens=int(self._cu_q[num_absorbed]),
            num_rows=num_rows,
            is_dense=is_dense,
        )
        return StepInputs(self._views(shape), sampled, prompt_chunks)

    def _order(self, chunks: list[Chunk]) -> tuple[list[Chunk], int]:
        """Chunks for the absorbed kernel first, and how many those are."""
        absorbed: list[Chunk] = []
        expanded: list[Chunk] = []
        for chunk in chunks:
            is_absorbed = self._is_absorbed(chunk.length, chunk.start + chunk.length)
            (absorbed if is_absorbed else expanded).append(chunk)
        return absorbed + expanded, len(absorbed)

    def _put_decodes(self, decode: Ints) -> None:
        n = len(decode)
        positions = self._lanes.num_computed[decode]
        self._positions[:n] = positions
        self._tokens[:n] = self._lanes.tokens[decode, positions]
        np.add(positions, 1, out=self._kv_len[:n], casting="same_kind")
        pages, offsets = np.divmod(positions, self._page_size)
        slots = self._slots[:n]
        np.multiply(self._table[decode, pages], self._page_size, out=slots, dtype=np.int64)
        slots += offsets
        self._cu_q[: n + 1] = self._iota[: n + 1]

    def _put_chunks(self, chunks: list[Chunk], num_decode: int) -> None:
        begin = num_decode
        for row, chunk in enumerate(chunks, start=num_decode):
            lane, end = chunk.sequence.lane, begin + chunk.length
            positions = np.arange(chunk.start, chunk.start + chunk.length)
            self._positions[begin:end] = positions
            self._tokens[begin:end] = self._lanes.tokens[lane, positions[0] : positions[-1] + 1]
            pages, offsets = np.divmod(positions, self._page_size)
            slots = self._table[lane, pages].astype(np.int64)
            self._slots[begin:end] = slots * self._page_size + offsets
            self._kv_len[row] = chunk.start + chunk.length
            self._cu_q[row + 1] = end
            begin = end

    def _put_rows(self, decode: Ints, chunks: list[Chunk]) -> tuple[Ints, list[Chunk], int]:
        """Rows of the logits: decodes, chunks that end a prompt, then rows of prompts."""
        n = len(decode)
        self._rows[:n] = self._iota[:n]
        if not chunks:
            return decode, [], n
        ending: list[int] = []
        prompt_chunks: list[Chunk] = []
        for row, chunk in enumerate(chunks, start=n):
            lane = chunk.sequence.lane
            if chunk.start + chunk.length == self._lanes.num_tokens[lane]:
                self._rows[n + len(ending)] = self._cu_q[row + 1] - 1
                ending.append(lane)
        total = n + len(ending)
        for row, chunk in enumerate(chunks, start=n):
            if chunk.sequence.needs_prompt_logprobs:
                prompt_chunks.append(chunk)
                self._rows[total : total + chunk.length] = np.arange(
                    self._cu_q[row], self._cu_q[row + 1]
                )
                total += chunk.length
        return np.concatenate([decode, np.array(ending, np.int64)]), prompt_chunks, total

    def forget(self) -> None:
        """After a build that may not have come to its end: the next one makes its views anew."""
        self._previous = self._forward = None

    def _views(self, shape: _Shape) -> ForwardBatch:
        """The buffers' leading parts as tensors; those of the step before where shapes agree."""
        if shape == self._previous and self._forward is not None:
            return self._forward
        table = self._table_tensor if shape.is_dense else self._batch_table_tensor
        self._previous = shape
        self._forward = ForwardBatch(
            token_ids=torch.from_numpy(self._tokens[: shape.num_tokens]),
            positions=torch.from_numpy(self._positions[: shape.num_tokens]),
            slots=torch.from_numpy(self._slots[: shape.num_tokens]),
            cu_q=torch.from_numpy(self._cu_q[: shape.num_requests + 1]),
            kv_len=torch.from_numpy(self._kv_len[: shape.num_requests]),
            block_table=table[: shape.num_requests],
            num_absorbed=shape.num_absorbed,
            num_absorbed_tokens=shape.num_absorbed_tokens,
            logits_rows=torch.from_numpy(self._rows[: shape.num_rows]),
            cache_format=self._cache_format,
        )
        if self._split is not None:
            self._forward = self._split.add_to(self._forward)
        return self._forward


class _SplitRows:
    """What a batch has besides where ranks split the sequence: see ForwardBatch."""

    def __init__(self, shards: Shards, max_tokens: int, num_lanes: int) -> None:
        self._ledger, self._rank = shards.ledger, shards.context_rank
        self._pages = np.zeros(max_tokens, np.int32)
        self._bounds = np.zeros(max_tokens, np.int32)
        self._local_len = np.zeros(num_lanes, np.int32)

    def fill(self, positions: Int32s, slots: Ints, cu_q: Int32s, num_requests: int) -> None:
        """Slots come as if one rank had all rows of a page; they leave as those of this rank."""
        n = int(cu_q[num_requests])
        pages, bounds = self._pages[:n], self._bounds[:n]
        np.floor_divide(slots[:n], self._ledger.super_block, out=pages, casting="unsafe")
        self._ledger.fill_rows(self._rank, positions[:n], pages, slots[:n], bounds)
        np.take(bounds, cu_q[1 : num_requests + 1] - 1, out=self._local_len[:num_requests])

    def add_to(self, batch: ForwardBatch) -> ForwardBatch:
        return dataclasses.replace(
            batch,
            kv_bound=torch.from_numpy(self._bounds[: batch.token_ids.shape[0]]),
            local_kv_len=torch.from_numpy(self._local_len[: batch.kv_len.shape[0]]),
        )
