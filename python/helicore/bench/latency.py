"""`helicore bench latency`: what one request waits for, and the executor's own work per step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helicore.bench import environment
from helicore.bench.report import Report, Result
from helicore.bench.throughput import dtype_name
from helicore.bench.timing import percentile
from helicore.bench.workload import make_prompts
from helicore.executor.detokenizer import DetokenizerFactory, IncrementalDetokenizer
from helicore.executor.updates import SequenceUpdate
from helicore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from helicore.llm import LLM


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """input_len, output_len: tokens per request; batch_size: requests at the same time."""

    input_len: int = 128
    output_len: int = 128
    batch_size: int = 1
    rounds: int = 5


@dataclass(slots=True)
class _Run:
    """Milliseconds; one entry per decode step in the lists."""

    ttft: float
    total: float
    steps: list[float]
    executor: list[float]
    detokenize: list[float]


def run(
    llm: LLM, config: LatencyConfig, progress: Callable[[str], None] = lambda text: None
) -> Report:
    """Medians and tails over all rounds. `llm` must not reuse prefixes."""
    prompts = make_prompts(llm, [config.input_len] * config.batch_size)
    _run_once(llm, prompts, min(8, config.output_len))
    runs = []
    for number in range(config.rounds):
        progress(f"round {number + 1} of {config.rounds}")
        runs.append(_run_once(llm, prompts, config.output_len))
    batch = f"b{config.batch_size}"
    results = [
        _ms(f"ttft_{batch}", statistics.median(r.ttft for r in runs)),
        _ms(f"e2e_{batch}", statistics.median(r.total for r in runs)),
    ]
    for name, series in (
        ("inter_token", [s for r in runs for s in r.steps]),
        ("executor_step", [s for r in runs for s in r.executor]),
        ("detokenize_step", [s for r in runs for s in r.detokenize]),
    ):
        if series:
            results.append(_ms(f"{name}_{batch}_p50", percentile(series, 50)))
            results.append(_ms(f"{name}_{batch}_p99", percentile(series, 99)))
    env = environment.collect() | {
        "dtype": dtype_name(llm),
        "model": llm.model,
        "input_len": config.input_len,
        "output_len": config.output_len,
    }
    return Report(f"latency_{batch}", results, env)


def _ms(name: str, value: float) -> Result:
    return Result(name, value, "ms", higher_is_better=False)


def _run_once(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> _Run:
    """Drives the engine itself: steps are timed one by one, text is made apart from them."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    factory = DetokenizerFactory(llm.get_tokenizer())
    texts = {f"bench-{number}": factory(params) for number in range(len(prompts))}
    start = time.perf_counter()
    for request_id, prompt in zip(texts, prompts, strict=True):
        engine.add_request(request_id, prompt, params)
    ttft = None
    run = _Run(0.0, 0.0, [], [], [])
    last = start
    while engine.has_unfinished():
        times = engine.counters.times
        executor = times.executor
        updates = engine.step()
        now = time.perf_counter()
        if ttft is not None and updates:
            run.steps.append((now - last) * 1e3)
            run.executor.append((times.executor - executor) * 1e3)
            run.detokenize.append(_write(texts, updates) * 1e3)
        if ttft is None and len(updates) == len(prompts):
            ttft = now - start
        last = time.perf_counter()
    run.ttft = (ttft or 0.0) * 1e3
    run.total = (last - start) * 1e3
    return run


def _write(texts: Mapping[str, IncrementalDetokenizer], updates: Sequence[SequenceUpdate]) -> float:
    """Seconds to make the text of a step."""
    start = time.perf_counter()
    for update in updates:
        texts[update.request_id].append(update.new_token_ids, update.finish_reason is not None)
    return time.perf_counter() - start
