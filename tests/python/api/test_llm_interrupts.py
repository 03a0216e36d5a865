"""Ctrl-C, close() and fork() while requests run: others stay right, or get an error."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from api.fake_engine import FakeEngine
from executor.test_interrupts import AtLine
from helicore import LLM, KVCacheConfig, SamplingParams

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


def small_llm() -> LLM:
    return LLM("tiny", num_threads=1, kv_cache=KVCacheConfig(host_gb=0.02, block_size=16))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def fives(prompt: Any, index: int) -> list[int]:
    return []


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    saved = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, saved)


def generate_at_line(llm: LLM, at: int, action: Callable[[], None]) -> int:
    tracer = AtLine(at, action)
    sys.settrace(tracer)
    try:
        llm.generate(["import os\n", "print("], GREEDY, use_tqdm=False)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return tracer.count


def test_ctrl_c_in_one_call_leaves_an_open_stream_whole() -> None:
    llm = small_llm()
    whole = "".join(llm.stream("def f(", GREEDY))
    num_lines = generate_at_line(llm, -1, interrupt)
    for at in range(5, num_lines, num_lines // 60):
        stream = llm.stream("def f(", GREEDY)
        text = next(stream)
        generate_at_line(llm, at, interrupt)
        assert text + "".join(stream) == whole, at
        engine = llm.engine
        assert not engine._requests
        assert engine._lanes.num_free == engine.config.scheduler.max_num_seqs
        assert engine._pool.available_pages() == engine._pool.num_pages
    llm.close()


def test_an_exception_at_any_line_leaves_an_open_stream_whole_or_in_error() -> None:
    llm = small_llm()
    whole = "".join(llm.stream("def f(", GREEDY))
    num_lines = generate_at_line(llm, -1, raise_interrupt)
    outcomes = set()
    for at in range(5, num_lines, num_lines // 40):
        stream = llm.stream("def f(", GREEDY)
        text = next(stream)
        generate_at_line(llm, at, raise_interrupt)
        try:
            text += "".join(stream)
            outcomes.add(text)
            again = llm.generate("def f(", GREEDY, use_tqdm=False)
            outcomes.add(again[0].outputs[0].text)
        except RuntimeError as error:
            outcomes.add("stopped" if "the engine " in str(error) else str(error))
            llm.close()
            llm = small_llm()
    assert outcomes == {whole, "stopped"}
    llm.close()


def test_an_error_while_updates_are_handed_out_ends_its_request_alone(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeEngine(fives))
    stream = llm.stream("x", SamplingParams(max_tokens=6, ignore_eos=True))
    first = next(stream)
    bad = llm.stream("y", ENDLESS)

    def broken(*arguments: object) -> None:
        raise ArithmeticError("no text")

    bad._state.sequences[0].apply = broken  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="no text"):
        assert list(bad) == []
    assert bad.output.outputs[0].finish_reason == "abort"
    assert bad.output.outputs[0].error == "ArithmeticError: no text"
    assert len(first + "".join(stream)) > len(first)
    assert stream.output.outputs[0].token_ids == [5] * 6


def test_a_closed_stream_has_ended(make_llm: MakeLLM) -> None:
    stream = make_llm(FakeEngine(fives)).stream("x", ENDLESS)
    next(stream)
    stream.close()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def test_a_stream_of_a_closed_llm_says_so(make_llm: MakeLLM) -> None:
    engine = FakeEngine(fives)
    llm = make_llm(engine)
    stream = llm.stream("x", ENDLESS)
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert (engine.aborted, engine.closed) == ([], 1)


class SlowEngine(FakeEngine):
    """Waits in its first step until it is told to go on; notices a close within a step."""

    def prepare(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.is_stepping = self.closed_within_a_step = False

    def step(self) -> Any:
        self.is_stepping = True
        self.entered.set()
        assert self.go_on.wait(60)
        updates = super().step()
        self.is_stepping = False
        return updates

    def close(self) -> None:
        self.closed_within_a_step |= self.is_stepping
        super().close()


def test_close_waits_for_the_step_of_another_thread_and_that_call_fails(make_llm: MakeLLM) -> None:
    engine = SlowEngine(fives)
    engine.prepare()
    llm, errors = make_llm(engine), []

    def work() -> None:
        try:
            llm.generate("x", ENDLESS, use_tqdm=False)
        except RuntimeError as error:
            errors.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    assert engine.entered.wait(60)
    closer = threading.Thread(target=llm.close)
    closer.start()
    while "closed" not in repr(llm):
        time.sleep(0)
    engine.go_on.set()
    for thread in (worker, closer):
        thread.join(60)
        assert not thread.is_alive()
    assert errors == ["the engine is closed"]
    assert (engine.closed, engine.closed_within_a_step) == (1, False)


def test_close_from_within_a_step_is_done_at_its_end(make_llm: MakeLLM) -> None:
    engine = SlowEngine(fives)
    engine.prepare()
    engine.go_on.set()
    llm = make_llm(engine)
    saved = signal.signal(signal.SIGUSR1, lambda number, frame: llm.close())
    advance = engine._advance

    def advance_and_close(sequence: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return advance(sequence)

    engine._advance = advance_and_close  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="the engine is closed"):
            llm.generate("x", ENDLESS, use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, saved)
    assert (engine.closed, engine.closed_within_a_step) == (1, False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_gets_an_error_instead_of_a_hang() -> None:
    llm = small_llm()
    stream = llm.stream("def f(", GREEDY)
    next(stream)
    calls = (
        lambda: llm.generate("x", GREEDY, use_tqdm=False),
        lambda: next(stream),
        llm.engine.step,
    )
    engine = llm.engine
    child = os.fork()
    if not child:
        good = 0
        for call in (*calls, lambda: engine.add_request("a", [5], GREEDY)):
            try:
                call()
            except RuntimeError as error:
                good += "loaded in another process" in str(error) and "spawn" in str(error)
        llm.close()
        os._exit(good)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4
    assert len("".join(stream)) > 0
    llm.close()
