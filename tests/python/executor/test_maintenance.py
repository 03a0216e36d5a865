"""Between steps the engine lets the manager change the sizes of its pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.driving import Updates, drain, tokens_of
from executor.fake_model import fake_engine, greedy_output
from executor.test_swap import greedy, prompt_of
from helicore import kv
from helicore.executor.engine import Engine


class Watched:
    """A manager that notes what the engine asks of it, and may claim to need an adjustment."""

    def __init__(self, manager: kv.KVCacheManager) -> None:
        self._manager = manager
        self.wants_adjustment: Callable[[], bool] = lambda: False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    @property
    def need_adjustment(self) -> bool:
        self.calls.append("look")
        return self.wants_adjustment()

    def adjust(self) -> bool:
        self.calls.append("adjust")
        return self._manager.adjust()

    def maintain(self, max_pages: int) -> int:
        self.calls.append("maintain")
        return self._manager.maintain(max_pages)


def watched(engine: Engine) -> Watched:
    assert engine._pool._live_manager is not None
    manager = Watched(engine._pool._live_manager)
    engine._pool._live_manager = manager  # type: ignore[assignment]
    return manager


def serve(engine: Engine, lengths: list[int], max_tokens: int) -> dict[tuple[str, int], Updates]:
    for i, length in enumerate(lengths):
        engine.add_request(f"{length}-{i}", prompt_of(length, i), greedy(max_tokens))
    return drain(engine)


def assert_own_tokens(
    results: dict[tuple[str, int], Updates], lengths: list[int], max_tokens: int
) -> None:
    for i, length in enumerate(lengths):
        expected = greedy_output(prompt_of(length, i), max_tokens, eos=False)
        assert tokens_of(results[f"{length}-{i}", 0]) == expected


def test_an_adjustment_that_is_asked_for_happens_between_steps_and_tokens_stay() -> None:
    engine, _ = fake_engine(num_pages=64, block_size=16)
    manager = watched(engine)
    long_ones: list[int] = []
    manager.wants_adjustment = lambda: bool(long_ones) and "adjust" not in manager.calls
    short = [6 + i for i in range(6)]
    assert_own_tokens(serve(engine, short, 80), short, 80)
    assert manager.calls == ["look"] * len(manager.calls) != []
    long_ones += [90 + i for i in range(5)]
    assert_own_tokens(serve(engine, long_ones, 80), long_ones, 80)
    at = manager.calls.index("adjust")
    assert manager.calls[at - 1 : at + 2] == ["look", "adjust", "maintain"]


def test_the_manager_is_asked_now_and_then_not_at_every_step() -> None:
    engine, _ = fake_engine()
    manager = watched(engine)
    serve(engine, [5], 130)
    steps = engine.counters.num_steps
    assert manager.calls == ["look"] * (steps // 64)
    assert steps >= 128


def test_a_level_that_shrinks_under_running_sequences_does_so_without_a_wrong_token() -> None:
    engine, _ = fake_engine(num_pages=48, block_size=16, swap_pages=64)
    lengths = [20 + 3 * i for i in range(8)]
    for i, length in enumerate(lengths):
        engine.add_request(f"{length}-{i}", prompt_of(length, i), greedy(60))
    results: dict[tuple[str, int], Updates] = {}
    for _ in range(12):
        for update in engine.step():
            results.setdefault((update.request_id, update.index), []).append(update)
    manager = watched(engine)
    total = engine._pool.num_pages
    manager.resize(0, manager.get_quota(0) * 3 // 8, best_effort=True)
    assert manager.is_resizing, "running sequences hold more"
    for key, updates in drain(engine).items():
        results.setdefault(key, []).extend(updates)
    assert_own_tokens(results, lengths, 60)
    assert "maintain" in manager.calls
    assert not manager.is_resizing
    assert engine.counters.kv_pages_total == engine._pool.num_pages == total * 3 // 8
