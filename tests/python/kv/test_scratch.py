"""Scratch slots of windowed prefill steps."""

from typing import Any

import numpy as np
import pytest
from helicore import kv

TPB, WINDOW, LAYERS = 4, 8, 3
BLOCK = 64 * TPB


def manager(rewind: int | None = 0, num_slots: int = 60) -> kv.KVCacheManager:
    layers: list[Any] = [
        kv.AttentionLayerConfig(i, [kv.BufferConfig("latent", BLOCK)], sliding_window_size=WINDOW)
        for i in range(LAYERS)
    ]
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(BLOCK * LAYERS * num_slots)],
            layers=layers,
            max_util_for_resume=1.0,
            swa_scratch_reuse=None if rewind is None else kv.SwaScratchReuseConfig(rewind),
        )
    )


def active(owner: kv.KVCacheManager, **options: Any) -> kv.KVCache:
    cache = owner.create_kv_cache(**options)
    assert cache.resume()
    return cache


def rows(owner: kv.KVCacheManager, cache: kv.KVCache, layer: int) -> dict[int, Any]:
    """Writable first bytes of every block that the layer has a page for."""
    pool = owner.get_mem_pool_view(0, "latent")
    base = owner.get_mem_pool_base_address(layer, "latent", kv.PageIndexMode.PER_LAYER)
    assert base == pool.ctypes.data
    flat = np.lib.stride_tricks.as_strided(
        pool, (pool.shape[0] * LAYERS, BLOCK), (BLOCK, 1), writeable=True
    )
    pages = owner.get_page_index_converter(layer, "latent")(
        cache.get_base_page_indices(0),
        kv.PageIndexMode.PER_LAYER,
        cache.get_scratch_desc(0),
    )
    return {o: flat[page] for o, page in enumerate(pages) if page != kv.BAD_PAGE_INDEX}


def test_scratch_blocks_have_slots_of_the_cache_and_no_page() -> None:
    owner = manager()
    cache = active(owner)
    assert cache.get_scratch_desc(0) is None
    assert cache.resize(44, 0)
    scratch = cache.get_scratch_desc(0)
    assert scratch is not None
    assert scratch.range == (0, 9)
    assert len(scratch.slot_ids) == 3
    assert cache.has_scratch_slots
    assert list(cache.get_base_page_indices(0)[:9]) == [kv.BAD_PAGE_INDEX] * 9
    assert owner.get_storage_statistics()[0].unavailable == 3 + 2
    cache.commit(list(range(44)))
    assert not cache.has_scratch_slots
    assert cache.get_scratch_desc(0) is None
    assert owner.get_storage_statistics()[0].unavailable == 2
    cache.close()
    assert owner.probe_reuse(list(range(44))) == 44


def test_every_layer_reads_its_own_rows_back_before_the_next_one_runs() -> None:
    owner = manager()
    cache = active(owner)
    at = 0
    for chunk in (30, 50, 1, 1, 17):
        assert cache.resize(at + chunk, at)
        for layer in range(LAYERS):
            blocks = rows(owner, cache, layer)
            for o in range(-(-at // TPB), cache.num_blocks):
                blocks[o][:] = (layer * 83 + o) % 251
            live = range(max(0, (at + 1 - WINDOW) // TPB), cache.num_blocks)
            for o in live:
                assert (blocks[o] == (layer * 83 + o) % 251).all(), (at, layer, o)
        at += chunk
        assert cache.resize(None, at)


def test_the_capacity_alone_is_not_set_and_lengths_that_need_lost_rows_are_refused() -> None:
    cache = active(manager(rewind=4))
    with pytest.raises(ValueError, match="capacity can't be set alone"):
        cache.capacity = 44
    assert cache.resize(44, 0)
    with pytest.raises(ValueError, match="history_length must be in"):
        cache.resize(60)
    with pytest.raises(ValueError, match="history_length must stay 0"):
        cache.history_length = 20
    with pytest.raises(ValueError, match="capacity must not shrink"):
        cache.resize(41, 40)
    cache.history_length = 40
    assert cache.resize(45, 40)


def test_the_switch_is_refused_inside_a_step_with_scratch_blocks() -> None:
    cache = active(manager())
    assert cache.enable_swa_scratch_reuse
    assert cache.resize(44, 0)
    with pytest.raises(RuntimeError, match="are scratch"):
        cache.enable_swa_scratch_reuse = False
    assert cache.resize(None, 44)
    cache.enable_swa_scratch_reuse = False
    assert cache.resize(88, 44)
    assert not cache.has_scratch_slots
    assert cache.supports_index_mode(kv.PageIndexMode.SHARED)

    plain = active(manager(rewind=None))
    with pytest.raises(ValueError, match="swa_scratch_reuse"):
        plain.enable_swa_scratch_reuse = True


def test_the_index_mode_is_explicit_where_scratch_is_configured() -> None:
    owner = manager()
    with pytest.raises(ValueError, match="index_mode"):
        owner.get_mem_pool_base_address(0, "latent")
    assert owner.supports_index_mode(kv.PageIndexMode.PER_LAYER) is True
    assert owner.supports_index_mode(kv.PageIndexMode.SHARED) is None
    assert manager(rewind=None).supports_index_mode(kv.PageIndexMode.SHARED) is True
    cache = active(owner)
    assert not cache.supports_index_mode(kv.PageIndexMode.SHARED)
    assert cache.supports_index_mode(kv.PageIndexMode.PER_LAYER)
    converter = owner.get_page_index_converter(1, "latent")
    scratch = kv.ScratchDesc((0, 3), [5])
    assert converter([-1, -1, -1], kv.PageIndexMode.PER_LAYER, scratch) == [16, 17, 15]
    with pytest.raises(ValueError, match="PER_LAYER"):
        converter([-1, -1, -1], kv.PageIndexMode.SHARED, scratch)
