"""What generate() returns: RequestOutput, one CompletionOutput per sequence, Logprob per token."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of a token's probability before temperature and filters.

    rank counts from 1 (the most likely token) over the vocabulary; None when it was not computed.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOfToken: TypeAlias = dict[int, Logprob]
"""One position: token id -> Logprob, the chosen token first, then the best ones in order."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    text: without the stop string or stop token, unless include_stop_str_in_output.
    token_ids: every generated token, an end-of-sequence or stop token included.
    stop_reason: the stop string, or the id from stop_token_ids; None for the model's own end of
      sequence and for the other finish reasons.
    error: why the engine gave the sequence up (finish_reason "abort"); else None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOfToken] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the monotonic clock of this process; None where it has not happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt.

    prompt: the text, or None when the prompt came as token ids.
    prompt_logprobs: one entry per prompt token, the first None; None when not asked for.
    num_cached_tokens: prompt tokens whose cache pages were found, not computed.
    cached_tokens_by_level: those of them that each level of the cache held, the hot one first; what
      is missing to num_cached_tokens came from the prefixes on disk.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfToken | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    cached_tokens_by_level: list[int] = field(default_factory=list)
    metrics: RequestMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for json.dumps."""
        return asdict(self)
