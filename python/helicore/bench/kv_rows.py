"""The rows of `helicore bench kv`: what is asked of each, and its form in JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helicore.bench.report import Result

PYTHON, CPP, DISK = "python", "c++", "disk"


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row. scale: from seconds (or bytes) to `unit`; required, goal: bounds, or None."""

    name: str
    unit: str
    scale: float
    required: float | None = None
    goal: float | None = None
    source: str = PYTHON
    higher_is_better: bool = False
    benchmark: str = ""  # of the C++ binary
    counter: str = ""  # of that benchmark; empty: its time


SPECS = (
    RowSpec("decode_step_256_python_us", "us", 1e6, 30, 20),
    RowSpec("decode_step_256_cpp_us", "us", 1e6, 10, 6, CPP, benchmark="decode_step/256"),
    RowSpec("match_100k_ms", "ms", 1e3, 0.25, 0.08),
    RowSpec("match_100k_branchy_ms", "ms", 1e3, 0.3, 0.1),
    RowSpec("commit_64_blocks_us", "us", 1e6, 50, 25),
    RowSpec("evict_10k_pages_ms", "ms", 1e3, 2, 0.8),
    RowSpec("evict_one_us", "us", 1e6, 0.4),
    RowSpec("free_256x2k_ms", "ms", 1e3, 0.6, 0.3),
    RowSpec(
        "bytes_per_page",
        "bytes",
        1,
        48,
        source=CPP,
        benchmark="bytes_per_block",
        counter="page_record",
    ),
    RowSpec("bytes_per_open_page", "bytes", 1),
    RowSpec("bytes_per_tree_node", "bytes", 1, 256, 200),
    RowSpec("match_2k_of_1e6_us", "us", 1e6),
    RowSpec("scaling_1e4_to_1e6", "x", 1, 2.5, 1.5),
    RowSpec("host_to_disk_ratio", "x", 1, 0.8, 0.95, DISK, higher_is_better=True),
    RowSpec("disk_to_host_ratio", "x", 1, 0.8, 0.95, DISK, higher_is_better=True),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of rounds and their range, in the row's unit."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1) -> Figure:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("values must hold at least one number, got none")
        return cls(*(scale * v for v in (statistics.median(values), min(values), max(values))))

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "range": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class KVRow(Result):
    """A row with its bounds and every peer. `value` is NaN when ours was not measured.

    peers: name -> a figure of this run, or why there is none ({"status": ..., "install": ...}).
    """

    spec: RowSpec = SPECS[0]
    figure: Figure | None = None
    peers: Mapping[str, Figure | Mapping[str, Any]] = field(default_factory=dict)
    status: str = "measured"
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether the required bound holds; None without a bound or a figure."""
        return self._holds(self.spec.required)

    @property
    def goal_met(self) -> bool | None:
        return self._holds(self.spec.goal)

    def _holds(self, bound: float | None) -> bool | None:
        if bound is None or self.figure is None:
            return None
        value = self.figure.value
        return value >= bound if self.spec.higher_is_better else value <= bound

    def to_dict(self) -> dict[str, Any]:
        base = Result.to_dict(self)
        if self.figure is None:
            base["value"] = None
        return base | {
            "status": self.status,
            "range": None if self.figure is None else [self.figure.low, self.figure.high],
            "measured_in": self.spec.source,
            "peers": {name: self._peer(peer) for name, peer in self.peers.items()},
            "required": self.spec.required,
            "goal": self.spec.goal,
            "pass": self.passed,
            "goal_met": self.goal_met,
            "details": dict(self.details),
        }

    def _peer(self, peer: Figure | Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(peer, Figure):
            return dict(peer)
        ratio = None
        if self.figure is not None and self.figure.value and peer.value:
            ratio = peer.value / self.figure.value
            ratio = 1 / ratio if self.spec.higher_is_better else ratio
        return {"status": "measured", **peer.to_dict(), "ratio": ratio}


def make_row(
    spec: RowSpec,
    ours: Figure | None,
    peers: Mapping[str, Figure | Mapping[str, Any]],
    status: str = "measured",
    details: Mapping[str, Any] | None = None,
) -> KVRow:
    """The row whose `peer` is the best one that was measured in this run."""
    measured = {name: peer for name, peer in peers.items() if isinstance(peer, Figure)}
    best = None
    if measured and ours is not None:
        pick = max if spec.higher_is_better else min
        best = pick(measured, key=lambda name: measured[name].value)
    return KVRow(
        name=spec.name,
        value=math.nan if ours is None else ours.value,
        unit=spec.unit,
        peer=best,
        peer_value=None if best is None else measured[best].value,
        higher_is_better=spec.higher_is_better,
        spec=spec,
        figure=ours,
        peers=peers,
        status=status,
        details=details or {},
    )
