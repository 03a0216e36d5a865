"""Continuous batching: which sequences run in the next step, and with how many tokens.

Each step has a token budget. Every decoding sequence gets its token first; the remainder goes to
chunks of prompts, half of it in order of arrival and half to the shortest remainder, so that
neither a long prompt nor a stream of short ones can keep the other out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from helicore._core import InternalError
from helicore.config import SchedulerConfig
from helicore.executor.counters import EngineCounters
from helicore.executor.kv_pool import KVPool
from helicore.executor.lanes import Ints, Lanes
from helicore.executor.sequence import Phase, Request, Sequence


@dataclass(slots=True)
class Chunk:
    """Tokens start .. start + length of a sequence's prompt, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int


@dataclass(slots=True)
class Step:
    """What runs: one token of each decode lane, then the chunks."""

    decode: Ints
    chunks: list[Chunk]

    @property
    def empty(self) -> bool:
        return not len(self.decode) and not self.chunks

    def split(self, lanes: Lanes) -> Iterator[tuple[Sequence, Step]]:
        """The same work, one sequence at a time."""
        for position, lane in enumerate(self.decode.tolist()):
            yield lanes.sequence(lane), Step(self.decode[position : position + 1], [])
        for chunk in self.chunks:
            yield chunk.sequence, Step(self.decode[:0], [chunk])


