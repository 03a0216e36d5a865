"""The benchmark frame: rows, ratios, files, interleaving. No test looks at a duration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helicore.bench.report import COLUMNS, Report, Result
from helicore.bench.throughput import ROWS, Difference
from helicore.bench.timing import interleave, medians, percentile
from helicore.bench.workload import ragged_lengths


def test_a_ratio_above_one_means_ours_is_better() -> None:
    assert Result("x", 200.0, "tokens/s", "peer", 100.0).ratio == 2.0
    assert Result("x", 10.0, "ms", "peer", 40.0, higher_is_better=False).ratio == 4.0
    assert Result("x", 10.0, "ms").ratio is None
    assert Result("x", 10.0, "tokens/s", "peer", 0.0).ratio is None


def test_a_report_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    report = Report("demo", [Result("x", 2.0, "ms", "peer", 4.0)], {"commit": "abc", "cpu": "c"})
    value = report.to_dict()
    assert list(value) == ["results", "env"]
    assert list(value["results"][0]) == ["name", "value", "unit", "peer", "peer_value", "ratio"]
    assert len(report.rows()[0]) == len(COLUMNS)
    path = report.write(tmp_path / "new" / "folder")
    written = json.loads(path.read_text())
    assert written["results"] == value["results"]
    assert path.name.startswith("demo-abc-")


def test_sides_are_measured_in_turn_and_in_alternating_order() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = interleave({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}
    assert medians(figures) == {"a": 4.0, "b": 3.0}


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1.0, 3.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="values"):
        percentile([], 50)


def test_ragged_lengths_cover_their_range_and_are_the_same_each_time() -> None:
    lengths = ragged_lengths(16, 16, 256)
    assert (len(lengths), min(lengths), max(lengths)) == (16, 16, 256)
    assert lengths == ragged_lengths(16, 16, 256)
    assert lengths != sorted(lengths)


def test_the_ragged_row_fits_one_prefill_step() -> None:
    """Decode speed is counted from the step in which every request got its first token."""
    row = next(row for row in ROWS if row.name == "decode_b16_ragged")
    assert sum(row.lengths) < 8192


def test_only_a_gap_within_the_tolerance_is_a_tie() -> None:
    assert Difference("x", 0, 3, gap=0.01, tolerance=0.02).is_tie
    assert not Difference("x", 0, 3, gap=0.03, tolerance=0.02).is_tie
