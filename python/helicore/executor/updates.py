"""What a step hands to its caller: one update per sequence that got tokens or ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helicore.executor.detokenizer import Detokenizer

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and truncation.

    `rank` is 1 for the most likely token. `top_ids` has the k most likely tokens, best first,
    k being SamplingParams.logprobs or prompt_logprobs; it need not contain `token_id`.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class SequenceUpdate:
    """News of one sequence of a request (`index` is 0..n-1).

    `new_token_ids` holds the tokens that this step added, a stop token included. The last update
    of a sequence has a `finish_reason`; `stop_reason` is the matched stop id or stop string, None
    for an end-of-sequence token. `error` says why a request was aborted by the engine itself.
    `num_cached_tokens`, `cached_tokens_by_level` (hot first, prefixes on disk not counted) and
    `prompt_logprobs` (None at the first position) come with the first update of index 0.
    `detokenizer` is the sequence's own where stop strings made it necessary.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    cached_tokens_by_level: list[int] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    detokenizer: Detokenizer | None = None
    error: str | None = None
