"""Time to the first token of a long prompt: computed, and found on disk after a restart.

    python benchmarks/routines/disk_prefix.py [--json] [--tokens N] [--rounds N] [--folder DIR]

A round is two new processes with the bundled model over an empty folder. The first computes the
prompt (`cold`) and finds it in memory (`memory`), the second one finds it on disk (`disk`). Medians
over the rounds; each engine has answered a short prompt before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from helicore import LLM, KVCacheConfig, SamplingParams
from helicore.bench import environment
from helicore.bench.report import Report, Result

PARAMS = SamplingParams(temperature=0, max_tokens=1)


def measure(folder: str, num_tokens: int) -> dict[str, Any]:
    """Seconds to the first token in this process: first and second time."""
    prompt = {"prompt_token_ids": np.random.default_rng(0).integers(10, 1000, num_tokens).tolist()}
    cache = KVCacheConfig(disk_path=folder, disk_gb=1, host_gb=1)
    with LLM("tiny", kv_cache=cache, seed=0) as llm:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)
        values: dict[str, Any] = {}
        for name in ("first", "second"):
            start = time.perf_counter()
            (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
            values[name] = time.perf_counter() - start
            values[f"{name}_cached"] = output.num_cached_tokens
        values["token"] = output.outputs[0].token_ids[0]
        values["read"] = llm.counters.disk_bytes_read
    return values


def in_new_process(folder: Path, num_tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", str(folder), "--tokens", str(num_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run(folder: Path, num_tokens: int, num_rounds: int) -> Report:
    times: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    failures = []
    for _ in range(num_rounds):
        shutil.rmtree(folder, ignore_errors=True)
        before, after = (in_new_process(folder, num_tokens) for _ in range(2))
        times["cold"].append(before["first"])
        times["memory"].append(before["second"])
        times["disk"].append(after["first"])
        if before["first_cached"] or not after["first_cached"] or before["token"] != after["token"]:
            failures.append(f"before {before}, after {after}")
    shutil.rmtree(folder, ignore_errors=True)
    cold = statistics.median(times["cold"])
    results = [
        Result(
            f"ttft_{name}_{num_tokens}",
            round(1e3 * statistics.median(values), 2),
            "ms",
            peer="cold",
            peer_value=round(1e3 * cold, 2),
            higher_is_better=False,
        )
        for name, values in times.items()
    ]
    results += [
        Result(f"ttft_{name}_{kind.__name__}_{num_tokens}", round(1e3 * kind(values), 2), "ms")
        for name, values in times.items()
        for kind in (min, max)
    ]
    return Report("disk_prefix", results, environment.collect(), failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--tokens", type=int, default=8192, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder that may be emptied")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.tokens)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.folder or Path(scratch)) / "prefixes"
        report = run(folder, args.tokens, args.rounds)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        for row in report.results:
            ratio = f"{row.ratio:8.2f} x" if row.ratio is not None else ""
            print(f"{row.name:28s} {row.value:10.2f} {row.unit} {ratio}")
    if report.failures:
        raise SystemExit("\n".join(report.failures))


if __name__ == "__main__":
    main()
