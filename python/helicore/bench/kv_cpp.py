"""C++ rows of `helicore bench kv`: figures of the benchmark binary `kv_bench`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from helicore.bench.kv_rows import Figure, RowSpec
from helicore.bench.kv_sides import SideFailed, pin

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
BUILD = "cmake --preset cpu-release && cmake --build --preset cpu-release --target kv_bench"


def measure(binary: Path, specs: Sequence[RowSpec], repetitions: int) -> dict[str, Figure]:
    """Figures by row name, of the processor time per iteration; rows that it lacks are left out.

    Raises SideFailed when the binary can't be run.
    """
    names = sorted({re.escape(spec.benchmark) for spec in specs})
    command = [
        str(binary),
        f"--benchmark_filter=^({'|'.join(names)})(/iterations:[0-9]+)?$",
        f"--benchmark_repetitions={repetitions}",
        "--benchmark_format=json",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=pin)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SideFailed(f"{binary}: {error}") from error
    return parse(done.stdout, specs)


def parse(output: str, specs: Sequence[RowSpec]) -> dict[str, Figure]:
    """Figures by row name from the JSON of the binary."""
    values: dict[str, list[float]] = {}
    for run in json.loads(output)["benchmarks"]:
        if run.get("run_type") != "iteration":
            continue
        name = re.sub(r"/iterations:\d+$", "", run["run_name"])
        name = re.sub(r"/repeats:\d+$", "", name)
        for spec in specs:
            if spec.benchmark != name:
                continue
            if spec.counter:
                if spec.counter in run:
                    values.setdefault(spec.name, []).append(float(run[spec.counter]))
            else:
                seconds = float(run["cpu_time"]) * _SECONDS[run["time_unit"]]
                values.setdefault(spec.name, []).append(seconds)
    scales = {spec.name: spec.scale for spec in specs}
    return {name: Figure.of(found, scales[name]) for name, found in values.items()}
