"""Levels that change their size while sequences run, and forecasts, from Python."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from helicore import kv
from kv.adaptor import (
    BatchDesc,
    CacheTier,
    DiskCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
)
from kv.engine import Engine, Sequence, layer, make_config

TPB = 8
PAGE = 2 * 2 * TPB * 64  # bytes: two layers of two buffers


def make_native(num_blocks: int = 64) -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=4,
            cache_tiers=[kv.HostCacheTierConfig(4096 * num_blocks)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 4096)])],
            max_util_for_resume=1.0,
        )
    )


def total(engine: Engine, level: int = 0) -> int:
    return engine.manager.get_storage_statistics(level)[0].total


def test_a_level_grows_and_shrinks_under_active_sequences(device: str) -> None:
    grain = 2 << 20 if device == "cuda" else 1 << 16
    config = make_config(device)
    config.cache_tiers[0].quota = 4 * grain
    engine = Engine(KVCacheManager(config))
    base = engine.manager.get_mem_pool_base_address(0, "k")
    slots = total(engine)
    kept = engine.start(list(range(40)))
    assert engine.prefill(kept)
    assert engine.manager.resize(0, 8 * grain)
    assert total(engine) == 2 * slots
    engine.buffers = list(engine._buffers())
    large = engine.start([7] * ((2 * slots - 8) * TPB))
    assert engine.prefill(large)
    engine.verify()
    assert engine.manager.resize(0, 2 * grain) is False, "pages in use are in the way"
    assert total(engine) == 2 * slots
    large.cache.close()
    assert engine.manager.resize(0, 2 * grain)
    assert engine.manager.get_quota(0) == 2 * grain
    assert engine.manager.get_mem_pool_base_address(0, "k") == base
    for token in range(20):
        assert engine.decode(kept, token)
    engine.verify()
    assert engine.manager.resize(0, 1) is False, "below what the configuration needs"
    kept.cache.close()


def test_suspended_sequences_survive_levels_that_shrink_and_grow_again(
    device: str, tmp_path: Path
) -> None:
    grain = 2 << 20
    config = make_config(
        device,
        colder=[HostCacheTierConfig(2 * grain), DiskCacheTierConfig(4 * grain, str(tmp_path))],
        max_util_for_resume=1.0,
    )
    config.cache_tiers[0].quota = 2 * grain  # type: ignore[index]
    engine = Engine(KVCacheManager(config))
    assert engine.manager.cache_tier_list[1:] == [CacheTier.HOST_MEM, CacheTier.DISK]
    length = total(engine) * TPB * 3 // 4
    sequences: list[Sequence] = []
    for number in range(2):
        sequence = engine.start([number * 1_000_000 + i for i in range(length)])
        assert engine.prefill(sequence)
        sequence.cache.suspend()
        sequences.append(sequence)
    first, second = sequences
    assert engine.manager.resize(0, grain)
    assert first.cache.resume(engine.stream) is False, "its pages are more than the level"
    assert engine.manager.resize(0, 2 * grain)
    assert first.cache.resume(engine.stream)
    assert engine.decode(first, 5)
    assert second.cache.resume(engine.stream) is False
    first.cache.suspend()
    assert engine.manager.resize(1, grain)
    assert engine.manager.resize(0, 4 * grain)
    engine.buffers = list(engine._buffers())
    for sequence in sequences:
        assert sequence.cache.prefetch(0)
        assert sequence.cache.resume(engine.stream)
        assert engine.decode(sequence, 9)
    engine.verify()
    for sequence in sequences:
        sequence.cache.close()


def test_the_longest_sequence_that_fits_is_told_and_fits(device: str) -> None:
    engine = Engine(KVCacheManager(make_config(device, num_blocks=40)))
    slots = total(engine)
    clamp = engine.manager.clamp_max_seq_len_for_mem
    assert clamp(1, 0) == 0
    assert clamp(1, 10**6) == slots * TPB
    assert clamp(1, 17) == 17
    assert clamp(5, 10**6) == (slots - 4) * TPB
    assert clamp(slots + 1, 10**6) == 0
    small = [engine.start([]) for _ in range(4)]
    for sequence in small:
        assert sequence.cache.resume(engine.stream)
        assert sequence.cache.resize(1)
    long = engine.start([])
    assert long.cache.resume(engine.stream)
    assert long.cache.resize(clamp(5, 10**6))
    assert long.cache.resize(clamp(5, 10**6) + 1) is False


def test_a_sliding_window_is_counted_with_what_it_keeps(device: str) -> None:
    layers = [layer(0, TPB), layer(1, TPB, sliding_window_size=TPB)]
    step = BatchDesc([KVCacheDesc(100, 96)])
    config = make_config(device, num_blocks=64, layers=layers, typical_step=step)
    manager = KVCacheManager(config)
    assert manager.clamp_max_seq_len_for_mem(1, 96) == 96


def test_traffic_moves_memory_between_pool_groups(device: str) -> None:
    layers = [layer(0, TPB), layer(1, TPB, "k", sliding_window_size=2 * TPB)]
    config = make_config(
        device,
        layers=layers,
        initial_pool_ratio=[0.3, 0.7],
        rebalance_min_sampled_kv_caches=5,
        rebalance_cooldown_secs=0.0,
        rebalance_target_ratio_update_interval=1,
        rebalance_moving_average_decay=0.5,
        max_util_for_resume=1.0,
    )
    config.cache_tiers[0].quota = 40 << 20 if device == "cuda" else 1 << 20  # type: ignore[index]
    engine = Engine(KVCacheManager(config))
    manager = engine.manager
    before = [group.total for group in manager.get_storage_statistics(0)]
    assert manager.need_adjustment is False
    assert manager.adjust() is False, "nobody has learnt anything yet"
    manager.mark_stats_excluded(9)
    for _ in range(10):
        sequence = engine.start(list(range(400)), id=9)
        sequence.cache.resume(engine.stream)
        assert sequence.cache.resize(400, 390)
        sequence.cache.close()
    assert manager.need_adjustment is False, "excluded caches teach nothing"
    for number in range(10):
        sequence = engine.start([])
        assert sequence.cache.resume(engine.stream)
        assert sequence.cache.resize(400 + number, 390)
        sequence.cache.close()
    assert manager.need_adjustment is True
    keeper = engine.start(list(range(50)))
    assert engine.prefill(keeper)
    assert manager.adjust() is True
    after = [group.total for group in manager.get_storage_statistics(0)]
    full = manager.get_life_cycle_pool_group_indices(0)[0]
    assert after[full] > before[full], "long sequences need more of the full attention"
    assert after[1 - full] < before[1 - full]
    assert manager.need_adjustment is False
    engine.buffers = list(engine._buffers())
    assert engine.decode(keeper, 3)
    engine.verify()
    keeper.cache.close()


def test_a_resize_tells_what_is_in_the_way_and_goes_on_by_itself() -> None:
    manager = make_native(64)
    slots = manager.num_total_blocks
    quota = manager.get_quota()
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(slots * 4)
    result = manager.resize(0, quota // 2)
    assert not result
    assert result.reason is not None
    assert (result.quota, result.slots) == (quota, [slots])
    assert 0 < result.minimum <= quota // 2
    assert manager.is_resizing is False
    result = manager.resize(0, quota // 2, best_effort=True)
    assert not result
    assert result.pending[0] > 0
    assert manager.is_resizing
    cache.close()
    while manager.is_resizing:
        manager.maintain(8)
    assert manager.get_quota() == quota // 2
    assert manager.resize(0, quota).done
    assert "done=True" in repr(manager.resize(0, quota))
    with pytest.raises(ValueError, match="quota"):
        manager.resize(0, quota * 100)
    with pytest.raises(ValueError, match="level"):
        manager.resize(3, quota)
    with pytest.raises(ValueError, match="max_pages"):
        manager.maintain(0)


def test_a_forecast_tells_when_a_request_fits() -> None:
    manager = make_native(16)
    slots = manager.num_total_blocks
    running = [manager.create_kv_cache() for _ in range(2)]
    for cache in running:
        assert cache.resume()
        assert cache.resize(4)
    request = kv.SequencePlan.of_request((slots - 2) * 4, 1, 0, 4)
    assert manager.forecast_admission(running, [4, 4], request).fits_now
    larger = kv.SequencePlan.of_request((slots - 1) * 4, 1, 0, 4)
    told = manager.forecast_admission(running, [8, 12], larger)
    assert told.fits_now is False
    assert told.steps_until_fits is not None
    assert told.limiting_pool_group == 0
    longer = [
        manager.forecast_admission(running, [8, last], larger).steps_until_fits or 0
        for last in (12, 16, 20)
    ]
    assert all(a < b for a, b in pairwise(longer)), "the longer the others run, the later"
    never = kv.SequencePlan.of_request((slots + 1) * 4, 1, 0, 4)
    assert manager.forecast_admission(running, [4, 4], never).steps_until_fits is None
    with pytest.raises(ValueError, match="final_capacities"):
        manager.forecast_admission(running, [4], request)
    assert kv.SequencePlan(8, 4, 20, tokens_per_step=2).final_capacity == 20
