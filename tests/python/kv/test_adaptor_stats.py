"""Events, statistics and value types through the published names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from kv.adaptor import (
    BAD_PAGE_INDEX,
    BufferConfig,
    BufferId,
    HalfOpenRange,
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    LogicError,
    MmItemContext,
    PlannedDropHandle,
    ReuseScope,
    SsmLayerConfig,
    gen_multimodal_cache_key_tokens,
    sequence_to_blockchain_keys,
)
from kv.engine import Engine, layer, make_config

TPB = 8


def make_engine(
    device: str, events: KVCacheEventManager | None = None, **options: object
) -> Engine:
    return Engine(KVCacheManager(make_config(device, **options), events))  # type: ignore[arg-type]


# ---- events


def poll(engine: Engine) -> list[KVCacheEvent]:
    events = engine.manager.event_manager
    assert events is not None
    events.flush_iteration_events()
    return events.get_latest_events(0)


def test_consecutive_blocks_of_a_chain_are_one_stored_event(device: str) -> None:
    engine = make_engine(device, KVCacheEventManager(100, window_size=7, attention_dp_rank=2))
    scope = ReuseScope(3, 9)
    tokens = list(range(3 * TPB))
    engine.serve(tokens, scope)
    created, stored = poll(engine)
    assert isinstance(created.data, KVCacheCreatedData)
    assert len(created.data.num_blocks_per_cache_level) == 1
    data = stored.data
    assert isinstance(data, KVCacheStoredData)
    assert [created.event_id, stored.event_id] == [0, 1]
    assert (stored.window_size, stored.attention_dp_rank, stored.layer_group_id) == (7, 2, 0)
    assert data.parent_hash is None
    assert [block.tokens for block in data.blocks] == [
        tokens[i : i + TPB] for i in range(0, 24, TPB)
    ]
    keys = [key.hex() for _, key in sequence_to_blockchain_keys(TPB, scope, tokens)][1:]
    assert [block.block_hash for block in data.blocks] == keys
    assert {(b.lora_id, b.cache_salt, b.cache_level, b.priority) for b in data.blocks} == {
        (3, 9, 0, 35)
    }
    engine.serve([*tokens, *range(TPB)], scope)
    (more,) = poll(engine)
    assert isinstance(more.data, KVCacheStoredData)
    assert more.data.parent_hash == keys[-1]
    assert poll(engine) == []


def test_removals_come_before_what_is_stored_after_them(device: str) -> None:
    engine = make_engine(device, KVCacheEventManager(1000))
    tokens = list(range(2 * TPB))
    engine.serve(tokens)
    engine.manager.clear_reusable_blocks()
    engine.serve([9, *tokens])
    kinds = [event.data.type for event in poll(engine)]
    assert kinds == ["created", "stored", "removed", "stored"]
    engine.manager.clear_reusable_blocks()
    (removed,) = poll(engine)
    assert isinstance(removed.data, KVCacheRemovedData)
    assert len(removed.data.block_hashes) == 3, "one event for all blocks of the layer group"


def test_every_layer_group_tells_of_its_own_pages(device: str) -> None:
    windows = {0: 1000, 1: TPB}
    events = KVCacheEventManager(1000, window_size_by_layer_group=windows)
    layers = [layer(0, TPB), layer(1, TPB, sliding_window_size=TPB)]
    engine = make_engine(device, events, layers=layers, num_blocks=256)
    engine.serve(list(range(4 * TPB)))
    stored = [e for e in poll(engine) if isinstance(e.data, KVCacheStoredData)]
    assert {e.layer_group_id for e in stored} == {0, 1}
    assert {(e.layer_group_id, e.window_size) for e in stored} == {(0, 1000), (1, TPB)}
    engine.manager.clear_reusable_blocks()
    removed = [e for e in poll(engine) if isinstance(e.data, KVCacheRemovedData)]
    told = {
        g: sorted(h for e in stored if e.layer_group_id == g for h in hashes(e)) for g in windows
    }
    gone = {
        g: sorted(h for e in removed if e.layer_group_id == g for h in hashes(e)) for g in windows
    }
    assert gone == told, "what was stored and nothing else is removed"


def hashes(event: KVCacheEvent) -> list[str]:
    if isinstance(event.data, KVCacheStoredData):
        return [block.block_hash for block in event.data.blocks]
    assert isinstance(event.data, KVCacheRemovedData)
    return event.data.block_hashes


def test_a_listener_that_replays_events_knows_what_a_probe_finds(device: str) -> None:
    engine = make_engine(device, KVCacheEventManager(10_000), num_blocks=24)
    rng = np.random.default_rng(5)
    alive: set[str] = set()
    prompts: list[list[int]] = []
    for _ in range(60):
        base = list(prompts[rng.integers(len(prompts))]) if prompts and rng.random() < 0.6 else []
        prompt = [*base[: rng.integers(len(base) + 1)], *rng.integers(0, 50, TPB).tolist()][:64]
        prompts.append(prompt)
        engine.serve(prompt)
        for event in poll(engine):
            if isinstance(event.data, KVCacheStoredData):
                assert event.data.parent_hash is None or event.data.parent_hash in alive
                alive.update(hashes(event))
            elif isinstance(event.data, KVCacheRemovedData):
                assert alive.issuperset(hashes(event))
                alive.difference_update(hashes(event))
        for prompt in prompts[-10:]:
            keys = [key.hex() for _, key in sequence_to_blockchain_keys(TPB, None, prompt)][1:]
            full = keys[: len(prompt) // TPB]
            known = next((i for i, key in enumerate(full) if key not in alive), len(full))
            assert engine.manager.probe_reuse(None, prompt) // TPB == known


def test_a_higher_priority_is_told_with_both_values(device: str) -> None:
    engine = make_engine(device, KVCacheEventManager(100))
    tokens = list(range(TPB))
    engine.serve(tokens)
    poll(engine)
    cache = engine.manager.create_kv_cache(
        None, tokens, custom_priority_callback=lambda ordinal, life_cycle: 80
    )
    cache.close()
    (updated,) = poll(engine)
    assert isinstance(updated.data, KVCacheUpdatedData)
    assert updated.data.priority is not None
    assert (updated.data.priority.old_value, updated.data.priority.new_value) == (35, 80)


def test_rank_0_gathers_the_events_of_all_ranks(device: str) -> None:
    parts: dict[int, list[KVCacheEvent]] = {}

    def make(rank: int) -> Engine:
        def gather(own: list[KVCacheEvent]) -> list[list[KVCacheEvent]]:
            parts[rank] = own
            return [parts.get(1, []), own] if rank == 0 else [own]

        return make_engine(
            device,
            KVCacheEventManager(100, attention_dp_rank=rank, attention_dp_gather=gather),
        )

    one, zero = make(1), make(0)
    zero.manager.event_manager.get_latest_events(0)  # type: ignore[union-attr]
    for engine in (one, zero):
        engine.serve(list(range(TPB)))
    assert poll(one) == []
    assert [e.attention_dp_rank for e in poll(zero)] == [1, 0]


def test_the_buffer_of_events_drops_the_oldest(device: str) -> None:
    engine = make_engine(device, KVCacheEventManager(3))
    for i in range(6):
        engine.serve([i] * TPB)
        engine.manager.event_manager.flush_iteration_events()  # type: ignore[union-attr]
    assert [e.event_id for e in engine.manager.event_manager.get_latest_events()] == [4, 5, 6]  # type: ignore[union-attr]


# ---- statistics


def test_prompt_and_generated_blocks_are_counted_apart(device: str) -> None:
    engine = make_engine(device)
    manager = engine.manager
    engine.serve(list(range(20)))
    sequence = engine.start([*range(20), *range(50, 60)], id=77)
    assert engine.prefill(sequence)
    assert manager.get_committed_stats().alloc_total_blocks == 0, "nothing was accepted yet"
    assert manager.get_dirty_stats_kv_cache_ids() == [77]
    sequence.cache.commit_pending_stats()
    assert manager.get_dirty_stats_kv_cache_ids() == []
    total = manager.get_committed_stats()
    assert (total.reused_blocks, total.missed_blocks) == (3, 1)
    assert (total.alloc_new_blocks, total.alloc_total_blocks) == (1, 2), "one is a private copy"
    for token in range(20):
        assert engine.decode(sequence, token)
    sequence.cache.commit_pending_stats()
    delta = manager.get_and_reset_iteration_stats()[0]
    assert delta.iter_gen_alloc_blocks == 3
    assert delta.iter_missed_blocks == 1
    assert (delta.iter_full_reused_blocks, delta.iter_partial_reused_blocks) == (2, 1)
    assert delta.iter_intra_device_copy_blocks == 1
    assert delta.iter_cache_hit_rate == 0.75
    assert not manager.get_and_reset_iteration_stats()[0], "a reset leaves nothing"
    assert manager.get_and_reset_iteration_reused_blocks_by_level().full == [2]
    assert manager.get_and_reset_iteration_cached_tokens_by_level() == [20]
    assert manager.get_and_reset_iteration_cached_tokens_by_level() == [0]
    sequence.cache.close()


def test_a_generation_step_that_is_taken_back_counts_nothing(device: str) -> None:
    engine = make_engine(device)
    sequence = engine.start(list(range(TPB)))
    assert engine.prefill(sequence)
    sequence.cache.commit_pending_stats()
    before = engine.manager.get_committed_stats()
    engine.manager.get_and_reset_iteration_stats()
    assert sequence.cache.resize(2 * TPB)
    assert sequence.cache.resize(TPB)
    sequence.cache.commit_pending_stats()
    assert engine.manager.get_committed_stats() == before
    assert not engine.manager.get_and_reset_iteration_stats()[0]
    assert sequence.cache.resize(2 * TPB)
    sequence.cache.discard_pending_stats()
    sequence.cache.commit_pending_stats()
    assert engine.manager.get_committed_stats() == before
    sequence.cache.close()


@pytest.mark.parametrize("how", ["disabled", "excluded"])
def test_caches_that_are_not_counted_leave_no_trace(device: str, how: str) -> None:
    engine = make_engine(device, enable_stats=how != "disabled")
    manager = engine.manager
    if how == "excluded":
        manager.mark_stats_excluded(5)
        assert manager.is_stats_excluded(5)
    sequence = engine.start(list(range(30)), id=5)
    assert engine.prefill(sequence)
    assert manager.get_dirty_stats_kv_cache_ids() == []
    sequence.cache.commit_pending_stats()
    assert not manager.get_committed_stats()
    assert not manager.get_and_reset_iteration_stats()[0]
    sequence.cache.close()
    manager.clear_stats_excluded(5)
    assert not manager.is_stats_excluded(5)


def test_peaks_are_the_most_since_the_last_drain(device: str) -> None:
    engine = make_engine(device)
    manager = engine.manager
    total = manager.get_storage_statistics(0)[0].total
    sequence = engine.start([])
    assert sequence.cache.resume(engine.stream)
    assert sequence.cache.resize(10 * TPB)
    assert sequence.cache.resize(2 * TPB)
    (peak,) = manager.get_and_reset_iteration_peak_block_stats()
    assert (peak.unavailable, peak.available, peak.evictable) == (10, total, 0)
    sequence.cache.close()
    ((peak,),) = manager.get_and_reset_iteration_peak_block_stats_by_level()
    assert (peak.unavailable, peak.available) == (2, total)
    manager.record_request_suspended()
    manager.record_request_resumed()
    manager.record_request_resumed()
    told = manager.get_and_reset_iteration_suspend_resume_stats()
    assert (told.num_suspended, told.num_resumed) == (1, 2)
    assert not manager.get_and_reset_iteration_suspend_resume_stats()


def test_state_snapshots_that_are_found_are_counted_by_alignment(device: str) -> None:
    layers = [layer(0, TPB), SsmLayerConfig(1, [BufferConfig("state", 512)])]
    engine = make_engine(device, layers=layers, num_blocks=128, commit_min_snapshot=True)
    prompts = [list(range(16)), [7] * 20]
    for prompt in prompts:
        engine.serve(prompt)
    for tokens in ([*prompts[0], 1], [*prompts[1], 1], [99]):
        sequence = engine.start(tokens)
        sequence.cache.commit_pending_stats()
        sequence.cache.close()
    stats = engine.manager.get_and_reset_ssm_snapshot_iteration_stats()
    assert (stats.lookups, stats.hits, stats.misses) == (3, 2, 1)
    assert (stats.aligned_hits, stats.unaligned_hits) == (1, 1)
    assert (stats.reused_tokens, stats.unreused_tokens) == (36, 3)


# ---- values


def test_buffer_ids_scopes_and_ranges_are_tuples() -> None:
    buffer = BufferId(3, "k")
    assert buffer == (3, "k")
    assert hash(buffer) == hash((3, "k"))
    assert (buffer[0], buffer[-1], len(buffer)) == (3, "k", 2)
    layer_id, role = buffer
    assert (layer_id, role) == buffer
    with pytest.raises(AttributeError):
        buffer.role = "v"  # type: ignore[misc]
    assert bool(HalfOpenRange(1, 1)) is False
    assert bool(HalfOpenRange(0, 1)) is True
    assert ReuseScope() == (None, None)
    assert MmItemContext(b"x").uuid is None


def test_aggregated_pages_are_runs_in_memory_order(device: str) -> None:
    layers = [layer(0, TPB, "k v"), layer(1, TPB, "k v"), layer(2, TPB, "k")]
    manager = KVCacheManager(make_config(device, layers=layers))
    assert manager.all_buffer_ids == [(0, "k"), (0, "v"), (1, "k"), (1, "v"), (2, "k")]
    (whole,) = manager.get_aggregated_pages(manager.all_buffer_ids)
    assert (whole.size, whole.stride) == (5 * TPB * 64, 5 * TPB * 64)
    assert whole.base == manager.pool_group_descs[0].pools[0].base_address
    first, second = manager.get_aggregated_pages([(2, "k"), (0, "v"), (1, "k")])  # type: ignore[list-item]
    assert [buffer.id for buffer in first.buffers] == [(0, "v"), (1, "k")]
    assert first.base == manager.get_mem_pool_base_address(0, "v")
    assert second.base == manager.get_mem_pool_base_address(2, "k")
    assert (first.layer_group_id, first.buffers[0].expansion) == (0, 1)
    with pytest.raises(ValueError, match="9"):
        list(manager.get_aggregated_pages([BufferId(9, "k")]))


def test_keys_of_a_chain_come_one_at_a_time_and_are_the_managers(device: str) -> None:
    engine = make_engine(device)
    tokens = list(range(20))
    read = 0

    class Counted(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal read
            read += 1
            return super().__getitem__(index)

    keys = sequence_to_blockchain_keys(TPB, ReuseScope(1, 2), Counted(tokens))
    assert isinstance(keys, Iterator)
    assert next(keys)[0] == []
    assert read == 0, "the root needs no token"
    block, first = next(keys)
    assert (block, read) == (tokens[:TPB], 1)
    engine.serve(tokens[:TPB], ReuseScope(1, 2))
    probe = engine.manager.probe_first_new_block_key
    assert probe(ReuseScope(1, 2), tokens) == next(keys)[1]
    assert probe(ReuseScope(1, 3), tokens) != first
    assert probe(ReuseScope(1, 2), tokens[:12]) is None
    assert len(list(keys)) == 1, "the part of a block at the end"


def test_media_are_told_apart_by_their_digest(device: str) -> None:
    engine = make_engine(device)
    cat, dog = bytes(range(32)), bytes(range(1, 33))
    prompts = [[5, *gen_multimodal_cache_key_tokens(1000, digest, 20), 6] for digest in (cat, dog)]
    assert [engine.serve(prompt) for prompt in [*prompts, *prompts]] == [0, 1, 22, 22]
    cache = engine.manager.create_kv_cache(None, prompts[0])
    assert cache.committed_tokens[:3] == [5, cat, 1001]
    with pytest.raises(ValueError, match="digest"):
        cache.text_only = True
    cache.close()
    assert engine.manager.probe_reuse(None, [5, cat, 1001]) == 3, "a bare digest is the same token"
    tail = gen_multimodal_cache_key_tokens(1000, cat, 3, token_offset=17)
    assert tail == [1017, 1018, 1019]
    for digest, count, offset in ((cat, 0, 0), (cat, 1, -1), (b"short", 1, 0)):
        with pytest.raises(ValueError):
            gen_multimodal_cache_key_tokens(1000, digest, count, offset)
    text = KVCacheManager(make_config(device, text_only=True))
    with pytest.raises(ValueError, match="text_only"):
        text.create_kv_cache(None, [cat])
    with pytest.raises(ValueError, match="text_only"):
        text.create_kv_cache(None, [1], text_only=False)


@pytest.mark.parametrize(("shared", "twice"), list(product((False, True), (False, True))))
def test_planned_drops_end_what_only_an_exact_continuation_needs(
    device: str, shared: bool, twice: bool
) -> None:
    layers = [layer(0, TPB), layer(1, TPB, sliding_window_size=2 * TPB)]
    engine = make_engine(device, layers=layers, num_blocks=256)
    prompt = list(range(4 * TPB))
    sequence = engine.start(prompt)
    with pytest.raises(LogicError, match="stop_committing"):
        sequence.cache.plan_committed_block_drop()
    assert engine.prefill(sequence)
    sequence.cache.stop_committing()
    plans = [sequence.cache.plan_committed_block_drop() for _ in range(1 + shared)]
    assert all(isinstance(plan, PlannedDropHandle) for plan in plans)
    sequence.cache.close()
    assert engine.manager.probe_reuse(None, prompt) == len(prompt)
    if shared:
        plans.pop().drop()  # type: ignore[union-attr]
        assert engine.manager.probe_reuse(None, prompt) == len(prompt), "the other plan has a say"
    plan = plans.pop()
    assert plan is not None
    if twice:
        plan.drop()
        with pytest.raises(LogicError):
            plan.drop()
    del plan
    assert engine.manager.probe_reuse(None, prompt) < len(prompt)


def test_no_tokens_give_no_plan(device: str) -> None:
    engine = make_engine(device)
    cache = engine.manager.create_kv_cache()
    assert cache.resume(engine.stream)
    cache.stop_committing()
    assert cache.plan_committed_block_drop() is None
    cache.close()


def test_page_tables_of_suspended_caches_are_bad_but_their_slots_are_known(device: str) -> None:
    engine = make_engine(device)
    sequence = engine.start(list(range(20)))
    assert engine.prefill(sequence)
    shown = sequence.cache.get_base_page_indices(0).tolist()
    sequence.cache.suspend()
    assert sequence.cache.get_base_page_indices(0).tolist() == [BAD_PAGE_INDEX] * 3
    assert list(sequence.cache.get_aggregated_page_indices(0)) == shown
    assert all(a != b for a, b in pairwise(shown))
    stream = SimpleNamespace(cuda_stream=engine.stream)
    assert sequence.cache.resume(stream), "anything with a cuda_stream is a stream"
    sequence.cache.close()
