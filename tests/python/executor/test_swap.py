"""Sequences that keep their pages while they wait: on lower levels, or where they are."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from executor.driving import Updates, drain, tokens_of
from executor.fake_model import VOCAB, FakeModel, fake_engine, greedy_output
from executor.test_properties import Traffic
from helicore.executor.engine import Engine
from helicore.executor.kv_pool import KVPool, Parked, Resumed
from helicore.sampling_params import SamplingParams

LEVELS = ["kept", "host", "disk", "host and disk"]
Make = Callable[..., tuple[Engine, FakeModel]]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


@pytest.fixture(params=LEVELS)
def options(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Options of an engine; "kept": no lower level, but pages are kept as if there were one."""
    if request.param == "kept":
        init = KVPool.__init__

        def pretend(self: KVPool, *arguments: Any) -> None:
            init(self, *arguments)
            self.has_lower_levels = True

        monkeypatch.setattr(KVPool, "__init__", pretend)
        monkeypatch.setattr(KVPool, "prefetch", lambda self, parked: None)
        monkeypatch.setattr(KVPool, "count_moves", lambda self, levels: None)
        return {}
    options: dict[str, Any] = {}
    if "host" in request.param:
        options["swap_pages"] = 64
    if "disk" in request.param:
        options |= {"swap_disk_pages": 64, "swap_path": tmp_path / "swap"}
    return options


def has_lower_level(options: dict[str, Any]) -> bool:
    return bool(options)


def assert_nothing_is_left(engine: Engine) -> None:
    assert engine.counters.num_requests_running == engine.counters.num_requests_waiting == 0
    assert engine.counters.kv_pages_in_use == engine._pool.num_parked == 0
    assert engine.reset_prefix_cache()


def rows(model: FakeModel) -> int:
    return sum(length for _, length in model.computed)


def test_a_preempted_sequence_goes_on_without_recomputation(options: dict[str, Any]) -> None:
    if not has_lower_level(options):
        pytest.skip("pages that stay on the only level give no room")
    engine, model = fake_engine(num_pages=7, block_size=16, **options)
    prompts = [prompt_of(12, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(70))
    results = drain(engine)
    for i, prompt in enumerate(prompts):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt, 70, eos=False)
    counters = engine.counters
    assert counters.preemptions == counters.suspends == counters.resumes > 3
    assert rows(model) == 6 * (12 + 69) - counters.prefix_cache_hits, "each row once"
    level = counters.levels[1]
    assert level.offloaded_pages > level.unwritten_pages > 0
    assert level.offloaded_bytes == (level.offloaded_pages - level.unwritten_pages) * 16 * 32 * 8
    assert level.onboarded_bytes == level.onboarded_pages * 16 * 32 * 8 > 0
    assert_nothing_is_left(engine)


def test_constant_swapping_gives_the_tokens_of_an_ample_pool(options: dict[str, Any]) -> None:
    engine, _ = fake_engine(num_pages=7, block_size=16, max_num_batched_tokens=16, **options)
    expected = {}
    for i in range(10):
        prompt = prompt_of(8 + i, i)
        engine.add_request(str(i), prompt, greedy(60), priority=i % 3)
        expected[str(i), 0] = greedy_output(prompt, 60, eos=False)
    got = {key: tokens_of(updates) for key, updates in drain(engine).items()}
    assert got == expected
    assert engine.counters.suspends > 3
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_every_request_its_own_tokens(
    options: dict[str, Any], seed: int
) -> None:
    engine = Traffic(seed, **options).run()
    assert_nothing_is_left(engine)


def test_the_random_traffic_reaches_suspends_resumes_and_forks(options: dict[str, Any]) -> None:
    counters = [Traffic(seed, **options).run().counters for seed in range(4)]
    assert sum(c.suspends for c in counters) > 5
    assert sum(c.forks for c in counters) > 5
    if has_lower_level(options):
        assert sum(c.resumes for c in counters) > 5


def test_a_fork_that_is_preempted_goes_on_where_it_was(options: dict[str, Any]) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=60, ignore_eos=True)
    ample, _ = fake_engine()
    ample.add_request("a", prompt_of(40), params)
    expected = {key: tokens_of(updates) for key, updates in drain(ample).items()}
    engine, _ = fake_engine(num_pages=12, block_size=16, **options)
    engine.add_request("a", prompt_of(40), params)
    assert {key: tokens_of(updates) for key, updates in drain(engine).items()} == expected
    assert engine.counters.suspends > 0
    assert_nothing_is_left(engine)


