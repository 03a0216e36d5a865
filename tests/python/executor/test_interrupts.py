"""An interrupt, or any other exception out of nowhere, never gives a wrong result."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import helicore
import pytest
from executor.driving import drain, tokens_of
from executor.fake_model import fake_engine, greedy_output
from helicore.executor.engine import Engine
from helicore.executor.interrupts import INTERRUPTS, StateChange
from helicore.sampling_params import SamplingParams

ROOT = str(Path(helicore.__file__).parent)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
EXPECTED = {f"r{i}": greedy_output([5 + i, 7, 9], 12) for i in range(3)}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    saved = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, saved)


def test_an_interrupt_waits_for_the_end_of_the_outermost_block() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        with INTERRUPTS:
            interrupt()
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_held_handler_acts_as_the_one_it_replaced_between_blocks() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    held = INTERRUPTS.hold()
    interrupt()
    assert seen == [signal.SIGINT]
    with INTERRUPTS:
        interrupt()
        assert len(seen) == 1
    assert len(seen) == 2
    INTERRUPTS.release(held)
    interrupt()
    assert len(seen) == 3


def test_a_second_interrupt_is_taken_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        with INTERRUPTS:
            interrupt()
            reached.append("first")
            interrupt()
        reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    test_an_interrupt_waits_for_the_end_of_the_outermost_block()


def test_blocks_whose_exit_was_skipped_neither_bare_nor_block_those_after_them() -> None:
    INTERRUPTS.__enter__()
    INTERRUPTS.__enter__()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    test_an_interrupt_waits_for_the_end_of_the_outermost_block()
    INTERRUPTS.__enter__()
    with INTERRUPTS:
        interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    INTERRUPTS.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    test_an_interrupt_waits_for_the_end_of_the_outermost_block()


def test_a_block_of_the_garbage_collector_is_safe_at_any_line_of_another() -> None:
    """Objects whose `__del__` enters a block are dropped at any line of `__enter__`, `__exit__`."""

    def collected() -> None:
        with INTERRUPTS:
            interrupt()
            interrupted.append("kept")

    def run(at: int) -> int:
        tracer = AtLine(at, collect, in_interrupts=True)
        sys.settrace(tracer)
        try:
            with INTERRUPTS:
                pass
        except KeyboardInterrupt:
            interrupted.append("raised")
        finally:
            sys.settrace(None)
        return tracer.count

    def collect() -> None:
        try:
            collected()
        except KeyboardInterrupt:
            interrupted.append("raised")

    interrupted: list[str] = []
    for at in range(1, run(-1) + 1):
        interrupted.clear()
        run(at)
        assert interrupted == ["kept", "raised"], at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_of_python_is_left_alone(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with INTERRUPTS:
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_neither_hold_nor_restore_the_handler() -> None:
    seen: list[Any] = []

    def work() -> None:
        with INTERRUPTS:
            seen.append(signal.getsignal(signal.SIGINT))

    with INTERRUPTS:
        inside = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [inside] != [signal.default_int_handler]


def test_a_change_that_was_cut_short_is_an_error_from_then_on() -> None:
    change = StateChange("engine")
    with pytest.raises(KeyError), change:
        raise KeyError("x")
    with pytest.raises(RuntimeError, match="the engine stopped after an internal error: KeyError"):
        change.check()


class AtLine:
    """Runs `action` at the n-th line of the package that this thread comes to."""

    def __init__(self, at: int, action: Callable[[], None], in_interrupts: bool = False) -> None:
        self._left, self._action, self._in_interrupts = at, action, in_interrupts
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        watched = name.startswith(ROOT) and name.endswith("interrupts.py") == self._in_interrupts
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._left:
                self._action()
        return self._line


def start() -> Engine:
    engine, _ = fake_engine()
    for i, request_id in enumerate(EXPECTED):
        engine.add_request(request_id, [5 + i, 7, 9], GREEDY)
    return engine


def lines_of_a_run() -> int:
    tracer = AtLine(-1, lambda: None)
    engine = start()
    sys.settrace(tracer)
    try:
        drain(engine)
    finally:
        sys.settrace(None)
    return tracer.count


def run_with(at: int, action: Callable[[], None]) -> dict[str, list[int]]:
    """All tokens of a run in which `action` comes at line `at`; the steps go on after it."""
    engine, found = start(), {request_id: [] for request_id in EXPECTED}  # type: ignore[var-annotated]
    sys.settrace(AtLine(at, action))
    try:
        while True:
            try:
                if not engine.has_unfinished():
                    break
                updates = engine.step()
            except KeyboardInterrupt:
                continue
            for update in updates:
                found[update.request_id] += update.new_token_ids
    finally:
        sys.settrace(None)
        engine.close()
    return found


def test_ctrl_c_at_any_line_of_a_step_loses_no_token() -> None:
    for at in range(1, lines_of_a_run(), 97):
        assert run_with(at, interrupt) == EXPECTED, at


def test_an_exception_at_any_line_of_a_step_gives_right_tokens_or_an_error() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    outcomes = set()
    for at in range(1, lines_of_a_run(), 41):
        try:
            found = run_with(at, fail)
        except RuntimeError as error:
            outcomes.add("stopped" if "the engine " in str(error) else str(error))
        else:
            outcomes.add("right" if found == EXPECTED else f"wrong at line {at}")
    assert outcomes == {"right", "stopped"}


def test_a_stopped_engine_says_why_and_can_be_closed() -> None:
    engine = start()

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    engine._scheduler.advance = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    for call in (
        engine.step,
        engine.has_unfinished,
        engine.reset_prefix_cache,
        lambda: engine.add_request("new", [1, 2], GREEDY),
    ):
        with pytest.raises(RuntimeError, match="internal error: ZeroDivisionError: a bug"):
            call()
    engine.abort("r0")
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.step()


def test_an_abort_in_the_middle_of_a_step_comes_with_the_next_one() -> None:
    engine = start()
    compute = engine._compute

    def compute_and_abort(step: Any) -> Any:
        engine._compute = compute  # type: ignore[method-assign]
        engine.abort("r1")
        return compute(step)

    engine._compute = compute_and_abort  # type: ignore[method-assign]
    results = drain(engine)
    assert results["r1", 0][-1].finish_reason == "abort"
    assert tokens_of(results["r0", 0]) == EXPECTED["r0"]
    assert engine.counters.kv_pages_in_use == 0


def test_a_step_within_a_step_is_refused_and_changes_nothing() -> None:
    engine = start()
    compute = engine._compute

    def compute_and_step(step: Any) -> Any:
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            engine.step()
        with pytest.raises(RuntimeError, match="in the middle of its own step"):
            engine.close()
        return compute(step)

    engine._compute = compute_and_step  # type: ignore[method-assign]
    results = drain(engine)
    assert {key[0]: tokens_of(updates) for key, updates in results.items()} == EXPECTED
