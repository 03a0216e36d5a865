"""vLLM's KVCacheManager (v1) as a side of `helicore bench kv`.

One full-attention group, prefix caching on, SHA-256, no connector and no events.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from helicore.bench import kv_workload
from helicore.bench.kv_peers import inert
from helicore.bench.kv_workload import (
    SEQUENCE_BLOCKS,
    TREE_BLOCK,
    Round,
    Tokens,
    TreeSide,
    Workload,
    clock,
)

inert.install("llguidance")

import torch  # noqa: E402
from vllm import SamplingParams  # type: ignore[import-not-found]  # noqa: E402
from vllm.utils.hashing import sha256  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1 import utils as vllm_utils  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1.core.kv_cache_manager import (  # type: ignore[import-not-found]  # noqa: E402
    KVCacheManager,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found]  # noqa: E402
from vllm.v1.worker.block_table import BlockTable  # type: ignore[import-not-found]  # noqa: E402

torch.set_num_threads(1)
vllm_utils.PIN_MEMORY = False  # as its CPU platform says; there is no device here
kv_cache_utils.init_none_hash(sha256)
_PARAMS = SamplingParams(max_tokens=1 << 20)
_MAX_LEN = 1 << 24
_ids = (str(number) for number in itertools.count())


def version() -> str:
    import importlib.metadata

    return importlib.metadata.version("vllm")


class _Engine:
    """A manager and what its scheduler does around it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config,
            max_model_len=_MAX_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        self.block_size = block_size
        self.pool = self.manager.block_pool
        self.hasher = kv_cache_utils.get_request_block_hasher(block_size, sha256)

    def request(self, tokens: list[int], hashed: bool = True) -> Any:
        """A new request; with `hashed` its full blocks are hashed here, as on arrival."""
        return Request(
            next(_ids), tokens, _PARAMS, None, block_hasher=self.hasher if hashed else None
        )

    def hold(self, request: Any) -> int:
        """Finds the cached prefix and holds it, with a slot for one more token."""
        blocks, found, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, 1, found, blocks) is None:
            raise RuntimeError("the pool has no room")
        return int(found)

    def admit(self, tokens: list[int]) -> Any:
        """A running request whose whole prompt is allocated and committed."""
        request = self.request(tokens)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        done = self.manager.allocate_slots(request, len(tokens) - found, found, blocks)
        if done is None:
            raise RuntimeError("the pool has no room")
        request.num_computed_tokens = len(tokens)
        return request

    def fill(self, seed: int, numbers: Iterator[int]) -> None:
        """Sequences of 100 blocks until no block is without cached content."""
        missing = self.pool.num_gpu_blocks - 1 - self.num_cached()
        while missing > 0:
            count = min(100, missing)
            tokens = kv_workload.prompt(seed, next(numbers), count * self.block_size)
            self.manager.free(self.admit(tokens.tolist()))
            missing -= count

    def num_cached(self) -> int:
        return sum(1 for block in self.pool.blocks if block.block_hash is not None)


