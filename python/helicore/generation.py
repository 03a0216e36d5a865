"""From prepared requests to finished outputs: submits to an engine, steps it, collects its updates.

All or nothing: a batch of which one request is refused leaves no request behind, and an interrupted
one is aborted.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from helicore.executor.detokenizer import Detokenizer, DetokenizerFactory, IncrementalDetokenizer
from helicore.executor.interrupts import INTERRUPTS, ProcessCheck, StateChange
from helicore.executor.updates import SequenceUpdate, TokenLogprobs
from helicore.outputs import (
    CompletionOutput,
    Logprob,
    LogprobsOfToken,
    RequestMetrics,
    RequestOutput,
)
from helicore.prompts import PreparedRequest
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer


class EngineLike(Protocol):
    """What is needed of the executor's engine. One thread at a time."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        reuse_scope: Any = None,
        detokenizer_factory: Callable[[], Detokenizer] | None = None,
    ) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[SequenceUpdate]: ...


class _SequenceState:
    """Builds one CompletionOutput from updates."""

    def __init__(self, index: int, detokenizer: IncrementalDetokenizer | None) -> None:
        self.output = CompletionOutput(index=index, text="", token_ids=[])
        self.detokenizer = detokenizer

    def apply(self, update: SequenceUpdate, params: SamplingParams, names: _TokenNames) -> None:
        output = self.output
        output.token_ids += update.new_token_ids
        if update.new_logprobs is not None and params.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs += [names.logprobs(entry) for entry in update.new_logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                entry.logprob for entry in update.new_logprobs
            )
        output.finish_reason = update.finish_reason
        output.stop_reason = update.stop_reason
        output.error = update.error
        finished = update.finish_reason is not None
        if isinstance(update.detokenizer, IncrementalDetokenizer):
            # The engine looks for stop strings, so it has the text already.
            self.detokenizer = update.detokenizer
            self.detokenizer.append([], finished)
        elif self.detokenizer is not None:
            self.detokenizer.append(_text_tokens(update, params), finished)
        if finished and self.detokenizer is not None:
            output.text = self.detokenizer.text


def _text_tokens(update: SequenceUpdate, params: SamplingParams) -> list[int]:
    """The new tokens that are text: the token that ended the sequence is not."""
    ended_by_token = update.finish_reason == "stop" and not isinstance(update.stop_reason, str)
    if ended_by_token and not params.include_stop_str_in_output:
        return update.new_token_ids[:-1]
    return update.new_token_ids


