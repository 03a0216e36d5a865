"""Events of the reuse tree in the published schema, polled."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from helicore import kv

from .tokens import FIRST_DIGEST_ID, decode

if TYPE_CHECKING:
    from .manager import KVCacheManager

HASH_ALGO_V2 = "v2"
HASH_ALGO_V2_64 = "v2_64"


@dataclass
class Diff:
    """A value that went from one to another."""

    old_value: int
    new_value: int


@dataclass
class KVCacheCreatedData:
    """The first event: how many blocks each level has."""

    num_blocks_per_cache_level: list[int]
    type: str = "created"


@dataclass
class KVCacheStoredBlockData:
    """One block that became reusable."""

    block_hash: str
    tokens: list[int | bytes]
    cache_level: int
    priority: int
    lora_id: int | None = None
    cache_salt: int | str | None = None
    mm_keys: list[bytes] = field(default_factory=list)


@dataclass
class KVCacheStoredData:
    """Blocks that hang on `parent_hash` one after the other."""

    parent_hash: str | None
    blocks: list[KVCacheStoredBlockData]
    type: str = "stored"


@dataclass
class KVCacheRemovedData:
    """Blocks that are gone."""

    block_hashes: list[str]
    type: str = "removed"


@dataclass
class KVCacheUpdatedData:
    """A block whose priority or level changed."""

    block_hash: str
    cache_level: Diff | None = None
    priority: Diff | None = None
    type: str = "updated"


EventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@dataclass
class KVCacheEvent:
    """One event of one layer group (None: of the manager)."""

    event_id: int
    data: EventData
    window_size: int
    hash_algo: str
    attention_dp_rank: int | None
    layer_group_id: int | None


@dataclass
class _Known:
    """What was told of a block."""

    priority: int
    groups: set[int]


class KVCacheEventManager:
    """Gathers events at flush_iteration_events() and hands them to whoever polls.

    Consecutive blocks of a chain are one stored event; removals wait until another kind of event
    comes. At most max_kv_event_entries are kept: the oldest go first.
    """

    def __init__(
        self,
        max_kv_event_entries: int,
        *,
        window_size: int = 0,
        attention_dp_rank: int | None = None,
        attention_dp_gather: Callable[[list[KVCacheEvent]], list[list[KVCacheEvent]]] | None = None,
        hash_algo: str = HASH_ALGO_V2,
        window_size_by_layer_group: dict[int, int] | None = None,
        mm_token_id_offset: int | None = None,
    ) -> None:
        if max_kv_event_entries < 0:
            raise ValueError(f"max_kv_event_entries must be >= 0, got {max_kv_event_entries}")
        if hash_algo not in (HASH_ALGO_V2, HASH_ALGO_V2_64):
            raise ValueError(f"hash_algo must be v2 or v2_64, got {hash_algo}")
        self.max_kv_event_entries = max_kv_event_entries
        self.hash_algo = hash_algo
        self.mm_token_id_offset = mm_token_id_offset
        self._window_size = window_size
        self._windows = window_size_by_layer_group or {}
        self._rank = attention_dp_rank
        self._gather = attention_dp_gather
        self._next_id = 0
        self._ready: deque[KVCacheEvent] = deque(maxlen=max_kv_event_entries)
        self._changed = threading.Condition()
        self._source: weakref.ref[KVCacheManager] | None = None
        self._known: dict[bytes, _Known] = {}
        self._scopes: dict[bytes, kv.ReuseScope] = {}
        self._removed: dict[int, list[str]] = {}
        self._batch: list[KVCacheEvent] = []

    @property
    def event_buffer_size(self) -> int:
        """What the native manager must keep between two flushes."""
        return max(4096, 4 * self.max_kv_event_entries)

    def attach(self, manager: KVCacheManager, num_blocks_per_level: list[int]) -> None:
        """The manager whose events these are; the created event is the first."""
        self._source = weakref.ref(manager)
        self._add(KVCacheCreatedData(num_blocks_per_level), None)
        self._publish()

    def flush_iteration_events(self) -> None:
        """Publishes what has happened since the last flush."""
        manager = None if self._source is None else self._source()
        if manager is None:
            return
        for event in manager.drain_events():
            self._take(event)
        self._end_removals()
        self._publish()

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """All that was published and not yet taken; waits for some. None waits for ever."""
        with self._changed:
            timeout = None if timeout_ms is None else timeout_ms / 1000
            self._changed.wait_for(lambda: bool(self._ready), timeout)
            events = list(self._ready)
            self._ready.clear()
            return events

    def _publish(self) -> None:
        batch, self._batch = self._batch, []
        if self._gather is not None:
            gathered = self._gather(batch)
            batch = [e for part in gathered for e in part] if not self._rank else []
        if batch:
            with self._changed:
                self._ready.extend(batch)
                self._changed.notify_all()

    def _hash(self, key: bytes) -> str:
        return key[: 8 if self.hash_algo == HASH_ALGO_V2_64 else 32].hex()

    def _add(self, data: EventData, group: int | None) -> None:
        window = self._window_size if group is None else self._windows.get(group, self._window_size)
        self._batch.append(
            KVCacheEvent(self._next_id, data, window, self.hash_algo, self._rank, group)
        )
        self._next_id += 1

    def _end_removals(self) -> None:
        removed, self._removed = self._removed, {}
        for group, hashes in removed.items():
            self._add(KVCacheRemovedData(hashes), group)

    def _take(self, event: kv.KVEvent) -> None:
        if event.kind == kv.EventKind.CREATED:
            if event.reuse_scope is not None:
                self._scopes[event.key] = event.reuse_scope
        elif event.kind == kv.EventKind.REMOVED:
            self._take_removed(event)
        elif event.kind == kv.EventKind.UPDATED:
            self._take_updated(event)
        elif event.layer_group is None and event.layer_groups:
            self._take_stored(event)

    def _take_removed(self, event: kv.KVEvent) -> None:
        known = self._known.get(event.key)
        if known is None:  # a root, or a block that covered no group in full
            self._scopes.pop(event.key, None)
            return
        going = known.groups if event.layer_group is None else known.groups & {event.layer_group}
        for group in sorted(going):
            self._removed.setdefault(group, []).append(self._hash(event.key))
        known.groups = known.groups - going
        if event.layer_group is None:
            del self._known[event.key]
            self._scopes.pop(event.key, None)

    def _take_updated(self, event: kv.KVEvent) -> None:
        known = self._known.get(event.key)
        if known is None or known.priority == event.priority:
            return
        self._end_removals()
        diff = Diff(known.priority, event.priority)
        known.priority = event.priority
        for group in sorted(known.groups):
            self._add(KVCacheUpdatedData(self._hash(event.key), priority=diff), group)

    def _take_stored(self, event: kv.KVEvent) -> None:
        self._end_removals()
        parent = event.parent_key
        assert parent is not None
        scope = self._scopes.get(parent, kv.ReuseScope())
        self._scopes[event.key] = scope
        self._known[event.key] = _Known(event.priority, set(event.layer_groups))
        is_top = event.ordinal == 0
        block = KVCacheStoredBlockData(
            block_hash=self._hash(event.key),
            tokens=decode(event.tokens),
            cache_level=0,
            priority=event.priority,
            lora_id=scope.lora_id,
            cache_salt=scope.salt,
            mm_keys=list(self._mm_keys(event.tokens)),
        )
        for group in event.layer_groups:
            last = self._last_stored(group)
            if last is not None and not is_top and last.blocks[-1].block_hash == self._hash(parent):
                last.blocks.append(block)
            else:
                stored = KVCacheStoredData(None if is_top else self._hash(parent), [block])
                self._add(stored, group)

    def _last_stored(self, group: int) -> KVCacheStoredData | None:
        """The group's latest event, if it stored something and nothing but stored events follow."""
        for event in reversed(self._batch):
            if not isinstance(event.data, KVCacheStoredData):
                return None
            if event.layer_group_id == group:
                return event.data
        return None

    @staticmethod
    def _mm_keys(tokens: list[int]) -> Iterator[bytes]:
        for token, shown in zip(tokens, decode(tokens), strict=True):
            if token >= FIRST_DIGEST_ID and isinstance(shown, bytes):
                yield shown
