"""The cache of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from helicore import kv
from numpy.typing import NDArray

from .names import (
    AttentionReusePolicy,
    CacheStatus,
    LogicError,
    PageIndexMode,
    translated,
)
from .stats import Pending
from .tokens import Tokens, decode, encode
from .values import (
    HalfOpenRange,
    LifeCycle,
    PlannedDropHandle,
    ReuseScope,
    ReuseStatus,
    ScratchDesc,
)

if TYPE_CHECKING:
    from .manager import KVCacheManager

PriorityCallback = Callable[[int, LifeCycle], int]


def stream_handle(stream: Any) -> int | None:
    """The cudaStream_t of an int or of a torch stream."""
    if stream is None or isinstance(stream, int):
        return stream
    return int(stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.handle)


class _KVCache:
    """Made by KVCacheManager.create_kv_cache(); one thread at a time may drive it."""

    def __init__(
        self, manager: KVCacheManager, native: kv.KVCache, expected: int, text_only: bool
    ) -> None:
        self._manager = manager
        self._native = native
        self._expected = expected  # tokens of the prompt
        self._text_only = text_only
        self._has_digests = False
        self._pending = Pending()
        self._id = native.id
        self._selected = False  # the choice of optional groups is made at the first resume
        self._copies_on_resume = native.num_reused_tokens % native.tokens_per_block != 0

    # ---- states

    def resume(
        self, cuda_stream: Any = None, optional_reuse_groups: Sequence[int] | None = None
    ) -> bool:
        """SUSPENDED -> ACTIVE; False when there is no room."""
        stream = stream_handle(cuda_stream)
        if stream is None and self._native.cuda_stream is None:
            raise ValueError("cuda_stream must be given at the first resume")
        for group in optional_reuse_groups or ():
            if self._manager.reuse_policy(group) != AttentionReusePolicy.OPTIONAL:
                raise ValueError(f"optional_reuse_groups: layer group {group} is not OPTIONAL")
        with translated():
            if optional_reuse_groups is not None and not self._selected:
                self._native.select_optional_reuse(list(optional_reuse_groups))
            resumed = self._native.resume(stream)
        self._selected = self._selected or resumed
        if resumed and self._copies_on_resume:
            self._copies_on_resume = False
            self._count_copy()
        self._manager.stats.sample()
        return resumed

    def suspend(self) -> None:
        """ACTIVE -> SUSPENDED."""
        with translated():
            self._native.suspend()
        self._manager.stats.sample()

    def close(self) -> None:
        """Gives the pages back; statistics that were not committed are discarded."""
        if self._native.status == CacheStatus.CLOSED:
            return
        self.discard_pending_stats()
        with translated():
            self._native.close()
        self._manager.forget(self)
        self._manager.stats.sample()

    def __del__(self) -> None:
        self._manager.stats.dirty.discard(self._id)

    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        """Sets the cursors; False when there is no room."""
        before = self._live_pages()
        is_generation = self._native.history_length >= self._expected
        with translated():
            resized = self._native.resize(capacity, history_length)
        if resized:
            self._count_growth(before, is_generation)
        self._manager.stats.sample()
        return resized

    def commit(self, tokens: Tokens, is_end: bool = False, beam_search_indices: Any = None) -> None:
        """Declares the next tokens final."""
        if beam_search_indices is not None:
            raise NotImplementedError("beam_search_indices: beams are forks")
        encoded = encode(tokens, self._text_only)
        with translated():
            self._native.commit(encoded, is_end)
        self._manager.stats.sample()

    def stop_committing(self) -> None:
        """Publishes the partial tail."""
        with translated():
            self._native.stop_committing()

    def prefetch(self, target_level: int) -> bool:
        """Brings the pages of a SUSPENDED cache up to a level and waits; False if some stayed."""
        book = self._manager.stats
        before = book.disk_onboarded()
        with translated():
            ticket = self._native.prefetch(target_level)
            while not ticket.is_done():
                pass
        if book.counts(self._id):
            book.disk_prefetch_blocks += book.disk_onboarded() - before
        return ticket.is_complete

    def plan_committed_block_drop(self) -> PlannedDropHandle | None:
        """Pages that end with this sequence, once drop() is called."""
        if self._native.commit_state.name == "ALLOWED":
            raise LogicError("plan_committed_block_drop needs stop_committing first")
        with translated():
            handle = self._native.plan_committed_block_drop()
        return None if handle is None else PlannedDropHandle(handle.drop)

    # ---- statistics

    def commit_pending_stats(self) -> None:
        """The step was accepted: what this cache did counts."""
        pending, self._pending = self._pending, Pending()
        self._manager.stats.dirty.discard(self._id)
        if self._manager.stats.counts(self._id):
            self._manager.stats.commit(pending)

    def discard_pending_stats(self) -> None:
        """It does not."""
        self._pending = Pending()
        self._manager.stats.dirty.discard(self._id)

    def _is_counted(self) -> bool:
        return self._manager.stats.counts(self._id)

    def _mark(self) -> None:
        dirty = self._manager.stats.dirty
        (dirty.add if self._pending else dirty.discard)(self._id)

    def count_match(self, num_tokens: int) -> None:
        """What the creation with `num_tokens` tokens found."""
        if not self._is_counted() or num_tokens == 0:
            return
        native, tpb = self._native, self._native.tokens_per_block
        full, partial = divmod(native.num_reused_tokens, tpb)
        self._pending.total.reused_blocks += full + (partial > 0)
        for group in self._manager.attention_groups:
            pages = native.get_aggregated_page_indices(group, valid_only=False)
            held = [ordinal for ordinal, page in enumerate(pages) if page >= 0]
            delta = self._pending.group(group)
            delta.iter_reused_blocks += len(held)
            delta.iter_partial_reused_blocks += sum(1 for ordinal in held if ordinal >= full)
            delta.iter_full_reused_blocks += sum(1 for ordinal in held if ordinal < full)
        if self._manager.has_ssm:
            found = native.num_reused_tokens
            ssm = self._pending.ssm
            ssm.lookups += 1
            ssm.hits += found > 0
            ssm.misses += found == 0
            ssm.reused_tokens += found
            ssm.unreused_tokens += num_tokens - found
            ssm.aligned_hits += found > 0 and found % tpb == 0
            ssm.unaligned_hits += found % tpb > 0
        levels = native.cached_tokens_by_level
        by_level = [divmod(tokens, tpb) for tokens in levels]
        self._manager.stats.found(
            [blocks for blocks, _ in by_level], [int(rest > 0) for _, rest in by_level], levels
        )
        self._mark()

    def _live_pages(self) -> list[int]:
        """Blocks of the cache, then pages of each attention group."""
        if not self._is_counted() or not self._native.is_active:
            return []
        counts = [
            int((self._native.get_base_page_indices(group) >= 0).sum())
            for group in self._manager.attention_groups
        ]
        return [self._native.num_blocks, *counts]

    def _count_growth(self, before: list[int], is_generation: bool) -> None:
        if not before:
            return
        blocks, *pages = (b - a for a, b in zip(before, self._live_pages(), strict=True))
        if blocks == 0:
            return
        total = self._pending.total
        total.alloc_total_blocks += blocks
        total.alloc_new_blocks += blocks
        total.missed_blocks += 0 if is_generation else blocks
        for group, grown in zip(self._manager.attention_groups, pages, strict=True):
            delta = self._pending.group(group)
            delta.iter_alloc_total_blocks += grown
            delta.iter_alloc_new_blocks += grown
            if is_generation:
                delta.iter_gen_alloc_blocks += grown
            else:
                delta.iter_missed_blocks += grown
        self._mark()

    def _count_copy(self) -> None:
        if not self._is_counted():
            return
        self._pending.total.alloc_total_blocks += 1
        for group in self._manager.attention_groups:
            delta = self._pending.group(group)
            delta.iter_alloc_total_blocks += 1
            delta.iter_intra_device_copy_blocks += 1
        self._mark()

    # ---- page tables

    def set_base_page_index_buf(
        self, beam_index: int, layer_group_id: int, buf: NDArray[np.int32] | torch.Tensor | None
    ) -> None:
        """Keep the page table in `buf`; None detaches."""
        row = buf
        if row is not None and not isinstance(row, (np.ndarray, torch.Tensor)):
            row = np.frombuffer(row, np.int32)
        with translated():
            self._native.set_base_page_index_buf(beam_index, layer_group_id, row)

    def get_base_page_indices(self, layer_group_id: int, beam_index: int = 0) -> NDArray[np.int32]:
        """A view of the page table, valid until the next change."""
        return self._native.get_base_page_indices(layer_group_id, beam_index)

    def get_aggregated_page_indices(
        self, layer_group_id: int, beam_index: int = 0, valid_only: bool = False
    ) -> Iterator[int]:
        """Slots of all blocks, also while suspended."""
        return iter(
            self._native.get_aggregated_page_indices(layer_group_id, beam_index, valid_only)
        )

    def get_ssm_block_base_index(self, beam_index: int = 0) -> int:
        """Slot of the recurrent state."""
        return self._native.ssm_base_index

    def get_scratch_desc(self, layer_group_id: int) -> ScratchDesc | None:
        """Blocks that share slots in this step; None when there are none."""
        found = self._native.get_scratch_desc(layer_group_id)
        if found is None:
            return None
        return ScratchDesc(HalfOpenRange(*found.range), found.slot_ids)

    def supports_index_mode(self, mode: PageIndexMode) -> bool:
        """PER_LAYER always; SHARED when there can be no scratch blocks."""
        return self._native.supports_index_mode(mode)

    # ---- read and write

    @property
    def cuda_stream(self) -> int | None:
        return self._native.cuda_stream

    @cuda_stream.setter
    def cuda_stream(self, stream: Any) -> None:
        new = stream_handle(stream)
        if new is None:
            raise ValueError("cuda_stream must not be None")
        with translated():
            self._native.cuda_stream = new

    @property
    def capacity(self) -> int:
        return self._native.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        before = self._live_pages()
        is_generation = self._native.history_length >= self._expected
        with translated():
            self._native.capacity = capacity
        self._count_growth(before, is_generation)
        self._manager.stats.sample()

    @property
    def history_length(self) -> int:
        return self._native.history_length

    @history_length.setter
    def history_length(self, history_length: int) -> None:
        with translated():
            self._native.history_length = history_length

    @property
    def beam_width(self) -> int:
        return 1

    @beam_width.setter
    def beam_width(self, width: int) -> None:
        if width < 1:
            raise ValueError(f"beam_width must be >= 1, got {width}")
        if width != 1:
            raise NotImplementedError("beam_width: beams are forks, see KVCache.fork")

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        return self._native.enable_swa_scratch_reuse

    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, enable: bool) -> None:
        with translated():
            self._native.enable_swa_scratch_reuse = enable

    @property
    def text_only(self) -> bool:
        return self._text_only

    @text_only.setter
    def text_only(self, text_only: bool) -> None:
        if not text_only and self._manager.init_config.text_only:
            raise ValueError("text_only must be True under a manager that is text_only")
        if text_only and any(isinstance(t, bytes) for t in self.committed_tokens):
            raise ValueError("text_only: digest tokens were committed")
        self._text_only = text_only

    # ---- read only

    @property
    def id(self) -> int:
        return self._id

    @property
    def manager(self) -> KVCacheManager:
        return self._manager

    @property
    def status(self) -> CacheStatus:
        return self._native.status

    @property
    def is_active(self) -> bool:
        return self._native.is_active

    @property
    def num_blocks(self) -> int:
        return self._native.num_blocks

    @property
    def tokens_per_block(self) -> int:
        return self._native.tokens_per_block

    @property
    def num_committed_tokens(self) -> int:
        return self._native.num_committed_tokens

    @property
    def committed_tokens(self) -> list[int | bytes]:
        return decode(self._native.committed_tokens)

    @property
    def cached_tokens_by_level(self) -> list[int]:
        return self._native.cached_tokens_by_level

    @property
    def reuse_status(self) -> dict[int, ReuseStatus]:
        """By layer group."""
        return {
            each.group_id: ReuseStatus(
                each.group_id,
                each.policy,
                each.endpoint,
                each.complete,
                tuple(HalfOpenRange(*tokens) for tokens in each.coverage),
            )
            for each in self._native.reuse_status
        }

    @property
    def reuse_scope(self) -> ReuseScope:
        scope = self._native.reuse_scope
        return ReuseScope(scope.lora_id, scope.salt)

    @property
    def has_scratch_slots(self) -> bool:
        return self._native.has_scratch_slots
