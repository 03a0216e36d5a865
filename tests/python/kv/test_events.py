"""Events of the reuse tree through the bindings."""

from __future__ import annotations

import pytest
from helicore import kv
from helicore._core.kv import get_root_key

TPB = 4


def make_manager(num_blocks: int = 16, event_buffer_size: int = 1000) -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(256 * num_blocks)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 256)])],
            event_buffer_size=event_buffer_size,
        )
    )


def run(manager: kv.KVCacheManager, tokens: list[int], scope: kv.ReuseScope | None = None) -> None:
    cache = manager.create_kv_cache(scope, tokens)
    found = cache.num_committed_tokens
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[found:])
    cache.close()


class Mirror:
    """A tree of block keys kept from events alone."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}

    def apply(self, events: list[kv.KVEvent]) -> None:
        for event in events:
            if event.kind == kv.EventKind.REMOVED:
                assert event.key not in self.parents.values()
                del self.parents[event.key]
            elif event.kind != kv.EventKind.UPDATED:
                assert event.parent_key is None or event.parent_key in self.parents
                self.parents[event.key] = event.parent_key


def test_events_tell_what_became_reusable_and_what_went() -> None:
    manager = make_manager()
    scope = kv.ReuseScope(lora_id=2, salt="tenant")
    tokens = list(range(9))
    run(manager, tokens, scope)
    events = manager.drain_events()
    assert [event.kind.name for event in events] == ["CREATED", "STORED", "STORED", "STORED"]
    assert [event.id for event in events] == [0, 1, 2, 3]
    assert events[0].reuse_scope == scope
    assert events[0].key == get_root_key(scope)
    assert events[0].parent_key is None
    keys = manager.get_chain_keys(tokens, scope)
    assert [event.key for event in events[1:3]] == keys
    assert [event.parent_key for event in events[1:3]] == [events[0].key, keys[0]]
    assert [event.tokens for event in events[1:]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [event.ordinal for event in events[1:]] == [0, 1, 2]
    manager.clear_reusable_blocks()
    assert [event.kind.name for event in manager.drain_events(2)] == ["REMOVED"] * 2
    assert manager.drain_events(1000)[-1].key == events[0].key
    assert manager.drain_events() == []


def test_a_mirror_follows_through_evictions_and_a_snapshot_repairs_it() -> None:
    manager = make_manager(num_blocks=16, event_buffer_size=64)
    mirror = Mirror()
    for i in range(30):
        run(manager, [i % 7, *range(i % 5), 9, 9, 9, i])
        mirror.apply(manager.drain_events())
    again = Mirror()
    again.apply(manager.snapshot_events())
    assert again.parents == mirror.parents
    assert manager.get_stats().evicted_blocks > 0
    for i in range(100):
        run(manager, list(range(i, i + 8)))
    assert manager.num_dropped_events > 0
    mirror = Mirror()
    mirror.apply(manager.snapshot_events())
    run(manager, list(range(500, 508)))
    mirror.apply(manager.drain_events())
    again = Mirror()
    again.apply(manager.snapshot_events())
    assert again.parents == mirror.parents


def test_no_buffer_no_events() -> None:
    manager = make_manager(event_buffer_size=0)
    run(manager, list(range(8)))
    assert manager.drain_events() == []
    assert len(manager.snapshot_events()) == 3
    with pytest.raises(TypeError):
        manager.drain_events(-1)