class Scheduler:
    """Owns the queue and the sets of running sequences; moves sequences between phases.

    Admission reserves pages for all known tokens of a sequence plus one page of growth for every
    running one, so a half-computed prompt never waits for pages. Only decoding sequences grow;
    when one finds no page, the running sequence that is last in order is preempted: its tokens
    are committed, its pages become evictable, and it is recomputed through the prefix tree.
    The first in order is never preempted for another one, so some sequence always finishes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        lanes: Lanes,
        pool: KVPool,
        counters: EngineCounters,
        max_prompt_logit_rows: int,
    ) -> None:
        self._config = config
        self._lanes = lanes
        self._pool = pool
        self._counters = counters
        self._max_prompt_logit_rows = max_prompt_logit_rows
        # A heap; entries that are no longer waiting are dropped when they come up.
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_waiting = 0
        self._head: Sequence | None = None
        self._prefilling: list[Sequence] = []
        self._decoding: set[int] = set()
        self._decode_lanes: Ints = np.empty(0, np.int64)
        self._is_stale = False
        # Lanes whose pages may be full: those that just filled one, or began to decode.
        self._may_grow: list[int] = []
        self._blocked_at: tuple[Sequence | None, int] = (None, 0)

    # --- the step ----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Picks the next step; empty only when nothing is left to run."""
        self._grow_decodes()
        decode = self._current_decodes()
        budget = self._config.max_num_batched_tokens - len(decode)
        self._admit(budget)
        self._note_wait()
        return Step(decode, self._plan_chunks(budget) if self._prefilling else [])

    def advance(self, step: Step) -> None:
        """After the forward pass: rows are in the cache, full pages become reusable."""
        lanes, page = self._lanes, self._pool.page_size
        computed = lanes.num_tokens[step.decode]
        lanes.num_computed[step.decode] = computed
        to_commit = step.decode[computed % page == 0].tolist()
        self._may_grow += to_commit
        for chunk in step.chunks:
            lane, end = chunk.sequence.lane, chunk.start + chunk.length
            lanes.num_computed[lane] = end
            self._counters.computed_prompt_tokens += chunk.length
            if end // page > lanes.num_committed[lane] // page:
                to_commit.append(lane)
            if end == lanes.num_tokens[lane]:
                self._start_decoding(chunk.sequence)
        if to_commit:
            self._commit_pages(to_commit)
        for chunk in step.chunks:
            self._release_siblings(chunk.sequence.request)

    # --- arrivals and departures -------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._enqueue(request.sequences[0])

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence from any phase; its cached tokens stay reusable."""
        if sequence.phase in (Phase.PREFILL, Phase.DECODE):
            self._leave_lane(sequence)
        elif sequence.phase is Phase.WAITING:
            self._num_waiting -= 1
        sequence.phase = Phase.DONE
        self._release_siblings(sequence.request)

    @property
    def running(self) -> list[Sequence]:
        return self._prefilling + [self._lanes.sequence(lane) for lane in self._decoding]

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    # --- decodes -----------------------------------------------------------------------------

    def _current_decodes(self) -> Ints:
        if self._is_stale:
            self._decode_lanes = np.array(sorted(self._decoding), np.int64)
            self._is_stale = False
        return self._decode_lanes

    def _grow_decodes(self) -> None:
        """Reserves the row of this step for each decoding lane, preempting where pages lack."""
        tokens, reserved = self._lanes.num_tokens, self._lanes.num_reserved
        page = self._pool.page_size
        need = [
            lane
            for lane in self._may_grow
            if lane in self._decoding and tokens[lane] > reserved[lane]
        ]
        while need:
            want = [-(-int(tokens[lane]) // page) * page for lane in need]
            granted = self._pool.reserve_many(need, want)
            for lane, num_tokens, ok in zip(need, want, granted, strict=True):
                if ok:
                    reserved[lane] = num_tokens
            need = [lane for lane, ok in zip(need, granted, strict=True) if not ok]
            if need:
                victim = max(self.running, key=lambda sequence: sequence.order)
                need = [lane for lane in need if lane != victim.lane]
                self._preempt(victim)
        self._may_grow.clear()

    def _preempt(self, victim: Sequence) -> None:
        self._leave_lane(victim)
        self._enqueue(victim)
        self._counters.preemptions += 1

    def _leave_lane(self, sequence: Sequence) -> None:
        lane = sequence.lane
        if sequence.phase is Phase.DECODE:
            self._decoding.discard(lane)
            self._is_stale = True
        else:
            self._prefilling.remove(sequence)
        self._pool.release(lane, self._lanes.uncommitted(lane))
        self._lanes.give_back(lane)
        self._blocked_at = (None, 0)

    def _start_decoding(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        sequence.phase = Phase.DECODE
        self._decoding.add(sequence.lane)
        self._may_grow.append(sequence.lane)
        self._is_stale = True

    def _commit_pages(self, lanes: list[int]) -> None:
        state, page = self._lanes, self._pool.page_size
        tokens = []
        for lane in lanes:
            begin, end = state.num_committed[lane], state.num_computed[lane] // page * page
            tokens.append(state.tokens[lane, begin:end])
            state.num_committed[lane] = end
        self._pool.commit_many(lanes, tokens)

    # --- admission ---------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_waiting += 1

    def _release_siblings(self, request: Request) -> None:
        """Queues the sequences that waited for the first one to compute the common prompt."""
        if request.has_held and request.sequences[0].phase in (Phase.DECODE, Phase.DONE):
            request.has_held = False
            for sequence in request.sequences:
                if sequence.phase is Phase.HELD:
                    self._enqueue(sequence)

    def _admit(self, budget: int) -> None:
        """Takes sequences from the queue, in order, while they have room and work to share.

        Beyond what the budget can run, a few more are let in, so that a short prompt does not wait
        for a long one that came first.
        """
        waiting, lanes = self._waiting, self._lanes
        planned = sum(self._remaining(sequence) for sequence in self._prefilling)
        while waiting and (
            planned < budget or len(self._prefilling) < self._config.max_concurrent_prefills
        ):
            sequence = waiting[0][1]
            if sequence.phase is Phase.WAITING:
                if not lanes.num_free or not self._try_admit(sequence):
                    break
                planned += self._remaining(sequence)
            heapq.heappop(waiting)

    def _try_admit(self, sequence: Sequence) -> bool:
        available = self._pool.available_pages()
        blocked, available_then = self._blocked_at
        if blocked is sequence and available <= available_then:
            return False  # nobody left since it was refused, and no page came back
        lane = self._lanes.take(sequence)
        matched = self._open(sequence, lane)
        if matched is None:
            self._lanes.give_back(lane)
            self._blocked_at = (sequence, available)
            if not self.num_running:
                raise InternalError(
                    f"an idle pool has no room for {len(sequence.tokens)} tokens of request "
                    f"{sequence.request.request_id!r}"
                )
            return False
        self._note_admission(sequence, matched)
        self._num_waiting -= 1
        sequence.phase = Phase.PREFILL
        self._prefilling.append(sequence)
        return True

    def _open(self, sequence: Sequence, lane: int) -> int | None:
        """Opens the lane's cache over what the tree holds; None when there is no room.

        The last known token is always computed: its logits are needed.
        """
        num_known = len(sequence.tokens)
        num_lookup = 0 if sequence.needs_prompt_logprobs else num_known - 1
        # One page of growth for each sequence that runs: an admission is not undone at once.
        headroom = self.num_running + 1 if self.num_running else 0
        lookups = [num_lookup] if self.num_running else [num_lookup, 0]
        for length in lookups:
            tokens = self._lanes.tokens[lane, :length]
            matched = self._pool.open(lane, tokens, sequence.request.scope, num_known, headroom)
            if matched is not None:
                self._lanes.num_computed[lane] = self._lanes.num_committed[lane] = matched
                self._lanes.num_reserved[lane] = num_known
                return matched
        return None

    def _note_wait(self) -> None:
        """How many steps the head of the queue has been the head."""
        head = self._waiting[0][1] if self._num_waiting else None
        if head is None or head is not self._head:
            self._head, self._counters.oldest_wait_steps = head, 0
        else:
            self._counters.oldest_wait_steps += 1

    def _note_admission(self, sequence: Sequence, matched: int) -> None:
        if sequence.num_cached_tokens is None:
            prompt_len = len(sequence.request.prompt)
            sequence.num_cached_tokens = matched
            self._counters.prompt_tokens += prompt_len if sequence.index == 0 else 0
            self._counters.prefix_cache_hits += matched
            self._counters.prefix_cache_queries += prompt_len

    # --- chunks of prompts -------------------------------------------------------------------

    def _remaining(self, sequence: Sequence) -> int:
        lane = sequence.lane
        return int(self._lanes.num_tokens[lane] - self._lanes.num_computed[lane])

    def _plan_chunks(self, budget: int) -> list[Chunk]:
        """Half of the budget by order, the rest to the shortest remainder.

        Rows of prompts whose logits are wanted are bounded over all of them: logits are large.
        """
        by_order = sorted(self._prefilling, key=lambda sequence: sequence.order)
        by_size = sorted(
            by_order, key=lambda sequence: (sequence.request.priority, self._remaining(sequence))
        )
        lengths: dict[int, int] = dict.fromkeys((s.lane for s in by_order), 0)
        rows_left = self._max_prompt_logit_rows
        for queue, share in ((by_order, budget - budget // 2), (by_size, budget)):
            left = min(share, budget - sum(lengths.values()))
            for sequence in queue:
                extra = min(left, self._remaining(sequence) - lengths[sequence.lane])
                if sequence.needs_prompt_logprobs:
                    extra = min(extra, rows_left)
                    rows_left -= extra
                lengths[sequence.lane] += extra
                left -= extra
        return [
            Chunk(sequence, int(self._lanes.num_computed[sequence.lane]), lengths[sequence.lane])
            for sequence in by_order
            if lengths[sequence.lane]
        ]
