"""Full pages of committed prefixes on disk: read when a lane opens, written when pages fill.

Only KVPool uses this. Nothing here can make a request fail: what the store can't give is computed,
what it can't take is not kept, and the first trouble is one line in the log.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from helicore import kv
from helicore.config import FieldError

_LOGGER = logging.getLogger("helicore")
_QUEUE_BYTES = 64 << 20
_ERRORS = (OSError, RuntimeError, MemoryError, ValueError)
_FAILED = (kv.BlockStatus.IO_ERROR, kv.BlockStatus.CORRUPT, kv.BlockStatus.DISABLED)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where a store lies, how large it may be, and what its pages mean (32 bytes)."""

    path: Path
    num_bytes: int
    stamp: bytes


class DiskPrefixes:
    """The store, and how much of each lane is in it.

    `pages` is the pool, uint8 [slots, bytes of a page over all layers]; `block_table` has the slots
    of each lane. Reads wait, writes never do: what does not fit the queue is offered again by
    `pump`, and dropped when its lane leaves before that.
    """

    def __init__(
        self,
        config: DiskConfig,
        pages: NDArray[np.uint8],
        block_table: NDArray[np.int32],
        page_size: int,
        max_tokens: int,
    ) -> None:
        self.hit_tokens = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self._config = config
        self._pages = pages
        self._block_table = block_table
        self._page_size = page_size
        self._block_bytes = pages.shape[1]
        self._piece = max(16, min(1024, _QUEUE_BYTES // self._block_bytes))
        num_lanes = len(block_table)
        # Touched only as far as sequences reach.
        self._tokens = np.empty((num_lanes, max_tokens), np.int32)
        self._roots = [b""] * num_lanes
        self._num_committed = [0] * num_lanes
        self._num_stored: list[int | None] = [None] * num_lanes
        self._pending: set[int] = set()
        self._puts: deque[int] = deque()
        self._is_reported = False
        self._takes_pages = True
        self._store = self._open_store(config.stamp)
        _LIVE.add(self)

    # --- lanes -------------------------------------------------------------------------------

    def enter(self, lane: int, tokens: NDArray[np.int32], scope: kv.ReuseScope | None) -> None:
        """A lane opens with these committed tokens; nothing is looked up."""
        self._roots[lane] = kv.get_root_key(scope)
        self._num_committed[lane] = len(tokens)
        self._num_stored[lane] = None
        self._tokens[lane, : len(tokens)] = tokens

    def open(
        self, lane: int, tokens: NDArray[np.int32], scope: kv.ReuseScope | None, num_matched: int
    ) -> int:
        """Fills pages of an open lane from the disk; how many of `tokens` it holds then.

        The lane has pages for all of them, and num_matched of them in the cache already.
        """
        self.enter(lane, tokens, scope)
        self._num_committed[lane] = num_matched
        full = len(tokens) // self._page_size
        if self._store is None or not full:
            return num_matched
        try:
            match = self._store.match(self._roots[lane], tokens[: full * self._page_size])
        except _ERRORS as error:
            self._give_up(error)
            return num_matched
        blocks = match.blocks
        self._num_stored[lane] = len(blocks)
        first, kept = divmod(num_matched, self._page_size)
        if len(blocks) <= first:
            if len(blocks) < first and not self._puts:
                self._pending.add(lane)  # the tree knows more, and nothing is under way
            return num_matched
        num_read = self._read(lane, first, blocks[first:], kept > 0)
        return max(num_matched, (first + num_read) * self._page_size if num_read else 0)

    def accept(self, lane: int, num_tokens: int) -> None:
        """The tree has taken in what `open` read: the lane has num_tokens committed tokens."""
        self.hit_tokens += num_tokens - self._num_committed[lane]
        self._num_committed[lane] = num_tokens

    def commit(self, lane: int, tokens: NDArray[np.int32]) -> None:
        """The next tokens of a lane are final; hands its full pages to the store."""
        begin = self._num_committed[lane]
        self._num_committed[lane] = end = begin + len(tokens)
        self._tokens[lane, begin:end] = tokens
        if end // self._page_size > begin // self._page_size:
            self._put(lane)

    def leave(self, lane: int) -> None:
        """The lane's pages are about to go."""
        self._pending.discard(lane)

    # --- the store ---------------------------------------------------------------------------

    def pump(self) -> None:
        """Collects what was written, and offers again what the queue had no room for."""
        try:
            while self._puts and self._store is not None:
                statuses = self._store.poll(self._puts[0])
                if statuses is None:
                    break
                self._puts.popleft()
                self.bytes_written += statuses.count(kv.BlockStatus.OK) * self._block_bytes
                self._look_at(statuses)
        except _ERRORS as error:
            self._give_up(error)
        for lane in list(self._pending):
            self._put(lane)

    def clear(self) -> None:
        """Forgets what is stored; no lane may be open."""
        if self._store is not None:
            self._puts.clear()
            self._store.close()
            other = bytes(byte ^ 0xFF for byte in self._config.stamp)
            for stamp in (other, self._config.stamp):  # another stamp empties the store
                self._store = self._open_store(stamp, is_clearing=True)
                if self._store is not None and stamp is other:
                    self._store.close()

    def flush(self) -> None:
        """Until everything that was put is on the disk."""
        if self._store is not None:
            self._store.flush()
            self.pump()

    def close(self) -> None:
        """Ends what was put. Safe to call again."""
        store, self._store = self._store, None
        if store is not None:
            store.flush()
            store.close()

    # --- helpers -----------------------------------------------------------------------------

    def _open_store(self, stamp: bytes, *, is_clearing: bool = False) -> kv.PrefixStore | None:
        config = self._config
        slot_bytes = -(-self._block_bytes // 4096) * 4096
        if config.num_bytes < slot_bytes:
            raise FieldError(
                "disk_gb",
                f"disk_gb must hold at least one page of {slot_bytes} bytes, got "
                f"{config.num_bytes} bytes",
            )
        try:
            store = kv.PrefixStore(
                str(config.path),
                capacity_bytes=config.num_bytes,
                block_bytes=self._block_bytes,
                tokens_per_block=self._page_size,
                stamp=stamp,
                max_queued_blocks=self._piece,
            )
        except (OSError, RuntimeError) as error:
            self._report(f"is not used: {error}")
            return None
        stats = store.stats()
        if stats.disabled_reason:
            self._report(f"is not used: {stats.disabled_reason}")
        elif stats.emptied_reason and not is_clearing:
            _LOGGER.warning("the disk store %s was emptied: %s", config.path, stats.emptied_reason)
        return store

    def _read(self, lane: int, first: int, blocks: list[kv.BlockRef], is_partly_kept: bool) -> int:
        """Reads blocks into the lane's pages from `first` on; how many came, without a gap.

        `is_partly_kept`: rows of the first page are in use; they survive a failed read.
        """
        assert self._store is not None
        slots = self._block_table[lane, first : first + len(blocks)]
        kept = self._pages[slots[0]].copy() if is_partly_kept else None
        statuses: list[kv.BlockStatus] = []
        try:
            reads = [
                self._store.get(blocks[begin:end], self._pages[slots[begin] :][: end - begin])
                for begin, end in _runs(slots)
            ]
            for read in reads:
                statuses += [kv.BlockStatus.IO_ERROR] if read is None else self._store.wait(read)
        except _ERRORS as error:
            self._give_up(error)
            statuses = []
        good = 0
        while good < len(statuses) and statuses[good] == kv.BlockStatus.OK:
            good += 1
        if kept is not None and not good:
            self._pages[slots[0]] = kept
        self.bytes_read += good * self._block_bytes
        self._num_stored[lane] = first + good
        self._look_at(statuses)
        return good

    def _put(self, lane: int) -> None:
        """Offers the full pages of a lane that are not stored, as far as the queue has room."""
        self._pending.discard(lane)
        if self._store is not None and self._takes_pages:
            try:
                self._offer(lane, self._store)
            except _ERRORS as error:
                self._give_up(error)

    def _offer(self, lane: int, store: kv.PrefixStore) -> None:
        page, root = self._page_size, self._roots[lane]
        end = self._num_committed[lane] // page
        stored = self._num_stored[lane]
        if stored is None:  # nothing was looked up when the lane was opened
            stored = len(store.match(root, self._tokens[lane, : end * page]).blocks)
        while stored < end:
            stop = min(end, stored + self._piece)
            slots = self._block_table[lane, stored:stop]
            tokens = self._tokens[lane, : stop * page]
            put = store.put(root, tokens, self._gather(slots), first_block=stored, block=False)
            if put is None:
                self._pending.add(lane)
                break
            self._puts.append(put)
            stored = stop
        self._num_stored[lane] = stored

    def _gather(self, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The pages in `slots`: a view where they lie side by side."""
        first, count = int(slots[0]), len(slots)
        if len(list(_runs(slots))) == 1:
            return self._pages[first : first + count]
        return self._pages[slots]

    def _look_at(self, statuses: list[kv.BlockStatus]) -> None:
        """Reports the first failure, and stops writing to a store that takes nothing any more."""
        if self._store is None or not any(status in _FAILED for status in statuses):
            return
        stats = self._store.stats()
        reason = stats.disabled_reason or stats.read_only_reason
        self._takes_pages = not reason
        if reason:
            self._report(f"takes no more pages: {reason}")
        else:
            self._report(f"failed: {stats.num_corrupt} pages damaged, {stats.num_io_errors} errors")

    def _give_up(self, error: BaseException) -> None:
        """Goes on without the store, which ends what is under way."""
        self._report(f"is not used any more: {type(error).__name__}: {error}")
        self._pending.clear()
        self._puts.clear()
        self._store = None

    def leave_to_parent(self) -> None:
        """After fork(), in the child: the threads that could end the store are not here."""
        store, self._store = self._store, None
        if store is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # never taken down

    def _report(self, trouble: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            _LOGGER.warning("the disk store %s %s (said once)", self._config.path, trouble)


_LIVE: weakref.WeakSet[DiskPrefixes] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for disk in list(_LIVE):
        disk.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _runs(slots: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of consecutive slots."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    yield from itertools.pairwise(cuts)
