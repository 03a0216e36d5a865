"""What the scheduler promises, on a model that checks every cache row it reads."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from executor.driving import drain, tokens_of
from executor.fake_model import MAX_LEN, VOCAB, fake_engine, greedy_output
from helicore.executor.engine import Engine
from helicore.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def assert_no_page_is_lost(engine: Engine) -> None:
    assert engine.counters.num_requests_running == engine.counters.num_requests_waiting == 0
    assert engine.counters.kv_pages_in_use == 0
    assert engine.reset_prefix_cache()


def test_one_request_gives_the_tokens_that_the_model_defines() -> None:
    engine, _ = fake_engine()
    prompt = prompt_of(37)
    engine.add_request("a", prompt, greedy(20))
    updates = drain(engine)["a", 0]
    expected = greedy_output(prompt, 20)
    assert tokens_of(updates) == expected
    assert updates[-1].finish_reason == ("stop" if expected[-1] == 1 else "length")
    assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
    assert_no_page_is_lost(engine)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine, model = fake_engine(max_num_batched_tokens=16)
    prompt = prompt_of(100)
    engine.add_request("a", prompt, GREEDY)
    assert tokens_of(drain(engine)["a", 0]) == greedy_output(prompt, 10, eos=False)
    assert max(tokens for _, tokens in model.batches) == 16
    assert sum(length for first, length in model.computed if first < 100) == 100


@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128])
def test_every_page_size_gives_the_same_tokens(block_size: int) -> None:
    engine, _ = fake_engine(block_size=block_size, num_pages=max(8, 512 // block_size))
    for i in range(6):
        engine.add_request(str(i), prompt_of(10 + 17 * i, i), greedy(30))
    results = drain(engine)
    for i in range(6):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt_of(10 + 17 * i, i), 30)
    assert_no_page_is_lost(engine)


def test_no_step_exceeds_the_token_budget_or_the_number_of_sequences() -> None:
    engine, model = fake_engine(max_num_seqs=4, max_num_batched_tokens=20)
    for i in range(12):
        engine.add_request(str(i), prompt_of(1 + 7 * i, i), GREEDY)
    drain(engine)
    assert max(tokens for _, tokens in model.batches) <= 20
    assert max(requests for requests, _ in model.batches) <= 4


def test_requests_of_equal_priority_start_in_the_order_of_arrival() -> None:
    engine, _ = fake_engine(max_num_seqs=1)
    for name in "abc":
        engine.add_request(name, prompt_of(5, ord(name)), GREEDY)
    assert [name for name, _ in drain(engine)] == ["a", "b", "c"]


def test_a_smaller_priority_runs_first() -> None:
    engine, _ = fake_engine(max_num_seqs=1)
    for name, priority in (("late", 5), ("first", -1), ("second", 0)):
        engine.add_request(name, prompt_of(5, priority + 9), GREEDY, priority=priority)
    assert [name for name, _ in drain(engine)] == ["first", "second", "late"]


def test_a_second_request_with_the_same_prompt_computes_only_its_last_tokens() -> None:
    engine, model = fake_engine()
    prompt = prompt_of(70)
    engine.add_request("cold", prompt, GREEDY)
    cold = drain(engine)["cold", 0]
    model.computed.clear()
    engine.add_request("warm", prompt, GREEDY)
    warm = drain(engine)["warm", 0]
    assert tokens_of(warm) == tokens_of(cold)
    assert cold[0].num_cached_tokens == 0
    assert warm[0].num_cached_tokens == 69, "the last prompt token is always computed"
    assert model.computed[0] == (69, 1)
    assert engine.counters.prefix_cache_hits == 69
    assert engine.counters.prefix_cache_queries == 140


def test_a_conversation_reuses_the_tokens_that_were_generated() -> None:
    engine, model = fake_engine()
    prompt = prompt_of(40)
    engine.add_request("one", prompt, GREEDY)
    longer = prompt + tokens_of(drain(engine)["one", 0]) + prompt_of(3, 9)
    model.computed.clear()
    engine.add_request("two", longer, GREEDY)
    assert tokens_of(drain(engine)["two", 0]) == greedy_output(longer, 10, eos=False)
    assert model.computed[0][0] == 49, "all rows but that of the last sampled token were there"


def test_without_prefix_caching_nothing_is_reused() -> None:
    engine, _ = fake_engine(enable_prefix_caching=False)
    for name in "ab":
        engine.add_request(name, prompt_of(70), GREEDY)
        assert drain(engine)[name, 0][0].num_cached_tokens == 0
    assert_no_page_is_lost(engine)


def test_different_reuse_scopes_share_nothing() -> None:
    from helicore.kv import ReuseScope

    engine, _ = fake_engine()
    found = []
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        scope = None if salt is None else ReuseScope(salt=salt)
        engine.add_request(name, prompt_of(70), GREEDY, reuse_scope=scope)
        found.append(drain(engine)[name, 0][0].num_cached_tokens)
    assert found == [0, 0, 0, 69]


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    engine, _ = fake_engine(num_pages=9, block_size=16)
    prompts = [prompt_of(40, i) for i in range(3)]  # three pages each, five when done
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(40, ignore_eos=True))
    results = drain(engine)
    for i, prompt in enumerate(prompts):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt, 40, eos=False)
    assert engine.counters.preemptions > 0
    assert_no_page_is_lost(engine)


def test_one_missing_page_preempts_exactly_one_sequence() -> None:
    engine, _ = fake_engine(num_pages=8, block_size=16, max_num_batched_tokens=256)
    engine.add_request("old", prompt_of(47, 1), greedy(30, ignore_eos=True))
    engine.add_request("young", prompt_of(45, 2), greedy(30, ignore_eos=True))
    running = []
    while engine.has_unfinished():
        engine.step()
        running.append(engine.counters.num_requests_running)
    assert engine.counters.preemptions == 1
    assert running[:5] == [2] * 5
    assert 0 not in running[: running.index(1)]


def test_a_less_important_sequence_is_preempted_before_a_younger_one() -> None:
    engine, _ = fake_engine(num_pages=9, block_size=16)
    engine.add_request("low", prompt_of(40, 1), greedy(40, ignore_eos=True), priority=1)
    engine.step()
    engine.add_request("high", prompt_of(40, 2), greedy(40, ignore_eos=True), priority=0)
    order = []
    while engine.has_unfinished():
        order += [u.request_id for u in engine.step() if u.finish_reason]
    assert order == ["high", "low"]


def test_preempted_work_is_recomputed_through_the_prefix_tree() -> None:
    engine, model = fake_engine(num_pages=10, block_size=16)
    for i in range(2):
        engine.add_request(str(i), prompt_of(60, i), greedy(30, ignore_eos=True))
    drain(engine)
    assert engine.counters.preemptions > 0
    assert any(first > 0 and length > 1 for first, length in model.computed)


def test_half_admitted_prompts_can_not_block_each_other() -> None:
    engine, _ = fake_engine(num_pages=11, block_size=16, max_num_batched_tokens=32)
    prompts = [prompt_of(120, i) for i in range(2)]  # eight pages each, ten in the pool
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(5))
    results = drain(engine, max_steps=60)
    for i, prompt in enumerate(prompts):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt, 5)
    assert engine.counters.preemptions == 0


def test_a_sequence_that_fills_the_pool_alone_runs_to_its_end() -> None:
    engine, _ = fake_engine(num_pages=5, block_size=16)
    assert engine.limits.max_model_len == 64
    prompt = prompt_of(50)
    for name in "abc":
        engine.add_request(name, prompt, greedy(100, ignore_eos=True))
    results = drain(engine)
    for name in "abc":
        assert tokens_of(results[name, 0]) == greedy_output(prompt, 14, eos=False)
        assert results[name, 0][-1].finish_reason == "length"
    assert_no_page_is_lost(engine)


def test_the_model_length_ends_a_sequence() -> None:
    engine, _ = fake_engine()
    engine.add_request("a", prompt_of(MAX_LEN - 3), SamplingParams(max_tokens=None, temperature=0))
    updates = drain(engine)["a", 0]
    assert len(tokens_of(updates)) <= 3
    assert updates[-1].finish_reason in ("length", "stop")


def test_abort_ends_a_request_in_every_phase() -> None:
    engine, _ = fake_engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add_request("decoding", prompt_of(4, 1), greedy(100, ignore_eos=True))
    engine.step()
    engine.add_request("prefilling", prompt_of(150, 2), GREEDY)
    engine.step()
    engine.add_request("waiting", prompt_of(4, 3), greedy(5, n=3))
    engine.step()
    for name in ("decoding", "prefilling", "waiting", "never heard of"):
        engine.abort(name)
    assert engine.has_unfinished()
    updates = engine.step()
    assert [(u.request_id, u.finish_reason) for u in updates] == [
        ("decoding", "abort"),
        ("prefilling", "abort"),
        *[("waiting", "abort")] * 3,
    ]
    assert not engine.has_unfinished()
    assert_no_page_is_lost(engine)


def test_an_aborted_request_leaves_its_computed_tokens_for_reuse() -> None:
    engine, _ = fake_engine(max_num_batched_tokens=16)
    engine.add_request("a", prompt_of(100), GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.add_request("b", prompt_of(100), GREEDY)
    assert (drain(engine)["b", 0][0].num_cached_tokens or 0) >= 48


def test_close_frees_everything_with_requests_in_flight() -> None:
    engine, _ = fake_engine()
    engine.add_request("a", prompt_of(30), GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_unfinished()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("b", prompt_of(3), GREEDY)


def test_batches_of_equal_size_but_other_kernels_are_told_apart() -> None:
    """Chunks of 3 + 61 and of 30 + 34 tokens have the same totals, not the same division."""
    engine, model = fake_engine(max_num_batched_tokens=64)
    for i, lengths in enumerate([(3, 61), (30, 34), (3, 61)]):
        for j, length in enumerate(lengths):
            engine.add_request(f"{i} {j}", prompt_of(length, 10 * i + j), greedy(1))
        drain(engine)  # the model checks num_absorbed_tokens
    assert model.batches == [(2, 64)] * 3


def test_steady_decode_steps_share_one_batch_object() -> None:
    """Models replay a recorded step when the same object comes again."""
    engine, model = fake_engine()
    for i in range(3):
        engine.add_request(str(i), prompt_of(20, i), greedy(20, ignore_eos=True))
    engine.step()
    seen = []
    for _ in range(5):
        engine.step()
        seen.append(model.last_batch)
    assert all(batch is seen[0] for batch in seen)
    engine.abort("1")
    engine.step()
    assert model.last_batch is not seen[0]
    drain(engine)


def test_the_logits_of_prompts_in_one_step_are_bounded_together() -> None:
    engine, model = fake_engine()
    engine._scheduler._max_prompt_logit_rows = 10
    for i in range(3):
        params = greedy(3, ignore_eos=True, prompt_logprobs=0)
        engine.add_request(str(i), prompt_of(24, i), params)
    results = drain(engine)
    assert max(tokens for _, tokens in model.batches) <= 10 + 2, "ten rows and two decodes"
    for i in range(3):
        assert len(results[str(i), 0][0].prompt_logprobs or []) == 24


def test_the_benchmark_of_host_work_reports_every_case() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "routines" / "executor.py"
    spec = importlib.util.spec_from_file_location("executor_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    names = [row.name for row in module.run(2).results]
    assert {"executor_b1", "executor_b64", "executor_b64_cold", "sample_b64_queue10000"} < set(
        names
    )


def test_the_worked_example_of_the_design_document() -> None:
    engine, model = fake_engine(
        num_pages=6, block_size=16, max_num_seqs=4, max_num_batched_tokens=32
    )
    pool, a = engine._pool, prompt_of(40, 1)
    engine.add_request("A", a, greedy(12, ignore_eos=True))
    engine.add_request("B", prompt_of(24, 2), greedy(2, ignore_eos=True))
    engine.step()
    assert model.computed == [(0, 32)]
    assert pool.available_pages() == 3
    engine.step()
    assert model.computed[1:] == [(32, 8)]
    for position in range(40, 48):
        engine.step()
        assert model.computed[-1] == (position, 1)
        assert (pool.available_pages(), engine.counters.num_requests_waiting) == (3, 1)
    engine.step()
    assert (model.computed[-1], pool.available_pages()) == ((48, 1), 2)
    engine.step()
    ended = [(u.request_id, u.finish_reason) for u in engine.step()]
    assert (ended, engine.counters.num_steps) == ([("A", "length")], 13)
    assert pool.available_pages() == 6
    engine.step()
    assert model.computed[-1] == (0, 24)
    drain(engine)
    output = greedy_output(a, 12, eos=False)
    engine.add_request("C", (a + output)[:50], greedy(1))
    assert drain(engine)["C", 0][0].num_cached_tokens == 49
