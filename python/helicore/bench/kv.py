"""`helicore bench kv`: host cost of the KV cache manager beside other managers, without a model.

Every side is a process of its own on the same core, and rounds take turns; the method is described
in docs/design/kv-cache-bench.md. A figure of a peer is from the same run or it is not there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helicore.bench import environment, kv_cpp, kv_disk
from helicore.bench.kv_rows import CPP, DISK, PYTHON, SPECS, Figure, KVRow, RowSpec, make_row
from helicore.bench.kv_sides import FRESH_PROCESS, OURS, PEERS, Side, SideFailed
from helicore.bench.kv_sides import measure as measure_sides
from helicore.bench.kv_workload import Workload
from helicore.bench.report import Report

_OURS_MODULE = "helicore.bench.kv_ours"


@dataclass(frozen=True, slots=True)
class KVBenchConfig:
    """peers: folder that benchmarks/peers/install.py filled; cpp_bench: the binary kv_bench.

    disk: a folder on the disk to measure; rows: names, empty for all; disk_bytes: written a round.
    """

    rounds: int = 5
    peers: Path | None = None
    cpp_bench: Path | None = None
    disk: Path | None = None
    rows: tuple[str, ...] = ()
    work: Workload = field(default_factory=Workload)
    disk_bytes: int = 1 << 30


def run(config: KVBenchConfig, progress: Callable[[str], None] = lambda text: None) -> Report:
    """Raises ValueError for a row that is not there; what can't be measured is said in its row."""
    specs = _chosen(config.rows)
    env = environment.collect()
    notes: list[str] = []
    rows: dict[str, KVRow] = {}
    with contextlib.ExitStack() as stack:
        sides, missing = _start(config, stack, progress)
        env["peers"] = _describe(sides, missing)
        for spec in specs:
            if spec.source == PYTHON:
                progress(spec.name)
                figures = measure_sides(sides, spec.name, config.work, config.rounds, notes.append)
                rows[spec.name] = _python_row(spec, figures, missing, notes)
    rows |= _cpp_rows(config, [s for s in specs if s.source == CPP], progress)
    rows |= _disk_rows(config, [s for s in specs if s.source == DISK], progress)
    env |= {
        "work": asdict(config.work),
        "rounds": config.rounds,
        "clock": "processor time of the calling thread; disk rows: wall time",
        "core": max(os.sched_getaffinity(0)),
        "load_average_end": round(os.getloadavg()[0], 1),
        "notes": notes,
    }
    return Report("kv", [rows[spec.name] for spec in specs], env)


def missed(report: Report) -> list[str]:
    """One line for each row that has a required bound and does not hold it."""
    return [
        f"{row.name}: {row.value:.4g} {row.unit}, required {row.spec.required:g}"
        for row in report.results
        if isinstance(row, KVRow) and row.passed is False
    ]


def _chosen(names: Sequence[str]) -> list[RowSpec]:
    known = [spec.name for spec in SPECS]
    for name in names:
        if name not in known:
            raise ValueError(f"--row must be one of {', '.join(known)}, got {name!r}")
    return [spec for spec in SPECS if not names or spec.name in names]


def _start(
    config: KVBenchConfig, stack: contextlib.ExitStack, progress: Callable[[str], None]
) -> tuple[list[Side], dict[str, dict[str, Any]]]:
    """The sides that run, and for each peer that does not, why."""
    sides = [stack.enter_context(Side(OURS, _OURS_MODULE))]
    missing: dict[str, dict[str, Any]] = {}
    folder = config.peers.resolve() if config.peers is not None else None
    for peer in PEERS:
        install = peer.install_command(str(config.peers or ".venv-peers"))
        if folder is None or not (folder / peer.name).is_dir():
            missing[peer.name] = {"status": "not installed", "install": install}
            continue
        progress(f"starting {peer.name}")
        try:
            side = Side(peer.name, peer.module, [folder / peer.name, folder / "site"])
        except SideFailed as error:
            missing[peer.name] = {"status": f"failed to start: {error}", "install": install}
        else:
            sides.append(stack.enter_context(side))
    return sides, missing


def _describe(sides: Sequence[Side], missing: Mapping[str, Any]) -> dict[str, Any]:
    measured = {peer.name: peer.measured for peer in PEERS}
    running = {
        side.name: {"status": "measured", "version": side.version, "what": measured[side.name]}
        for side in sides
        if side.name in measured
    }
    return {**running, **missing}


def _python_row(
    spec: RowSpec,
    figures: Mapping[str, list[float]],
    missing: Mapping[str, dict[str, Any]],
    notes: Sequence[str],
) -> KVRow:
    peers: dict[str, Figure | Mapping[str, Any]] = {}
    for peer in PEERS:
        if peer.name in missing:
            peers[peer.name] = missing[peer.name]
        elif peer.name in figures:
            peers[peer.name] = Figure.of(figures[peer.name], spec.scale)
        else:
            peers[peer.name] = {"status": "failed, see env.notes"}
    ours = Figure.of(figures[OURS], spec.scale) if OURS in figures else None
    status = "measured" if ours is not None else "failed: " + "; ".join(notes[-1:])
    rounds = 1 if spec.name in FRESH_PROCESS else len(figures.get(OURS, ()))
    return make_row(spec, ours, peers, status, {"rounds": rounds})


def _cpp_rows(
    config: KVBenchConfig, specs: Sequence[RowSpec], progress: Callable[[str], None]
) -> dict[str, KVRow]:
    status = f"not measured: give --cpp-bench PATH, the binary of `{kv_cpp.BUILD}`"
    figures: dict[str, Figure] = {}
    if config.cpp_bench is not None and specs:
        progress("C++ benchmark")
        status = "not measured: the binary has no such benchmark"
        try:
            figures = kv_cpp.measure(config.cpp_bench, specs, config.rounds)
        except SideFailed as error:
            status = f"failed: {error}"
    return {
        spec.name: make_row(
            spec, figures.get(spec.name), {}, "measured" if spec.name in figures else status
        )
        for spec in specs
    }


def _disk_rows(
    config: KVBenchConfig, specs: Sequence[RowSpec], progress: Callable[[str], None]
) -> dict[str, KVRow]:
    status = "not measured: give --disk DIR, a folder on the disk to measure"
    figures = None
    if config.disk is not None and specs:
        try:
            figures = kv_disk.measure(config.disk, config.disk_bytes, config.rounds, progress)
        except OSError as error:
            status = f"failed: {error}"
    rows = {}
    for spec in specs:
        if figures is None:
            rows[spec.name] = make_row(spec, None, {}, status)
            continue
        direction = "write" if spec.name.startswith("host_to_disk") else "read"
        details = {
            f"{side}_gbps": Figure.of(getattr(figures, f"{side}_{direction}"), 1e-9).to_dict()
            for side in ("store", "device")
        }
        rows[spec.name] = make_row(spec, Figure.of(figures.ratios(direction)), {}, details=details)
    return rows
