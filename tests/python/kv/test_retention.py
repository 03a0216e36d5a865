"""Retention ranges, pins, planned drops and step streams through the bindings."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from helicore import kv

TPB = 4


def make_manager(num_blocks: int = 16, window: int | None = None) -> kv.KVCacheManager:
    layers = [kv.AttentionLayerConfig(0, [kv.BufferConfig("k", 256)])]
    if window is not None:
        layers.append(kv.AttentionLayerConfig(1, [kv.BufferConfig("k", 256)], window))
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(256 * num_blocks * len(layers))],
            layers=layers,
            max_util_for_resume=1.0,
        )
    )


def run(
    manager: kv.KVCacheManager, tokens: list[int], retention: list[kv.RetentionRange] | None = None
) -> None:
    cache = manager.create_kv_cache(input_tokens=tokens, retention=retention or [])
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[cache.num_committed_tokens :])
    cache.close()


def fill(manager: kv.KVCacheManager) -> None:
    """Takes every slot that can be had."""
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(manager.num_available_blocks * TPB)
    cache.close()


def test_what_a_range_names_stays_longest() -> None:
    for retention, survivor in (
        ([], [8, 9, 10, 11]),
        ([kv.RetentionRange(0, 4, 90)], [1, 2, 3, 4]),
    ):
        manager = make_manager(num_blocks=16)
        total = manager.num_total_blocks
        run(manager, [1, 2, 3, 4], retention)
        run(manager, [8, 9, 10, 11])
        cache = manager.create_kv_cache()
        assert cache.resume()
        assert cache.resize((total - 1) * TPB)
        found = [t for t in ([1, 2, 3, 4], [8, 9, 10, 11]) if manager.probe_reuse(t) == 4]
        assert found == [survivor]


def test_a_range_is_checked_by_the_name_of_its_field() -> None:
    ranged = kv.RetentionRange(4, None, 90, duration_ms=1000)
    assert (ranged.begin, ranged.end, ranged.priority, ranged.duration_ms) == (4, None, 90, 1000)
    assert ranged == kv.RetentionRange(4, None, 90, 1000)
    for arguments, name in (
        ((-1, None, 50), "begin"),
        ((4, 4, 50), "end"),
        ((0, None, 101), "priority"),
        ((0, None, 50, 0), "duration_ms"),
    ):
        with pytest.raises(ValueError, match=name):
            kv.RetentionRange(*arguments)  # type: ignore[arg-type]


def test_a_pin_keeps_its_prefix_until_it_goes() -> None:
    manager = make_manager()
    tokens = list(range(12))
    run(manager, tokens)
    pin = manager.pin(tokens)
    assert pin.num_committed_tokens == 12
    assert pin.manager is manager
    fill(manager)
    assert manager.probe_reuse(tokens) == 12
    del pin
    gc.collect()
    fill(manager)
    assert manager.probe_reuse(tokens) == 0
    assert manager.get_stats().num_lookups == 1, "a pin is no lookup"
    assert manager.pin(np.arange(4, dtype=np.int32)).num_committed_tokens == 0


def test_a_planned_drop_takes_what_the_continuation_needs() -> None:
    manager = make_manager(num_blocks=32, window=2 * TPB)
    tokens = list(range(16))
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(16)
    with pytest.raises(kv.LogicError, match="stop_committing"):
        cache.plan_committed_block_drop()
    cache.commit(tokens)
    cache.stop_committing()
    plan = cache.plan_committed_block_drop()
    assert plan is not None
    assert plan.num_pages > 0
    cache.close()
    assert manager.probe_reuse(tokens) == 16
    plan.drop()
    with pytest.raises(kv.LogicError):
        plan.drop()
    assert manager.probe_reuse(tokens) < 16


def test_pages_of_a_step_that_is_not_done_are_not_used_again() -> None:
    manager = make_manager(num_blocks=16)
    total = manager.num_total_blocks
    stream = manager.make_step_stream()
    cache = manager.create_kv_cache()
    assert cache.resume(stream)
    step = manager.submit_step(stream)
    assert step == 1
    assert cache.resize(total * TPB)
    cache.close()
    assert manager.get_storage_statistics()[0].pending == total
    other = manager.create_kv_cache()
    assert other.resume()
    assert other.resize(TPB) is False
    assert other.last_failure is not None
    assert other.last_failure.pending == total
    manager.complete_step(stream, step)
    assert other.resize(TPB)
    with pytest.raises(ValueError, match="step"):
        manager.complete_step(stream, 7)
    other.close()


def test_layer_groups_have_counters_of_their_own() -> None:
    manager = make_manager(num_blocks=32, window=2 * TPB)
    run(manager, list(range(20)))
    run(manager, list(range(20)))
    full, windowed = manager.get_layer_group_stats()
    assert full.reused_tokens == 20
    assert windowed.reused_pages < full.reused_pages
    assert full.committed_pages == 5
    assert windowed.released_pages > 0
    assert (full.domain, full.released_pages) == (kv.CacheDomain.TARGET, 0)
