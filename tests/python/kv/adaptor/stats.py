"""Statistics of requests and iterations, kept from what the native manager shows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

from helicore import kv

from .names import CacheTier


@dataclass
class Delta:
    """Counters that can be added up."""

    def add(self, other: Self) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def __bool__(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self))


@dataclass
class KVCacheStatsDelta(Delta):
    """Blocks of requests: alloc_total counts private copies of reused blocks too."""

    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

    @property
    def cache_hit_rate(self) -> float:
        looked_up = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / looked_up if looked_up else 0.0


@dataclass
class KVCacheIterationStatsDelta(Delta):
    """Pages of one attention layer group since the last reset."""

    iter_alloc_total_blocks: int = 0
    iter_alloc_new_blocks: int = 0
    iter_reused_blocks: int = 0
    iter_full_reused_blocks: int = 0
    iter_partial_reused_blocks: int = 0
    iter_missed_blocks: int = 0
    iter_gen_alloc_blocks: int = 0
    iter_onboard_blocks: int = 0
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0
    iter_offload_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0
    iter_intra_device_copy_bytes: int = 0
    iter_host_dropped_blocks: int = 0
    iter_host_dropped_bytes: int = 0

    @property
    def iter_cache_hit_rate(self) -> float:
        looked_up = self.iter_reused_blocks + self.iter_missed_blocks
        return self.iter_reused_blocks / looked_up if looked_up else 0.0


@dataclass
class SsmSnapshotIterationStatsDelta(Delta):
    """Lookups of recurrent state: one per cache made with tokens."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    unreused_tokens: int = 0
    aligned_hits: int = 0
    unaligned_hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass
class ReusedBlocksByLevel:
    """Reused blocks by the level that they were found on."""

    full: list[int]
    partial: list[int]


@dataclass
class SuspendResumeStats(Delta):
    """What record_request_suspended and record_request_resumed counted."""

    num_suspended: int = 0
    num_resumed: int = 0


@dataclass
class PoolGroupPeakBlockStats:
    """The most that was seen of each since the last drain."""

    available: int = 0
    unavailable: int = 0
    evictable: int = 0

    def see(self, now: kv.PoolGroupStatistics) -> None:
        self.available = max(self.available, now.available)
        self.unavailable = max(self.unavailable, now.unavailable)
        self.evictable = max(self.evictable, now.evictable)


@dataclass
class StorageStatistics:
    """Slots of one pool group on one level, now."""

    slot_sizes: list[int]
    total: int
    free: int
    evictable: int
    available: int
    unavailable: int


def storage_statistics(native: kv.PoolGroupStatistics) -> StorageStatistics:
    """The published form."""
    return StorageStatistics(
        native.slot_sizes,
        native.total,
        native.free,
        native.evictable,
        native.available,
        native.unavailable,
    )


@dataclass
class Pending:
    """What one cache did since its statistics were last committed or discarded."""

    total: KVCacheStatsDelta = field(default_factory=KVCacheStatsDelta)
    groups: dict[int, KVCacheIterationStatsDelta] = field(default_factory=dict)
    ssm: SsmSnapshotIterationStatsDelta = field(default_factory=SsmSnapshotIterationStatsDelta)

    def group(self, group: int) -> KVCacheIterationStatsDelta:
        return self.groups.setdefault(group, KVCacheIterationStatsDelta())

    def __bool__(self) -> bool:
        return bool(self.total or self.ssm or any(self.groups.values()))


