"""A program over every typed part of helicore, as a user would write it.

Never run: strict mypy and strict pyright must accept it, and each assert_type says what they must
infer, so that no public name is Any.
"""

from __future__ import annotations

from typing import assert_type

import helicore
import numpy
import numpy.typing
import torch
from helicore import (
    LLM,
    CompletionOutput,
    KVCacheConfig,
    Logprob,
    RequestOutput,
    SamplingParams,
    kv,
    ops,
)
from helicore._core import core
from helicore.kv import CacheDomain, KVCache, KVCacheManager


def generate() -> str:
    params = SamplingParams(max_tokens=16, temperature=0.0, stop=["\n"], logprobs=2)
    with LLM("tiny", kv_cache=KVCacheConfig(block_size=32), num_threads=2) as llm:
        outputs = llm.generate("def f(", params)
        assert_type(outputs, list[RequestOutput])
        first = outputs[0].outputs[0]
        assert_type(first, CompletionOutput)
        assert_type(first.token_ids, list[int])
        assert_type(first.logprobs, list[dict[int, Logprob]] | None)
        assert_type(llm.encode("x"), list[int])
    return first.text


def manage() -> None:
    config = kv.KVCacheManagerConfig(
        tokens_per_block=16,
        cache_tiers=[kv.HostCacheTierConfig(quota=1 << 20)],
        layers=[
            kv.AttentionLayerConfig(
                0, [kv.BufferConfig("latent", 4096)], cache_domain=CacheDomain.DRAFT
            )
        ],
    )
    manager = KVCacheManager(config)
    assert_type(manager.init_config, kv.KVCacheManagerConfig)
    cache = manager.create_kv_cache(input_tokens=[1, 2, 3])
    assert_type(cache, KVCache)
    assert_type(cache.resume(), bool)
    assert_type(cache.resize(32), bool)
    assert_type(cache.num_committed_tokens, int)
    assert_type(cache.last_failure, kv.NoRoom | None)
    assert_type(manager.resize_many([cache], [48]), list[bool])
    assert_type(manager.resize_many([cache], torch.tensor([48], dtype=torch.int32)), list[bool])
    assert_type(manager.probe_reuse(numpy.zeros(4, numpy.int32)), int)
    assert_type(manager.get_mem_pool_base_address(0, "latent"), int)
    assert_type(manager.get_mem_pool_view(0, "latent"), numpy.typing.NDArray[numpy.uint8])
    scope = kv.ReuseScope(lora_id=1, salt="tenant")
    assert_type(scope.lora_id, int | None)
    assert_type(scope.salt, int | str | None)
    assert_type(kv.BAD_PAGE_INDEX, int)
    kept = manager.create_kv_cache(retention=[kv.RetentionRange(0, None, 90, duration_ms=1000)])
    assert_type(kept.manager, KVCacheManager)
    assert_type(kept.plan_committed_block_drop(), kv.PlannedDrop | None)
    assert_type(manager.pin([1, 2]), KVCache)
    assert_type(manager.submit_step(manager.make_step_stream()), int)
    assert_type(manager.get_layer_group_stats(), list[kv.LayerGroupStats])
    assert_type([event.layer_group for event in manager.drain_events()], list[int | None])
    try:
        kept.capacity = 1 << 20
    except kv.OutOfPagesError as error:
        assert_type(error.reason, kv.NoRoom)
    assert_type(config.layers, list[kv.AttentionLayerConfig | kv.SsmLayerConfig])


def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert_type(core.num_threads(), int)
    assert_type(core.detected_isa(), str)
    packed = ops.pack_linear(weight)
    assert_type(packed, torch.Tensor)
    normed = ops.rms_norm(x, weight[0], 1e-6)
    assert_type(normed, torch.Tensor)
    return normed


def failures(error: Exception) -> str:
    if isinstance(error, helicore.NotSupportedError):
        return str(error)
    assert_type(helicore.__version__, str)
    return ""
