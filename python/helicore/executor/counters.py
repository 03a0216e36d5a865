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
class LevelCounters:
    """One level of the KV cache, the hot one first. Pages and bytes are totals of moves."""

    tier: str
    """"host" or "disk"."""
    num_pages: int
    hit_tokens: int = 0
    """Tokens of looked-up prompts that were here, in the coldest page of their block."""
    offloaded_pages: int = 0
    """Came from a hotter level."""
    offloaded_bytes: int = 0
    """Written for it."""
    unwritten_pages: int = 0
    """Came back to a copy that was still here, so that nothing was written."""
    onboarded_pages: int = 0
    """Left for a hotter level."""
    onboarded_bytes: int = 0
    dropped_pages: int = 0
    """Evicted from here for good."""


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
    suspends: int = 0
    """Preemptions after which the sequence kept its pages."""
    resumes: int = 0
    """Sequences that went on with the pages they had kept, without recomputation."""
    lost: int = 0
    """Sequences that are computed again because pages could not be read back."""
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
    levels: list[LevelCounters] = field(default_factory=list)
    """Of the KV cache, hot first."""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that running sequences hold, 0..1."""
        return self.kv_pages_in_use / self.kv_pages_total if self.kv_pages_total else 0.0

    def snapshot(self) -> EngineCounters:
        """A copy that later steps do not change."""
        levels = [replace(level) for level in self.levels]
        return replace(self, levels=levels, times=replace(self.times))

    def note_lookup(self, num_tokens: int, num_found: int, found_by_level: list[int]) -> None:
        """A request looked its prompt up."""
        self.prompt_tokens += num_tokens
        self.prefix_cache_queries += num_tokens
        self.prefix_cache_hits += num_found
        for level, found in zip(self.levels, found_by_level, strict=True):
            level.hit_tokens += found


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
