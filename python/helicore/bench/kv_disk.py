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
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helicore import kv
from helicore.bench import kv_workload

BLOCK_BYTES = 2 << 20
TOKENS_PER_BLOCK = 64
GROUP = 32  # blocks per put and per get
TURN = 4  # groups that one side moves before the other
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

    A virtual disk's rate triples from one second, place in a file or piece of memory to the next,
    so the two take turns every 256 MiB, through the same memory and reading the same file. Raises
    OSError when the folder's file system refuses direct transfers.
    """
    figures = DiskFigures([], [], [], [])
    turns = max(1, total_bytes // (TURN * GROUP * BLOCK_BYTES))
    for number in range(rounds):
        progress(f"disk, round {number + 1}")
        work = Path(tempfile.mkdtemp(prefix="helicore-bench-", dir=folder))
        try:
            _measure_round(work, turns, figures)
        finally:
            shutil.rmtree(work)
    return figures


def _measure_round(work: Path, turns: int, figures: DiskFigures) -> None:
    total = turns * TURN * GROUP * BLOCK_BYTES
    prompts = [kv_workload.prompt(20, i, GROUP * TOKENS_PER_BLOCK) for i in range(turns * TURN)]
    pages = _aligned(2 * GROUP)
    pages[:] = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    with _open(work, total) as store, _Device(work / "device", total, pages) as device:
        ours, theirs = _take_turns(
            turns,
            lambda first: _put(store, prompts[first : first + TURN], pages[:GROUP]),
            device.write,
        )
        figures.store_write.append(total / ours)
        figures.device_write.append(total / theirs)
    with _open(work, total) as store, _Device(work / "store" / "blocks", total, pages) as device:
        found = [store.match(kv.get_root_key(None), prompt).blocks for prompt in prompts]
        ours, theirs = _take_turns(
            turns, lambda first: _get(store, found[first : first + TURN], pages), device.read
        )
        figures.store_read.append(total / ours)
        figures.device_read.append(total / theirs)


def _take_turns(
    turns: int, store: Callable[[int], None], device: Callable[[int, int], None]
) -> tuple[float, float]:
    """Seconds of the store, and of the device at the depth that suits it best.

    Each call moves the TURN groups from the given one on.
    """
    sides: list[Callable[[int], None]] = [store, *(partial(device, depth) for depth in DEPTHS)]
    seconds = [0.0] * len(sides)
    for turn in range(turns):
        for k in range(len(sides)):
            side = (turn + k) % len(sides)
            start = time.perf_counter()
            sides[side](turn * TURN)
            seconds[side] += time.perf_counter() - start
    return seconds[0], min(seconds[1:])


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


class _Device:
    """A file of `total` bytes moved from and to `pages` by plain direct system calls."""

    def __init__(self, path: Path, total: int, pages: npt.NDArray[np.uint8]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._lanes = ThreadPoolExecutor(max(DEPTHS))
        self._pages = [memoryview(page).cast("B") for page in pages]
        os.posix_fallocate(self._file, 0, total)

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None:
        self._lanes.shutdown()
        os.close(self._file)

    def write(self, depth: int, first_group: int) -> None:
        """TURN groups, `depth` blocks at a time, and a sync."""
        self._move(depth, first_group, os.pwritev)
        os.fdatasync(self._file)

    def read(self, depth: int, first_group: int) -> None:
        """TURN groups, `depth` blocks at a time."""
        self._move(depth, first_group, os.preadv)

    def _move(
        self, depth: int, first_group: int, transfer: Callable[[int, list[memoryview], int], int]
    ) -> None:
        begin, end = first_group * GROUP, (first_group + TURN) * GROUP

        def lane(index: int) -> None:
            for block in range(begin + index, end, depth):
                page = [self._pages[block % len(self._pages)]]
                if transfer(self._file, page, block * BLOCK_BYTES) != BLOCK_BYTES:
                    raise OSError(f"a transfer of {BLOCK_BYTES} bytes was cut short")

        list(self._lanes.map(lane, range(depth)))


def _put(
    store: kv.PrefixStore,
    prompts: list[npt.NDArray[np.int32]],
    pages: npt.NDArray[np.uint8],
) -> None:
    root = kv.get_root_key(None)
    tokens = [store.put(root, prompt, pages) for prompt in prompts]
    if not store.flush():
        raise OSError(f"the store could not write: {store.stats().disabled_reason}")
    for token in tokens:
        _collect(store, token)


def _get(
    store: kv.PrefixStore, found: list[list[kv.BlockRef]], pages: npt.NDArray[np.uint8]
) -> None:
    pending: list[int | None] = []
    for number, blocks in enumerate(found):
        half = number % 2 * GROUP
        if len(pending) == 2:
            _collect(store, pending.pop(0))
        pending.append(store.get(blocks, pages[half : half + GROUP]))
    for token in pending:
        _collect(store, token)


def _open(work: Path, total: int) -> kv.PrefixStore:
    return kv.PrefixStore(
        str(work / "store"),
        capacity_bytes=total + GROUP * BLOCK_BYTES,
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
