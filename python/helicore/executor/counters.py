"""What the engine counts, as plain values that a caller may keep."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class StepTimes:
    """Seconds spent in the parts of a step, summed over all steps."""

    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    postprocess: float = 0.0
    """Without detokenising."""
    detokenize: float = 0.0

    @property
    def executor(self) -> float:
        """Everything but the kernels and detokenising."""
        return self.schedule + self.prepare + self.postprocess


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine was made, and gauges as of the last step."""

    num_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached ones included."""
    computed_prompt_tokens: int = 0
    """Tokens that ran in prompt chunks, recomputation after preemption included."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of requests that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens found there, those on disk included."""
    prefix_cache_hits_disk: int = 0
    """Tokens that came from the disk, for recomputation after preemption too."""
    disk_bytes_read: int = 0
    disk_bytes_written: int = 0
    """As of the last step; pages that were stored already do not count."""
    forks: int = 0
    """Sequences that took a computed prompt over from another one of their request."""
    preemptions: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    failed_steps: int = 0
    """Steps that raised and were repeated one sequence at a time."""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_in_use: int = 0
    """Pages held by running sequences; pages kept for reuse only do not count."""
    oldest_wait_steps: int = 0
    """Steps for which the same sequence has been first in the queue; grows while it is blocked."""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that running sequences hold, 0..1."""
        return self.kv_pages_in_use / self.kv_pages_total if self.kv_pages_total else 0.0

    def snapshot(self) -> EngineCounters:
        """A copy that later steps do not change."""
        return replace(self, times=replace(self.times))


class Stopwatch:
    """Adds the time since the last mark to one part of StepTimes."""

    __slots__ = ("_last", "times")

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._last = time.perf_counter()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        setattr(self.times, part, getattr(self.times, part) + now - self._last)
        self._last = now
