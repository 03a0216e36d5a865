"""SGLang's UnifiedRadixCache with its native tree as a side of `helicore bench kv`.

Paged allocator, LRU, no host tier, real requests; the batch object holds just the fields that the
allocation functions read.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
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

inert.install("torchvision")

import torch  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # type: ignore[import-not-found] # noqa: E402
from sglang.srt.mem_cache.allocation import (  # type: ignore[import-not-found] # noqa: E402
    alloc_for_decode,
    alloc_for_extend,
)
from sglang.srt.mem_cache.allocator.paged import (  # type: ignore[import-not-found] # noqa: E402
    PagedTokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found] # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import (  # type: ignore[import-not-found] # noqa: E402
    CacheInitParams,
)
from sglang.srt.mem_cache.common import (  # type: ignore[import-not-found] # noqa: E402
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import (  # type: ignore[import-not-found] # noqa: E402
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # type: ignore[import-not-found] # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import (  # type: ignore[import-not-found] # noqa: E402
    ComponentType,
)
from sglang.srt.mem_cache.unified_radix_cache import (  # type: ignore[import-not-found] # noqa: E402
    UnifiedRadixCache,
)
from sglang.srt.runtime_context import get_context  # type: ignore[import-not-found] # noqa: E402
from sglang.srt.sampling.sampling_params import (  # type: ignore[import-not-found] # noqa: E402
    SamplingParams,
)
from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found] # noqa: E402

torch.set_num_threads(1)
get_context().set_server_args(
    ServerArgs(
        model_path="none", device="cpu", attention_backend="torch_native", skip_tokenizer_init=True
    )
)
_PARAMS = SamplingParams(max_new_tokens=1 << 20)
_NO_MODEL = SimpleNamespace(is_encoder_decoder=False)
_ids = (str(number) for number in itertools.count())


def version() -> str:
    import importlib.metadata

    return importlib.metadata.version("sglang")


class _Engine:
    """Row table, allocator and tree, and what the scheduler does around them."""

    def __init__(self, num_blocks: int, block_size: int, rows: int = 1, width: int = 8) -> None:
        self.rows = ReqToTokenPool(rows, width, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(
            num_blocks * block_size, block_size, torch.bfloat16, "cpu", None, False
        )
        self.block_size = block_size
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=block_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        backend = self.tree._tree_core_backend
        if backend != "rust":
            raise RuntimeError(f"the native tree can't be had, got the {backend} one")

    def request(self, tokens: array[int]) -> Any:
        """A new request whose cached prefix is found and locked."""
        request = Req(next(_ids), "", tokens, _PARAMS)
        request.init_next_round_input(self.tree)
        request.lock = self.tree.lock(request.last_node)
        return request

    def batch(self, requests: list[Any]) -> Any:
        return SimpleNamespace(
            reqs=requests,
            device="cpu",
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=None,
            model_config=_NO_MODEL,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
        )

    def extend(self, request: Any) -> None:
        """Allocates every token of the request that has no slot yet."""
        length = len(request.full_untruncated_fill_ids)
        request.extend_end = length
        batch = self.batch([request])
        batch.prefix_lens = [request.prefix_len]
        batch.extend_lens = [length - request.prefix_len]
        batch.extend_num_tokens = length - request.prefix_len
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([length], dtype=torch.int64)
        alloc_for_extend(batch)

    def insert(self, tokens: Tokens) -> None:
        """Shows new tokens in the tree, as a finished request does; evicts for them."""
        key = RadixKey(_ids_of(tokens)).page_aligned(self.block_size)
        result = self.tree.match_prefix(MatchPrefixParams(key=key))
        lock = self.tree.lock(result.last_device_node)
        missing = len(key) - result.device_prefix_len
        evict_from_tree_cache(self.tree, missing)
        new = self.allocator.alloc(missing)
        if new is None:
            raise RuntimeError("the pool has no room")
        path = self.tree.path_device_indices(result.last_device_node)
        value = torch.cat([path[: result.device_prefix_len], new])
        self.tree.insert(
            InsertParams(key=key, value=value, prev_prefix_len=result.device_prefix_len)
        )
        self.tree.unlock(lock)

    def fill(self, seed: int, numbers: Iterator[int]) -> None:
        """Sequences of 100 blocks until no page is free."""
        while (free := self.allocator.available_size() // self.block_size) > 0:
            count = min(free, 100) * self.block_size
            self.insert(kv_workload.prompt(seed, next(numbers), count))


def _ids_of(tokens: Tokens) -> array[int]:
    ids = array("q")
    ids.frombytes(tokens.astype(np.int64).tobytes())
    return ids


def decode_step(work: Workload) -> Round:
    """Memory check, allocation, write of the row table, lengths, append of a token.

    The tree takes no part: generated tokens are inserted when a request ends.
    """
    width = work.context * 3 // 2 + 64 * work.steps
    pages = work.batch * (width // work.block_size + 2)
    engine = _Engine(pages, work.block_size, work.batch, width)
    draw = np.random.default_rng(2)
    running: list[Any] = []
    batch = engine.batch(running)

    def admit() -> None:
        while running:
            release_kv_cache(running.pop(), engine.tree, checkpoint=False)
        for length in kv_workload.decode_lengths(work):
            tokens = draw.integers(0, kv_workload.VOCABULARY, length, np.int32)
            request = engine.request(_ids_of(tokens))
            engine.extend(request)
            checkpoint_kv_cache(request, engine.tree)
            request.output_ids.append(1)
            running.append(request)
        batch.seq_lens = torch.tensor([r.kv.kv_committed_len for r in running])
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.orig_seq_lens = batch.seq_lens.clone()
        batch.req_pool_indices = torch.tensor([r.kv.req_pool_idx for r in running])
        batch.req_pool_indices_cpu = batch.req_pool_indices.clone()

    def step(tokens: list[int]) -> None:
        needed = sum(1 for r in running if r.kv.kv_committed_len % work.block_size == 0)
        fits = engine.allocator.check_decode_capacity(
            num_tokens=needed * work.block_size,
            tree_cache=engine.tree,
            requests=running,
            spec_algorithm=None,
        )
        if not fits:
            raise RuntimeError("the pool has no room")
        alloc_for_decode(batch, token_per_req=1)
        for request in running:
            request.decode_batch_idx += 1
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        for request, token in zip(running, tokens, strict=True):
            request.output_ids.append(token)

    def round_() -> list[float]:
        if int(batch.seq_lens.max()) + work.steps > width:
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
    """A new request, its prefix found and locked. Its end is not timed."""
    blocks = work.num_prompts * (work.prompt // work.block_size + 2)
    engine = _Engine(blocks, work.block_size)
    prompts = [kv_workload.prompt(3, i, work.prompt + 1) for i in range(work.num_prompts)]
    for tokens in prompts:
        engine.insert(tokens[:-1])
    ids = [_ids_of(tokens) for tokens in prompts]
    expected = work.prompt // work.block_size * work.block_size
    chosen = iter(kv_workload.order(3, work.num_prompts))

    def round_() -> list[float]:
        samples = []
        for _ in range(work.num_prompts):
            tokens = ids[next(chosen)]
            start = clock()
            request = engine.request(tokens)
            samples.append(clock() - start)
            if request.prefix_len != expected:
                raise RuntimeError(f"matched {request.prefix_len} tokens, not {expected}")
            engine.tree.unlock(request.lock)
        return samples

    return round_


def match_branchy(work: Workload) -> Round:
    """match_prefix alone."""
    per_prompt = work.prompt // work.block_size + work.prompt // kv_workload.BRANCH_EVERY + 4
    engine = _Engine(work.branchy_prompts * per_prompt, work.block_size)
    keys = []
    for number in range(work.branchy_prompts):
        tokens = kv_workload.prompt(4, number, work.prompt)
        engine.insert(tokens)
        for at in range(kv_workload.BRANCH_EVERY, work.prompt, kv_workload.BRANCH_EVERY):
            ending = kv_workload.prompt(5, number * work.prompt + at, work.block_size)
            engine.insert(np.concatenate([tokens[:at], ending]))
        keys.append(RadixKey(_ids_of(tokens)))
    expected = work.prompt // work.block_size * work.block_size

    def round_() -> list[float]:
        samples = []
        for key in keys * 8:
            start = clock()
            found = engine.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            samples.append(clock() - start)
            if found != expected:
                raise RuntimeError(f"matched {found} tokens, not {expected}")
        return samples

    return round_


def commit(work: Workload) -> Round:
    """Checkpoint of a request with 64 new pages: insert, row re-read, lock moved. No hash."""
    count = 64 * work.block_size
    engine = _Engine(4 * 64, work.block_size, 4, count + work.block_size)
    draw = np.random.default_rng(6)

    def round_() -> list[float]:
        samples = []
        for _ in range(40):
            tokens = draw.integers(0, kv_workload.VOCABULARY, count, np.int32)
            request = engine.request(_ids_of(tokens))
            engine.extend(request)
            start = clock()
            checkpoint_kv_cache(request, engine.tree)
            samples.append(clock() - start)
            release_kv_cache(request, engine.tree, checkpoint=False)
        return samples

    return round_


def evict_many(work: Workload) -> Round:
    """Eviction of 10,000 of 100,000 pages, in leaves of 100, and handing them out."""
    engine = _Engine(work.cached_blocks, work.block_size)
    numbers = itertools.count()

    def round_() -> list[float]:
        engine.fill(8, numbers)
        start = clock()
        engine.tree.evict(EvictParams(num_tokens=work.evicted_blocks * work.block_size))
        taken = engine.allocator.alloc(work.evicted_blocks * work.block_size)
        seconds = clock() - start
        engine.allocator.free(taken)
        return [seconds]

    return round_


def evict_one(work: Workload) -> Round:
    """One page at a time in a full pool: a leaf is evicted when none is free; mean of a round."""
    engine = _Engine(work.cached_blocks, work.block_size)
    numbers = itertools.count()

    def round_() -> list[float]:
        engine.fill(9, numbers)
        taken = []
        start = clock()
        for _ in range(work.singles):
            evict_from_tree_cache(engine.tree, work.block_size)
            taken.append(engine.allocator.alloc(work.block_size))
        seconds = clock() - start
        engine.allocator.free(torch.cat(taken))
        return [seconds / work.singles]

    return round_


def free_sequences(work: Workload) -> Round:
    """Release of every request: its generated half is inserted now, the prompt was before."""
    half = work.sequence // 2
    per_sequence = work.sequence // work.block_size + 1
    engine = _Engine(
        3 * work.sequences * per_sequence,
        work.block_size,
        work.sequences,
        work.sequence + work.block_size,
    )
    numbers = itertools.count()

    def running() -> Any:
        tokens = _ids_of(kv_workload.prompt(10, next(numbers), work.sequence + 1))
        request = engine.request(tokens[:half])
        engine.extend(request)
        checkpoint_kv_cache(request, engine.tree)
        request.output_ids.extend(tokens[half : work.sequence])
        request.refresh_fill_ids()
        engine.extend(request)
        return request

    def round_() -> list[float]:
        requests = [running() for _ in range(work.sequences)]
        start = clock()
        engine.allocator.free_group_begin()
        for request in requests:
            release_kv_cache(request, engine.tree, checkpoint=True)
        engine.allocator.free_group_end()
        return [clock() - start]

    return round_


def bytes_per_open_page(work: Workload) -> Round:
    """Growth of memory with an allocator and an empty tree; the row table is not counted."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        engine = _Engine(work.large_tree, TREE_BLOCK)
        kv_workload.trim()
        grown = kv_workload.resident_bytes() - before
        return [grown / engine.allocator.num_pages]

    return round_


def bytes_per_tree_node(work: Workload) -> Round:
    """Growth of memory while the tree fills with leaves of 2,048 tokens, by page of 16 tokens."""

    def round_() -> list[float]:
        kv_workload.trim()
        before = kv_workload.resident_bytes()
        engine = _Engine(work.large_tree, TREE_BLOCK)
        for number in range(work.large_tree // SEQUENCE_BLOCKS):
            engine.insert(kv_workload.prompt(11, number, SEQUENCE_BLOCKS * TREE_BLOCK))
        kv_workload.trim()
        return [(kv_workload.resident_bytes() - before) / work.large_tree]

    return round_


def _tree(num_blocks: int) -> TreeSide:
    engine = _Engine(num_blocks, TREE_BLOCK)

    def look_up(tokens: Tokens) -> Callable[[], object]:
        params = MatchPrefixParams(key=RadixKey(_ids_of(tokens)))
        return partial(engine.tree.match_prefix, params)

    return TreeSide(engine.insert, look_up, insert=lambda tokens: partial(engine.insert, tokens))


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