class StatsBook:
    """The manager's side: committed totals, iteration deltas, peaks, dirty and excluded ids."""

    def __init__(self, native: kv.KVCacheManager, groups: list[int]) -> None:
        self._native = native
        self._groups = groups  # attention layer groups
        self._seen = native.get_migration_stats()
        self._seen_copies = native.get_stats().copied_blocks
        self.is_enabled = native.init_config.enable_stats
        self.committed = KVCacheStatsDelta()
        self.dirty: set[int] = set()
        self.excluded: set[int] = set()
        self.suspend_resume = SuspendResumeStats()
        self.disk_prefetch_blocks = 0
        self.take_iteration()
        self.take_ssm()
        self.take_peaks()
        self.take_by_level()

    def counts(self, cache_id: int) -> bool:
        return self.is_enabled and cache_id not in self.excluded

    def commit(self, pending: Pending) -> None:
        self.committed.add(pending.total)
        self._ssm.add(pending.ssm)
        for group, delta in pending.groups.items():
            self._iteration[group].add(delta)

    def found(self, full: list[int], partial: list[int], tokens: list[int]) -> None:
        """A new cache's match, by level."""
        for level, count in enumerate(tokens):
            self._cached_tokens[level] += count
            self._reused.full[level] += full[level]
            self._reused.partial[level] += partial[level]

    def sample(self) -> None:
        """After an operation: keeps the peaks."""
        if not self.is_enabled:
            return
        for level, peaks in enumerate(self._peaks):
            for peak, now in zip(peaks, self._native.get_storage_statistics(level), strict=True):
                peak.see(now)

    def take_peaks(self) -> list[list[PoolGroupPeakBlockStats]]:
        """[level][pool group]; the next period starts with what there is now."""
        taken = getattr(self, "_peaks", [])
        self._peaks = [
            [PoolGroupPeakBlockStats() for _ in self._native.get_storage_statistics(level)]
            for level in range(self._native.num_levels)
        ]
        self.sample()
        return taken

    def take_iteration(self) -> dict[int, KVCacheIterationStatsDelta]:
        """By layer group, with the pages that moved between levels since the last call."""
        taken = getattr(self, "_iteration", {})
        self._iteration = {group: KVCacheIterationStatsDelta() for group in self._groups}
        now = self._native.get_migration_stats()
        if self.is_enabled:
            for group, delta in taken.items():
                self._add_moves(group, delta, now)
        self._seen = now
        return taken

    def _add_moves(
        self,
        group: int,
        delta: KVCacheIterationStatsDelta,
        now: list[list[kv.MigrationCounters]],
    ) -> None:
        for level in range(1, len(now)):
            new, old = now[level][group], self._seen[level][group]
            delta.iter_offload_blocks += new.offloaded_pages - old.offloaded_pages
            delta.iter_offload_bytes += new.offloaded_bytes - old.offloaded_bytes
            delta.iter_onboard_blocks += new.onboarded_pages - old.onboarded_pages
            delta.iter_onboard_bytes += new.onboarded_bytes - old.onboarded_bytes
            if self._native.get_tier(level) == CacheTier.HOST_MEM:
                delta.iter_host_dropped_blocks += new.dropped_pages - old.dropped_pages
        delta.iter_host_dropped_bytes = delta.iter_host_dropped_blocks * self.page_bytes(group)
        delta.iter_intra_device_copy_bytes = delta.iter_intra_device_copy_blocks * (
            self.page_bytes(group)
        )

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of the layer group."""
        desc = self._native.pool_group_descs[self._native.get_pool_group_of(group)]
        return sum(pool.slot_bytes for pool in desc.pools)

    def disk_onboarded(self) -> int:
        """Pages that ever came up from a disk level."""
        stats = self._native.get_migration_stats()
        return sum(
            counters.onboarded_pages
            for level, groups in enumerate(stats)
            if self._native.get_tier(level) == CacheTier.DISK
            for counters in groups
        )

    def take_ssm(self) -> SsmSnapshotIterationStatsDelta:
        taken = getattr(self, "_ssm", SsmSnapshotIterationStatsDelta())
        self._ssm = SsmSnapshotIterationStatsDelta()
        return taken

    def take_by_level(self) -> tuple[list[int], ReusedBlocksByLevel]:
        """(tokens, blocks) that caches found, by level."""
        levels = self._native.num_levels
        taken = (getattr(self, "_cached_tokens", []), getattr(self, "_reused", None))
        self._cached_tokens = [0] * levels
        self._reused = ReusedBlocksByLevel([0] * levels, [0] * levels)
        return taken[0], taken[1] or self._reused

    def take_cached_tokens(self) -> list[int]:
        taken, self._cached_tokens = self._cached_tokens, [0] * len(self._cached_tokens)
        return taken

    def take_reused_blocks(self) -> ReusedBlocksByLevel:
        taken = self._reused
        self._reused = ReusedBlocksByLevel([0] * len(taken.full), [0] * len(taken.full))
        return taken
