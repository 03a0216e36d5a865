"""Measuring: several sides in turn, so that a drifting machine hits all alike; medians."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    on_run: Callable[[str], None] = lambda side: None,
) -> dict[str, list[float]]:
    """Runs every side once a round, in alternating order; a side returns its own figure."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            on_run(name)
            gc.collect()
            figures[name].append(sides[name]())
    return figures


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in figures.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; ValueError without values."""
    if not values:
        raise ValueError("values must hold at least one number, got none")
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
