"""The n sequences of a request: one computes the prompt, the others fork from it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from executor.driving import drain, tokens_of
from executor.fake_model import VOCAB, FakeModel, fake_engine, greedy_output
from helicore.executor.engine import Engine
from helicore.executor.kv_pool import KVPool
from helicore.sampling_params import SamplingParams


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def drawn(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def prompt_rows(model: FakeModel, length: int) -> int:
    """Rows of the first `length` positions that were computed."""
    return sum(min(first + count, length) - min(first, length) for first, count in model.computed)


def assert_nothing_is_left(engine: Engine) -> None:
    assert engine.counters.num_requests_running == engine.counters.num_requests_waiting == 0
    assert engine.counters.kv_pages_in_use == engine._pool.num_parked == 0
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 75])
def test_siblings_compute_no_row_of_their_prompt_but_the_last(length: int) -> None:
    engine, model = fake_engine(block_size=16)
    prompt = prompt_of(length)
    engine.add_request("a", prompt, greedy(20, n=4))
    results = drain(engine)
    assert len(results) == 4
    for updates in results.values():
        assert tokens_of(updates) == greedy_output(prompt, 20, eos=False)
    assert prompt_rows(model, length - 1) == length - 1
    assert prompt_rows(model, length) == length + 3
    assert engine.counters.forks == 3
    assert_nothing_is_left(engine)


def test_siblings_share_the_full_pages_and_copy_the_last_one() -> None:
    engine, _ = fake_engine(block_size=16)
    engine.add_request("a", prompt_of(75), drawn(30, n=4, seed=1))  # four full pages and a tail
    engine.step()
    engine.step()
    assert engine.counters.num_requests_running == 1
    engine.step()
    assert engine.counters.num_requests_running == 4
    assert engine.counters.kv_pages_in_use == 4 + 4
    for _ in range(10):
        engine.step()
    assert engine.counters.kv_pages_in_use == 4 + 4 + 4, "then each grows by its own"
    drain(engine)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("length", [32, 40])
def test_siblings_draw_what_single_requests_with_their_seeds_draw(length: int) -> None:
    """What each one gives does not depend on the pages of the others."""
    engine, _ = fake_engine(block_size=16)
    prompt = prompt_of(length)
    engine.add_request("all", prompt, drawn(25, n=5, seed=11))
    seeds = [s.seed for s in engine._requests["all"].sequences]
    results = drain(engine)
    assert len({tuple(tokens_of(results["all", i])) for i in range(5)}) == 5
    for i, seed in enumerate(seeds):
        alone, _ = fake_engine(block_size=16)
        alone.add_request("x", prompt, drawn(25, seed=seed))
        assert tokens_of(drain(alone)["x", 0]) == tokens_of(results["all", i])


def test_siblings_run_side_by_side_from_the_second_step_on() -> None:
    engine, model = fake_engine()
    engine.add_request("a", prompt_of(20), greedy(10, n=5))
    drain(engine)
    assert model.batches[:2] == [(1, 20), (5, 5)]


def test_siblings_wait_for_lanes_with_their_pages() -> None:
    engine, model = fake_engine(max_num_seqs=2)
    prompt = prompt_of(40)
    engine.add_request("a", prompt, greedy(10, n=6))
    results = drain(engine)
    assert all(tokens_of(u) == greedy_output(prompt, 10, eos=False) for u in results.values())
    assert prompt_rows(model, 39) == 39
    assert_nothing_is_left(engine)


def test_siblings_finish_when_the_first_one_ends_at_once() -> None:
    engine, model = fake_engine()
    engine.add_request("a", prompt_of(20), greedy(1, n=3))
    results = drain(engine)
    assert len(results) == 3
    assert all(updates[-1].finish_reason == "length" for updates in results.values())
    assert prompt_rows(model, 19) == 19
    assert_nothing_is_left(engine)


def test_a_chunked_prompt_is_computed_once_for_all_siblings() -> None:
    engine, model = fake_engine(max_num_batched_tokens=16)
    prompt = prompt_of(100)
    engine.add_request("a", prompt, greedy(5, n=3))
    results = drain(engine)
    assert all(tokens_of(u) == greedy_output(prompt, 5, eos=False) for u in results.values())
    assert prompt_rows(model, 99) == 99


def test_siblings_survive_the_end_of_the_first_one() -> None:
    engine, model = fake_engine()
    call = FakeModel.__call__

    def poisoned(batch: Any, caches: Any) -> Any:
        logits = call(model, batch, caches)
        if len(batch.kv_len) == 1 and len(model.batches) == 1:
            logits[0, 7] = float("nan")
        return logits

    engine._runner._model = poisoned  # type: ignore[assignment]
    prompt = prompt_of(40)
    engine.add_request("a", prompt, greedy(12, n=4))
    results = drain(engine)
    assert "NaN" in (results["a", 0][-1].error or "")
    for index in range(1, 4):
        assert tokens_of(results["a", index]) == greedy_output(prompt, 12, eos=False)
    assert prompt_rows(model, 39) == 39, "its pages went on with the siblings"
    assert_nothing_is_left(engine)


def test_another_sibling_computes_the_prompt_when_the_first_one_fails() -> None:
    engine, model = fake_engine(max_num_batched_tokens=16)
    prompt = prompt_of(40)
    engine.add_request("a", prompt, greedy(6, n=3))
    engine.step()
    model.broken_token = prompt[20]
    engine.step()
    model.broken_token = None
    results = drain(engine)
    assert engine.counters.finished_abort == 1
    for index in (1, 2):
        assert tokens_of(results["a", index]) == greedy_output(prompt, 6, eos=False)
    assert engine.counters.forks == 1
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_an_abort_ends_all_siblings_in_any_phase(num_steps: int) -> None:
    engine, _ = fake_engine(max_num_seqs=2, max_num_batched_tokens=32)
    engine.add_request("a", prompt_of(40), greedy(50, n=5))
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    ended = [u.index for u in engine.step() if u.finish_reason == "abort"]
    assert ended == [0, 1, 2, 3, 4]
    assert not engine.has_unfinished()
    assert_nothing_is_left(engine)


def test_a_preempted_sibling_loses_no_token() -> None:
    params = drawn(60, n=4, seed=3)
    ample, _ = fake_engine()
    ample.add_request("a", prompt_of(40), params)
    expected = {key: tokens_of(updates) for key, updates in drain(ample).items()}
    engine, _ = fake_engine(num_pages=12, block_size=16)
    engine.add_request("a", prompt_of(40), params)
    assert {key: tokens_of(updates) for key, updates in drain(engine).items()} == expected
    assert engine.counters.preemptions > 0
    assert_nothing_is_left(engine)


def test_the_pages_of_waiting_siblings_never_block_an_older_request() -> None:
    """Two lanes, and forks that hold most of the pool for a request of lower priority."""
    engine, _ = fake_engine(num_pages=9, block_size=16, max_num_seqs=2)
    low, high = prompt_of(70, 1), prompt_of(70, 2)
    engine.add_request("low", low, greedy(8, n=4), priority=1)
    engine.step()
    first = engine.step()
    engine.add_request("high", high, greedy(30), priority=0)
    results = drain(engine, max_steps=200)
    assert tokens_of(results["high", 0]) == greedy_output(high, 30, eos=False)
    results["low", 0] = first + results["low", 0]
    for index in range(4):
        assert tokens_of(results["low", index]) == greedy_output(low, 8, eos=False)
    assert_nothing_is_left(engine)


def test_close_and_reset_mind_pages_of_siblings_without_a_lane() -> None:
    engine, _ = fake_engine(max_num_seqs=1)
    engine.add_request("a", prompt_of(40), greedy(10, n=3))
    engine.step()
    assert engine._pool.num_parked == 2
    assert not engine.reset_prefix_cache()
    engine.close()


def test_only_the_first_lookup_of_a_request_is_counted_and_reported() -> None:
    engine, _ = fake_engine()
    engine.add_request("a", prompt_of(70), greedy(3, n=3))
    drain(engine)
    engine.add_request("b", prompt_of(70), greedy(3, n=3))
    results = drain(engine)
    assert [results["b", i][0].num_cached_tokens for i in range(3)] == [69, None, None]
    assert engine.counters.prefix_cache_queries == engine.counters.prompt_tokens == 140
    assert engine.counters.prefix_cache_hits == 69


def test_siblings_work_without_prefix_caching() -> None:
    engine, model = fake_engine(enable_prefix_caching=False)
    prompt = prompt_of(50)
    engine.add_request("a", prompt, greedy(8, n=4))
    results = drain(engine)
    assert all(tokens_of(u) == greedy_output(prompt, 8, eos=False) for u in results.values())
    assert prompt_rows(model, 49) == 49


def test_prompt_logprobs_come_once_and_siblings_still_fork() -> None:
    engine, model = fake_engine()
    prompt = prompt_of(40)
    engine.add_request("a", prompt, greedy(5, n=3, prompt_logprobs=1))
    results = drain(engine)
    found = [[u.prompt_logprobs for u in results["a", i] if u.prompt_logprobs] for i in range(3)]
    assert [len(entries) for entries in found] == [1, 0, 0]
    assert len(found[0][0] or []) == 40
    assert prompt_rows(model, 39) == 39


def test_a_twin_that_writes_into_a_shared_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: all siblings in the pages of the first one."""
    resume = KVPool.resume

    def share(self: KVPool, lane: int, *arguments: Any) -> Any:
        result = resume(self, lane, *arguments)
        self.block_table[lane] = self.block_table[0]
        return result

    monkeypatch.setattr(KVPool, "resume", share)
    engine, _ = fake_engine()
    engine.add_request("a", prompt_of(40), drawn(12, n=3, seed=5))
    drain(engine)
    assert engine.counters.failed_steps > 0
