"""Single sequences, reuse and guards through the published names, values checked at every step."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from kv.adaptor import (
    BAD_PAGE_INDEX,
    AttentionLifeCycle,
    BatchDesc,
    BufferConfig,
    CacheStatus,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    LogicError,
    OutOfMemoryError,
    OutOfPagesError,
    PageIndexMode,
    ResourceBusyError,
    ReuseScope,
    SsmLayerConfig,
)
from kv.engine import (
    ROW,
    Engine,
    Sequence,
    colder_tiers,
    free_slots,
    hot_tier,
    layer,
    make_config,
)

TPB = 8


def make_engine(device: str, **options: object) -> Engine:
    return Engine(KVCacheManager(make_config(device, **options)), delay=200_000)  # type: ignore[arg-type]


def quant_layer(layer_id: int, **options: object):  # type: ignore[no-untyped-def]
    """A layer with a buffer of scales, one row per block, beside its rows per token."""
    made = layer(layer_id, TPB, "k v", **options)
    made.buffers.append(BufferConfig("scale", TPB * 8))
    return made


@pytest.mark.parametrize(
    ("external", "quant", "delayed"), list(product((False, True), (False, True), (False, True)))
)
def test_decode_reads_back_every_value_it_wrote(
    device: str, external: bool, quant: bool, delayed: bool
) -> None:
    make = quant_layer if quant else lambda i, **o: layer(i, TPB, **o)
    layers = [make(0), make(1, sliding_window_size=11, num_sink_tokens=3), make(2)]
    engine = make_engine(device, layers=layers)
    sequence = engine.start([])
    cache = sequence.cache
    assert cache.resume(engine.stream)
    if external:
        for group in range(len(engine.manager.layer_grouping)):
            sequence.tables[group] = np.full(64, 77, np.int32)
            cache.set_base_page_index_buf(0, group, sequence.tables[group])
            assert (sequence.tables[group] == BAD_PAGE_INDEX).all()
    for token in range(60):
        assert engine.decode(sequence, token, commit=not delayed or token % 7 == 6)
    if delayed:
        cache.commit(sequence.tokens[cache.num_committed_tokens :])
    engine.verify()
    assert engine.num_checked > 60 * 20
    assert cache.committed_tokens == list(range(60))
    cache.close()
    for table in sequence.tables.values():
        assert (table == BAD_PAGE_INDEX).all()
    engine.manager.shutdown()


def test_a_page_of_another_sequence_is_noticed(device: str) -> None:
    engine = make_engine(device)
    one, two = engine.start([]), engine.start([])
    for sequence in (one, two):
        assert sequence.cache.resume(engine.stream)
    for token in range(9):
        assert engine.decode(one, token, commit=False)
        assert engine.decode(two, token + 100, commit=False)
    one.tables[0] = two.cache.get_base_page_indices(0)
    engine.decode(one, 9, commit=False)
    with pytest.raises(AssertionError, match="wrong values"):
        engine.verify()


def test_capacity_shrinks_token_by_token(device: str) -> None:
    engine = make_engine(device)
    sequence = engine.start([])
    cache = sequence.cache
    assert cache.resume(engine.stream)
    before = free_slots(engine.manager)
    cache.capacity = 40
    for capacity in range(39, -1, -1):
        cache.capacity = capacity
        assert cache.num_blocks == -(-capacity // TPB)
        assert free_slots(engine.manager) == before - cache.num_blocks
        assert len(cache.get_base_page_indices(0)) == cache.num_blocks
    assert engine.decode(sequence, 5)
    cache.close()


def test_tables_are_cut_when_capacity_shrinks(device: str) -> None:
    engine = make_engine(device)
    cache = engine.start([]).cache
    assert cache.resume(engine.stream)
    assert cache.resize(40)
    with pytest.raises(ValueError, match="at least 5"):
        cache.set_base_page_index_buf(0, 0, np.zeros(4, np.int32))
    row = np.full(9, 7, np.int32)
    shown = cache.get_base_page_indices(0).tolist()
    cache.set_base_page_index_buf(0, 0, row)
    assert row.tolist() == [*shown, -1, -1, -1, -1]
    assert cache.resize(17)
    assert row.tolist() == [*shown[:3], -1, -1, -1, -1, -1, -1]
    with pytest.raises(ValueError, match="page table entries"):
        cache.resize(80)
    cache.set_base_page_index_buf(0, 0, None)
    assert cache.resize(80)
    assert cache.get_base_page_indices(0).tolist()[:3] == shown[:3]
    assert row.tolist()[:3] == shown[:3], "a detached row is nobody's any more"
    cache.close()


def test_a_tiny_quota_is_raised_to_what_is_needed(device: str) -> None:
    config = make_config(device)
    config.cache_tiers = [hot_tier(device, 1)]
    manager = KVCacheManager(config)
    assert manager.get_quota(0) >= 2 * 2 * TPB * ROW
    assert Engine(manager).serve([1, 2, 3]) == 0


@pytest.mark.parametrize("with_colder", [False, True])
def test_one_token_more_than_fits_raises_out_of_pages(
    device: str, with_colder: bool, tmp_path: Path
) -> None:
    colder = colder_tiers(str(tmp_path), 1 << 20) if with_colder else []
    engine = make_engine(device, colder=colder, max_util_for_resume=1.0)
    waiting = engine.start(list(range(20)))
    assert engine.prefill(waiting)
    waiting.cache.suspend()
    running = engine.start([])
    assert running.cache.resume(engine.stream)
    total = engine.manager.get_storage_statistics(0)[0].total
    fits = total if with_colder else total - 3
    running.cache.capacity = fits * TPB
    with pytest.raises(OutOfPagesError) as caught:
        running.cache.capacity = fits * TPB + 1
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.reason is not None
    assert caught.value.reason.level == 0
    assert running.cache.capacity == fits * TPB
    assert running.cache.resize(fits * TPB + 1) is False
    running.cache.close()
    assert waiting.cache.resume(engine.stream)
    assert engine.decode(waiting, 99)
    engine.verify()
    waiting.cache.close()


def test_resume_waits_while_one_pool_group_is_full_though_the_others_are_not(device: str) -> None:
    layers = [layer(0, TPB), layer(1, TPB, "k", sliding_window_size=TPB)]
    engine = make_engine(
        device,
        layers=layers,
        num_blocks=256,
        max_util_for_resume=0.9,
        initial_pool_ratio=[0.5, 0.5],
    )
    manager = engine.manager
    running = engine.start([])
    assert running.cache.resume(engine.stream)
    full = manager.get_life_cycle_pool_group_indices(0)[0]
    total = manager.get_storage_statistics(0)[full].total
    history = int(total * 0.95) * TPB
    assert running.cache.resize(history, history)
    used = [s.unavailable / s.total for s in manager.get_storage_statistics(0)]
    assert used[full] > 0.9 > max(u for g, u in enumerate(used) if g != full)
    other = engine.start([1])
    assert other.cache.resume(engine.stream) is False
    assert other.cache.status == CacheStatus.SUSPENDED
    running.cache.close()
    assert other.cache.resume(engine.stream)
    other.cache.close()


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_later_requests_reuse_earlier_ones(device: str, requests: int) -> None:
    engine = make_engine(device)
    prompt = list(range(21))
    for number in range(requests):
        assert engine.serve([*prompt, *range(100 * number, 100 * number + 9)]) == (
            21 if number else 0
        )
    for group in engine.manager.get_storage_statistics(0):
        assert group.unavailable == 0, "what closed caches left can all be dropped"
        assert group.evictable > 0
    engine.manager.clear_reusable_blocks()
    assert all(g.free == g.total for g in engine.manager.get_storage_statistics(0))
    assert engine.serve(prompt) == 0


@pytest.mark.parametrize("backoff", [0, 1, 5, 30])
def test_a_match_backs_off_and_probe_tells_the_same(device: str, backoff: int) -> None:
    engine = make_engine(device, reuse_match_backoff=backoff)
    prompt = list(range(20))
    engine.serve(prompt)
    expected = max(0, 20 - backoff)
    assert engine.manager.probe_reuse(None, prompt) == expected
    assert engine.serve([*prompt]) == expected
    assert engine.manager.probe_reuse(None, prompt[:3]) == max(0, 3 - backoff)


def test_arrays_lists_and_tuples_are_the_same_tokens(device: str) -> None:
    engine = make_engine(device)
    for i, (first, second) in enumerate(
        product((list, tuple, lambda t: np.array(t, np.int32)), repeat=2)
    ):
        tokens = [i, *range(17)]
        cache = engine.manager.create_kv_cache(None, first(tokens))
        assert cache.resume(engine.stream)
        assert cache.resize(18)
        cache.commit(first(tokens))
        cache.close()
        assert engine.manager.probe_reuse(None, second(tokens)) == 18
        again = engine.manager.create_kv_cache(None, second(tokens))
        assert again.committed_tokens == tokens
        again.close()


def test_scopes_that_differ_in_anything_share_nothing(device: str) -> None:
    engine = make_engine(device, num_blocks=200)
    tokens = list(range(16))
    scopes = [ReuseScope(lora, salt) for lora, salt in product((None, 0, 1), (None, 0, 1))]
    for scope in scopes:
        assert engine.serve(tokens, scope) == 0
    for scope in scopes:
        assert engine.serve(tokens, scope) == 16

    class Duck:
        lora_id = 1
        salt = None

    assert engine.manager.probe_reuse(1, tokens) == 16, "a number is an adapter"
    assert engine.manager.probe_reuse(Duck(), tokens) == 16
    assert engine.manager.probe_reuse(ReuseScope(7, 7), tokens) == 0
    cache = engine.manager.create_kv_cache(ReuseScope(1, 0), tokens)
    assert cache.reuse_scope == (1, 0)
    cache.close()


def test_the_priority_callback_is_given_life_cycles(device: str) -> None:
    layers = [layer(0, TPB), layer(1, TPB, sliding_window_size=20, num_sink_tokens=9)]
    engine = make_engine(device, layers=layers)
    seen: list[tuple[int, object]] = []

    def priority(ordinal: int, life_cycle: object) -> int:
        seen.append((ordinal, life_cycle))
        return 40

    cache = engine.manager.create_kv_cache(None, [1], custom_priority_callback=priority)
    assert (0, AttentionLifeCycle(None, 0, 0)) in seen
    assert (0, AttentionLifeCycle(20, 2, 1)) in seen
    cache.close()


def test_caches_without_a_stream_and_closed_twice_leave_nothing_behind(device: str) -> None:
    engine = make_engine(device)
    never = engine.manager.create_kv_cache()
    with pytest.raises(ValueError, match="cuda_stream"):
        never.resume()
    never.close()
    never.close()
    assert never.status == CacheStatus.CLOSED
    for call in (lambda: never.resume(engine.stream), never.suspend, lambda: never.resize(1)):
        with pytest.raises(LogicError, match="CLOSED"):
            call()
    sequence = engine.start(list(range(9)))
    assert engine.prefill(sequence)
    sequence.cache.suspend()
    assert sequence.cache.resume(), "the stream is remembered"
    sequence.cache.close()
    engine.verify()
    assert all(g.unavailable == 0 for g in engine.manager.get_storage_statistics(0))
    engine.manager.shutdown()


def test_layers_with_kernel_pages_of_other_sizes_are_reused_alike(device: str) -> None:
    def paged(layer_id: int, override: int | None, **options: object):  # type: ignore[no-untyped-def]
        made = layer(layer_id, TPB, "", **options)
        rows = override or TPB
        made.buffers = [BufferConfig(r, rows * ROW, override) for r in ("k", "v")]
        return made

    layers = [paged(0, None), paged(1, 2), paged(2, 4, sliding_window_size=12), paged(3, 1)]
    step = BatchDesc([KVCacheDesc(80, 0)])
    engine = make_engine(device, layers=layers, num_blocks=256, typical_step=step)
    assert engine.manager.get_page_index_converter(1, "k").expansion == 4
    prompt = list(range(30))
    assert engine.serve(prompt) == 0
    assert engine.serve([*prompt, *range(50)]) == 30
    converter = engine.manager.get_page_index_converter(1, "k")
    per_layer = converter([3, -1], PageIndexMode.PER_LAYER)
    shared = converter([3, -1])
    offset_pages = converter.layer_offset * converter.expansion
    assert [a - b for a, b in zip(per_layer, shared, strict=True)] == [offset_pages] * 4 + [0] * 4
    base = engine.manager.get_mem_pool_base_address
    offset = base(1, "k") - base(1, "k", PageIndexMode.PER_LAYER)
    assert offset == offset_pages * engine.manager.get_page_stride(1, "k")


def test_a_second_pass_over_many_prompts_finds_all_of_them(device: str) -> None:
    engine = make_engine(device, num_blocks=20 * 130)
    prompts = [[seed * 5000 + i for i in range(1000)] for seed in range(20)]
    assert [engine.serve(prompt) for prompt in prompts] == [0] * 20
    assert [engine.serve(prompt) for prompt in prompts] == [1000] * 20


def test_min_snapshot_keeps_what_its_exact_length_needs(device: str) -> None:
    layers = [layer(0, TPB), SsmLayerConfig(1, [BufferConfig("state", 512)])]
    engine = make_engine(device, layers=layers, num_blocks=128, commit_min_snapshot=True)
    prompt = list(range(20))
    assert engine.serve(prompt) == 0
    assert engine.manager.probe_reuse(None, prompt[:12]) == 0
    assert engine.serve([*prompt, 1, 2]) == 20
    stats = engine.manager.get_and_reset_ssm_snapshot_iteration_stats()
    assert stats.lookups == 0, "nobody committed the statistics"


@pytest.mark.parametrize("call", ["clear_reusable_blocks", "shutdown"])
def test_open_caches_stop_clear_and_shutdown_with_their_number(device: str, call: str) -> None:
    engine = make_engine(device)
    tokens = list(range(16))
    engine.serve(tokens)
    caches = [engine.manager.create_kv_cache() for _ in range(3)]
    with pytest.raises(ResourceBusyError, match=rf"{call}.*3 caches"):
        getattr(engine.manager, call)()
    assert engine.manager.probe_reuse(None, tokens) == 16, "nothing was changed"
    caches[0].close()
    with pytest.raises(ResourceBusyError, match="2 caches"):
        getattr(engine.manager, call)()
    assert caches[0].status == CacheStatus.CLOSED, "the object lives on, uncounted"
    for cache in caches[1:]:
        cache.close()
    getattr(engine.manager, call)()
    if call == "shutdown":
        with pytest.raises(LogicError, match="shut down"):
            engine.manager.create_kv_cache()
    else:
        assert engine.manager.probe_reuse(None, tokens) == 0


def test_values_survive_levels_below(device: str, tmp_path: Path) -> None:
    engine = make_engine(
        device, num_blocks=8, colder=colder_tiers(str(tmp_path), 8 << 20), max_util_for_resume=1.0
    )
    total = engine.manager.get_storage_statistics(0)[0].total
    length = total * TPB // 2
    sequences: list[Sequence] = []
    for number in range(6):
        sequence = engine.start([number * 10_000 + i for i in range(length)])
        assert engine.prefill(sequence)
        sequence.cache.suspend()
        sequences.append(sequence)
    for sequence in sequences:
        assert sequence.cache.resume(engine.stream)
        assert engine.decode(sequence, 3)
        engine.verify()
        sequence.cache.suspend()
    assert sequences[0].cache.prefetch(0)
    for sequence in sequences:
        sequence.cache.close()
    moved = engine.manager.get_and_reset_iteration_stats()[0]
    assert moved.iter_offload_blocks > 0
    assert moved.iter_onboard_blocks > 0
    assert moved.iter_onboard_bytes == moved.iter_onboard_blocks * 2 * 2 * TPB * ROW


def test_a_stream_switch_orders_the_work_of_both(device: str) -> None:
    engine = make_engine(device)
    other = Engine(engine.manager)
    sequence = engine.start(list(range(40)))
    assert engine.prefill(sequence)
    sequence.cache.cuda_stream = other.stream
    assert sequence.cache.cuda_stream == other.stream
    for token in range(10):
        assert other.decode(sequence, token)
    other.verify()
    engine.verify()
    sequence.cache.close()


def test_config_objects_are_copied_and_can_be_changed(device: str) -> None:
    config: KVCacheManagerConfig = make_config(device)
    config.assert_valid()
    manager = KVCacheManager(config)
    config.tokens_per_block = 99
    config.layers[0].layer_id = 1
    assert manager.init_config.tokens_per_block == TPB
    assert manager.layer_ids == [0, 1]
    manager.init_config.tokens_per_block = 5
    assert manager.tokens_per_block == TPB
    with pytest.raises(ValueError, match="layer_id"):
        config.assert_valid()
