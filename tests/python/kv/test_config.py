"""Configuration value types of helicore.kv: defaults, rules, value semantics, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from helicore import kv


def layer(layer_id: int = 0, **extra: Any) -> kv.AttentionLayerConfig:
    return kv.AttentionLayerConfig(layer_id, [kv.BufferConfig("latent", 4096)], **extra)


def config(**extra: Any) -> kv.KVCacheManagerConfig:
    values: dict[str, Any] = {
        "tokens_per_block": 4,
        "cache_tiers": [kv.HostCacheTierConfig(1 << 16)],
        "layers": [layer()],
    }
    values.update(extra)
    return kv.KVCacheManagerConfig(**values)


def test_defaults_are_the_documented_ones() -> None:
    made = config()
    assert made.max_util_for_resume == 0.97
    assert made.enable_partial_reuse is True
    assert made.reuse_match_backoff == 0
    assert made.constraints == []
    assert made.typical_step is None
    assert made.initial_pool_ratio is None
    assert made.swa_scratch_reuse is None
    assert made.enable_swa_scratch_reuse is False
    assert made.commit_min_snapshot is False
    assert made.enable_stats is True
    assert made.text_only is False
    assert made.event_buffer_size == 0
    assert made.rebalance_min_sampled_kv_caches == 2000
    assert made.rebalance_cooldown_secs == 120.0
    assert made.rebalance_target_ratio_update_interval == 100
    assert made.rebalance_ratio_threshold == 1.25
    assert made.rebalance_moving_average_decay == 0.9999
    assert layer().cache_domain == kv.CacheDomain.TARGET
    assert layer().window_size is None


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: config(tokens_per_block=0), "tokens_per_block"),
        (lambda: config(cache_tiers=[]), "cache_tiers"),
        (lambda: config(layers=[]), "layers"),
        (lambda: config(layers=[layer(3), layer(3)]), "layer_id"),
        (lambda: config(max_util_for_resume=0.0), "max_util_for_resume"),
        (lambda: config(max_util_for_resume=math.nan), "max_util_for_resume"),
        (lambda: config(reuse_match_backoff=-1), "reuse_match_backoff"),
        (lambda: config(event_buffer_size=-1), "event_buffer_size"),
        (lambda: config(initial_pool_ratio=[0.5]), "initial_pool_ratio"),
        (lambda: config(initial_pool_ratio=[math.inf]), "initial_pool_ratio"),
        (lambda: config(rebalance_ratio_threshold=1.0), "rebalance_ratio_threshold"),
        (lambda: kv.HostCacheTierConfig(0), "quota"),
        (lambda: kv.GpuCacheTierConfig(-1), "quota"),
        (lambda: kv.DiskCacheTierConfig(1, "/no/such/folder"), "path"),
        (lambda: kv.BufferConfig("k", 0), "size"),
        (lambda: kv.BufferConfig("", 8), "role"),
        (lambda: kv.BufferConfig("k", 8, 0), "tokens_per_block_override"),
        (lambda: kv.AttentionLayerConfig(0, []), "buffers"),
        (lambda: layer(sliding_window_size=0), "sliding_window_size"),
        (lambda: layer(num_sink_tokens=4), "num_sink_tokens"),
        (lambda: kv.KVCacheDesc(4, 5), "history_length"),
        (lambda: kv.BatchDesc([], -1), "system_prompt_length"),
        (lambda: kv.SwaScratchReuseConfig(-1), "max_rewind_len"),
        (lambda: kv.ReuseScope(lora_generation=1), "lora_generation"),
        (lambda: kv.ReuseScope(-2), "lora_id"),
    ],
)
def test_a_wrong_value_is_a_value_error_naming_the_field(
    build: Callable[[], object], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        build()


def test_wrong_types_are_type_errors() -> None:
    with pytest.raises(TypeError):
        kv.KVCacheManagerConfig("4", [], [])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kv.ReuseScope(salt=1.5)  # type: ignore[arg-type]


def test_values_compare_hash_and_print_by_their_fields() -> None:
    assert kv.KVCacheDesc(4, 2) == kv.KVCacheDesc(4, 2)
    assert kv.KVCacheDesc(4, 2) != kv.KVCacheDesc(4, 3)
    assert kv.BatchDesc([kv.KVCacheDesc(4, 2)]) == kv.BatchDesc([kv.KVCacheDesc(4, 2)], 0)
    assert config() == config()
    assert config() != config(tokens_per_block=8)
    assert (kv.ReuseScope(1) == 1) is False
    assert len({kv.ReuseScope(1, "a"), kv.ReuseScope(1, "a"), kv.ReuseScope(1, "b")}) == 2
    assert repr(kv.ReuseScope(1, "a")) == "ReuseScope(lora_id=1, salt='a', lora_generation=0)"
    assert repr(kv.KVCacheDesc(4, 2)) == "KVCacheDesc(capacity=4, history_length=2)"


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        kv.KVCacheDesc(4, 2).capacity = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config().tokens_per_block = 5  # type: ignore[misc]


def test_a_salt_keeps_its_type() -> None:
    assert kv.ReuseScope(salt="7").salt == "7"
    assert kv.ReuseScope(salt=7).salt == 7
    assert kv.ReuseScope().salt is None
    assert kv.ReuseScope(salt="7") != kv.ReuseScope(salt=7)
    assert kv.ReuseScope(salt="") != kv.ReuseScope()


def test_a_buffer_id_behaves_like_a_pair() -> None:
    buffer = kv.BufferId(3, "k")
    assert (buffer[0], buffer[1], len(buffer)) == (3, "k", 2)
    assert tuple(buffer) == (3, "k")
    assert buffer == kv.BufferId(3, "k")
    assert hash(buffer) == hash(kv.BufferId(3, "k"))


def test_tiers_know_their_kind(tmp_path: Any) -> None:
    assert kv.GpuCacheTierConfig(1).tier == kv.CacheTier.GPU_MEM
    assert kv.HostCacheTierConfig(1).tier == kv.CacheTier.HOST_MEM
    disk = kv.DiskCacheTierConfig(1, str(tmp_path))
    assert disk.tier == kv.CacheTier.DISK
    disk.assert_valid()


def test_enums_have_the_published_values() -> None:
    assert [tier.value for tier in kv.CacheTier] == [0, 1, 2]
    assert (kv.CacheDomain.TARGET.value, kv.CacheDomain.DRAFT.value) == (0, 1)
    assert (kv.PageIndexMode.SHARED.value, kv.PageIndexMode.PER_LAYER.value) == (0, 1)
    assert (kv.BAD_PAGE_INDEX, kv.DEFAULT_BEAM_INDEX, kv.GPU_LEVEL) == (-1, 0, 0)
    assert (kv.PRIORITY_MIN, kv.PRIORITY_DEFAULT, kv.PRIORITY_MAX) == (0, 35, 100)
