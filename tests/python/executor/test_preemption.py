"""Who gives way when lanes or pages lack, how much, and that somebody always gets on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from executor.driving import Updates, drain, tokens_of
from executor.fake_model import VOCAB, fake_engine, greedy_output
from helicore._core import InternalError
from helicore.executor.engine import Engine
from helicore.executor.kv_pool import KVPool
from helicore.executor.scheduler import Scheduler
from helicore.sampling_params import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def steps(engine: Engine, count: int, results: dict[tuple[str, int], Updates]) -> None:
    for _ in range(count):
        for update in engine.step():
            results.setdefault((update.request_id, update.index), []).append(update)


def finish(engine: Engine, results: dict[tuple[str, int], Updates]) -> list[str]:
    """Steps to the end; the requests in the order of their ends."""
    ended = []
    while engine.has_unfinished():
        for update in engine.step():
            results.setdefault((update.request_id, update.index), []).append(update)
            if update.finish_reason:
                ended.append(update.request_id)
    assert engine.counters.kv_pages_in_use == 0
    return ended


# --- priorities ------------------------------------------------------------------------------


def test_a_more_important_request_takes_the_lane_of_the_last_less_important_one() -> None:
    engine, _ = fake_engine(max_num_seqs=2)
    results: dict[tuple[str, int], Updates] = {}
    prompts = {name: prompt_of(20, i) for i, name in enumerate(["low", "lower", "high"])}
    engine.add_request("low", prompts["low"], greedy(30), priority=1)
    engine.add_request("lower", prompts["lower"], greedy(30), priority=2)
    steps(engine, 5, results)
    engine.add_request("high", prompts["high"], greedy(30), priority=0)
    steps(engine, 1, results)
    assert len(results["high", 0]) == 1, "it runs in the step after its arrival"
    assert engine.counters.preemptions == 1
    assert finish(engine, results) == ["low", "high", "lower"]
    for name, prompt in prompts.items():
        assert tokens_of(results[name, 0]) == greedy_output(prompt, 30, eos=False)


def test_a_more_important_request_takes_the_pages_of_less_important_ones() -> None:
    engine, _ = fake_engine(num_pages=10, block_size=16)
    results: dict[tuple[str, int], Updates] = {}
    prompts = {name: prompt_of(40, i) for i, name in enumerate(["a", "b", "high"])}
    for name in "ab":
        engine.add_request(name, prompts[name], greedy(30), priority=1)
    steps(engine, 5, results)
    assert engine.counters.num_requests_running == 2
    engine.add_request("high", prompts["high"], greedy(60), priority=0)
    steps(engine, 1, results)
    assert len(results["high", 0]) == 1
    assert (engine.counters.num_requests_running, engine.counters.preemptions) == (2, 1)
    finish(engine, results)
    for name, prompt in prompts.items():
        count = 60 if name == "high" else 30
        assert tokens_of(results[name, 0]) == greedy_output(prompt, count, eos=False)


def test_a_prompt_that_is_being_computed_gives_way_too() -> None:
    engine, _ = fake_engine(max_num_seqs=1, max_num_batched_tokens=16)
    results: dict[tuple[str, int], Updates] = {}
    engine.add_request("long", prompt_of(150, 1), greedy(5), priority=1)
    steps(engine, 3, results)
    engine.add_request("high", prompt_of(5, 2), greedy(5))
    steps(engine, 1, results)
    assert list(results) == [("high", 0)]
    assert finish(engine, results) == ["high", "long"]
    assert tokens_of(results["long", 0]) == greedy_output(prompt_of(150, 1), 5, eos=False)


@pytest.mark.parametrize("priority", [1, 2])
def test_equal_or_less_important_requests_preempt_nobody(priority: int) -> None:
    engine, _ = fake_engine(max_num_seqs=1)
    engine.add_request("first", prompt_of(20, 1), greedy(20), priority=1)
    engine.step()
    engine.add_request("second", prompt_of(20, 2), greedy(5), priority=priority)
    assert finish(engine, {}) == ["first", "second"]
    assert engine.counters.preemptions == 0


def test_nobody_is_preempted_for_a_request_that_would_still_not_fit() -> None:
    """The pages of the less important one are too few while the important one runs."""
    engine, _ = fake_engine(num_pages=12, block_size=16, max_num_batched_tokens=256)
    engine.add_request("important", prompt_of(110, 1), greedy(12), priority=0)
    engine.add_request("less", prompt_of(16, 2), greedy(30), priority=1)
    engine.step()
    assert engine.counters.num_requests_running == 2
    engine.add_request("large", prompt_of(100, 3), greedy(3), priority=0)
    engine.step()
    assert engine.counters.preemptions == 0
    assert finish(engine, {})[0] == "important"


def test_endless_important_traffic_holds_each_preempted_request_back_only_while_it_lasts() -> None:
    engine, _ = fake_engine(max_num_seqs=2)
    results: dict[tuple[str, int], Updates] = {}
    engine.add_request("low", prompt_of(30, 99), greedy(40), priority=5)
    for i in range(20):
        engine.add_request(f"high {i}", prompt_of(10, i), greedy(4))
        steps(engine, 3, results)
    finish(engine, results)
    assert tokens_of(results["low", 0]) == greedy_output(prompt_of(30, 99), 40, eos=False)


# --- how much is taken -----------------------------------------------------------------------


def fenced(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Pages of whoever leaves come free only after so many steps, and are told as pending."""
    release, schedule = KVPool.release, Scheduler.schedule
    held: list[list[Any]] = []

    def late_release(self: KVPool, lane: int, tokens: Any) -> None:
        (cache,) = self._of([lane])
        assert cache.resize(None, cache.capacity)
        twin = cache.fork()  # keeps all pages
        held.append([num_steps, twin, twin.num_blocks])
        release(self, lane, tokens)

    def tick(self: Scheduler) -> Any:
        for entry in list(held):
            entry[0] -= 1
            if entry[0] < 0:
                entry[1].close()
                held.remove(entry)
        return schedule(self)

    monkeypatch.setattr(KVPool, "release", late_release)
    monkeypatch.setattr(Scheduler, "schedule", tick)
    monkeypatch.setattr(KVPool, "pending_pages", lambda self: sum(entry[2] for entry in held))


