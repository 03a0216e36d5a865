"""`helicore bench kv`: host cost of the KV cache manager's calls through Python, without a model.

No peer runs in the same process: other managers come as whole serving systems.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from helicore import kv
from helicore.bench import environment
from helicore.bench.report import Report, Result

_ROW_BYTES = 1152
_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class KVBenchConfig:
    """block_size: tokens per page; context: mean tokens per sequence of the decode rows."""

    block_size: int = 64
    context: int = 2048
    rounds: int = 5
    steps: int = 200


def run(config: KVBenchConfig, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Microseconds per call: decode step at batch 64 and 256, match, commit, open and close."""
    results = []
    for batch in (64, 256):
        progress(f"decode step at batch {batch}")
        results.append(_us(f"decode_step_b{batch}", _decode_step(config, batch)))
    for length in (2_000, 10_000, 100_000):
        progress(f"match of a prompt of {length} tokens")
        results.append(_us(f"match_{length // 1000}k", _match(config, length)))
    progress("commit")
    results.append(_us("commit_64_blocks", _commit(config, 64 * config.block_size)))
    env = environment.collect() | {"block_size": config.block_size}
    return Report("kv", results, env)


def _us(name: str, seconds: float) -> Result:
    return Result(name, seconds * 1e6, "us", higher_is_better=False)


def _manager(config: KVBenchConfig, num_tokens: int) -> kv.KVCacheManager:
    """One latent layer with room for `num_tokens` in whole blocks, and some to spare."""
    block_bytes = config.block_size * _ROW_BYTES
    num_blocks = -(-num_tokens // config.block_size) + 64
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=config.block_size,
            cache_tiers=[kv.HostCacheTierConfig(num_blocks * block_bytes)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", block_bytes)])],
            max_util_for_resume=1.0,
        )
    )


def _filled(manager: kv.KVCacheManager, tokens: np.ndarray, headroom: int = 0) -> kv.KVCache:
    cache = manager.create_kv_cache(input_tokens=tokens[:0])
    if not (cache.resume() and cache.resize(len(tokens) + headroom)):
        raise RuntimeError(f"the pool has no room for {len(tokens)} tokens: {cache.last_failure}")
    cache.commit(tokens)
    return cache


def _decode_step(config: KVBenchConfig, batch: int) -> float:
    """Median seconds of resize_many + commit_many with one more token for each sequence."""
    draw = np.random.default_rng(batch)
    low, high = config.context // 2, config.context * 3 // 2
    lengths = draw.integers(low, high, batch).astype(np.int32)
    extra = config.rounds * config.steps + 8
    manager = _manager(config, int(lengths.sum()) + batch * (extra + config.block_size))
    caches = [_filled(manager, _random_tokens(draw, int(n))) for n in lengths]
    samples = []
    for _ in range(config.rounds * config.steps):
        tokens = _random_tokens(draw, batch)
        lengths += 1
        start = time.perf_counter()
        manager.resize_many(caches, lengths)
        manager.commit_many(caches, tokens)
        samples.append(time.perf_counter() - start)
    for cache in caches:
        cache.close()
    return statistics.median(samples)


def _match(config: KVBenchConfig, length: int) -> float:
    """Median seconds to create and close a cache whose prompt is wholly in the tree."""
    draw = np.random.default_rng(length)
    manager = _manager(config, 2 * length)
    tokens = _random_tokens(draw, length)
    _filled(manager, tokens).close()
    samples = []
    for _ in range(config.rounds * 20):
        start = time.perf_counter()
        cache = manager.create_kv_cache(input_tokens=tokens)
        samples.append(time.perf_counter() - start)
        cache.close()
    return statistics.median(samples)


def _commit(config: KVBenchConfig, length: int) -> float:
    """Median seconds to commit `length` new tokens in one call: keys, tree nodes."""
    draw = np.random.default_rng(7)
    manager = _manager(config, 2 * length)
    samples = []
    for _ in range(config.rounds * 10):
        cache = manager.create_kv_cache(input_tokens=_random_tokens(draw, 0))
        tokens = _random_tokens(draw, length)
        if not (cache.resume() and cache.resize(length)):
            raise RuntimeError(f"the pool has no room: {cache.last_failure}")
        start = time.perf_counter()
        cache.commit(tokens)
        samples.append(time.perf_counter() - start)
        cache.close()
    return statistics.median(samples)


def _random_tokens(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.integers(0, _VOCABULARY, count).astype(np.int32)
