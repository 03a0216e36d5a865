"""The manager."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from helicore import kv

from .cache import PriorityCallback, _KVCache
from .config import AttentionLayerConfig, KVCacheManagerConfig
from .events import KVCacheEventManager
from .names import (
    PRIORITY_DEFAULT,
    AttentionReusePolicy,
    CacheTier,
    OutOfMemoryError,
    PageIndexMode,
    translated,
)
from .stats import (
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    PoolGroupPeakBlockStats,
    ReusedBlocksByLevel,
    SsmSnapshotIterationStatsDelta,
    StatsBook,
    StorageStatistics,
    SuspendResumeStats,
    storage_statistics,
)
from .tokens import Tokens, encode, sequence_to_blockchain_keys, to_scope
from .values import (
    AggregatedPageDesc,
    AttentionLifeCycle,
    BufferId,
    ExpandedBuffer,
    LifeCycle,
    PageIndexConverter,
    PoolGroupDesc,
    SsmLifeCycle,
    pool_group_desc,
)

_managers: weakref.WeakSet[KVCacheManager] = weakref.WeakSet()


def num_live_managers() -> int:
    """Managers that were not let go of."""
    return len(_managers)


def poison_reason() -> str | None:
    """None: a failure stays in its manager, nothing poisons the process."""
    return None


def take_poison() -> str | None:
    """None, as poison_reason()."""
    return None


def default_priority(ordinal: int, life_cycle: LifeCycle) -> int:
    """The priority of every page unless a callback says otherwise."""
    return PRIORITY_DEFAULT


class Layout:
    """Where things lie: facts of the construction."""

    _native: kv.KVCacheManager
    _config: KVCacheManagerConfig

    def get_mem_pool_base_address(
        self, layer_id: int, data_role: str, index_mode: PageIndexMode | None = None
    ) -> int:
        mode = PageIndexMode.SHARED if index_mode is None else index_mode
        return self._native.get_mem_pool_base_address(layer_id, data_role, mode)

    def get_page_stride(self, layer_id: int, data_role: str) -> int:
        return self._native.get_page_stride(layer_id, data_role)

    def get_page_index_upper_bound(self, layer_id: int, data_role: str) -> int:
        return self._native.get_page_index_upper_bound(layer_id, data_role)

    def get_page_index_scale(self, layer_id: int, data_role: str) -> int:
        return self._native.get_page_index_scale(layer_id, data_role)

    def get_page_index_converter(self, layer_id: int, data_role: str) -> PageIndexConverter:
        return PageIndexConverter(self._native.get_page_index_converter(layer_id, data_role))

    def get_aggregated_pages(self, buffers: Iterable[BufferId]) -> Iterator[AggregatedPageDesc]:
        """The buffers as runs that are contiguous inside a slot, in memory order."""
        wanted = {BufferId(*buffer) for buffer in buffers}
        unknown = wanted.difference(self.all_buffer_ids)
        if unknown:
            raise ValueError(f"buffers: there is no {min(unknown)}")
        for desc in self._native.pool_group_descs:
            for variant in desc.variants:
                for pool, piece in zip(desc.pools, variant.coalesced_buffers, strict=True):
                    yield from self._runs(wanted, variant.layer_group_id, pool, piece)

    def _runs(
        self, wanted: set[BufferId], group: int, pool: kv.PoolDesc, piece: kv.CoalescedBuffer
    ) -> Iterator[AggregatedPageDesc]:
        size = piece.single_buffer_size
        run: list[ExpandedBuffer] = []
        ids = [BufferId(b.layer_id, b.role) for b in piece.buffer_ids]
        for i, buffer in enumerate([*ids, None]):
            if buffer is not None and buffer in wanted:
                expansion = self._native.get_page_index_converter(*buffer).expansion
                run.append(ExpandedBuffer(buffer, expansion))
            elif run:
                base = pool.base_address + (i - len(run)) * size
                yield AggregatedPageDesc(base, len(run) * size, pool.slot_bytes, group, tuple(run))
                run = []

    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]:
        return [pool_group_desc(desc) for desc in self._native.pool_group_descs]

    @property
    def layer_grouping(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(group) for group in self._native.layer_grouping)

    @property
    def layer_ids(self) -> list[int]:
        return [layer.layer_id for layer in self._config.layers]

    @property
    def num_layers(self) -> int:
        return len(self._config.layers)

    @property
    def all_buffer_ids(self) -> list[BufferId]:
        return [
            BufferId(layer.layer_id, buffer.role)
            for layer in self._config.layers
            for buffer in layer.buffers
        ]

    def get_layer_group_id(self, layer_id: int) -> int:
        return self._native.get_layer_group_id(layer_id)

    @property
    def cache_tier_list(self) -> list[CacheTier]:
        return [self._native.get_tier(level) for level in range(self._native.num_levels)]

    @property
    def hot_tier(self) -> CacheTier:
        return self._native.get_tier(0)

    @property
    def tokens_per_block(self) -> int:
        return self._native.tokens_per_block

    def supports_index_mode(self, mode: PageIndexMode) -> bool:
        """Both: there are no scratch blocks."""
        return True

    def get_life_cycle_pool_group_indices(self, level: int = 0) -> list[int]:
        """By layer group; every level has the same pool groups."""
        self._native.get_tier(level)
        return [self._native.get_pool_group_of(g) for g in range(self._native.num_layer_groups)]

    def life_cycles(self) -> list[LifeCycle]:
        """By layer group."""
        found: list[LifeCycle] = []
        for group, layers in enumerate(self._native.layer_grouping):
            layer = next(x for x in self._config.layers if x.layer_id == layers[0])
            if isinstance(layer, AttentionLayerConfig):
                sinks = -(-(layer.num_sink_tokens or 0) // self.tokens_per_block)
                found.append(AttentionLifeCycle(layer.sliding_window_size, sinks, group))
            else:
                found.append(SsmLifeCycle(group))
        return found

    def reuse_policy(self, group: int) -> AttentionReusePolicy | None:
        """Of a layer group; ValueError when there is no such group."""
        if not 0 <= group < self._native.num_layer_groups:
            raise ValueError(f"there is no layer group {group}")
        first = self._native.layer_grouping[group][0]
        layer = next(x for x in self._config.layers if x.layer_id == first)
        return layer.reuse_policy if isinstance(layer, AttentionLayerConfig) else None


class Statistics:
    """Counters and what is left of them since the last reset."""

    _native: kv.KVCacheManager
    stats: StatsBook

    def get_storage_statistics(self, level: int = 0) -> list[StorageStatistics]:
        return [storage_statistics(group) for group in self._native.get_storage_statistics(level)]

    def get_committed_stats(self) -> KVCacheStatsDelta:
        return copy.copy(self.stats.committed)

    def get_and_reset_iteration_stats(self) -> dict[int, KVCacheIterationStatsDelta]:
        return self.stats.take_iteration()

    def get_and_reset_iteration_peak_block_stats(self) -> list[PoolGroupPeakBlockStats]:
        return self.stats.take_peaks()[0]

    def get_and_reset_iteration_peak_block_stats_by_level(
        self,
    ) -> list[list[PoolGroupPeakBlockStats]]:
        return self.stats.take_peaks()

    def get_and_reset_iteration_suspend_resume_stats(self) -> SuspendResumeStats:
        taken, self.stats.suspend_resume = self.stats.suspend_resume, SuspendResumeStats()
        return taken

    def get_and_reset_iteration_disk_prefetch_blocks(self) -> int:
        taken, self.stats.disk_prefetch_blocks = self.stats.disk_prefetch_blocks, 0
        return taken

    def get_and_reset_iteration_cached_tokens_by_level(self) -> list[int]:
        return self.stats.take_cached_tokens()

    def get_and_reset_iteration_reused_blocks_by_level(self) -> ReusedBlocksByLevel:
        return self.stats.take_reused_blocks()

    def get_and_reset_ssm_snapshot_iteration_stats(self) -> SsmSnapshotIterationStatsDelta:
        return self.stats.take_ssm()

    def record_request_suspended(self) -> None:
        self.stats.suspend_resume.num_suspended += 1

    def record_request_resumed(self) -> None:
        self.stats.suspend_resume.num_resumed += 1

    def mark_stats_dirty(self, kv_cache_id: int) -> None:
        self.stats.dirty.add(kv_cache_id)

    def clear_stats_dirty(self, kv_cache_id: int) -> None:
        self.stats.dirty.discard(kv_cache_id)

    def get_dirty_stats_kv_cache_ids(self) -> list[int]:
        return sorted(self.stats.dirty)

    def mark_stats_excluded(self, kv_cache_id: int) -> None:
        self._native.mark_stats_excluded(kv_cache_id)
        self.stats.excluded.add(kv_cache_id)

    def clear_stats_excluded(self, kv_cache_id: int) -> None:
        self.stats.excluded.discard(kv_cache_id)

    def is_stats_excluded(self, kv_cache_id: int) -> bool:
        return kv_cache_id in self.stats.excluded


class KVCacheManager(Layout, Statistics):
    """Owns the pools, the pages and the tree of reusable blocks."""

    def __init__(
        self,
        config: KVCacheManagerConfig,
        event_manager: KVCacheEventManager | None = None,
        cold_page_codec: object | None = None,
    ) -> None:
        if cold_page_codec is not None:
            raise NotImplementedError("cold_page_codec: cold levels keep the pools of the hot one")
        self._config = copy.deepcopy(config)
        self._event_manager = event_manager
        events = 0 if event_manager is None else event_manager.event_buffer_size
        with translated():
            self._native = kv.KVCacheManager(self._config.native(events))
        self._life_cycles = self.life_cycles()
        self.attention_groups = [
            x.id for x in self._life_cycles if isinstance(x, AttentionLifeCycle)
        ]
        self.has_ssm = len(self.attention_groups) < len(self._life_cycles)
        self.stats = StatsBook(self._native, self.attention_groups)
        self._open: weakref.WeakSet[_KVCache] = weakref.WeakSet()
        if event_manager is not None:
            levels = range(self._native.num_levels)
            blocks = [sum(s.total for s in self._native.get_storage_statistics(i)) for i in levels]
            event_manager.attach(self, blocks)
        _managers.add(self)

    # ---- life

    def shutdown(self) -> None:
        with translated():
            self._native.shutdown()

    def clear_reusable_blocks(self) -> None:
        with translated():
            self._native.clear_reusable_blocks()

    def drain_events(self) -> list[kv.KVEvent]:
        """For the event manager."""
        return self._native.drain_events()

    def forget(self, cache: _KVCache) -> None:
        """The cache was closed."""
        self._open.discard(cache)

    # ---- create and match

    def create_kv_cache(
        self,
        reuse_scope: object = None,
        input_tokens: Tokens | None = None,
        id: int | None = None,
        custom_priority_callback: PriorityCallback = default_priority,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> _KVCache:
        if text_only is False and self._config.text_only:
            raise ValueError("text_only must not be False under a manager that is text_only")
        text_only = self._config.text_only if text_only is None else text_only
        num_tokens = 0 if input_tokens is None else len(input_tokens)
        expected = num_tokens if expected_prompt_length is None else expected_prompt_length
        retention = self._retention(custom_priority_callback, max(num_tokens, expected))
        lowest = min((r.priority for r in retention), default=PRIORITY_DEFAULT)
        with translated():
            native = self._native.create_kv_cache(
                to_scope(reuse_scope),
                encode(input_tokens, text_only),
                id,
                priority=lowest,
                expected_prompt_length=max(0, expected),
                retention=retention,
            )
        cache = _KVCache(self, native, max(0, expected), text_only)
        cache.count_match(num_tokens)
        self._open.add(cache)
        self.stats.sample()
        return cache

    def _retention(self, callback: PriorityCallback, num_tokens: int) -> list[kv.RetentionRange]:
        """The callback's priorities for the blocks of the prompt, asked now and never under a lock.
        A block gets the highest of its layer groups; what follows the prompt, that of its end."""
        if callback is default_priority:
            return []
        tpb = self.tokens_per_block
        ordinals = range(num_tokens // tpb + 1)
        worth = [max(int(callback(o, lc)) for lc in self._life_cycles) for o in ordinals]
        ranges: list[kv.RetentionRange] = []
        begin = 0
        for ordinal in ordinals:
            is_last = ordinal + 1 == len(worth)
            if is_last or worth[ordinal + 1] != worth[ordinal]:
                end = None if is_last else (ordinal + 1) * tpb
                ranges.append(kv.RetentionRange(begin, end, worth[ordinal]))
                begin = (ordinal + 1) * tpb
        return ranges

    def probe_reuse(self, reuse_scope: object = None, input_tokens: Tokens | None = None) -> int:
        with translated():
            return self._native.probe_reuse(
                encode(input_tokens, self._config.text_only), to_scope(reuse_scope)
            )

    def probe_first_new_block_key(
        self, reuse_scope: object = None, input_tokens: Tokens | None = None
    ) -> bytes | None:
        """Key of the first block that a request would newly commit; None without one."""
        tokens: Any = [] if input_tokens is None else input_tokens
        known = self.probe_reuse(reuse_scope, tokens) // self.tokens_per_block
        if (known + 1) * self.tokens_per_block > len(tokens):
            return None
        keys = sequence_to_blockchain_keys(self.tokens_per_block, reuse_scope, tokens)
        return next(key for i, (_, key) in enumerate(keys) if i == known + 1)

    # ---- sizing

    def get_quota(self, cache_level: int = 0) -> int:
        return self._native.get_quota(cache_level)

    def resize(self, cache_level: int, quota: int, best_efforts: bool = False) -> bool:
        """Takes a level to `quota` bytes while sequences run; False when that can't be had. With
        best_efforts it gets as near as it can now; maintain() goes on."""
        try:
            with translated():
                return self._native.resize(cache_level, quota, best_efforts).done
        except OutOfMemoryError:
            return False

    def maintain(self, max_pages: int = 1024) -> int:
        """Between steps: goes on with what resize() and adjust() have begun."""
        return self._native.maintain(max_pages)

    @property
    def need_adjustment(self) -> bool:
        return self._native.need_adjustment

    def adjust(self) -> bool:
        """Moves memory between pool groups, all at once as far as pages may move now."""
        with translated():
            started = self._native.adjust()
            while self._native.is_resizing and self._native.maintain(1024) > 0:
                pass
        return started

    def clamp_max_seq_len_for_mem(self, batch_size: int, token_num_upper_bound: int) -> int:
        return self._native.clamp_max_seq_len_for_mem(batch_size, token_num_upper_bound)

    # ---- properties

    @property
    def init_config(self) -> KVCacheManagerConfig:
        return copy.deepcopy(self._config)

    @property
    def event_manager(self) -> KVCacheEventManager | None:
        return self._event_manager

    @property
    def allow_seq_rebasing(self) -> bool:
        return True

    @property
    def enable_partial_match(self) -> bool:
        return self._config.enable_partial_reuse

    @property
    def commit_min_snapshot(self) -> bool:
        return self._config.commit_min_snapshot
