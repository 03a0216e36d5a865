"""Scratch blocks of long windowed prefill steps through the published names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kv.adaptor import (
    BAD_PAGE_INDEX,
    KVCacheManager,
    LogicError,
    PageIndexMode,
    SwaScratchReuseConfig,
    _KVCache,
)
from kv.engine import layer, make_config, memory

TPB = 32
WINDOW = 128
LAYERS = 4


def make_manager(device: str, max_rewind_len: int = 0) -> KVCacheManager:
    layers = [layer(i, TPB, "k v", sliding_window_size=WINDOW) for i in range(LAYERS)]
    config = make_config(
        device,
        num_blocks=64,
        tokens_per_block=TPB,
        layers=layers,
        swa_scratch_reuse=SwaScratchReuseConfig(max_rewind_len),
        max_util_for_resume=1.0,
    )
    return KVCacheManager(config)


def rows(manager: KVCacheManager, cache: _KVCache, layer_id: int, role: str, device: str):  # type: ignore[no-untyped-def]
    """Every block of the cache as [tokens, words] indices into the pages of a layer's buffer."""
    base = manager.get_mem_pool_base_address(layer_id, role, PageIndexMode.PER_LAYER)
    converter = manager.get_page_index_converter(layer_id, role)
    table = cache.get_base_page_indices(0).tolist()
    pages = converter(table, PageIndexMode.PER_LAYER, cache.get_scratch_desc(0))
    desc = manager.pool_group_descs[0]
    stride = manager.get_page_stride(layer_id, role)
    count = desc.num_slots * desc.pools[0].slot_bytes // stride
    return memory(device, base, (count, stride // 8)), torch.tensor(pages, device=device)


def test_layers_share_the_slots_of_blocks_that_no_later_step_reads(device: str) -> None:
    manager = make_manager(device)
    cache = manager.create_kv_cache()
    stream = torch.cuda.Stream().cuda_stream if device == "cuda" else 0
    assert cache.resume(stream)
    before = manager.get_storage_statistics(0)[0].unavailable
    assert cache.resize(1025, 0)
    scratch = cache.get_scratch_desc(0)
    assert scratch is not None
    assert scratch.range
    blocks = scratch.range.end - scratch.range.beg
    used = manager.get_storage_statistics(0)[0].unavailable - before
    assert cache.has_scratch_slots
    assert len(scratch.slot_ids) == -(-blocks // LAYERS), "two of eight buffers per layer"
    assert used == cache.num_blocks - blocks + len(scratch.slot_ids)
    table = cache.get_base_page_indices(0)
    assert (table[scratch.range.beg : scratch.range.end] == BAD_PAGE_INDEX).all()
    assert (np.delete(table, range(*scratch.range)) >= 0).all()
    for number in range(LAYERS):  # one layer after the other writes all rows and reads them back
        for role, offset in (("k", 0), ("v", 1000)):
            pages, index = rows(manager, cache, number, role, device)
            assert (index >= 0).all()
            assert len(set(index.tolist())) == cache.num_blocks
            value = torch.arange(cache.num_blocks, device=device) + offset + 10_000 * number
            pages[index] = value[:, None]
        for role, offset in (("k", 0), ("v", 1000)):
            pages, index = rows(manager, cache, number, role, device)
            value = torch.arange(cache.num_blocks, device=device) + offset + 10_000 * number
            assert (pages[index] == value[:, None]).all(), "k and v of a layer share no page"
    kept = [i for i in range(cache.num_blocks) if not scratch.range.beg <= i < scratch.range.end]
    cache.commit(range(1025))
    assert cache.get_scratch_desc(0) is None
    for number in range(LAYERS):
        for role, offset in (("k", 0), ("v", 1000)):
            pages, index = rows(manager, cache, number, role, device)
            for block in kept:
                if int(cache.get_base_page_indices(0)[block]) >= 0:
                    expected = block + offset + 10_000 * number
                    assert (pages[index[block]] == expected).all()
    cache.close()
    assert manager.get_storage_statistics(0)[0].unavailable == 0


def test_scratch_can_be_switched_off_between_steps_alone(device: str) -> None:
    manager = make_manager(device)
    assert manager.supports_index_mode(PageIndexMode.PER_LAYER) is True
    assert manager.supports_index_mode(PageIndexMode.SHARED) is None
    with pytest.raises(ValueError, match="index_mode"):
        manager.get_mem_pool_base_address(0, "k")
    cache = manager.create_kv_cache()
    assert cache.enable_swa_scratch_reuse is True
    assert cache.supports_index_mode(PageIndexMode.SHARED) is False
    cache.enable_swa_scratch_reuse = False
    assert cache.supports_index_mode(PageIndexMode.SHARED) is True
    cache.enable_swa_scratch_reuse = True
    stream = torch.cuda.Stream().cuda_stream if device == "cuda" else 0
    assert cache.resume(stream)
    assert cache.resize(1025, 0)
    with pytest.raises(LogicError):
        cache.enable_swa_scratch_reuse = False
    cache.close()


def test_the_tail_that_may_be_rewound_is_not_scratch(device: str) -> None:
    counts = []
    for rewind in (0, 64, 2000):
        manager = make_manager(device, rewind)
        cache = manager.create_kv_cache()
        assert cache.resume(torch.cuda.Stream().cuda_stream if device == "cuda" else 0)
        assert cache.resize(1025, 0)
        found = cache.get_scratch_desc(0)
        counts.append(0 if found is None else found.range.end - found.range.beg)
        cache.close()
    assert counts[0] == counts[1] + 64 // TPB > 0
    assert counts[2] == 0
