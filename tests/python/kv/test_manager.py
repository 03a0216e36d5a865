"""KVCacheManager and KVCache through the bindings."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helicore import kv

TPB = 4
ROW = 64  # bytes of a token's row in a layer


def make_config(num_blocks: int = 64, num_layers: int = 2) -> kv.KVCacheManagerConfig:
    block = TPB * ROW
    return kv.KVCacheManagerConfig(
        tokens_per_block=TPB,
        cache_tiers=[kv.HostCacheTierConfig(block * num_layers * num_blocks)],
        layers=[
            kv.AttentionLayerConfig(i, [kv.BufferConfig("latent", block)])
            for i in range(num_layers)
        ],
        max_util_for_resume=1.0,
    )


@pytest.fixture
def manager() -> Iterator[kv.KVCacheManager]:
    made = kv.KVCacheManager(make_config())
    yield made
    gc.collect()
    made.shutdown()


def rows(manager: kv.KVCacheManager, layer: int) -> torch.Tensor:
    """The layer's pool as float32 [num_slots, TPB, ROW / 4]."""
    view: torch.Tensor = torch.from_numpy(manager.get_mem_pool_view(layer, "latent")).view(
        torch.float32
    )
    tokens: torch.Tensor = view.unflatten(1, (TPB, ROW // 4))
    return tokens


def run(manager: kv.KVCacheManager, tokens: list[int], scope: kv.ReuseScope | None = None) -> int:
    """One sequence from start to close; returns the tokens it found cached."""
    cache = manager.create_kv_cache(scope, tokens)
    found = cache.num_committed_tokens
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[found:])
    cache.close()
    return found


def test_a_sequence_finds_what_another_left(manager: kv.KVCacheManager) -> None:
    tokens = list(range(11))
    assert run(manager, tokens) == 0
    assert manager.probe_reuse(tokens) == 11
    assert manager.probe_reuse([*tokens[:6], 99]) == 6
    assert run(manager, [*tokens, 50, 51]) == 11
    stats = manager.get_stats()
    assert (stats.num_lookups, stats.hit_tokens) == (2, 11)


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda t: np.array(t, dtype=np.int32),
        lambda t: torch.tensor(t, dtype=torch.int32),
    ],
)
def test_tokens_of_every_kind_are_the_same_tokens(manager: kv.KVCacheManager, convert) -> None:  # type: ignore[no-untyped-def]
    tokens = list(range(100, 111))
    cache = manager.create_kv_cache(input_tokens=convert(tokens[:0]))
    assert cache.resume()
    assert cache.resize(11)
    cache.commit(convert(tokens))
    assert cache.committed_tokens == tokens
    cache.close()
    for kind in (list, tuple, lambda t: np.array(t, np.int32), torch.IntTensor):
        assert manager.probe_reuse(kind(tokens)) == 11
        assert manager.create_kv_cache(input_tokens=kind(tokens)).num_committed_tokens == 11


def test_arrays_of_other_types_and_shapes_are_refused(manager: kv.KVCacheManager) -> None:
    for wrong in (
        np.zeros(4, np.int64),
        np.zeros((2, 2), np.int32),
        np.zeros(8, np.int32)[::2],
        torch.zeros(4, dtype=torch.int64),
        [1.5],
        ["a"],
        "abc",
        None,
        5,
    ):
        with pytest.raises(TypeError):
            manager.probe_reuse(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="32-bit"):
        manager.probe_reuse([1 << 31])
    assert manager.probe_reuse([]) == 0


def test_scopes_are_kept_apart(manager: kv.KVCacheManager) -> None:
    tokens = list(range(8))
    scopes = [None, kv.ReuseScope(salt="X"), kv.ReuseScope(salt=""), kv.ReuseScope(7), 8]
    run(manager, tokens, kv.ReuseScope(7))
    assert [manager.probe_reuse(tokens, scope) for scope in scopes] == [0, 0, 0, 8, 0]
    assert manager.probe_reuse(tokens, 7) == 8, "a number is an adapter id"
    assert manager.probe_reuse(tokens, kv.ReuseScope(7, lora_generation=1)) == 0


