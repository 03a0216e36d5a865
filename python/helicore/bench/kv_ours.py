"""Our side of `helicore bench kv`: what each row calls, through the Python module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from helicore import __version__, kv
from helicore.bench import kv_workload
from helicore.bench.kv_workload import (
    SEQUENCE_BLOCKS,
    TREE_BLOCK,
    Round,
    Tokens,
    TreeSide,
    Workload,
    clock,
)

_SLOT_BYTES = 64  # the smallest: rows measure the manager, not its pools
_NOTHING = np.empty(0, np.int32)


def version() -> str:
    return __version__


def _manager(num_blocks: int, block_size: int) -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=block_size,
            cache_tiers=[kv.HostCacheTierConfig(num_blocks * _SLOT_BYTES)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", _SLOT_BYTES)])],
            max_util_for_resume=1.0,
        )
    )


def _grown(manager: kv.KVCacheManager, prompt: Tokens, length: int) -> kv.KVCache:
    """An active cache for `prompt` with room for `length` tokens."""
    cache = manager.create_kv_cache(input_tokens=prompt)
    if not (cache.resume() and cache.resize(length)):
        raise RuntimeError(f"the pool has no room for {length} tokens: {cache.last_failure}")
    return cache


def _filled(manager: kv.KVCacheManager, tokens: Tokens) -> kv.KVCache:
    cache = _grown(manager, tokens, len(tokens))
    cache.commit(tokens[cache.num_committed_tokens :])
    return cache


def decode_step(work: Workload) -> Round:
    """resize_many and commit_many, page tables kept in rows of the caller's array."""
    lengths = np.array(kv_workload.decode_lengths(work), np.int32)
    first = lengths.copy()
    width = (work.context * 3 // 2 + 64 * work.steps) // work.block_size + 2
    rows = np.empty((work.batch, width), np.int32)
    manager = _manager(work.batch * width, work.block_size)
    caches: list[kv.KVCache] = []
    draw = np.random.default_rng(2)

    def admit() -> None:
        while caches:
            caches.pop().close()
        for i, length in enumerate(first):
            cache = _filled(manager, draw.integers(0, kv_workload.VOCABULARY, length, np.int32))
            cache.set_base_page_index_buf(0, 0, rows[i])
            caches.append(cache)
        lengths[:] = first

    def round_() -> list[float]:
        if int(lengths.max()) + work.steps > width * work.block_size:
            admit()
        samples = []
        for _ in range(work.steps):
            tokens = draw.integers(0, kv_workload.VOCABULARY, work.batch, np.int32)
            start = clock()
            np.add(lengths, 1, out=lengths)
            manager.resize_many(caches, lengths)
            manager.commit_many(caches, tokens)
            samples.append(clock() - start)
        return samples

    admit()
    return round_


def match(work: Workload) -> Round:
    """create_kv_cache of a prompt that is wholly cached: found and held. The close is not timed."""
    blocks = work.num_prompts * (work.prompt // work.block_size + 2)
    manager = _manager(blocks, work.block_size)
    prompts = [kv_workload.prompt(3, i, work.prompt + 1) for i in range(work.num_prompts)]
    for tokens in prompts:
        _filled(manager, tokens[:-1]).close()
    found = work.prompt // work.block_size * work.block_size
    chosen = iter(kv_workload.order(3, work.num_prompts))

    def round_() -> list[float]:
        samples = []
        for _ in range(work.num_prompts):
            tokens = prompts[next(chosen)]
            start = clock()
            cache = manager.create_kv_cache(input_tokens=tokens)
            samples.append(clock() - start)
            if cache.num_committed_tokens < found:
                raise RuntimeError(f"matched {cache.num_committed_tokens} tokens, not {found}")
            cache.close()
        return samples

    return round_


def match_branchy(work: Workload) -> Round:
    """probe_reuse of a prompt from whose path a branch of one block leaves every 256 tokens."""
    per_prompt = work.prompt // work.block_size + work.prompt // kv_workload.BRANCH_EVERY + 4
    manager = _manager(work.branchy_prompts * per_prompt, work.block_size)
    prompts = [kv_workload.prompt(4, i, work.prompt) for i in range(work.branchy_prompts)]
    for number, tokens in enumerate(prompts):
        _filled(manager, tokens).close()
        for at in range(kv_workload.BRANCH_EVERY, work.prompt, kv_workload.BRANCH_EVERY):
            ending = kv_workload.prompt(5, number * work.prompt + at, work.block_size)
            _filled(manager, np.concatenate([tokens[:at], ending])).close()
    found = work.prompt // work.block_size * work.block_size

    def round_() -> list[float]:
        samples = []
        for tokens in prompts * 8:
            start = clock()
            got = manager.probe_reuse(tokens)
            samples.append(clock() - start)
            if got < found:
                raise RuntimeError(f"matched {got} tokens, not {found}")
        return samples

    return round_


def commit(work: Workload) -> Round:
    """commit of 64 blocks at once: chain keys and tree nodes."""
    count = 64 * work.block_size
    manager = _manager(4 * 64, work.block_size)
    draw = np.random.default_rng(6)

    def round_() -> list[float]:
        samples = []
        for _ in range(40):
            tokens = draw.integers(0, kv_workload.VOCABULARY, count, np.int32)
            cache = _grown(manager, _NOTHING, count)
            start = clock()
            cache.commit(tokens)
            samples.append(clock() - start)
            cache.close()
        return samples

    return round_


def _fill(manager: kv.KVCacheManager, block_size: int, seed: int) -> Callable[[], None]:
    """A function that fills every free slot with cached sequences of 100 blocks."""
    numbers = iter(range(1 << 30))

    def fill() -> None:
        while (free := manager.get_storage_statistics(0)[0].free) > 0:
            count = min(free, 100) * block_size
            _filled(manager, kv_workload.prompt(seed, next(numbers), count)).close()

    return fill


def evict_many(work: Workload) -> Round:
    """One resize that takes 10,000 of 100,000 cached blocks, handing them out included."""
    manager = _manager(work.cached_blocks, work.block_size)
    fill = _fill(manager, work.block_size, 8)

    def round_() -> list[float]:
        fill()
        cache = _grown(manager, _NOTHING, 0)
        start = clock()
        done = cache.resize(work.evicted_blocks * work.block_size)
        seconds = clock() - start
        cache.close()
        if not done:
            raise RuntimeError(f"the pool has no room: {cache.last_failure}")
        return [seconds]

    return round_


def evict_one(work: Workload) -> Round:
    """resize by one block in a full pool, one call each: the mean of a round."""
    manager = _manager(work.cached_blocks, work.block_size)
    fill = _fill(manager, work.block_size, 9)

    def round_() -> list[float]:
        fill()
        cache = _grown(manager, _NOTHING, 0)
        capacities = [(i + 1) * work.block_size for i in range(work.singles)]
        resize = cache.resize
        start = clock()
        for capacity in capacities:
            resize(capacity)
        seconds = clock() - start
        cache.close()
        return [seconds / work.singles]

    return round_


def free_sequences(work: Workload) -> Round:
    """close of every sequence; their blocks were committed and stay cached."""
    per_sequence = work.sequence // work.block_size
    manager = _manager(2 * work.sequences * per_sequence, work.block_size)
    numbers = iter(range(1 << 30))

    def round_() -> list[float]:
        prompts = [
            kv_workload.prompt(10, next(numbers), work.sequence) for _ in range(work.sequences)
        ]
        caches = [_filled(manager, tokens) for tokens in prompts]
        start = clock()
        for cache in caches:
            cache.close()
        return [clock() - start]

    return round_


def bytes_per_open_page(work: Workload) -> Round:
    """Growth of memory while one sequence takes pages that no tree node shows yet."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        manager = _manager(work.large_tree, TREE_BLOCK)
        cache = _grown(manager, _NOTHING, TREE_BLOCK)
        if not cache.resize(work.large_tree * TREE_BLOCK):
            raise RuntimeError(f"the pool has no room: {cache.last_failure}")
        kv_workload.trim()
        return [(kv_workload.resident_bytes() - before) / work.large_tree]

    return round_


def bytes_per_tree_node(work: Workload) -> Round:
    """Growth of memory while the tree fills with blocks of 16 tokens: everything per block."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        manager = _manager(work.large_tree, TREE_BLOCK)
        for number in range(work.large_tree // SEQUENCE_BLOCKS):
            tokens = kv_workload.prompt(11, number, SEQUENCE_BLOCKS * TREE_BLOCK)
            _filled(manager, tokens).close()
        kv_workload.trim()
        return [(kv_workload.resident_bytes() - before) / work.large_tree]

    return round_


def _tree(num_blocks: int) -> TreeSide:
    manager = _manager(num_blocks, TREE_BLOCK)

    def store(tokens: Tokens) -> None:
        _filled(manager, tokens).close()

    return TreeSide(
        store,
        look_up=lambda tokens: partial(manager.probe_reuse, tokens),
        insert=lambda tokens: partial(store, tokens),
    )


ROWS = kv_workload.rows(
    _tree,
    decode_step,
    match,
    match_branchy,
    commit,
    evict_many,
    evict_one,
    free_sequences,
    bytes_per_open_page,
    bytes_per_tree_node,
)
