"""What every side of `helicore bench kv` works on: the same tokens, lengths, orders and loops."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def trim() -> None:
    """Collects, and gives free heap pages back to the system."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
