"""An engine without a model: it writes a given continuation and counts calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helicore.executor.detokenizer import Detokenizer
from helicore.executor.updates import SequenceUpdate, TokenLogprobs
from helicore.sampling_params import SamplingParams


@dataclass
class _Sequence:
    request_id: str
    index: int
    script: list[int]
    params: SamplingParams
    num_prompt: int
    detokenizer: Detokenizer | None
    sent: int = 0


@dataclass
class FakeEngine:
    """Sequence `index` of a prompt continues with `script(prompt, index)`; then it goes on with 5s.

    tokens_per_step: how many tokens an update carries at most.  eos: ends a sequence.
    fail_at_step: raises there instead.
    """

    script: Callable[[Sequence[int], int], list[int]]
    eos: int = 1
    tokens_per_step: int = 1
    max_model_len: int = 1000
    fail_at_step: BaseException | None = None
    running: list[_Sequence] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    added: list[dict[str, Any]] = field(default_factory=list)
    num_steps: int = 0
    closed: int = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        reuse_scope: Any = None,
        detokenizer_factory: Callable[[], Detokenizer] | None = None,
    ) -> None:
        if len(prompt_token_ids) >= self.max_model_len:
            raise ValueError(f"prompt_token_ids has {len(prompt_token_ids)} tokens")
        self.added.append({"id": request_id, "priority": priority, "scope": reuse_scope})
        for index in range(params.n):
            self.running.append(
                _Sequence(
                    request_id,
                    index,
                    list(self.script(prompt_token_ids, index)),
                    params,
                    len(prompt_token_ids),
                    detokenizer_factory() if detokenizer_factory and params.stop else None,
                )
            )

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running = [s for s in self.running if s.request_id != request_id]

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[SequenceUpdate]:
        self.num_steps += 1
        if self.fail_at_step is not None:
            error, self.fail_at_step = self.fail_at_step, None
            raise error
        # Backwards, so that nothing relies on the order of updates.
        updates = [self._advance(sequence) for sequence in reversed(self.running)]
        done = {(u.request_id, u.index) for u in updates if u.finish_reason}
        self.running = [s for s in self.running if (s.request_id, s.index) not in done]
        return updates

    def close(self) -> None:
        self.closed += 1

    def _advance(self, sequence: _Sequence) -> SequenceUpdate:
        params = sequence.params
        update = SequenceUpdate(sequence.request_id, sequence.index, [])
        update.detokenizer = sequence.detokenizer
        if sequence.sent == 0:
            update.num_cached_tokens = 3
            if params.prompt_logprobs is not None and sequence.index == 0:
                update.prompt_logprobs = [
                    None,
                    *(
                        self._logprobs(7, params.prompt_logprobs)
                        for _ in range(1, sequence.num_prompt)
                    ),
                ]
        for _ in range(self.tokens_per_step):
            token = sequence.script[sequence.sent] if sequence.sent < len(sequence.script) else 5
            sequence.sent += 1
            update.new_token_ids.append(token)
            if self._ended(sequence, token, update):
                break
        if params.logprobs is not None:
            update.new_logprobs = [
                self._logprobs(token, params.logprobs) for token in update.new_token_ids
            ]
        return update

    def _ended(self, sequence: _Sequence, token: int, update: SequenceUpdate) -> bool:
        params = sequence.params
        if token in params.stop_token_ids:
            update.finish_reason, update.stop_reason = "stop", token
        elif token == self.eos and not params.ignore_eos:
            update.finish_reason = "stop"
        elif sequence.detokenizer and (stop := sequence.detokenizer.append([token], False)):
            update.finish_reason, update.stop_reason = "stop", stop
        elif params.max_tokens is not None and sequence.sent >= params.max_tokens:
            update.finish_reason = "length"
        return update.finish_reason is not None

    @staticmethod
    def _logprobs(token: int, count: int) -> TokenLogprobs:
        tops = [token, *range(100, 200)][:count]
        return TokenLogprobs(token, -0.5, 1, tops, [-0.5 - i for i in range(len(tops))])
