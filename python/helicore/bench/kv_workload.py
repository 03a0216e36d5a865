"""What every side of `helicore bench kv` works on: the same tokens, lengths, orders and loops."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

VOCABULARY = 128_000
# Processor time of the calling thread: every row runs on one thread and never waits, so on an idle
# machine this is wall time, and on a shared one it leaves out the turns of other processes.
clock = time.thread_time
BRANCH_EVERY = 256  # tokens between two side branches of the branchy prompt
TREE_BLOCK = 16  # tokens per block of the rows about memory and scale
SEQUENCE_BLOCKS = 128  # a cached sequence of those rows: 2,048 tokens

Tokens: TypeAlias = npt.NDArray[np.int32]
# One round of a prepared row: the figures of its samples, seconds each (bytes for memory rows).
Round: TypeAlias = Callable[[], list[float]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the rows. Tests shrink them; figures are comparable with the defaults only."""

    block_size: int = 64
    batch: int = 256
    context: int = 2048  # mean tokens per sequence of the decode step, uniform in half to 3/2
    steps: int = 60  # decode steps a round
    prompt: int = 100_000  # tokens of a cached prompt
    num_prompts: int = 16
    branchy_prompts: int = 2
    cached_blocks: int = 100_000  # of the full pool
    evicted_blocks: int = 10_000
    singles: int = 2_000  # single evictions a round
    sequences: int = 256  # that are freed
    sequence: int = 2_048
    small_tree: int = 10_000
    large_tree: int = 1_000_000
    tree_samples: int = 60

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Workload:
        return cls(**values)


def prompt(seed: int, index: int, count: int) -> Tokens:
    """int32 [count], the same on every side; unlike any other (seed, index)."""
    draw = np.random.default_rng((seed, index))
    return draw.integers(0, VOCABULARY, count).astype(np.int32)


def decode_lengths(work: Workload) -> list[int]:
    """Tokens that each sequence has before the first step."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(work.context // 2, work.context * 3 // 2, work.batch)
    return [int(n) for n in lengths]


def order(seed: int, count: int) -> Iterable[int]:
    """Prompts in random order, without end: no prompt's metadata stays in the caches."""
    draw = random.Random(seed)
    while True:
        yield draw.randrange(count)


def settle() -> None:
    """After set-up: one collection, then what lives is frozen. The collector stays on."""
    gc.collect()
    gc.freeze()


def timed_each(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Seconds of each call."""
    samples = []
    for call in calls:
        start = clock()
        call()
        samples.append(clock() - start)
    return samples


@dataclass(frozen=True, slots=True)
class TreeSide:
    """A side whose pool is full of cached sequences.

    store: caches a sequence, evicting others; look_up, insert: the call that is timed for a
    sequence, what precedes it having been done.
    """

    store: Callable[[Tokens], object]
    look_up: Callable[[Tokens], Callable[[], object]]
    insert: Callable[[Tokens], Callable[[], object]]


MakeTree: TypeAlias = Callable[[int], TreeSide]  # by blocks


def _operations(make: MakeTree, num_blocks: int, samples: int) -> Iterator[list[float]]:
    """Seconds of a match and of a new sequence in a full pool of so many blocks."""
    side = make(num_blocks)
    count = SEQUENCE_BLOCKS * TREE_BLOCK
    filled = num_blocks // SEQUENCE_BLOCKS
    for number in range(filled):
        side.store(prompt(12, number, count))
    settle()
    draw = np.random.default_rng(13)
    fresh = itertools.count(1 << 30)
    while True:
        known = draw.integers(filled // 2, filled, samples)
        found = timed_each([side.look_up(prompt(12, int(n), count)) for n in known])
        new = [prompt(12, next(fresh), count) for _ in range(samples // 8 + 1)]
        added = timed_each([side.insert(tokens) for tokens in new])
        yield [statistics.median(found), statistics.median(added)]


def match_in_large(make: MakeTree, work: Workload) -> Round:
    """A match of a random cached 2k prompt among 1 M blocks."""
    large = _operations(make, work.large_tree, work.tree_samples)
    return lambda: [next(large)[0]]


def scaling(make: MakeTree, work: Workload) -> Round:
    """The worse growth, small tree to large, of a 2k match and of a 2k insertion that evicts."""
    small = _operations(make, work.small_tree, work.tree_samples)
    large = _operations(make, work.large_tree, work.tree_samples)

    def round_() -> list[float]:
        pairs = zip(next(small), next(large), strict=True)
        return [max(big / little for little, big in pairs)]

    return round_


_ROW_OF = {
    "decode_step": "decode_step_256_python_us",
    "match": "match_100k_ms",
    "match_branchy": "match_100k_branchy_ms",
    "commit": "commit_64_blocks_us",
    "evict_many": "evict_10k_pages_ms",
    "evict_one": "evict_one_us",
    "free_sequences": "free_256x2k_ms",
    "bytes_per_open_page": "bytes_per_open_page",
    "bytes_per_tree_node": "bytes_per_tree_node",
}


def rows(
    make: MakeTree, *own: Callable[[Workload], Round]
) -> dict[str, Callable[[Workload], Round]]:
    """What a side offers by row: its functions, known by their names, and those about scale.

    Raises KeyError for a function that is no row.
    """
    offered = {_ROW_OF[function.__name__]: function for function in own}
    return offered | {
        "match_2k_of_1e6_us": partial(match_in_large, make),
        "scaling_1e4_to_1e6": partial(scaling, make),
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def trim() -> None:
    """Collects, and gives free heap pages back to the system."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