class _TokenNames:
    """Logprob objects with decoded tokens, where there is a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def logprobs(self, entry: TokenLogprobs) -> LogprobsOfToken:
        name = self._name
        result = {entry.token_id: Logprob(entry.logprob, entry.rank, name(entry.token_id))}
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        for rank, (token, logprob) in enumerate(pairs, start=1):
            if token not in result:
                result[token] = Logprob(logprob, rank, name(token))
        return result

    def _name(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode_token(token_id)


class RequestState:
    """One request in flight, and its output when it is done."""

    def __init__(self, request_id: str, request: PreparedRequest, names: _TokenNames) -> None:
        self.request_id = request_id
        self.request = request
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.sequences: list[_SequenceState] = []
        self.num_cached_tokens = 0
        self.cached_tokens_by_level: list[int] = []
        self.num_output_tokens = 0
        self.finished = False
        self._warned = False
        self._names = names
        self._prompt_logprobs: list[LogprobsOfToken | None] | None = None

    def apply(self, update: SequenceUpdate) -> None:
        now = time.monotonic()
        if update.new_token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.num_output_tokens += len(update.new_token_ids)
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
            self.cached_tokens_by_level = update.cached_tokens_by_level or []
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else self._names.logprobs(entry)
                for entry in update.prompt_logprobs
            ]
        self.sequences[update.index].apply(update, self.request.params, self._names)
        if update.finish_reason is not None:
            self.finished = all(sequence.output.finished() for sequence in self.sequences)
            self.metrics.finished_time = now if self.finished else None

    def fail(self, error: Exception) -> None:
        """Ends what is unfinished because its updates cannot be taken in."""
        for sequence in self.sequences:
            if not sequence.output.finished():
                sequence.output.finish_reason = "abort"
                sequence.output.error = f"{type(error).__name__}: {error}"
        self.finished = True
        self.metrics.finished_time = time.monotonic()

    def warn(self) -> None:
        """Says once why sequences were aborted by the engine."""
        errors = [s.output.error for s in self.sequences if s.output.error is not None]
        if errors and self.finished and not self._warned:
            self._warned = True
            for error in errors:
                warnings.warn(f"{self.request.where}: {error}", RuntimeWarning, stacklevel=3)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[sequence.output for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            cached_tokens_by_level=self.cached_tokens_by_level,
            metrics=self.metrics,
        )


class RequestRunner:
    """Submits requests and routes updates to them. Thread-safe: one lock round every engine call.

    Any thread that waits for its requests may step the engine for all of them. An interrupt is
    taken between steps only, so that no update is lost; see executor/interrupts.py.
    """

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._names = _TokenNames(tokenizer)
        self._detokenizers = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self._lock = threading.RLock()
        self._states: dict[str, RequestState] = {}
        self._inbox: deque[SequenceUpdate] = deque()
        """Updates of the engine that were not handed out yet."""
        self._num_submitted = 0
        self._change = StateChange("engine")
        self._process = ProcessCheck()
        self._is_busy = self._is_closing = self._is_closed = False

    def submit(self, requests: Sequence[PreparedRequest], into: list[RequestState]) -> None:
        """Adds all requests or none; an error of the engine gets the place of its prompt.

        `into` gets the states, one by one: its owner cancels them when an interrupt comes.
        """
        self._check_usable()
        with self._lock, INTERRUPTS:
            self._check_idle()
            try:
                for request in requests:
                    into.append(self._add(request))
            except BaseException:
                self.cancel(into)
                raise

    def step(self, states: Sequence[RequestState]) -> bool:
        """Steps the engine unless all `states` are finished. Returns whether any is unfinished."""
        self._process.check()
        with self._lock, INTERRUPTS:
            if all(state.finished for state in states):
                return False
            self._check_idle()
            try:
                self._is_busy = True
                self._step()
            finally:
                self._is_busy = False
                if self._is_closing:
                    self._close_engine()
            return True

    def _step(self) -> None:
        if not self._inbox:
            if not self._engine.has_unfinished():
                raise RuntimeError("the engine lost a request: it has no work, but outputs are due")
            self._inbox += self._engine.step()
        with self._change:
            while self._inbox:
                self._hand_out(self._inbox.popleft())

    def _hand_out(self, update: SequenceUpdate) -> None:
        state = self._states.get(update.request_id)
        if state is None:
            return  # aborted in the meantime
        try:
            state.apply(update)
        except Exception as error:  # of a tokenizer, or no memory: this request's alone
            state.fail(error)
            self._engine.abort(update.request_id)
        if state.finished:
            self._states.pop(update.request_id, None)

    def cancel(self, states: Sequence[RequestState]) -> None:
        """Aborts what is unfinished. Safe to call again, also after `close`."""
        if self._process.is_child:
            return
        with self._lock, INTERRUPTS:
            for state in states:
                if self._states.pop(state.request_id, None) is not None and not self._is_closed:
                    self._engine.abort(state.request_id)

    def close(self) -> None:
        """Closes the engine after the step that another thread may be in; that thread's next call
        raises RuntimeError, as everyone's."""
        self._is_closing = True
        if self._process.is_child:
            self._close_engine()
            return
        with self._lock, INTERRUPTS:
            # Called from within a step (a signal handler, say): the step closes at its end.
            if not self._is_busy:
                self._close_engine()

    def _close_engine(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._states.clear()
            self._inbox.clear()
            close = getattr(self._engine, "close", None)
            if close is not None:
                close()

    def _check_usable(self) -> None:
        self._process.check()
        if self._is_closing:
            raise RuntimeError("the engine is closed")
        self._change.check()

    def _check_idle(self) -> None:
        """Under the lock: the caller may be a signal handler within this thread's own step."""
        self._check_usable()
        if self._is_busy:
            raise RuntimeError("the engine is in the middle of a step; it takes one call at a time")

    def run(
        self, requests: Sequence[PreparedRequest], on_step: Callable[[Sequence[RequestState]], None]
    ) -> list[RequestOutput]:
        """Outputs in the order of `requests`. On any error or interrupt the rest is aborted."""
        states: list[RequestState] = []
        held = INTERRUPTS.hold()
        try:
            self.submit(requests, states)
            while self.step(states):
                on_step(states)
        except BaseException:
            self.cancel(states)
            raise
        finally:
            INTERRUPTS.release(held)
        for state in states:
            state.warn()
        return [state.output() for state in states]

    def stream(self, request: PreparedRequest) -> CompletionStream:
        """Submits one request of one sequence and hands out its text as it grows."""
        if request.params.n != 1:
            raise ValueError(f"n must be 1 to stream, got {request.params.n}")
        states: list[RequestState] = []
        try:
            self.submit([request], states)
            return CompletionStream(self, states[0])
        except BaseException:
            self.cancel(states)
            raise

    def take_text(self, state: RequestState) -> str:
        """Text of the single sequence that was not taken before."""
        with self._lock:
            detokenizer = state.sequences[0].detokenizer
            return "" if detokenizer is None else detokenizer.take_new_text()

    def _add(self, request: PreparedRequest) -> RequestState:
        request_id = str(self._num_submitted)
        self._num_submitted += 1
        state = RequestState(request_id, request, self._names)
        state.sequences = [
            _SequenceState(i, self._detokenizer(request)) for i in range(request.params.n)
        ]
        try:
            self._engine.add_request(
                request_id,
                request.token_ids,
                request.params,
                priority=request.priority,
                reuse_scope=_reuse_scope(request),
                detokenizer_factory=self._factory(request),
            )
        except ValueError as error:
            raise _at_place(error, request.where) from error
        self._states[request_id] = state
        return state

    def _detokenizer(self, request: PreparedRequest) -> IncrementalDetokenizer | None:
        """One for a sequence whose text only the caller wants: without stop strings."""
        if self._detokenizers is None or not request.params.detokenize or request.params.stop:
            return None
        return self._detokenizers(request.params, request.token_ids)

    def _factory(self, request: PreparedRequest) -> Callable[[], Detokenizer] | None:
        factory = self._detokenizers
        if factory is None or not request.params.stop:
            return None
        return lambda: factory(request.params, request.token_ids)


class CompletionStream(Iterator[str]):
    """Iterates over the new text of one request. Closing it early cancels the request."""

    def __init__(self, runner: RequestRunner, state: RequestState) -> None:
        self._runner = runner
        self._state = state
        self._is_closed = False

    def __next__(self) -> str:
        if self._is_closed:
            raise StopIteration
        try:
            while self._runner.step([self._state]):
                if text := self._runner.take_text(self._state):
                    return text
        except BaseException:
            self.close()
            raise
        # Another caller's step may have finished this request.
        if text := self._runner.take_text(self._state):
            return text
        self._is_closed = True
        self._state.warn()
        raise StopIteration

    @property
    def output(self) -> RequestOutput:
        """The result so far; complete when `finished`."""
        return self._state.output()

    def close(self) -> None:
        """Cancels the request unless it is finished. The stream has ended then."""
        self._is_closed = True
        self._runner.cancel([self._state])

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _reuse_scope(request: PreparedRequest) -> Any:
    if request.cache_salt is None:
        return None
    from helicore.kv import ReuseScope

    return ReuseScope(lora_id=None, salt=request.cache_salt)


def _at_place(error: ValueError, where: str) -> ValueError:
    """The same error with the place of the prompt in front; `param` is kept."""
    placed = ValueError(f"{where}: {error}")
    if hasattr(error, "param"):
        placed.param = error.param  # type: ignore[attr-defined]
    return placed