def test_page_tables_are_views_and_rows_are_kept_up_to_date(manager: kv.KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert len(cache.get_base_page_indices()) == 0
    assert cache.resume()
    assert cache.resize(6)
    view = cache.get_base_page_indices(0)
    assert view.dtype == np.int32
    assert view.shape == (2,)
    assert not view.flags.writeable
    table = torch.full((2, 4), 77, dtype=torch.int32)
    cache.set_base_page_index_buf(0, 0, table[1])
    assert table[1].tolist() == [*view.tolist(), -1, -1]
    assert cache.resize(16)
    assert (table[1] >= 0).all()
    assert table[0].tolist() == [77] * 4
    with pytest.raises(ValueError, match="capacity"):
        cache.resize(17)
    cache.set_base_page_index_buf(0, 0, None)
    assert cache.resize(17)
    cache.set_base_page_index_buf(0, 0, np.zeros(8, np.int32))
    with pytest.raises(ValueError, match="at least 5"):
        cache.set_base_page_index_buf(0, 0, table[1])
    with pytest.raises(TypeError):
        cache.set_base_page_index_buf(0, 0, np.zeros(8, np.int64))
    assert cache.resize(16)
    cache.set_base_page_index_buf(0, 0, table[1])
    cache.suspend()
    assert table[1].tolist() == [-1] * 4
    assert cache.get_base_page_indices().tolist() == [-1] * 4
    assert len(cache.get_aggregated_page_indices(0)) == 4
    cache.close()


def test_a_row_lives_as_long_as_the_cache_that_fills_it(manager: kv.KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    cache.set_base_page_index_buf(0, 0, np.zeros(64, np.int32))
    gc.collect()
    assert cache.resize(64 * TPB)
    assert cache.get_base_page_indices().min() >= 0


def test_pool_views_and_addresses_are_the_same_memory(manager: kv.KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(8)
    b = int(cache.get_base_page_indices()[1])
    rows(manager, 1)[b, 2] = 3.5
    base = manager.get_mem_pool_base_address(1, "latent")
    stride = manager.get_page_stride(1, "latent")
    scale = manager.get_page_index_scale(1, "latent")
    pool = manager.pool_group_descs[0].pools[0]
    offset = base + b * scale * stride - pool.base_address
    whole = manager.get_mem_pool_view(0, "latent")
    assert whole.ctypes.data == pool.base_address
    assert offset == b * pool.slot_bytes + stride
    converter = manager.get_page_index_converter(1, "latent")
    assert converter([b, -1]) == [b * scale, -1]
    assert converter([b], kv.PageIndexMode.PER_LAYER) == [b * scale + 1]
    assert rows(manager, 0)[b, 2].tolist() == [0.0] * (ROW // 4)
    assert manager.get_page_index_upper_bound(1, "latent") == 2 * pool_slots(manager) - 1


def pool_slots(manager: kv.KVCacheManager) -> int:
    return manager.pool_group_descs[0].num_slots


def test_a_partly_matched_block_is_copied_before_it_is_written(
    manager: kv.KVCacheManager,
) -> None:
    first = manager.create_kv_cache()
    assert first.resume()
    assert first.resize(4)
    b = int(first.get_base_page_indices()[0])
    rows(manager, 0)[b] = torch.arange(4.0)[:, None]
    first.commit([1, 2, 3, 4])
    second = manager.create_kv_cache(input_tokens=[1, 2, 9])
    assert second.num_committed_tokens == 2
    assert second.resume()
    copy = int(second.get_base_page_indices()[0])
    assert copy != b
    assert rows(manager, 0)[copy, :2, 0].tolist() == [0.0, 1.0]
    rows(manager, 0)[copy, 2] = 99.0
    assert rows(manager, 0)[b, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_no_room_is_false_with_a_reason_and_the_setter_raises() -> None:
    manager = kv.KVCacheManager(make_config(num_blocks=8))
    total = manager.num_total_blocks
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.last_failure is None
    assert cache.resize((total + 1) * TPB) is False
    reason = cache.last_failure
    assert reason is not None
    assert (reason.domain, reason.pool_group, reason.level) == (kv.CacheDomain.TARGET, 0, 0)
    assert (reason.needed, reason.free, reason.evictable) == (total + 1, total, 0)
    assert "needed" in str(reason)
    with pytest.raises(kv.OutOfPagesError, match="no room") as caught:
        cache.capacity = (total + 1) * TPB
    assert caught.value.reason == reason
    cache.capacity = TPB
    cache.history_length = 2
    assert (cache.capacity, cache.history_length, cache.num_blocks) == (TPB, 2, 1)
    with pytest.raises(ValueError, match="history_length"):
        cache.history_length = 1


def test_misuse_raises_logic_errors(manager: kv.KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    with pytest.raises(kv.LogicError, match="SUSPENDED"):
        cache.resize(4)
    assert cache.resume()
    cache.stop_committing()
    with pytest.raises(kv.LogicError, match="stopped"):
        cache.commit([1])
    cache.close()
    cache.close()
    with pytest.raises(kv.LogicError, match="CLOSED"):
        cache.resume()
    assert cache.status == kv.CacheStatus.CLOSED


def test_open_caches_block_clear_and_shutdown(manager: kv.KVCacheManager) -> None:
    run(manager, list(range(8)))
    cache = manager.create_kv_cache()
    for call in (manager.clear_reusable_blocks, manager.shutdown):
        with pytest.raises(kv.ResourceBusyError, match="1 caches"):
            call()
    assert manager.probe_reuse(list(range(8))) == 8
    cache.close()
    manager.clear_reusable_blocks()
    assert manager.probe_reuse(list(range(8))) == 0


def test_a_dropped_cache_gives_its_pages_back(manager: kv.KVCacheManager) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(40)
    assert manager.num_open_caches == 1
    del cache
    gc.collect()
    assert manager.num_open_caches == 0
    assert manager.num_available_blocks == manager.num_total_blocks


def test_a_cache_keeps_its_manager_alive() -> None:
    cache = kv.KVCacheManager(make_config()).create_kv_cache()
    gc.collect()
    assert cache.resume()
    assert cache.resize(9)


def test_batch_calls_work_on_lists_and_arrays(manager: kv.KVCacheManager) -> None:
    caches = [manager.create_kv_cache(id=100 + i) for i in range(3)]
    assert [cache.id for cache in caches] == [100, 101, 102]
    assert manager.resume_many(caches) == [True] * 3
    assert manager.resize_many(caches, [4, 5, 10**6]) == [True, True, False]
    assert caches[2].last_failure is not None
    assert manager.resize_many(caches, np.array([5, 5, 5], np.int32), [1, 2, 3]) == [True] * 3
    assert [cache.history_length for cache in caches] == [1, 2, 3]
    manager.commit_many(caches, torch.tensor([7, 8, 9], dtype=torch.int32))
    manager.commit_many(tuple(caches[:2]), [1, 2, 3, 4], counts=[3, 1])
    assert [cache.committed_tokens for cache in caches] == [[7, 1, 2, 3], [8, 4], [9]]
    with pytest.raises(ValueError, match="counts"):
        manager.commit_many(caches, [1, 2, 3], counts=[])
    with pytest.raises(ValueError, match="twice"):
        manager.resize_many([caches[0], caches[0]], [6, 6])
    with pytest.raises(TypeError):
        manager.resize_many([caches[0], None], [6, 6])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="this manager"):
        kv.KVCacheManager(make_config()).resize_many(caches, [6, 6, 6])
    assert [cache.capacity for cache in caches] == [5, 5, 5]


def test_domains_have_groups_of_their_own() -> None:
    block = TPB * ROW
    config = kv.KVCacheManagerConfig(
        tokens_per_block=TPB,
        cache_tiers=[kv.HostCacheTierConfig(block * 200)],
        layers=[
            kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", block)]),
            kv.AttentionLayerConfig(
                1, [kv.BufferConfig("latent", block)], cache_domain=kv.CacheDomain.DRAFT
            ),
        ],
    )
    manager = kv.KVCacheManager(config)
    assert manager.num_layer_groups == 2
    draft = manager.get_layer_group_id(1)
    assert manager.get_layer_group_domain(draft) == kv.CacheDomain.DRAFT
    assert manager.get_pool_group_of(draft) != manager.get_pool_group_of(0)
    domains = [group.domain for group in manager.get_storage_statistics()]
    assert domains == [kv.CacheDomain.TARGET, kv.CacheDomain.DRAFT]
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(9)
    assert len(cache.get_base_page_indices(draft)) == 3
    assert manager.layer_grouping == [[0], [1]]


def test_probes_run_in_other_threads_while_sequences_work(manager: kv.KVCacheManager) -> None:
    tokens = np.arange(40, dtype=np.int32)
    stop = threading.Event()
    problems: list[int] = []

    def probe() -> None:
        while not stop.is_set():
            found = manager.probe_reuse(tokens)
            if not 0 <= found <= 40:
                problems.append(found)
            manager.get_storage_statistics()

    threads = [threading.Thread(target=probe) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(200):
        run(manager, list(range(i % 40)))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_chain_keys_depend_on_the_scope_and_are_chained(manager: kv.KVCacheManager) -> None:
    keys = manager.get_chain_keys(list(range(9)))
    assert [len(key) for key in keys] == [32, 32]
    assert manager.get_chain_keys(np.arange(9, dtype=np.int32)) == keys
    other = manager.get_chain_keys(list(range(9)), kv.ReuseScope(salt="a"))
    assert set(keys).isdisjoint(other)
    changed = manager.get_chain_keys([9, *range(1, 9)])
    assert set(keys).isdisjoint(changed), "a change in the first block changes every key"


def test_init_config_is_an_equal_copy(manager: kv.KVCacheManager) -> None:
    assert manager.init_config == make_config()
    assert manager.tokens_per_block == TPB
    assert manager.get_quota() >= TPB * ROW * 2 * 64


def test_a_view_of_page_indices_that_is_out_of_date_never_reads_freed_memory() -> None:
    manager = kv.KVCacheManager(make_config(num_blocks=2_000))
    cache = manager.create_kv_cache()
    assert cache.resume()
    views = []
    for capacity in (100, 400, 1_600, 6_400):
        assert cache.resize(capacity)
        views.append(cache.get_base_page_indices(0))
    shown = [view.tolist() for view in views]
    assert all(old == new[: len(old)] for old, new in pairwise(shown))
    cache.close()
    assert [view.tolist() for view in views[:-1]] == shown[:-1]
    assert len(views[-1].tolist()) == len(shown[-1])


@pytest.mark.parametrize("row", [np.zeros(8, np.int64), np.zeros(16, np.int32)[::2]])
def test_a_page_table_row_of_another_type_or_stride_is_refused(
    manager: kv.KVCacheManager, row: Any
) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    with pytest.raises(TypeError):
        cache.set_base_page_index_buf(0, 0, row)


def test_sizes_that_overflow_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"quota must be in 1\.\."):
        kv.KVCacheManager(
            kv.KVCacheManagerConfig(
                tokens_per_block=TPB,
                cache_tiers=[kv.HostCacheTierConfig(2**63 - 1)],
                layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 64)])],
            )
        )
    with pytest.raises(ValueError, match=r"BufferConfig\.size must be in 1\.\."):
        make = kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 2**63 - 1)])
        kv.KVCacheManager(
            kv.KVCacheManagerConfig(
                tokens_per_block=TPB, cache_tiers=[kv.HostCacheTierConfig(1 << 20)], layers=[make]
            )
        )
