"""Prefill and decode share steps: bounds in both directions, counted in steps and tokens.

Time is the work of a step in tokens, so nothing here depends on the machine.
"""

from __future__ import annotations

import random

import pytest
from executor.driving import drain
from executor.fake_model import VOCAB, FakeModel, fake_engine
from helicore.executor.engine import Engine
from helicore.sampling_params import SamplingParams

LONG = 30_000
BUDGET = 512


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class QuickModel(FakeModel):
    """Answers at once without reading the cache: only the schedule matters."""

    def __call__(self, batch, caches):  # type: ignore[no-untyped-def]
        import torch

        self.batches.append((len(batch.kv_len), len(batch.token_ids)))
        logits = torch.zeros(len(batch.logits_rows), VOCAB)
        logits[:, 5] = 1
        return logits


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.fake_model.FakeModel", QuickModel)


def engine_of(**options: int) -> Engine:
    settings = {
        "num_pages": 4096,
        "max_num_batched_tokens": BUDGET,
        "max_position_embeddings": 60_000,
        "max_num_seqs": 32,
    }
    return fake_engine(**(settings | options))[0]  # type: ignore[arg-type]


def steps_until_first_token(engine: Engine, name: str, limit: int) -> int:
    for step in range(1, limit + 1):
        if any(u.request_id == name and u.new_token_ids for u in engine.step()):
            return step
    raise AssertionError(f"{name} got no token within {limit} steps")


@pytest.mark.usefixtures("quick")
def test_a_decoding_sequence_gets_a_token_in_every_step_under_endless_prefill() -> None:
    engine = engine_of()
    engine.add_request("stream", [5, 6], params(400))
    engine.step()
    for i in range(200):
        engine.add_request(f"long {i}", prompt_of(4000, i), params(1))
        got = [u for u in engine.step() if u.request_id == "stream"]
        assert [len(u.new_token_ids) for u in got] == [1], f"no token in step {i}"


@pytest.mark.usefixtures("quick")
def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = engine_of()
    engine.add_request("long", prompt_of(LONG), params(1))
    engine.step()
    engine.add_request("short", prompt_of(101, 1), params(1))
    assert steps_until_first_token(engine, "short", 3) <= 2


@pytest.mark.usefixtures("quick")
def test_a_short_prompt_passes_several_long_ones() -> None:
    engine = engine_of()
    for i in range(5):
        engine.add_request(f"long {i}", prompt_of(8000, i), params(1))
        engine.step()
    engine.add_request("short", prompt_of(101, 9), params(1))
    assert steps_until_first_token(engine, "short", 3) <= 2


@pytest.mark.usefixtures("quick")
def test_short_prompts_can_not_starve_a_long_one() -> None:
    engine = engine_of()
    engine.add_request("long", prompt_of(LONG), params(1))
    done = False
    for i in range(4 * LONG // BUDGET):
        for j in range(4):
            engine.add_request(f"short {i} {j}", prompt_of(200, 7 * i + j), params(1))
        done |= any(u.request_id == "long" and u.new_token_ids for u in engine.step())
        if done:
            assert i <= 2 * LONG // BUDGET + 2, "half of every step belongs to the first in order"
            return
    raise AssertionError("the long prompt never got through")


@pytest.mark.usefixtures("quick")
def test_decodes_leave_room_for_a_waiting_prompt() -> None:
    engine = engine_of(max_num_seqs=8, max_num_batched_tokens=8)
    for i in range(7):
        engine.add_request(f"stream {i}", [5 + i], params(500))
    for _ in range(10):
        engine.step()
    engine.add_request("late", prompt_of(40), params(1))
    assert steps_until_first_token(engine, "late", 60) <= 41


@pytest.mark.usefixtures("quick")
def test_the_counter_of_waiting_tells_of_a_blocked_queue() -> None:
    engine = engine_of(max_num_seqs=1, max_num_batched_tokens=8)
    engine.add_request("first", [5], params(20))
    engine.add_request("second", [6], params(1))
    seen = []
    while engine.has_unfinished():
        engine.step()
        seen.append(engine.counters.oldest_wait_steps)
    assert max(seen) >= 15
    assert seen[-1] == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(8))
def test_some_request_always_finishes_within_a_bound(seed: int) -> None:
    """Overload with preemption: between two ends there is at most the work of one sequence."""
    rng = random.Random(seed)
    engine = engine_of(num_pages=40, max_num_batched_tokens=64, max_num_seqs=16)
    for i in range(30):
        engine.add_request(str(i), prompt_of(rng.randrange(50, 300), i), params(60))
    since_end = longest = 0
    while engine.has_unfinished():
        ended = any(u.finish_reason for u in engine.step())
        since_end = 0 if ended else since_end + 1
        longest = max(longest, since_end)
    # 360 tokens at half a budget of 64 a step, then 60 decodes, for the first in order.
    assert longest <= 360 // 32 + 60 + 20
    assert engine.counters.finished_length == 30


@pytest.mark.usefixtures("quick")
def test_prefill_first_would_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with decodes left out while prompts run, the first test must fail."""
    from helicore.executor.scheduler import Scheduler
    from helicore.executor.steps import Step

    plan = Scheduler.schedule

    def prefill_first(self: Scheduler) -> Step:
        step = plan(self)
        return Step(step.decode[:0], step.chunks) if step.chunks else step

    monkeypatch.setattr(Scheduler, "schedule", prefill_first)
    engine = engine_of()
    engine.add_request("stream", [5, 6], params(400))
    engine.step()
    engine.add_request("long", prompt_of(4000), params(1))
    assert not [u for u in engine.step() if u.request_id == "stream"]
    drain(engine)
