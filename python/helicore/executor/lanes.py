"""State of the running sequences as arrays, one row ("lane") each.

A decode step touches these arrays with a fixed number of vector operations; Python objects are
touched only for sequences to which something happens.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from helicore.executor.sampling_rows import SamplingRows
from helicore.executor.sequence import Sequence

Ints = NDArray[np.int64]

BAD_TOKEN = -1
"""Sampled where a row of logits has a NaN or nothing but -inf."""


class Lanes:
    """Rows for at most `num_lanes` sequences of at most `max_tokens` tokens.

    Invariant of a taken lane: committed <= computed <= tokens <= limit, computed <= reserved.
    Memory of `tokens` is touched only as far as sequences reach.
    """

    def __init__(self, num_lanes: int, max_tokens: int, vocab_size: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_lanes
        self.tokens = np.empty((num_lanes, max_tokens), np.int32)
        """Prompt and output of each lane."""
        self.num_tokens = np.zeros(num_lanes, np.int64)
        self.num_computed = np.zeros(num_lanes, np.int64)
        """Tokens whose rows are in the cache."""
        self.num_committed = np.zeros(num_lanes, np.int64)
        """Tokens that the KV manager knows as final."""
        self.num_reserved = np.zeros(num_lanes, np.int64)
        """Tokens for which there are pages."""
        self.prompt_len = np.zeros(num_lanes, np.int64)
        self.limit = np.zeros(num_lanes, np.int64)
        self.min_total = np.zeros(num_lanes, np.int64)
        """No stop before a sequence has this many tokens."""
        self.stop_ids = np.full((num_lanes, 2), BAD_TOKEN, np.int32)
        """Padded with at least one BAD_TOKEN, which is an event for every lane."""
        self.alarm = np.zeros(num_lanes, np.int64)
        """No look at a lane before it has this many tokens, unless a stop id comes: its limit, or
        0 for a lane whose every token needs a look (stop strings, logprobs, a first report)."""
        self.sampling = SamplingRows(num_lanes)
        self._vocab_size = vocab_size
        self._free = list(range(num_lanes))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence) -> int:
        """Gives `sequence` the lowest free lane, so that full batches stay dense."""
        lane = heapq.heappop(self._free)
        request = sequence.request
        num_tokens = len(sequence.tokens)
        self.sequences[lane] = sequence
        self.tokens[lane, :num_tokens] = sequence.tokens
        self.num_tokens[lane] = num_tokens
        self.num_computed[lane] = self.num_committed[lane] = self.num_reserved[lane] = 0
        self.prompt_len[lane] = len(request.prompt)
        self.limit[lane] = request.limit
        self.min_total[lane] = len(request.prompt) + request.params.min_tokens
        self._set_stop_ids(lane, request.stop_ids)
        self.alarm[lane] = 0
        self.sampling.set(lane, request.params, sequence.seed, self._vocab_size)
        sequence.lane = lane
        return lane

    def give_back(self, lane: int) -> None:
        """Frees the lane; the sequence keeps a copy of its tokens."""
        sequence = self.sequences[lane]
        assert sequence is not None
        sequence.tokens = self.tokens[lane, : self.num_tokens[lane]].copy()
        sequence.lane = -1
        self.sequences[lane] = None
        heapq.heappush(self._free, lane)

    def sequence(self, lane: int) -> Sequence:
        sequence = self.sequences[lane]
        assert sequence is not None, f"lane {lane} is free"
        return sequence

    def uncommitted(self, lane: int) -> NDArray[np.int32]:
        """Tokens that are in the cache but not yet committed: a view."""
        return self.tokens[lane, self.num_committed[lane] : self.num_computed[lane]]

    def num_remaining(self, lane: int) -> int:
        """Tokens that are not in the cache."""
        return int(self.num_tokens[lane] - self.num_computed[lane])

    def append(self, lanes: Ints, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Adds one sampled token to each of `lanes`; which of them need a look.

        Those are the lanes that may have ended, and the ones that are watched.
        """
        positions = self.num_tokens[lanes]
        self.tokens[lanes, positions] = tokens
        positions += 1
        self.num_tokens[lanes] = positions
        events: NDArray[np.bool_] = (self.stop_ids[lanes] == tokens[:, None]).any(1)
        events |= positions >= self.alarm[lanes]
        return events

    def watch(self, lane: int, is_watched: bool) -> None:
        """Whether every token of the lane needs a look."""
        self.alarm[lane] = 0 if is_watched else self.limit[lane]

    def _set_stop_ids(self, lane: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) >= width:
            wider = np.full((len(self.sequences), len(ids) + 1), BAD_TOKEN, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[lane] = BAD_TOKEN
        self.stop_ids[lane, : len(ids)] = ids