def deficit_engine() -> Engine:
    """Four sequences that fill nine pages and of which one needs a tenth at a time."""
    engine, _ = fake_engine(num_pages=13, block_size=16, max_num_batched_tokens=256)
    for i in range(4):
        engine.add_request(str(i), prompt_of(33 + i, i), greedy(40))
    return engine


def test_pages_that_are_about_to_come_keep_others_from_being_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fenced(monkeypatch, 2)
    engine = deficit_engine()
    results: dict[tuple[str, int], Updates] = {}
    most, before = 0, 0
    while engine.has_unfinished():
        steps(engine, 1, results)
        most = max(most, engine.counters.preemptions - before)
        before = engine.counters.preemptions
    assert engine.counters.preemptions > 0
    assert most == 1, "one page was missing, one sequence had to leave"
    for i in range(4):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt_of(33 + i, i), 40, eos=False)


def test_a_loop_that_forgets_pending_pages_preempts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    fenced(monkeypatch, 2)
    monkeypatch.setattr(KVPool, "pending_pages", lambda self: 0)
    engine = deficit_engine()
    with pytest.raises(InternalError, match="an idle pool has no room"):
        drain(engine)


# --- liveness --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_some_request_finishes_within_a_bound_whatever_holds_the_pages(seed: int) -> None:
    """Half-loaded prompts, forks without lanes, preempted ones: none of them stops the others."""
    rng = random.Random(seed)
    engine, _ = fake_engine(
        num_pages=rng.choice([8, 10, 13]),
        block_size=16,
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=rng.choice([8, 32]),
    )
    expected = {}
    for i in range(16):
        prompt = prompt_of(rng.randrange(1, 70), 100 * seed + i)
        n, count = rng.choice([1, 1, 2, 4]), rng.randrange(1, 25)
        params = SamplingParams(n=n, temperature=0, max_tokens=count, ignore_eos=True)
        engine.add_request(str(i), prompt, params, priority=rng.choice([0, 0, 1]))
        room = engine.limits.max_model_len - len(prompt)
        for index in range(n):
            expected[str(i), index] = greedy_output(prompt, min(count, room), eos=False)
    got: dict[tuple[str, int], Updates] = {}
    since_end = longest = 0
    while engine.has_unfinished():
        ended = engine.counters.finished_length
        steps(engine, 1, got)
        since_end = 0 if engine.counters.finished_length > ended else since_end + 1
        longest = max(longest, since_end)
        assert longest < 100
    # 94 tokens at half a budget of 8 a step, and 24 decodes, for the first in order.
    assert longest <= 94 // 4 + 24 + 10
    assert {key: tokens_of(updates) for key, updates in got.items()} == expected
    assert engine._pool.num_parked == 0
    assert engine.reset_prefix_cache()


def test_two_half_loaded_requests_never_wait_for_each_other() -> None:
    """Each prompt fits alone, both do not: the second one is not let in half."""
    engine, _ = fake_engine(num_pages=11, block_size=16, max_num_batched_tokens=32)
    prompts = [prompt_of(120, i) for i in range(2)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(5))
    engine.step()
    engine.step()
    assert engine.counters.num_requests_running == 1
    results = drain(engine, max_steps=60)
    assert [name for name, _ in results] == ["0", "1"]
    assert engine.counters.preemptions == 0
