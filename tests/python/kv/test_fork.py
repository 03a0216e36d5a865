"""Rewinding and forking sequences through the bindings."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helicore import kv

TPB = 4
BLOCK_BYTES = 256


def make_manager(num_blocks: int = 16) -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(BLOCK_BYTES * num_blocks)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", BLOCK_BYTES)])],
            max_util_for_resume=1.0,
        )
    )


def start(manager: kv.KVCacheManager, tokens: list[int]) -> kv.KVCache:
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens)
    return cache


def used(manager: kv.KVCacheManager) -> int:
    return manager.get_storage_statistics()[0].unavailable


def test_truncate_gives_blocks_back_and_clears_the_table_row() -> None:
    manager = make_manager()
    cache = start(manager, list(range(5)))
    row = np.full(8, 99, dtype=np.int32)
    cache.set_base_page_index_buf(0, 0, row)
    assert cache.resize(18, 18)
    cache.truncate(7)
    assert (cache.capacity, cache.history_length, cache.num_blocks) == (7, 7, 2)
    assert (row[2:] == kv.BAD_PAGE_INDEX).all()
    assert used(manager) == 2
    with pytest.raises(ValueError, match=r"num_tokens must be in .* = \[5, 7\], got 4"):
        cache.truncate(4)


def test_truncate_many_is_all_or_nothing() -> None:
    manager = make_manager()
    caches = [start(manager, [i]) for i in range(3)]
    assert manager.resize_many(caches, [9, 9, 9]) == [True] * 3
    with pytest.raises(ValueError, match="num_tokens"):
        manager.truncate_many(caches, [2, 2, 0])
    assert [cache.capacity for cache in caches] == [9, 9, 9]
    manager.truncate_many(caches, np.array([1, 4, 5], dtype=np.int32))
    assert [cache.num_blocks for cache in caches] == [1, 1, 2]


def test_a_fork_shares_pages_until_one_writes() -> None:
    manager = make_manager()
    parent = start(manager, list(range(6)))
    child = parent.fork(id=7)
    assert child.id == 7
    assert child.committed_tokens == parent.committed_tokens
    assert used(manager) == 2
    pool = manager.get_mem_pool_view(0, "latent")
    shared = parent.get_base_page_indices()[1]
    pool[shared] = 11
    assert child.resume()
    own = child.get_base_page_indices()[1]
    assert own != shared
    assert (pool[own] == 11).all(), "the rows came along"
    pool[own] = 22
    assert (pool[shared] == 11).all()
    assert parent.resize(7)
    assert parent.get_base_page_indices()[1] == shared, "the last holder writes in place"
    stats = manager.get_stats()
    assert (stats.num_forks, stats.copied_blocks) == (1, 1)
    for cache in (parent, child):
        cache.close()
    assert used(manager) == 0


def test_no_room_for_a_forks_copy_is_a_value() -> None:
    manager = make_manager(num_blocks=16)
    parent = start(manager, list(range(TPB * manager.num_total_blocks - 2)))
    child = parent.fork()
    assert not child.resume()
    failure = child.last_failure
    assert failure is not None
    assert failure.needed == 1
    with pytest.raises(kv.OutOfPagesError):
        parent.capacity = parent.capacity  # to write, it would need a copy as well
    child.close()
    parent.close()


def test_rows_that_a_fork_shares_are_refused_until_a_resize() -> None:
    manager = make_manager()
    parent = start(manager, list(range(6)))
    assert parent.resize(8)
    child = parent.fork()
    with pytest.raises(kv.LogicError, match="shares the rows from history_length 6"):
        parent.commit([6])
    assert parent.resize(8)
    parent.commit([6])
    assert child.num_committed_tokens == 6


def test_a_fork_keeps_the_manager_alive_but_not_its_parent() -> None:
    manager = make_manager()
    parent = start(manager, list(range(6)))
    child = parent.fork()
    del parent, manager
    gc.collect()
    assert child.resume(), "the parent gave the tail back"
    assert child.committed_tokens == list(range(6))
    assert child.resize(7)
    child.commit([6])
    grandchild = child.fork()
    del child
    gc.collect()
    assert grandchild.num_committed_tokens == 7
    assert grandchild.resume()
    assert grandchild.resize(9)