def test_a_more_important_request_suspends_a_less_important_one(options: dict[str, Any]) -> None:
    engine, model = fake_engine(max_num_seqs=1, max_num_batched_tokens=16, **options)
    results: dict[tuple[str, int], Updates] = {}
    engine.add_request("long", prompt_of(150, 1), greedy(5), priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("high", prompt_of(5, 2), greedy(5))
    results |= drain(engine)
    assert list(results) == [("high", 0), ("long", 0)]
    assert tokens_of(results["long", 0]) == greedy_output(prompt_of(150, 1), 5, eos=False)
    assert rows(model) == 150 + 4 + 5 + 4, "a prompt that was computed in part goes on there"
    assert (engine.counters.suspends, engine.counters.resumes) == (1, 1)
    assert_nothing_is_left(engine)


def test_prompt_logprobs_are_whole_after_a_suspension_in_the_middle(
    options: dict[str, Any],
) -> None:
    def entries(engine: Engine, results: dict[tuple[str, int], Updates]) -> list[Any]:
        (found,) = [u.prompt_logprobs for u in results["long", 0] if u.prompt_logprobs]
        return [None if e is None else (e.token_id, e.logprob) for e in found]

    params = greedy(3, prompt_logprobs=0)
    alone, _ = fake_engine(max_num_batched_tokens=16)
    alone.add_request("long", prompt_of(100, 1), params)
    expected = entries(alone, drain(alone))
    engine, _ = fake_engine(max_num_seqs=1, max_num_batched_tokens=16, **options)
    engine.add_request("long", prompt_of(100, 1), params, priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("high", prompt_of(5, 2), greedy(3))
    assert entries(engine, drain(engine)) == expected
    assert engine.counters.preemptions == 1


def test_an_abort_of_a_suspended_sequence_gives_its_pages_back(options: dict[str, Any]) -> None:
    engine, _ = fake_engine(max_num_seqs=1, **options)
    engine.add_request("low", prompt_of(40, 1), greedy(50), priority=1)
    for _ in range(5):
        engine.step()
    engine.add_request("high", prompt_of(40, 2), greedy(5))
    got = tokens_of(engine.step())
    assert engine._pool.num_parked == 1
    engine.abort("low")
    results = drain(engine)
    assert results["low", 0][-1].finish_reason == "abort"
    got += tokens_of(results["high", 0])
    assert got == greedy_output(prompt_of(40, 2), 5, eos=False)
    assert_nothing_is_left(engine)
    engine.add_request("again", prompt_of(40, 1), greedy(3))
    drain(engine)


def test_close_ends_suspended_sequences(options: dict[str, Any]) -> None:
    engine, _ = fake_engine(max_num_seqs=1, **options)
    engine.add_request("low", prompt_of(40, 1), greedy(50), priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("high", prompt_of(40, 2), greedy(50))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.close()


def test_a_resume_that_lost_data_recomputes_that_request_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, lost = KVPool.resume, []

    def lose(self: KVPool, lane: int, parked: Parked, *arguments: Any) -> Resumed:
        if parked.was_running and not lost:
            lost.append(parked)
            return Resumed.LOST
        return resume(self, lane, parked, *arguments)

    monkeypatch.setattr(KVPool, "resume", lose)
    engine, _ = fake_engine(num_pages=9, block_size=16, **options)
    prompts = [prompt_of(40, i) for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(40))
    results = drain(engine)
    for i, prompt in enumerate(prompts):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt, 40, eos=False)
    if has_lower_level(options):
        assert engine.counters.lost == 1
        assert engine.counters.resumes == engine.counters.suspends - 1
    assert_nothing_is_left(engine)


def break_files_in(folder: Path) -> int:
    """This process's open files without a name in `folder` refuse reads and writes from now on."""
    count = 0
    broken = os.open("/dev/full", os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", name)
        if link.is_symlink() and str(link.readlink()).startswith(f"{folder}/"):
            os.dup2(broken, int(name))
            count += 1
    os.close(broken)
    return count


def test_pages_that_can_not_be_read_back_are_computed_again(tmp_path: Path) -> None:
    engine, _ = fake_engine(
        num_pages=8, max_num_seqs=1, swap_disk_pages=64, swap_path=tmp_path / "swap"
    )
    results: dict[tuple[str, int], Updates] = {}
    low, high = prompt_of(60, 1), prompt_of(70, 2)
    engine.add_request("low", low, greedy(20), priority=1)
    for _ in range(5):
        for update in engine.step():
            results.setdefault((update.request_id, 0), []).append(update)
    engine.add_request("high", high, greedy(40))
    for _ in range(36):
        for update in engine.step():
            results.setdefault((update.request_id, 0), []).append(update)
    assert engine.counters.levels[1].offloaded_pages > 0
    assert break_files_in(tmp_path / "swap") > 0
    for key, updates in drain(engine).items():
        results.setdefault(key, []).extend(updates)
    assert tokens_of(results["high", 0]) == greedy_output(high, 40, eos=False)
    assert tokens_of(results["low", 0]) == greedy_output(low, 20, eos=False)
    assert (engine.counters.lost, engine.counters.resumes) == (1, 0)
    assert_nothing_is_left(engine)


def test_a_running_sequence_that_lost_rows_is_recomputed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserve = KVPool.reserve_many
    lost: list[int] = []

    def lose(self: KVPool, lanes: Any, num_tokens: list[int]) -> list[bool]:
        granted = reserve(self, lanes, num_tokens)
        if not lost and len(lanes) > 1:
            lost.append(lanes[1])
            self._of([lanes[1]])[0].suspend()  # as the manager leaves it
            granted[1] = False
        return granted

    monkeypatch.setattr(KVPool, "reserve_many", lose)
    engine, _ = fake_engine(block_size=16)
    for i in range(3):
        engine.add_request(str(i), prompt_of(24, i), greedy(20))
    results = drain(engine)
    for i in range(3):
        assert tokens_of(results[str(i), 0]) == greedy_output(prompt_of(24, i), 20, eos=False)
    assert (engine.counters.lost, engine.counters.preemptions) == (1, 0)
    assert_nothing_is_left(engine)


def test_a_full_lower_level_falls_back_to_recomputation(options: dict[str, Any]) -> None:
    if list(options) != ["swap_pages"]:
        pytest.skip("two pages on disk are rounded up to many")
    engine, _ = fake_engine(num_pages=9, block_size=16, swap_pages=2)
    expected = {}
    for i in range(8):
        prompt = prompt_of(30, i)
        engine.add_request(str(i), prompt, greedy(60))
        expected[str(i), 0] = greedy_output(prompt, 60, eos=False)
    assert {key: tokens_of(u) for key, u in drain(engine).items()} == expected
    assert engine.counters.suspends > engine.counters.resumes
    assert_nothing_is_left(engine)


def test_hits_are_reported_by_level(options: dict[str, Any]) -> None:
    if not has_lower_level(options):
        pytest.skip("there is one level")
    engine, _ = fake_engine(num_pages=6, block_size=16, max_model_len=80, **options)
    num_levels = len(engine.counters.levels)
    engine.add_request("a", prompt_of(64, 1), greedy(1))
    drain(engine)
    engine.add_request("b", prompt_of(70, 2), greedy(2))  # pushes pages of a down
    drain(engine)
    engine.add_request("a", prompt_of(64, 1), greedy(1))
    first = drain(engine)["a", 0][0]
    assert first.cached_tokens_by_level is not None
    assert len(first.cached_tokens_by_level) == num_levels
    assert first.num_cached_tokens == sum(first.cached_tokens_by_level) == 63
    assert sum(first.cached_tokens_by_level[1:]) > 0
    assert [level.hit_tokens for level in engine.counters.levels] == first.cached_tokens_by_level
    assert engine.counters.prefix_cache_hits == 63


def test_pages_of_the_next_sequence_come_up_while_others_run(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_lower_level(options):
        pytest.skip("there is nothing to bring up")
    fetched: list[Parked] = []
    prefetch = KVPool.prefetch

    def note(self: KVPool, parked: Parked) -> None:
        fetched.append(parked)
        prefetch(self, parked)

    monkeypatch.setattr(KVPool, "prefetch", note)
    engine, _ = fake_engine(num_pages=20, max_num_seqs=1, **options)
    engine.add_request("low", prompt_of(40, 1), greedy(10), priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("high", prompt_of(40, 2), greedy(10))
    engine.step()
    assert [parked.was_running for parked in fetched] == [True]
    drain(engine)
    assert engine.counters.resumes == 1


def test_a_page_that_comes_up_wrong_is_noticed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a resumed sequence with the pages of another one."""
    resume = KVPool.resume

    def mix_up(self: KVPool, lane: int, parked: Parked, *arguments: Any) -> Resumed:
        result = resume(self, lane, parked, *arguments)
        if parked.was_running and result is Resumed.RUNS:
            self.block_table[lane, :2] = self.block_table[lane, 1::-1].copy()
        return result

    monkeypatch.setattr(KVPool, "resume", mix_up)
    engine, _ = fake_engine(max_num_seqs=1, **options)
    engine.add_request("low", prompt_of(40, 1), greedy(50), priority=1)
    for _ in range(3):
        engine.step()
    engine.add_request("high", prompt_of(40, 2), greedy(5))
    drain(engine)
    assert engine.counters.failed_steps > 0


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_on_disk_and_lower_levels_go_together(
    options: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    engine = Traffic(seed, disk=tmp_path / "store", **options).run()
    assert_nothing_is_left(engine)
    engine.close()
