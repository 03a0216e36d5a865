"""Mistakes that the type checkers must find. Never run.

Each line that ends in `# error` must be reported by mypy and by pyright, and no other line may be.
"""

from __future__ import annotations

from typing import assert_type

import helicore
import torch
from helicore import LLM, KVCacheConfig, SamplingParams, kv, ops
from helicore._core import attention, core


def generate(llm: LLM) -> None:
    SamplingParams(max_tokens="16")  # error
    SamplingParams(max_token=16)  # error
    KVCacheConfig(64)  # error
    KVCacheConfig(enable_prefix_caching="yes")  # error
    llm.generate(7)  # error
    llm.generate("x", {"max_tokens": 4})  # error
    llm.generates("x")  # error
    outputs = llm.generate("x")
    outputs[0].texts  # error
    assert_type(outputs, list[str])  # error
    helicore.NoSuchName  # error


def manage(manager: kv.KVCacheManager, cache: kv.KVCache) -> None:
    kv.BufferConfig(4096, "latent")  # error
    kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 1)], cache_domain=1.5)  # error
    kv.CacheDomain.BOTH  # error
    kv.KVCacheManager()  # error
    cache.resize("32")  # error
    cache.resize(32, history="0")  # error
    cache.commit(5)  # error
    cache.num_blocks = 3  # error
    cache.manager = manager  # error
    kv.RetentionRange(0, 4, "high")  # error
    kv.OutOfPagesError("full").reason = None  # error
    manager.resize_many(cache, [1])  # error
    manager.create_kv_cache(None, [1], None, 5)  # error
    number: str = manager.probe_reuse([1])  # error
    print(number)


def compute(x: torch.Tensor) -> None:
    core.set_num_threads(1.5)  # error
    core.set_isa()  # error
    core.set_num_threads_(1)  # error
    attention.mla_decode(x)  # error
    attention.merge_states(x, x, x, x, x, [1.0])  # error
    ops.rms_norm(x)  # error
    ops.rms_norm([1.0], x, 1e-6)  # error
