"""Sides of `helicore bench kv`: worker processes that are measured in turn on one core."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from helicore.bench.kv_workload import Workload

OURS = "helicore"
# Rows in which what a process did before shows: they get a process of their own, and one round.
FRESH_PROCESS = frozenset({"bytes_per_open_page", "bytes_per_tree_node"})


@dataclass(frozen=True, slots=True)
class Peer:
    """A package that is measured beside us when `--peers DIR` has it as DIR/<name>."""

    name: str
    module: str
    measured: str  # what of the package is measured

    def install_command(self, folder: str) -> str:
        return f"python benchmarks/peers/install.py {self.name} --peers {folder}"


PEERS = (
    Peer("vllm", "helicore.bench.kv_peers.vllm_side", "vllm.v1.core KVCacheManager"),
    Peer("sglang", "helicore.bench.kv_peers.sglang_side", "sglang UnifiedRadixCache, native tree"),
)


class SideFailed(RuntimeError):
    """A worker could not start or could not run a row; the message says why."""


class Side:
    """One worker process. Not for several threads."""

    def __init__(self, name: str, module: str, paths: Sequence[Path] = ()) -> None:
        """Raises SideFailed when the adapter can't be imported."""
        self.name = name
        self._command = [sys.executable, "-m", __package__ + ".kv_worker", module]
        self._command += [str(path) for path in paths]
        self._start()

    def prepare(self, row: str, work: Workload) -> bool:
        """Sets the row up; False when this side has no such row. Raises SideFailed."""
        if row in FRESH_PROCESS:
            self.close()
            self._start()
        return bool(self._ask({"row": row, "work": asdict(work)})["ready"])

    def round(self) -> list[float]:
        """Seconds (bytes for memory rows) of each sample. Raises SideFailed."""
        return [float(value) for value in self._ask({"round": True})["samples"]]

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
            preexec_fn=pin,
        )
        self.version: str = self._answer()["version"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError as error:
            raise SideFailed(f"{self.name}: {error}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.name}: the process ended, status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.name}: {answer['error']}")
        return answer


def pin() -> None:
    """Binds the process to the last core that it may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _environment() -> dict[str, str]:
    """The same for every side: one thread, one hash seed, nothing of the caller's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_", "SGLANG_"))}
    fixed = {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**kept, **fixed}


def measure(
    sides: Sequence[Side],
    row: str,
    work: Workload,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, list[float]]:
    """The medians of the rounds of one row by side, sides in alternating order.

    A side without the row, or one that fails in it, is left out (a failure goes to `note`).
    """
    ready: list[Side] = []
    for side in sides:
        try:
            if side.prepare(row, work):
                ready.append(side)
        except SideFailed as error:
            note(f"{row}: {error}")
    figures: dict[str, list[float]] = {side.name: [] for side in ready}
    failed: set[str] = set()
    for number in range(1 if row in FRESH_PROCESS else rounds):
        for side in ready[:: 1 if number % 2 == 0 else -1]:
            if side.name in failed:
                continue
            try:
                figures[side.name].append(statistics.median(side.round()))
            except SideFailed as error:
                note(f"{row}: {error}")
                failed.add(side.name)
    return {name: values for name, values in figures.items() if name not in failed}
