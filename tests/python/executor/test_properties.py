"""Random arrivals, aborts and priorities over tiny pools, against what each request must give."""

from __future__ import annotations

import random
from typing import Any

import pytest
from executor.fake_model import EOS, VOCAB, FakeModel, fake_engine, greedy_output
from helicore.executor import kv_pool
from helicore.executor.engine import Engine
from helicore.sampling_params import SamplingParams

NUM_REQUESTS = 25
MAX_STEPS = 4000


class Traffic:
    """Feeds an engine and holds every update against the expected tokens."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        block_size = rng.choice([1, 16, 32])
        self.engine, self.model = fake_engine(
            num_pages=rng.choice([8, 8, 12, 20]) * (16 if block_size == 1 else 1),
            block_size=block_size,
            max_num_seqs=rng.choice([1, 4, 8, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            max_concurrent_prefills=rng.choice([1, 2, 8]),
            enable_prefix_caching=rng.random() < 0.7,
            **options,
        )
        self.stem = [rng.randrange(2, VOCAB) for _ in range(60)]
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.stops: dict[tuple[str, int], bool] = {}
        self.num_sent = 0

    def run(self) -> Engine:
        for _ in range(MAX_STEPS):
            if self.num_sent < NUM_REQUESTS and self.rng.random() < 0.5:
                self.send()
            if self.num_sent and self.rng.random() < 0.03:
                self.engine.abort(str(self.rng.randrange(self.num_sent)))
            self.step()
            if self.num_sent == NUM_REQUESTS and not self.engine.has_unfinished():
                break
        assert self.ended.keys() == self.expected.keys(), "every sequence ends, and ends once"
        return self.engine

    def send(self) -> None:
        rng, name = self.rng, str(self.num_sent)
        room = self.engine.limits.max_model_len
        # Short prompts with long outputs run out of pages while they decode.
        length = rng.randrange(1, min(rng.choice([12, 60]), room))
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        if rng.random() < 0.6:
            shared = rng.randrange(length)
            prompt[:shared] = self.stem[:shared]
        max_tokens, n = rng.randrange(1, 90), rng.choice([1, 1, 1, 3])
        eos = rng.random() < 0.6
        params = SamplingParams(n=n, temperature=0, max_tokens=max_tokens, ignore_eos=not eos)
        self.engine.add_request(name, prompt, params, priority=rng.choice([0, 0, 1]))
        for index in range(n):
            expected = greedy_output(prompt, min(max_tokens, room - length), eos=eos)
            self.expected[name, index] = expected
            self.stops[name, index] = eos and expected[-1] == EOS
            self.got[name, index] = []
        self.num_sent += 1

    def step(self) -> None:
        for update in self.engine.step():
            key = (update.request_id, update.index)
            assert key not in self.ended, f"{key} got an update after its end"
            assert update.error is None, update.error
            got, expected = self.got[key], self.expected[key]
            got += update.new_token_ids
            assert got == expected[: len(got)]
            if update.finish_reason is not None:
                self.ended[key] = update.finish_reason
            if update.finish_reason in ("stop", "length"):
                assert got == expected
                assert (update.finish_reason == "stop") == self.stops[key]


@pytest.mark.parametrize("seed", range(24))
def test_random_traffic_gives_every_request_its_own_tokens(seed: int) -> None:
    engine = Traffic(seed).run()
    assert engine.counters.kv_pages_in_use == 0, "no page is lost"
    assert engine.reset_prefix_cache()


def test_the_traffic_reaches_preemption_reuse_and_stops() -> None:
    counters = [Traffic(seed).run().counters for seed in range(4)]
    assert sum(c.preemptions for c in counters) > 10
    assert sum(c.prefix_cache_hits for c in counters) > 50
    assert sum(c.forks for c in counters) > 20
    assert sum(c.finished_stop for c in counters) > 20
    assert sum(c.finished_length for c in counters) > 20
    assert sum(c.finished_abort for c in counters) > 0


# --- negative controls: faults that the checks above must notice -----------------------------


def some_traffic_fails() -> bool:
    for seed in range(6):
        try:
            Traffic(seed).run()
        except AssertionError:
            return True
    return False


def test_a_page_released_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = kv_pool.KVPool.reserve_many

    def pretend(self: kv_pool.KVPool, lanes: Any, num_tokens: Any) -> Any:
        granted = reserve(self, lanes, num_tokens)
        self.block_table[lanes, 0] = 0
        return granted

    monkeypatch.setattr(kv_pool.KVPool, "reserve_many", pretend)
    assert some_traffic_fails()


def test_tokens_committed_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = kv_pool.KVPool.commit_many

    def mix_up(self: kv_pool.KVPool, lanes: Any, tokens: Any) -> None:
        commit(self, lanes, [part[::-1].copy() for part in tokens])

    monkeypatch.setattr(kv_pool.KVPool, "commit_many", mix_up)
    assert some_repeat_fails()


def some_repeat_fails() -> bool:
    """Palindromic prompts match what was committed in reverse."""
    engine, _ = fake_engine()
    prompt = [2 + i % 40 for i in range(33)]
    for name, tokens in (("a", prompt), ("b", [*prompt[:32][::-1], 5])):
        engine.add_request(name, tokens, SamplingParams(temperature=0, max_tokens=4))
        got: list[int] = []
        while engine.has_unfinished():
            got += [token for update in engine.step() for token in update.new_token_ids]
        if got != greedy_output(tokens, 4):
            return True
    return False


def test_a_skipped_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = FakeModel._append

    def forget(
        self: FakeModel, batch: Any, request: int, begin: int, end: int, caches: Any
    ) -> None:
        append(self, batch, request, begin, max(begin + 1, end - 1), caches)

    monkeypatch.setattr(FakeModel, "_append", forget)
    assert some_traffic_fails()
