"""After sampling: tokens join their sequences, ends are found, updates are made."""

from __future__ import annotations

import time
from dataclasses import dataclass

from helicore.executor.counters import EngineCounters
from helicore.executor.lanes import BAD_TOKEN, Ints, Lanes
from helicore.executor.sampler import Sampled
from helicore.executor.scheduler import Scheduler
from helicore.executor.sequence import Sequence
from helicore.executor.updates import FinishReason, SequenceUpdate, TokenLogprobs


@dataclass(slots=True)
class TokenEvent:
    """The first thing among new tokens that ends a sequence."""

    num_kept: int
    """Tokens that belong to the output, the one that ends it included."""
    reason: FinishReason
    stop_id: int | None = None


def first_event(
    tokens: list[int], stop_ids: tuple[int, ...], num_generated: int, min_tokens: int, room: int
) -> TokenEvent | None:
    """Scans new tokens in order for a stop id or the end of the room; the first one wins.

    num_generated: output tokens before these. room: how many more tokens the output may get.
    A stop id that is the last token with room counts as a stop.
    """
    for position, token in enumerate(tokens[: max(room, 0)], start=1):
        if num_generated + position > min_tokens and token in stop_ids:
            return TokenEvent(position, "stop", token)
    return TokenEvent(max(room, 0), "length") if len(tokens) >= room else None


class PostProcessor:
    """Writes sampled tokens into lanes and reports what happened, one update per sequence."""

    def __init__(self, lanes: Lanes, scheduler: Scheduler, counters: EngineCounters) -> None:
        self._lanes = lanes
        self._scheduler = scheduler
        self._counters = counters

        self._finished: list[str] = []

    def run(self, sampled: Ints, result: Sampled) -> list[SequenceUpdate]:
        """sampled: the lanes that got the tokens of `result`, in its order."""
        lanes, tokens = self._lanes, result.tokens
        for sequence, entries in result.prompt_logprobs:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs += entries
        events = lanes.append(sampled, tokens)
        self._counters.generation_tokens += len(sampled)
        owners = lanes.sequences
        updates = [
            SequenceUpdate(sequence.request.request_id, sequence.index, [token])
            for sequence, token in zip(
                [owners[lane] for lane in sampled.tolist()], tokens.tolist(), strict=True
            )
            if sequence is not None
        ]
        for position in events.nonzero()[0].tolist():
            lane = int(sampled[position])
            sequence = lanes.sequence(lane)
            try:
                if tokens[position] == BAD_TOKEN:
                    raise ValueError("the logits hold a NaN, or no token is allowed")
                self._handle(sequence, updates[position], result.logprobs.get(position))
            except Exception as error:  # a caller's detokenizer may raise anything
                updates[position] = self.abort(sequence, f"{type(error).__name__}: {error}")
        return updates

    def take_finished(self) -> list[str]:
        """Ids of requests whose last sequence ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _handle(
        self, sequence: Sequence, update: SequenceUpdate, logprobs: TokenLogprobs | None
    ) -> None:
        """One sequence that ends, streams text, or wants log-probabilities."""
        if logprobs is not None:
            update.new_logprobs = [logprobs]
        self._report(sequence, update)
        request, lane = sequence.request, sequence.lane
        num_generated = int(self._lanes.num_tokens[lane]) - len(request.prompt) - 1
        event = first_event(
            update.new_token_ids,
            request.stop_ids,
            num_generated,
            request.params.min_tokens,
            request.limit - len(request.prompt) - num_generated,
        )
        if event is not None:
            update.finish_reason = event.reason
            if event.stop_id is not None and event.stop_id not in request.eos_ids:
                update.stop_reason = event.stop_id
        if sequence.detokenizer is not None:
            self._detokenize(sequence, update, event)
        if update.finish_reason is not None:
            self._finish(sequence, update.finish_reason)
        else:
            is_watched = sequence.detokenizer is not None or request.params.logprobs is not None
            self._lanes.watch(lane, is_watched)

    def _report(self, sequence: Sequence, update: SequenceUpdate) -> None:
        """Facts about the prompt, once."""
        if not sequence.reported:
            sequence.reported = True
            update.num_cached_tokens = sequence.num_cached_tokens
            update.cached_tokens_by_level = sequence.cached_tokens_by_level
            update.prompt_logprobs = sequence.prompt_logprobs

    def _detokenize(
        self, sequence: Sequence, update: SequenceUpdate, event: TokenEvent | None
    ) -> None:
        begin = time.perf_counter()
        detokenizer = sequence.detokenizer
        assert detokenizer is not None
        tokens = update.new_token_ids
        params = sequence.request.params
        if (
            event is not None
            and event.stop_id is not None
            and not params.include_stop_str_in_output
        ):
            tokens = tokens[:-1]
        stop = detokenizer.append(tokens, event is not None)
        if stop is not None:
            # The text of a stop id is not looked at, so a string that matched came first.
            update.finish_reason, update.stop_reason = "stop", stop
            detokenizer.append([], True)
        update.detokenizer = detokenizer
        seconds = time.perf_counter() - begin
        self._counters.times.detokenize += seconds
        self._counters.times.postprocess -= seconds

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.remove(sequence)
        request = sequence.request
        request.num_unfinished -= 1
        if not request.num_unfinished:
            self._finished.append(request.request_id)
        if reason == "stop":
            self._counters.finished_stop += 1
        elif reason == "length":
            self._counters.finished_length += 1
        else:
            self._counters.finished_abort += 1

    def abort(self, sequence: Sequence, error: str | None = None) -> SequenceUpdate:
        """Ends a sequence that is not done and says so."""
        self._finish(sequence, "abort")
        return SequenceUpdate(
            sequence.request.request_id, sequence.index, [], finish_reason="abort", error=error
        )
