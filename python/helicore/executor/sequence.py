"""Requests and their sequences: identity, parameters and what lives longer than a lane.

What changes on every step (token counts, cache lengths) is not here but in `Lanes`, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from helicore.executor.detokenizer import Detokenizer
from helicore.executor.updates import TokenLogprobs

if TYPE_CHECKING:
    from helicore.executor.kv_pool import Parked
    from helicore.kv import ReuseScope
    from helicore.sampling_params import SamplingParams


class Phase(Enum):
    """Where a sequence is.

    HELD -> WAITING -> PREFILL -> DECODE -> DONE; preemption leads from PREFILL and DECODE back to
    WAITING; abort leads from anywhere to DONE. HELD: a sibling that waits for another sequence of
    its request to compute their common prompt.
    """

    HELD = auto()
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One add_request call: a prompt, its parameters and its n sequences."""

    request_id: str
    prompt: NDArray[np.int32]
    params: SamplingParams
    priority: int
    arrival: int
    """Order of arrival in the engine; the age that fairness and preemption go by."""
    scope: ReuseScope | None
    detokenizer_factory: Callable[[], Detokenizer] | None
    limit: int
    """Tokens of prompt and output at which a sequence ends with "length"."""
    stop_ids: tuple[int, ...]
    """Ids that end a sequence, end-of-sequence ids included unless they are ignored."""
    eos_ids: frozenset[int]
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    num_released: int = 1
    """Sequences that were queued; those after them wait for the last of these to compute the
    prompt."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n outputs of a request. Owned by its request; one thread drives it."""

    request: Request
    index: int
    seed: int
    tokens: NDArray[np.int32]
    """Prompt and output as of the last time without a lane; the lane's row is current."""
    phase: Phase = Phase.HELD
    lane: int = -1
    """Row of the SoA state while it runs, else -1."""
    parked: Parked | None = None
    """The pages that it keeps while it waits: of a fork, or since it was preempted."""
    detokenizer: Detokenizer | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that the first admission found in the cache; None before it, and for forks."""
    cached_tokens_by_level: list[int] | None = None
    """Those of them that each level of the cache held, hot first; prefixes on disk not counted."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reported: bool = False
    """True once num_cached_tokens and prompt_logprobs were handed out."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller runs first and is preempted last; total, so the smallest always advances."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while rows of the prompt must still be computed for their log-probabilities."""
        rows = self.prompt_logprobs
        return rows is not None and len(rows) < len(self.request.prompt)
