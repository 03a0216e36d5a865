"""From prepared requests to finished outputs: submits to an engine, steps it, collects its updates.

All or nothing: a batch of which one request is refused leaves no request behind, and an interrupted
one is aborted.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from helicore.executor.detokenizer import Detokenizer, DetokenizerFactory, IncrementalDetokenizer
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
        self.num_output_tokens = 0
        self.finished = False
        self._names = names
        self._prompt_logprobs: list[LogprobsOfToken | None] | None = None

    def apply(self, update: SequenceUpdate) -> None:
        now = time.monotonic()
        if update.new_token_ids and self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.num_output_tokens += len(update.new_token_ids)
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if entry is None else self._names.logprobs(entry)
                for entry in update.prompt_logprobs
            ]
        if update.error is not None:
            warnings.warn(f"{self.request.where}: {update.error}", RuntimeWarning, stacklevel=2)
        self.sequences[update.index].apply(update, self.request.params, self._names)
        if update.finish_reason is not None:
            self.finished = all(sequence.output.finished() for sequence in self.sequences)
            self.metrics.finished_time = now if self.finished else None

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[sequence.output for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


class RequestRunner:
    """Submits requests and routes updates to them. Thread-safe: one lock round every engine call.

    Any thread that waits for its requests may step the engine for all of them.
    """

    def __init__(self, engine: EngineLike, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._names = _TokenNames(tokenizer)
        self._detokenizers = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self._lock = threading.RLock()
        self._states: dict[str, RequestState] = {}
        self._num_submitted = 0

    def submit(self, requests: Sequence[PreparedRequest]) -> list[RequestState]:
        """Adds all requests or none; an error of the engine gets the place of its prompt."""
        with self._lock:
            states: list[RequestState] = []
            try:
                for request in requests:
                    states.append(self._add(request))
            except BaseException:
                self.cancel(states)
                raise
            return states

    def step(self, states: Sequence[RequestState]) -> bool:
        """Steps the engine unless all `states` are finished. Returns whether any is unfinished."""
        with self._lock:
            if all(state.finished for state in states):
                return False
            if not self._engine.has_unfinished():
                raise RuntimeError("the engine lost a request: it has no work, but outputs are due")
            for update in self._engine.step():
                state = self._states.get(update.request_id)
                if state is None:
                    continue  # aborted in the meantime
                state.apply(update)
                if state.finished:
                    del self._states[update.request_id]
            return True

    def cancel(self, states: Sequence[RequestState]) -> None:
        """Aborts what is unfinished. Safe to call again."""
        with self._lock:
            for state in states:
                if self._states.pop(state.request_id, None) is not None:
                    self._engine.abort(state.request_id)

    def run(
        self, requests: Sequence[PreparedRequest], on_step: Callable[[Sequence[RequestState]], None]
    ) -> list[RequestOutput]:
        """Outputs in the order of `requests`. On any error or interrupt the rest is aborted."""
        states = self.submit(requests)
        try:
            while self.step(states):
                on_step(states)
        except BaseException:
            self.cancel(states)
            raise
        return [state.output() for state in states]

    def stream(self, request: PreparedRequest) -> CompletionStream:
        """Submits one request of one sequence and hands out its text as it grows."""
        if request.params.n != 1:
            raise ValueError(f"n must be 1 to stream, got {request.params.n}")
        return CompletionStream(self, self.submit([request])[0])

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

    def __next__(self) -> str:
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
        raise StopIteration

    @property
    def output(self) -> RequestOutput:
        """The result so far; complete when `finished`."""
        return self._state.output()

    def close(self) -> None:
        """Cancels the request unless it is finished."""
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
