"""Disk rows of `helicore bench kv`: the prefix store against what its disk does by itself."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helicore import kv
from helicore.bench import kv_workload

BLOCK_BYTES = 2 << 20
TOKENS_PER_BLOCK = 64
GROUP = 32  # blocks per put and per get
DEPTHS = (1, 4)  # transfers in flight of the device itself; the better one counts


@dataclass(frozen=True, slots=True)
class DiskFigures:
    """Bytes per second of every round, and the ratio of that round, by direction."""

    store_write: list[float]
    device_write: list[float]
    store_read: list[float]
    device_read: list[float]

    def ratios(self, direction: str) -> list[float]:
        """direction: "write" or "read"."""
        store, device = getattr(self, f"store_{direction}"), getattr(self, f"device_{direction}")
        return [ours / theirs for ours, theirs in zip(store, device, strict=True)]


def measure(
    folder: Path, total_bytes: int, rounds: int, progress: Callable[[str], None]
) -> DiskFigures:
    """Writes and reads `total_bytes` per round, device and store in turn, past the page cache.

    Raises OSError when the folder's file system refuses direct transfers.
    """
    figures = DiskFigures([], [], [], [])
    groups = max(1, total_bytes // (GROUP * BLOCK_BYTES))
    for number in range(rounds):
        progress(f"disk, round {number + 1}")
        work = Path(tempfile.mkdtemp(prefix="helicore-bench-", dir=folder))
        try:
            for side in (_device, _store)[:: 1 if number % 2 == 0 else -1]:
                side(work, groups, figures)
        finally:
            shutil.rmtree(work)
    return figures


def _aligned(blocks: int) -> npt.NDArray[np.uint8]:
    """uint8 [blocks, BLOCK_BYTES] in huge pages where there are any, as pools of the cache are.

    Both sides use it: a disk moves long pieces of memory at up to three times the rate of pages.
    """
    memory = mmap.mmap(-1, (blocks + 1) * BLOCK_BYTES)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    start = -data.ctypes.data % BLOCK_BYTES
    return data[start : start + blocks * BLOCK_BYTES].reshape(blocks, BLOCK_BYTES)


def _device(work: Path, groups: int, figures: DiskFigures) -> None:
    path = work / "device"
    writes, reads = [], []
    for depth in DEPTHS:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, groups * GROUP * BLOCK_BYTES)
            writes.append(_rate(descriptor, groups * GROUP, depth, os.pwritev))
            reads.append(_rate(descriptor, groups * GROUP, depth, os.preadv))
        finally:
            os.close(descriptor)
            path.unlink()
    figures.device_write.append(max(writes))
    figures.device_read.append(max(reads))


def _rate(
    descriptor: int, blocks: int, depth: int, transfer: Callable[[int, list[memoryview], int], int]
) -> float:
    """Bytes per second of sequential transfers, `depth` at a time; writes end with a sync."""
    buffers = _aligned(depth)
    buffers[:] = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)

    def lane(index: int) -> None:
        view = [memoryview(buffers[index]).cast("B")]
        for block in range(index, blocks, depth):
            if transfer(descriptor, view, block * BLOCK_BYTES) != BLOCK_BYTES:
                raise OSError(f"a transfer of {BLOCK_BYTES} bytes was cut short")

    with ThreadPoolExecutor(depth) as pool:
        start = time.perf_counter()
        list(pool.map(lane, range(depth)))
        if transfer is os.pwritev:
            os.fdatasync(descriptor)
        return blocks * BLOCK_BYTES / (time.perf_counter() - start)


def _store(work: Path, groups: int, figures: DiskFigures) -> None:
    pages = _aligned(2 * GROUP)
    pages[:] = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    root = kv.get_root_key(None)
    total = groups * GROUP * BLOCK_BYTES
    prompts = [kv_workload.prompt(20, i, GROUP * TOKENS_PER_BLOCK) for i in range(groups)]
    with _open(work, groups) as store:
        start = time.perf_counter()
        tokens = [store.put(root, prompt, pages[:GROUP]) for prompt in prompts]
        if not store.flush():
            raise OSError(f"the store could not write: {store.stats().disabled_reason}")
        figures.store_write.append(total / (time.perf_counter() - start))
        for token in tokens:
            _collect(store, token)
    with _open(work, groups) as store:
        found = [store.match(root, prompt).blocks for prompt in prompts]
        start = time.perf_counter()
        pending: list[int | None] = []
        for number, blocks in enumerate(found):
            half = number % 2 * GROUP
            if len(pending) == 2:
                _collect(store, pending.pop(0))
            pending.append(store.get(blocks, pages[half : half + GROUP]))
        for token in pending:
            _collect(store, token)
        figures.store_read.append(total / (time.perf_counter() - start))


def _open(work: Path, groups: int) -> kv.PrefixStore:
    return kv.PrefixStore(
        str(work / "store"),
        capacity_bytes=(groups + 1) * GROUP * BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        tokens_per_block=TOKENS_PER_BLOCK,
        stamp=bytes(32),
    )


def _collect(store: kv.PrefixStore, token: int | None) -> None:
    if token is None:
        raise OSError("the store's queue refused a transfer")
    statuses = store.wait(token)
    bad = [status for status in statuses if status != kv.BlockStatus.OK]
    if bad or len(statuses) != GROUP:
        raise OSError(f"{len(bad)} of {len(statuses)} blocks failed, {bad[:1]}")
