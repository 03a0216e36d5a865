"""Continuous batching: which sequences run in the next step, and with how many tokens.

Each step has a token budget. Every decoding sequence gets its token first; the remainder goes to
chunks of prompts, half of it in order of arrival and half to the shortest remainder, so that
neither a long prompt nor a stream of short ones can keep the other out.
"""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np

from helicore._core import InternalError
from helicore.config import SchedulerConfig
from helicore.executor.counters import EngineCounters
from helicore.executor.kv_pool import KVPool, Parked, Resumed
from helicore.executor.lanes import Ints, Lanes
from helicore.executor.sequence import Phase, Request, Sequence
from helicore.executor.steps import Step, plan_chunks


class Scheduler:
    """Owns the queue and the sets of running sequences; moves sequences between phases.

    Admission reserves pages for all known tokens of a sequence plus one page of growth for every
    running one, so a half-computed prompt never waits for pages. Only decoding sequences grow;
    when one finds no page, the last in order of those that hold pages gives way: a running one is
    preempted, one that waits with pages loses them. The first in order never gives way to another
    one, and what waits with pages never keeps an idle pool from running, so some sequence always
    finishes.
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
        self._parked: set[Sequence] = set()  # those that wait with pages
        self._head: Sequence | None = None
        self._prefilling: list[Sequence] = []
        self._decoding: set[int] = set()
        self._num_running_of: Counter[int] = Counter()  # by priority
        # Decode lanes that leave this step out: their page is about to come.
        self._stalled: set[int] = set()
        self._decode_lanes: Ints = np.empty(0, np.int64)
        self._is_stale = False
        # Lanes whose pages may be full: those that just filled one, or began to decode.
        self._may_grow: list[int] = []
        self._blocked_at: tuple[Sequence | None, int] = (None, 0)
        self._prefetched: tuple[Sequence | None, int] = (None, 0)

    # --- the step ----------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Picks the next step; empty only when nothing can run now."""
        self._grow_decodes()
        self._admit()
        self._prefetch()
        self._note_wait()
        decode = self._current_decodes()
        budget = self._config.max_num_batched_tokens - len(decode)
        if not self._prefilling:
            return Step(decode, [])
        rows = self._max_prompt_logit_rows
        return Step(decode, plan_chunks(self._prefilling, self._lanes, budget, rows))

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

    # --- arrivals and departures -------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._enqueue(request.sequences[0])

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence from any phase; its cached tokens stay reusable."""
        if sequence.phase in (Phase.PREFILL, Phase.DECODE):
            self._pool.release(sequence.lane, self._lanes.uncommitted(sequence.lane))
            self._leave_lane(sequence)
        elif sequence.phase is Phase.WAITING:
            self._num_waiting -= 1
            self._drop_pages(sequence)
        sequence.phase = Phase.DONE
        if sequence.index == sequence.request.num_released - 1:
            self._release_next(sequence.request)

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
            self._decode_lanes = np.array(sorted(self._decoding - self._stalled), np.int64)
            self._is_stale = False
        return self._decode_lanes

    def _grow_decodes(self) -> None:
        """Reserves the row of this step for each decoding lane, making room where pages lack.

        Pages that come by themselves count as room: for those, lanes leave the step out instead.
        """
        tokens, reserved = self._lanes.num_tokens, self._lanes.num_reserved
        need = [
            lane
            for lane in self._may_grow
            if lane in self._decoding and tokens[lane] > reserved[lane]
        ]
        while need := self._reserve(need):
            if len(need) <= self._pool.pending_pages():
                break
            self._give_way()
            need = [lane for lane in need if lane in self._decoding]
        self._may_grow = need
        if need or self._stalled:
            self._stalled, self._is_stale = set(need), True

    def _reserve(self, lanes: list[int]) -> list[int]:
        """A page for each lane that needs one; those that got none."""
        if not lanes:
            return lanes
        page = self._pool.page_size
        want = [-(-int(self._lanes.num_tokens[lane]) // page) * page for lane in lanes]
        granted = self._pool.reserve_many(lanes, want)
        for lane, num_tokens, ok in zip(lanes, want, granted, strict=True):
            if ok:
                self._lanes.num_reserved[lane] = num_tokens
        refused = [lane for lane, ok in zip(lanes, granted, strict=True) if not ok]
        for lane in [lane for lane in refused if self._pool.is_lost(lane)]:
            refused.remove(lane)
            self._recompute(self._lanes.sequence(lane))
        return refused

    def _give_way(self) -> None:
        """The last in order of those whose pages are in the way loses them."""
        victims = [*self.running, *self._parked_in_the_way(1)]
        self._take_from(max(victims, key=lambda sequence: sequence.order))

    def _parked_in_the_way(self, num_refused: int) -> set[Sequence]:
        """Parked pages move down by themselves, unless so many pages were refused for lack of room
        below."""
        is_stuck = not self._pool.has_lower_levels or self._pool.available_pages() >= num_refused
        return self._parked if is_stuck else set()

    def _take_from(self, victim: Sequence) -> None:
        if victim.parked is not None:
            self._drop_pages(victim)
        else:
            self._preempt(victim)

    def _preempt(self, victim: Sequence) -> None:
        """Back to its place in the queue, with its pages where they can be kept."""
        victim.parked = self._pool.park(victim.lane, self._lanes.uncommitted(victim.lane))
        self._leave_lane(victim)
        self._enqueue(victim)
        self._counters.preemptions += 1
        self._counters.suspends += victim.parked is not None

    def _recompute(self, sequence: Sequence) -> None:
        """Rows of a running sequence are lost: back to the queue, without pages."""
        self._pool.release(sequence.lane, self._lanes.uncommitted(sequence.lane))
        self._leave_lane(sequence)
        self._enqueue(sequence)
        self._counters.lost += 1

    def _drop_pages(self, sequence: Sequence) -> None:
        """A waiting sequence gives its pages back; it is recomputed through the prefix tree."""
        if sequence.parked is not None:
            self._pool.drop(sequence.parked)
            self._parked.discard(sequence)
            sequence.parked = None
            self._blocked_at = (None, 0)

    def _leave_lane(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.DECODE:
            self._decoding.discard(sequence.lane)
            self._is_stale = True
        else:
            self._prefilling.remove(sequence)
        self._lanes.give_back(sequence.lane)
        self._num_running_of[sequence.request.priority] -= 1
        self._blocked_at = (None, 0)

    def _start_decoding(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        sequence.phase = Phase.DECODE
        self._decoding.add(sequence.lane)
        self._may_grow.append(sequence.lane)
        self._is_stale = True
        if sequence.request.num_released < len(sequence.request.sequences):
            self._fork(sequence)

    def _commit_pages(self, lanes: list[int]) -> None:
        state, page = self._lanes, self._pool.page_size
        tokens = []
        for lane in lanes:
            begin, end = state.num_committed[lane], state.num_computed[lane] // page * page
            tokens.append(state.tokens[lane, begin:end])
            state.num_committed[lane] = end
        self._pool.commit_many(lanes, tokens)

    # --- the queue ---------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_waiting += 1
        if sequence.parked is not None:
            self._parked.add(sequence)

    def _fork(self, first: Sequence) -> None:
        """Its prompt is computed: the siblings get twins of its cache.

        A twin lacks the last row, as every sequence whose prompt was found: it gives the logits.
        """
        request = first.request
        held = [s for s in request.sequences[request.num_released :] if s.phase is Phase.HELD]
        twins = self._pool.fork(first.lane, len(request.prompt), len(held))
        for sequence, twin in zip(held, twins, strict=True):
            sequence.parked = twin
            self._enqueue(sequence)
        request.num_released = len(request.sequences)
        self._counters.forks += len(twins)

    def _release_next(self, request: Request) -> None:
        """The one that was to compute the prompt has left: another sibling does."""
        while request.num_released < len(request.sequences):
            sequence = request.sequences[request.num_released]
            request.num_released += 1
            if sequence.phase is Phase.HELD:
                self._enqueue(sequence)
                return

    # --- admission ---------------------------------------------------------------------------

    def _admit(self) -> None:
        """Takes sequences from the queue, in order, while they have room and work to share.

        Beyond what the budget can run, a few more are let in, so that a short prompt does not wait
        for a long one that came first.
        """
        waiting, budget = self._waiting, self._config.max_num_batched_tokens
        planned = sum(self._lanes.num_remaining(sequence.lane) for sequence in self._prefilling)
        while waiting and (
            planned < budget - len(self._decoding)
            or len(self._prefilling) < self._config.max_concurrent_prefills
        ):
            sequence = waiting[0][1]
            if sequence.phase is Phase.WAITING:
                if not self._place(sequence):
                    break
                planned += self._lanes.num_remaining(sequence.lane)
            heapq.heappop(waiting)

    def _place(self, sequence: Sequence) -> bool:
        """Gives the head of the queue a lane and pages; less important ones may have to leave."""
        while not (self._lanes.num_free and self._try_admit(sequence)):
            if victim := self._less_important_victim(sequence):
                self._take_from(victim)
            elif self.num_running or self._pool.pending_pages():
                return False
            else:
                self._clear_idle_pool(sequence)
        return True

    def _less_important_victim(self, sequence: Sequence) -> Sequence | None:
        """The last sequence of lower priority that has what is missing: a lane, or pages.

        None where all of them together can not make enough room.
        """
        priority = sequence.request.priority
        runs_lower = any(p > priority and n for p, n in self._num_running_of.items())
        if not runs_lower and all(s.request.priority <= priority for s in self._parked):
            return None
        scope, known = sequence.request.scope, sequence.tokens[:-1]
        found = self._num_rows(sequence) if sequence.parked else self._pool.probe(known, scope)
        need = self._num_pages(len(known) + 1) - found // self._pool.page_size
        parked = self._parked_in_the_way(need + self._headroom(self.num_running))
        lower = [s for s in (*self.running, *parked) if s.request.priority > priority]
        victims = lower if self._lanes.num_free else [s for s in lower if s.parked is None]
        if not victims:
            return None
        room = sum(self._num_pages(self._num_rows(s)) for s in lower)
        num_left = self.num_running - sum(s.parked is None for s in lower)
        if self._pool.available_pages() + room < need + self._headroom(num_left):
            return None
        return max(victims, key=lambda victim: victim.order)

    def _clear_idle_pool(self, sequence: Sequence) -> None:
        """Nothing runs, and still there is no room: the last one that waits with pages has them."""
        last = max(self._parked, key=lambda parked: parked.order, default=None)
        if last is None or (last is sequence and sequence.parked and sequence.parked.is_lookup):
            raise InternalError(
                f"an idle pool has no room for {len(sequence.tokens)} tokens of request "
                f"{sequence.request.request_id!r}"
            )
        self._drop_pages(last)

    def _try_admit(self, sequence: Sequence) -> bool:
        available = self._pool.available_pages()
        blocked, available_then = self._blocked_at
        if blocked is sequence and available <= available_then:
            return False  # nobody left since it was refused, and no page came back
        lane = self._lanes.take(sequence)
        if not self._open(sequence, lane):
            self._lanes.give_back(lane)
            self._blocked_at = (sequence, available)
            return False
        self._num_waiting -= 1
        sequence.phase = Phase.PREFILL
        self._prefilling.append(sequence)
        self._num_running_of[sequence.request.priority] += 1
        return True

    def _open(self, sequence: Sequence, lane: int) -> bool:
        """Gives a lane what the sequence or the tree holds of it; False for no room.

        The last known token is always computed: its logits are needed.
        """
        headroom = self._headroom(self.num_running)
        tokens = self._lanes.tokens[lane, : len(sequence.tokens)]
        is_lookup_allowed = True
        while True:
            parked = self._look_up(sequence, is_lookup_allowed)
            resumed = self._pool.resume(lane, parked, tokens, headroom)
            if resumed is Resumed.RUNS:
                self._enter(sequence, lane, parked)
                return True
            if resumed is Resumed.NO_ROOM:
                is_last = self.num_running or not parked.is_lookup or not is_lookup_allowed
                if parked.is_lookup and not (is_last and self._pool.has_lower_levels):
                    self._drop_pages(sequence)
                if is_last:
                    return False
                is_lookup_allowed = False  # alone: pages that were found may be in the way
            else:
                self._counters.lost += 1
                self._drop_pages(sequence)

    def _look_up(self, sequence: Sequence, is_allowed: bool = True) -> Parked:
        """The pages that the sequence kept, or else those that the tree has of it."""
        parked = sequence.parked
        tokens = sequence.tokens[:-1]
        if sequence.needs_prompt_logprobs or not is_allowed:
            tokens = tokens[:0]
        scope = sequence.request.scope
        if parked is None or (
            parked.is_lookup and self._pool.probe(tokens, scope) > parked.num_rows
        ):
            self._drop_pages(sequence)
            sequence.parked = self._pool.look_up(tokens, scope)
            self._parked.add(sequence)
        assert sequence.parked is not None
        return sequence.parked

    def _enter(self, sequence: Sequence, lane: int, parked: Parked) -> None:
        """The lane has the rows of `parked`, which is its cache now."""
        sequence.parked = None
        self._parked.discard(sequence)
        self._lanes.num_computed[lane] = parked.num_rows
        self._lanes.num_committed[lane] = parked.cache.num_committed_tokens
        self._lanes.num_reserved[lane] = self._lanes.num_tokens[lane]
        if parked.is_lookup:
            self._note_lookup(sequence, parked)
        elif parked.was_running:
            self._counters.resumes += 1

    def _prefetch(self) -> None:
        """Pages of those that run next come up while others run."""
        if not self._num_waiting or not self._pool.has_lower_levels:
            return
        self._pool.go_on_prefetching()
        head = self._first_waiting()
        if self._prefetched == (head, len(self._parked)):
            return
        self._look_up(head)
        room = self._pool.free_pages() - self._headroom(self.num_running)
        for sequence in heapq.nsmallest(4, self._parked, key=lambda parked: parked.order):
            if sequence.parked is not None:
                room -= self._num_pages(sequence.parked.num_rows)
                if room < 0:
                    break
                self._pool.prefetch(sequence.parked)
        self._prefetched = (head, len(self._parked))

    def _first_waiting(self) -> Sequence:
        while self._waiting[0][1].phase is not Phase.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _headroom(self, num_running: int) -> int:
        """One page of growth for each sequence that runs: an admission is not undone at once."""
        return num_running + 1 if num_running else 0

    def _num_rows(self, sequence: Sequence) -> int:
        """Tokens for which a sequence holds pages."""
        parked = sequence.parked
        return int(self._lanes.num_reserved[sequence.lane]) if parked is None else parked.num_rows

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.page_size)

    def _note_wait(self) -> None:
        """How many steps the head of the queue has been the head."""
        head = self._first_waiting() if self._num_waiting else None
        if head is None or head is not self._head:
            self._head, self._counters.oldest_wait_steps = head, 0
        else:
            self._counters.oldest_wait_steps += 1

    def _note_lookup(self, sequence: Sequence, found: Parked) -> None:
        """Counted once per request: siblings fork."""
        if sequence.num_cached_tokens is None and sequence.index == 0:
            prompt_len = len(sequence.request.prompt)
            sequence.num_cached_tokens = found.num_rows
            sequence.cached_tokens_by_level = self._pool.tokens_by_level(found)
            self._counters.note_lookup(prompt_len, found.num_rows, sequence.cached_tokens_by_level)