def decode_step(work: Workload) -> Round:
    """The scheduler's calls, the worker's block table, append and hash of a token."""
    width = (work.context * 3 // 2 + 64 * work.steps) // work.block_size + 2
    engine = _Engine(work.batch * width, work.block_size)
    manager = engine.manager
    table = BlockTable(
        work.block_size, work.batch, width, work.batch, False, torch.device("cpu"), 1
    )
    running: list[Any] = []
    draw = np.random.default_rng(2)

    def admit() -> None:
        while running:
            manager.free(running.pop())
        for row, length in enumerate(kv_workload.decode_lengths(work)):
            request = engine.admit(draw.integers(0, kv_workload.VOCABULARY, length).tolist())
            table.add_row(manager.get_block_ids(request.request_id)[0], row)
            request.append_output_token_ids(1)
            running.append(request)

    def step(tokens: list[int]) -> None:
        manager.new_step_starts()
        new = []
        for request in running:
            blocks = manager.allocate_slots(request, 1)
            new.append(blocks.get_block_ids(allow_none=True))
        manager.take_boundary_state_offloads()
        manager.take_kv_cache_block_copies()
        manager.take_new_block_ids()
        for row, ids in enumerate(new):
            if ids is not None:
                table.append_row(ids[0], row)
        table.commit_block_table(work.batch)
        for request, token in zip(running, tokens, strict=True):
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    def round_() -> list[float]:
        longest = max(request.num_tokens for request in running)
        if longest + work.steps > width * work.block_size:
            admit()
        samples = []
        for _ in range(work.steps):
            tokens = draw.integers(0, kv_workload.VOCABULARY, work.batch).tolist()
            start = clock()
            step(tokens)
            samples.append(clock() - start)
        return samples

    admit()
    return round_


def match(work: Workload) -> Round:
    """A new request, hashed, its prefix looked up and held. Its end is not timed."""
    blocks = work.num_prompts * (work.prompt // work.block_size + 2)
    engine = _Engine(blocks, work.block_size)
    prompts = [kv_workload.prompt(3, i, work.prompt + 1).tolist() for i in range(work.num_prompts)]
    for tokens in prompts:
        engine.manager.free(engine.admit(tokens[:-1]))
    expected = work.prompt // work.block_size * work.block_size
    chosen = iter(kv_workload.order(3, work.num_prompts))

    def round_() -> list[float]:
        samples = []
        for _ in range(work.num_prompts):
            tokens = prompts[next(chosen)]
            start = clock()
            request = engine.request(tokens)
            found = engine.hold(request)
            samples.append(clock() - start)
            if found != expected:
                raise RuntimeError(f"matched {found} tokens, not {expected}")
            engine.manager.free(request)
        return samples

    return round_


def match_branchy(work: Workload) -> Round:
    """Look-up alone: the request exists and is hashed."""
    per_prompt = work.prompt // work.block_size + work.prompt // kv_workload.BRANCH_EVERY + 4
    engine = _Engine(work.branchy_prompts * per_prompt, work.block_size)
    requests = []
    for number in range(work.branchy_prompts):
        tokens = kv_workload.prompt(4, number, work.prompt).tolist()
        engine.manager.free(engine.admit(tokens))
        for at in range(kv_workload.BRANCH_EVERY, work.prompt, kv_workload.BRANCH_EVERY):
            ending = kv_workload.prompt(5, number * work.prompt + at, work.block_size).tolist()
            engine.manager.free(engine.admit(tokens[:at] + ending))
        requests.append(engine.request([*tokens, 1]))
    expected = work.prompt // work.block_size * work.block_size

    def round_() -> list[float]:
        samples = []
        for request in requests * 2:
            start = clock()
            _, found, _ = engine.manager.get_computed_blocks(request)
            samples.append(clock() - start)
            if found != expected:
                raise RuntimeError(f"matched {found} tokens, not {expected}")
        return samples

    return round_


def commit(work: Workload) -> Round:
    """Hashing of 64 blocks of a request and their publication."""
    count = 64 * work.block_size
    engine = _Engine(4 * 64, work.block_size)
    draw = np.random.default_rng(6)

    def round_() -> list[float]:
        samples = []
        for _ in range(40):
            tokens = draw.integers(0, kv_workload.VOCABULARY, count).tolist()
            request = engine.request(tokens, hashed=False)
            engine.manager.allocate_slots(request, count, delay_cache_blocks=True)
            start = clock()
            request.block_hashes.extend(engine.hasher(request))
            engine.manager.cache_blocks(request, count)
            samples.append(clock() - start)
            engine.manager.free(request)
        return samples

    return round_


def evict_many(work: Workload) -> Round:
    """One call for 10,000 blocks of a full pool, handing them out included."""
    engine = _Engine(work.cached_blocks, work.block_size)
    numbers = itertools.count()

    def round_() -> list[float]:
        engine.fill(8, numbers)
        start = clock()
        blocks = engine.pool.get_new_blocks(work.evicted_blocks)
        seconds = clock() - start
        engine.pool.free_blocks(blocks)
        return [seconds]

    return round_


def evict_one(work: Workload) -> Round:
    """Calls for one block each in a full pool: the mean of a round."""
    engine = _Engine(work.cached_blocks, work.block_size)
    numbers = itertools.count()

    def round_() -> list[float]:
        engine.fill(9, numbers)
        taken = []
        take = engine.pool.get_new_blocks
        start = clock()
        for _ in range(work.singles):
            taken.append(take(1))
        seconds = clock() - start
        for blocks in taken:
            engine.pool.free_blocks(blocks)
        return [seconds / work.singles]

    return round_


def free_sequences(work: Workload) -> Round:
    """free of every request; caching was paid before."""
    per_sequence = work.sequence // work.block_size
    engine = _Engine(2 * work.sequences * per_sequence, work.block_size)
    numbers = itertools.count()

    def round_() -> list[float]:
        running = [
            engine.admit(kv_workload.prompt(10, next(numbers), work.sequence).tolist())
            for _ in range(work.sequences)
        ]
        start = clock()
        for request in running:
            engine.manager.free(request)
        return [clock() - start]

    return round_


def bytes_per_open_page(work: Workload) -> Round:
    """Growth of memory with a pool of blocks that hold nothing yet."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        engine = _Engine(work.large_tree, TREE_BLOCK)
        kv_workload.trim()
        grown = kv_workload.resident_bytes() - before
        return [grown / engine.pool.num_gpu_blocks]

    return round_


def bytes_per_tree_node(work: Workload) -> Round:
    """Growth of memory with a pool full of cached blocks of 16 tokens."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        engine = _Engine(work.large_tree, TREE_BLOCK)
        for number in range(work.large_tree // SEQUENCE_BLOCKS):
            tokens = kv_workload.prompt(11, number, SEQUENCE_BLOCKS * TREE_BLOCK).tolist()
            engine.manager.free(engine.admit(tokens))
        kv_workload.trim()
        return [(kv_workload.resident_bytes() - before) / work.large_tree]

    return round_


def _tree(num_blocks: int) -> TreeSide:
    """Requests are made, and hashed, before the clock starts."""
    engine = _Engine(num_blocks, TREE_BLOCK)

    def store(tokens: Tokens) -> None:
        engine.manager.free(engine.admit(tokens.tolist()))

    def insert(request: Any) -> None:
        engine.manager.allocate_slots(request, SEQUENCE_BLOCKS * TREE_BLOCK)
        engine.manager.free(request)

    return TreeSide(
        store,
        look_up=lambda tokens: partial(
            engine.manager.get_computed_blocks, engine.request(tokens.tolist())
        ),
        insert=lambda tokens: partial(insert, engine.request(tokens.tolist())),
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
