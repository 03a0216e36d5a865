"""The executor's view of the KV cache: lanes in, pages out.

Nothing else talks to the manager; the disk store behind it is the business of `disk_prefix`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from helicore import kv
from helicore._core import InternalError, NotSupportedError
from helicore._core.kv import PrefetchTicket
from helicore.executor.counters import LevelCounters
from helicore.executor.disk_prefix import DiskConfig, DiskPrefixes
from helicore.executor.pool_shape import PoolShape

_ROLE = "latent"
_GROUP = 0  # all layers live and die together
_STEPS_BETWEEN_LOOKS = 64  # at whether the traffic asks for other shares of the memory
_PAGES_PER_STEP = 64  # that may move for a new size: what a step can take by the way
_TIER_NAMES = {
    kv.CacheTier.GPU_MEM: "gpu",
    kv.CacheTier.HOST_MEM: "host",
    kv.CacheTier.DISK: "disk",
}


@dataclass(slots=True, eq=False)
class Parked:
    """Pages of a sequence that has no lane: a suspended cache, rows of num_rows tokens in it.

    lookup: the tokens whose pages were looked up in the tree, of a sequence that kept none; by now
    the tree may have more of them. was_running: kept when it was preempted.
    """

    cache: kv.KVCache
    num_rows: int
    lookup: NDArray[np.int32] | None = None
    was_running: bool = False

    @property
    def is_lookup(self) -> bool:
        return self.lookup is not None


class Resumed(Enum):
    """What became of a parked cache."""

    RUNS = auto()
    NO_ROOM = auto()
    LOST = auto()
    """A read failed: the rows are gone, and must be computed again."""


class KVPool:
    """One cache per running lane; the manager keeps its pages in a row of `block_table`.

    Owns the manager. `caches` are views of the manager's memory: gone after `close`. Calls that
    find no room say so by their result and change nothing.
    """

    def __init__(
        self,
        shape: PoolShape,
        disk: DiskConfig | None = None,
        stream: int | None = None,
        is_replica: bool = False,
    ) -> None:
        """`disk`: where prefixes are kept beyond the process. `stream`: the cudaStream_t that
        steps run on, where the hot level is on a GPU. `is_replica`: other ranks make the same calls
        and must get the same answers, so pages that move are waited for."""
        self._stream = stream
        self._is_replica = is_replica
        self.page_size = shape.page_size
        page_bytes = [w * shape.page_rows * shape.dtype.itemsize for w in shape.row_widths]
        manager = kv.KVCacheManager(
            kv.KVCacheManagerConfig(
                tokens_per_block=shape.page_size,
                cache_tiers=_tiers(shape),
                layers=[
                    kv.AttentionLayerConfig(layer, [kv.BufferConfig(_ROLE, size)])
                    for layer, size in enumerate(page_bytes)
                ],
                max_util_for_resume=1.0,
            )
        )
        self._live_manager: kv.KVCacheManager | None = manager
        self.num_pages = int(manager.num_total_blocks)
        self.has_lower_levels = manager.num_levels > 1
        self.block_table = np.full((shape.num_lanes, shape.max_pages), kv.BAD_PAGE_INDEX, np.int32)
        """int32 [lanes, pages]; entries past a lane's pages are arbitrary."""
        self.caches = [self._view(layer, w, shape) for layer, w in enumerate(shape.row_widths)]
        """Per layer [pages, rows of a page, width]."""
        self._lanes: list[kv.KVCache | None] = [None] * shape.num_lanes
        self._parked: set[Parked] = set()
        self._prefetches: dict[Parked, PrefetchTicket] = {}
        self._num_steps = 0
        self.disk: DiskPrefixes | None = None
        if disk is not None:
            self.disk = DiskPrefixes(
                disk,
                self._slots(len(shape.row_widths)),
                self.block_table,
                shape.page_size,
                shape.max_model_len,
            )

    @property
    def _manager(self) -> kv.KVCacheManager:
        if self._live_manager is None:
            raise RuntimeError("the engine is closed")
        return self._live_manager

    def available_pages(self) -> int:
        """Pages that are free, or that nobody needs here: kept for reuse, or parked ones that may
        move down."""
        return int(self._manager.num_available_blocks)

    def look_up(self, tokens: NDArray[np.int32], scope: kv.ReuseScope | None) -> Parked:
        """What the tree holds of `tokens`, parked."""
        cache = self._manager.create_kv_cache(scope, tokens)
        found = Parked(cache, int(cache.num_committed_tokens), lookup=tokens.copy())
        self._parked.add(found)
        return found

    def probe(self, tokens: NDArray[np.int32], scope: kv.ReuseScope | None) -> int:
        """How many of `tokens` are cached."""
        return int(self._manager.probe_reuse(tokens, scope))

    def pending_pages(self) -> int:
        """Pages that were given back and come free by themselves: nobody need leave for them."""
        return sum(int(group.pending) for group in self._manager.get_storage_statistics())

    def free_pages(self) -> int:
        """Pages that nobody uses, not even for reuse."""
        return min(int(group.free) for group in self._manager.get_storage_statistics())

    def reserve_many(self, lanes: Sequence[int], num_tokens: list[int]) -> list[bool]:
        """Makes room for so many tokens in each lane; which of them got it."""
        return list(self._manager.resize_many(self._of(lanes), num_tokens))

    def is_lost(self, lane: int) -> bool:
        """Rows of an open lane are gone: a read failed in the last reserve_many."""
        (cache,) = self._of([lane])
        return not cache.is_active

    def commit_many(self, lanes: Sequence[int], tokens: Sequence[NDArray[np.int32]]) -> None:
        """Declares the next tokens of lanes final; entries of block_table may change."""
        flat = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        self._manager.commit_many(self._of(lanes), flat, [len(part) for part in tokens])
        if self.disk is not None:
            for lane, part in zip(lanes, tokens, strict=True):
                self.disk.commit(lane, part)

    def release(self, lane: int, tokens: NDArray[np.int32]) -> None:
        """Commits the last tokens of a lane and gives its pages back; they stay reusable.

        Of a lane that lost rows nothing is committed.
        """
        self._leave(lane, tokens).close()

    def _leave(self, lane: int, tokens: NDArray[np.int32]) -> kv.KVCache:
        (cache,) = self._of([lane])
        self._lanes[lane] = None
        if len(tokens) and cache.is_active:
            cache.commit(tokens)
            if self.disk is not None:
                self.disk.commit(lane, tokens)
        if self.disk is not None:
            self.disk.leave(lane)
        return cache

    def park(self, lane: int, tokens: NDArray[np.int32]) -> Parked | None:
        """Takes the lane of a sequence but lets it keep its pages; `tokens` are its last ones.

        None where that would give no memory back: then it is released.
        """
        if not self.has_lower_levels:
            self.release(lane, tokens)
            return None
        cache = self._leave(lane, tokens)
        cache.truncate(cache.num_committed_tokens)
        cache.suspend()
        parked = Parked(cache, int(cache.num_committed_tokens), was_running=True)
        self._parked.add(parked)
        self._settle()
        return parked

    def _settle(self) -> None:
        """Waits until no page is on its way, where what is free must not depend on time."""
        while self._is_replica and self.has_lower_levels and self.pending_pages():
            time.sleep(20e-6)

    def fork(self, lane: int, num_rows: int, count: int) -> list[Parked]:
        """Twins of a lane that has num_rows rows, each parked with all of them but the last.

        They share its pages: the lane needs `reserve_many` before it writes its next row.
        """
        (cache,) = self._of([lane])
        if not cache.resize(None, num_rows):
            raise InternalError(f"no room for {num_rows} rows that lane {lane} has")
        twins = []
        for _ in range(count):
            twin = Parked(cache.fork(), num_rows - 1)
            twin.cache.truncate(twin.num_rows)
            self._parked.add(twin)
            twins.append(twin)
        return twins

    def resume(
        self, lane: int, parked: Parked, tokens: NDArray[np.int32], headroom: int
    ) -> Resumed:
        """Gives a parked cache a lane, with pages for `tokens`, which are the sequence's own.

        Waits for pages that come from lower levels, and for what the disk has of a lookup beyond
        the tree. NO_ROOM where not all pages and `headroom` more are to be had: it stays parked.
        """
        cache = parked.cache
        if not cache.resume(self._stream):
            return self._refusal(cache)
        cache.set_base_page_index_buf(0, _GROUP, self.block_table[lane])
        if not cache.resize(len(tokens)) or self.available_pages() < headroom:
            if cache.is_active:
                cache.truncate(parked.num_rows)
                cache.suspend()
            return self._refusal(cache)
        self._lanes[lane] = cache
        self._unpark(parked)
        if self.disk is not None:
            if parked.lookup is not None:
                self._read_disk(lane, cache, parked.lookup)
                parked.num_rows = int(cache.num_committed_tokens)
            else:
                self.disk.enter(lane, tokens[: cache.num_committed_tokens], cache.reuse_scope)
        return Resumed.RUNS

    def prefetch(self, parked: Parked) -> None:
        """Starts to bring the pages of a parked cache up to the hot level; once."""
        if parked not in self._prefetches:
            ticket = self._prefetches[parked] = parked.cache.prefetch(kv.HOT_LEVEL)
            while self._is_replica and not ticket.is_done():
                time.sleep(20e-6)
            self._settle()

    def go_on_prefetching(self) -> None:
        """Starts what can be started now of the prefetches that are under way; once per step."""
        for ticket in self._prefetches.values():
            ticket.is_done()

    def maintain(self) -> None:
        """Between two steps: goes on with levels that change their sizes, or looks whether some
        should. Entries of block_table may change."""
        self._num_steps += 1
        self._settle()
        manager = self._manager
        if not manager.is_resizing:
            is_due = self._num_steps % _STEPS_BETWEEN_LOOKS == 0 and not self._is_replica
            if not is_due or not manager.need_adjustment:
                return
            manager.adjust()
        manager.maintain(_PAGES_PER_STEP)
        self.num_pages = int(manager.num_total_blocks)

    def level_counters(self) -> list[LevelCounters]:
        """One per level, hot first; `count_moves` brings them up to date."""
        tiers = self._manager.init_config.cache_tiers
        return [
            LevelCounters(
                _TIER_NAMES[tier.tier],
                sum(int(group.total) for group in self._manager.get_storage_statistics(level)),
            )
            for level, tier in enumerate(tiers)
        ]

    def count_moves(self, levels: list[LevelCounters]) -> None:
        """Totals of pages that moved between levels, as of now."""
        if not self.has_lower_levels:
            return
        for level, moved in zip(levels, self._manager.get_migration_stats(), strict=True):
            level.offloaded_pages = sum(part.offloaded_pages for part in moved)
            level.offloaded_bytes = sum(part.offloaded_bytes for part in moved)
            level.unwritten_pages = sum(part.unwritten_pages for part in moved)
            level.onboarded_pages = sum(part.onboarded_pages for part in moved)
            level.onboarded_bytes = sum(part.onboarded_bytes for part in moved)
            level.dropped_pages = sum(part.dropped_pages for part in moved)

    def tokens_by_level(self, found: Parked) -> list[int]:
        """Where the tokens of a lookup were, hot first; prefixes on disk not counted."""
        return list(found.cache.cached_tokens_by_level)

    def drop(self, parked: Parked) -> None:
        """Gives the pages of a parked cache back; committed ones stay reusable."""
        self._unpark(parked)
        parked.cache.close()

    def _unpark(self, parked: Parked) -> None:
        self._parked.remove(parked)
        ticket = self._prefetches.pop(parked, None)
        if ticket is not None:
            ticket.cancel()

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def clear(self) -> None:
        """Forgets every cached prefix, those on disk too; no cache may be open."""
        self._manager.clear_reusable_blocks()
        if self.disk is not None:
            self.disk.clear()

    def close(self) -> None:
        """Gives the memory back; caches that are open are closed. Safe to call again."""
        manager, self._live_manager = self._live_manager, None
        if manager is None:
            return
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()
        for lane, cache in enumerate(self._lanes):
            if cache is not None:
                cache.close()
                self._lanes[lane] = None
        for parked in list(self._parked):
            self.drop(parked)
        self.caches.clear()
        manager.shutdown()

    def _refusal(self, cache: kv.KVCache) -> Resumed:
        failure = cache.last_failure
        is_lost = failure is not None and failure.data_lost
        return Resumed.LOST if is_lost else Resumed.NO_ROOM

    def _read_disk(self, lane: int, cache: kv.KVCache, tokens: NDArray[np.int32]) -> None:
        """Takes what the disk holds beyond the tree into the lane and into the tree."""
        assert self.disk is not None
        matched = int(cache.num_committed_tokens)
        found = self.disk.open(lane, tokens, cache.reuse_scope, matched)
        if found > matched:
            cache.commit(tokens[matched:found])
            self.disk.accept(lane, found)

    def _slots(self, num_layers: int) -> NDArray[np.uint8]:
        """uint8 [pages, bytes]: a page with all its layers, which share one slot."""
        views = [self._manager.get_mem_pool_view(layer, _ROLE) for layer in range(num_layers)]
        first = min(views, key=lambda view: view.ctypes.data)
        num_bytes = first.strides[0]
        for view in views:
            offset = view.ctypes.data - first.ctypes.data
            if view.strides[0] != num_bytes or offset + view.shape[1] > num_bytes:
                raise NotSupportedError("disk_path needs layers with rows of one width")
        shape = (len(first), num_bytes)
        return np.lib.stride_tricks.as_strided(first, shape, (num_bytes, 1))

    def _of(self, lanes: Sequence[int]) -> list[kv.KVCache]:
        caches = [self._lanes[lane] for lane in lanes]
        assert None not in caches, f"a lane of {list(lanes)} has no cache"
        return caches  # type: ignore[return-value]

    def _view(self, layer: int, width: int, shape: PoolShape) -> Tensor:
        """The manager's memory of one layer; row p is the page with base page index p."""
        if shape.device.type == "cuda":
            pages = self._gpu_view(layer, shape)
        else:
            pages = torch.from_numpy(self._manager.get_mem_pool_view(layer, _ROLE))
        return pages.view(shape.dtype).view(len(pages), shape.page_rows, width)

    def _gpu_view(self, layer: int, shape: PoolShape) -> Tensor:
        """uint8 [pages, bytes] of GPU memory, whose addresses stay while the manager lives."""
        manager = self._manager
        scale = manager.get_page_index_scale(layer, _ROLE)
        memory = _GpuMemory(
            address=manager.get_mem_pool_base_address(layer, _ROLE),
            shape=(
                self.num_pages,
                shape.row_widths[layer] * shape.page_rows * shape.dtype.itemsize,
            ),
            strides=(manager.get_page_stride(layer, _ROLE) * scale, 1),
        )
        return torch.as_tensor(memory, device=shape.device)


class _GpuMemory:
    """uint8 memory that torch takes in without owning it."""

    def __init__(self, *, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }


def _tiers(
    shape: PoolShape,
) -> list[kv.GpuCacheTierConfig | kv.HostCacheTierConfig | kv.DiskCacheTierConfig]:
    """The levels of the cache, hot first."""
    on_gpu = shape.device.type == "cuda"
    hot = kv.GpuCacheTierConfig if on_gpu else kv.HostCacheTierConfig
    tiers: list[kv.GpuCacheTierConfig | kv.HostCacheTierConfig | kv.DiskCacheTierConfig] = [
        hot(shape.num_bytes)
    ]
    if shape.swap_host_bytes:
        tiers.append(kv.HostCacheTierConfig(shape.swap_host_bytes))
    if shape.swap_disk_bytes:
        tiers.append(kv.DiskCacheTierConfig(shape.swap_disk_bytes, str(shape.swap_path)))
    return tiers
