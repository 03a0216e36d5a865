"""What a benchmark returns, and its three forms: table, JSON line, file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One row. peer, peer_value: who was measured beside us in the same run, and its figure."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    higher_is_better: bool = True

    @property
    def ratio(self) -> float | None:
        """How many times better ours is: above 1 is better, whatever the unit."""
        if self.peer_value is None:
            return None
        ours, theirs = self.value, self.peer_value
        best, other = (ours, theirs) if self.higher_is_better else (theirs, ours)
        return best / other if other else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": self.peer_value,
            "ratio": self.ratio,
        }


@dataclass(slots=True)
class Report:
    """The rows of one run of one benchmark. failures: what a check found wrong, one line each."""

    bench: str
    results: list[Result]
    env: Mapping[str, Any]
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"results": [result.to_dict() for result in self.results], "env": dict(self.env)}

    def rows(self) -> list[list[object]]:
        """Cells for a table with the columns of `COLUMNS`."""
        return [
            [r.name, r.value, r.unit, r.peer or "-", r.peer_value, r.ratio] for r in self.results
        ]

    def write(self, folder: Path) -> Path:
        """Writes <bench>-<commit>-<time>.json into `folder`, which is made when missing."""
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        commit = str(self.env.get("commit") or "unknown")[:10]
        path = folder / f"{self.bench}-{commit}-{now:%Y%m%d-%H%M%S}.json"
        value = {"bench": self.bench, "date": now.isoformat(timespec="seconds"), **self.to_dict()}
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        return path


COLUMNS = ("name", "value", "unit", "peer", "peer value", "ratio")
