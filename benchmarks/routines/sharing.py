"""What pages that are kept save: siblings that fork, preempted sequences that wait on lower levels.

    python benchmarks/routines/sharing.py [--json] [--rounds N] [--folder DIR]

`siblings_n<n>`: milliseconds between the first tokens of the first and the last of n sequences of a
prompt of 2047 tokens, with the bundled model. `overload_<level>`: seconds for three long answers
that twelve more important requests interrupt, one every 20 steps, in a hot level for three of such
length: without a lower level, with one in memory and with one in files; beside it the tokens that
ran in prompts. Medians over rounds; the cases of a round follow each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from helicore import LLM, KVCacheConfig, SamplingParams
from helicore.bench import environment
from helicore.bench.report import Report, Result

NUM_SIBLINGS = (8, 32)
GIB = 1 << 30


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, length).tolist()  # type: ignore[no-any-return]


def siblings(llm: LLM, n: int, seed: int) -> float:
    """Milliseconds from the first token of the first sequence to that of the last one."""
    engine = llm.engine
    params = SamplingParams(n=n, temperature=1, seed=1, max_tokens=4, ignore_eos=True)
    engine.add_request("x", prompt(2047, seed), params)
    seen: set[int] = set()
    first = last = 0.0
    while engine.has_unfinished():
        updates = engine.step()
        now = time.perf_counter()
        new = {update.index for update in updates} - seen
        if new:
            first, last = first or now, now
            seen |= new
    return (last - first) * 1e3


def overload(cache: KVCacheConfig, seed: int) -> tuple[float, int, int]:
    """Seconds, tokens computed in prompts and preemptions."""
    with LLM("tiny", max_model_len=1500, kv_cache=cache) as llm:
        engine = llm.engine
        start = time.perf_counter()
        for i in range(3):
            params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
            engine.add_request(f"long {i}", prompt(1200, seed + i), params, priority=1)
        num_sent = num_steps = 0
        while engine.has_unfinished() or num_sent < 12:
            if num_steps >= 20 * (num_sent + 1) and num_sent < 12:
                params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
                engine.add_request(f"high {num_sent}", prompt(1200, seed + 100 + num_sent), params)
                num_sent += 1
            engine.step()
            num_steps += 1
        seconds = time.perf_counter() - start
        return seconds, engine.counters.computed_prompt_tokens, engine.counters.preemptions


def page_bytes() -> int:
    with LLM("tiny", max_model_len=128, kv_cache=KVCacheConfig(host_gb=0.05)) as llm:
        return sum(cache[0].nbytes for cache in llm.engine._pool.caches)


def run(num_rounds: int, folder: Path) -> Report:
    delays: dict[int, list[float]] = {n: [] for n in NUM_SIBLINGS}
    with LLM("tiny", kv_cache=KVCacheConfig(host_gb=0.3)) as llm:
        siblings(llm, 2, 1)
        for i in range(num_rounds):
            for n in NUM_SIBLINGS:
                delays[n].append(siblings(llm, n, 100 * n + i))
    results = [
        Result(f"siblings_n{n}", statistics.median(values), "ms", higher_is_better=False)
        for n, values in delays.items()
    ]
    page = page_bytes()
    hot, below = 72 * page / GIB, 400 * page / GIB
    caches = {
        "none": KVCacheConfig(host_gb=hot),
        "host": KVCacheConfig(host_gb=hot, swap_host_gb=below),
        "disk": KVCacheConfig(host_gb=hot, swap_disk_gb=below, swap_path=str(folder)),
    }
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in caches}
    for i in range(num_rounds):
        for name, cache in caches.items():
            found[name].append(overload(cache, 1000 * i))
    for name, rows in found.items():
        values = [statistics.median(column) for column in zip(*rows, strict=True)]
        units = ("s", "tokens", "preemptions")
        for unit, value in zip(units, values, strict=True):
            suffix = "" if unit == "s" else f"_{unit}"
            results.append(Result(f"overload_{name}{suffix}", value, unit, higher_is_better=False))
    return Report("sharing", results, environment.collect())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files of the lower level are made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = run(arguments.rounds, Path(folder))
    if arguments.json:
        print(json.dumps(report.to_dict()))
    else:
        for row in report.results:
            print(f"{row.name:28s} {row.value:10.2f} {row.unit}")


if __name__ == "__main__":
    main()
