"""Host work of the executor per decode step, without a model's time in the way.

    python benchmarks/routines/executor.py [--json] [--steps N]

A stub stands in for the model: its forward pass returns logits that were made before. Everything
else is the real path: scheduler, KV cache manager, batch, native sampler, post-processing. Reported
are medians over decode steps: `executor` is what the engine itself does (schedule, prepare,
post-process), `sample` the sampling kernel with its arguments. Greedy sampling, pages of 64 tokens.
Rows named `cold` read 64 MiB in place of the model, so that every step finds the caches of the CPU
as a forward pass leaves them; `queue10000` has that many requests waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np
import torch
from helicore.bench import environment
from helicore.bench.report import Report, Result
from helicore.config import EngineConfig, KVCacheConfig, SchedulerConfig
from helicore.executor.engine import Engine
from helicore.models.config import ModelConfig
from helicore.sampling_params import SamplingParams

VOCAB = 4096
BATCHES = (1, 16, 64, 256)
PARTS = ("schedule", "prepare", "sample", "postprocess", "executor")


class StubModel:
    """Answers every step with the same logits."""

    def __init__(self, is_cold: bool) -> None:
        self._weights = np.ones(16 << 20, np.float32) if is_cold else None
        self.config = ModelConfig.from_dict(
            {
                "model_type": "deepseek_v3",
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 6,
                "num_attention_heads": 12,
                "q_lora_rank": None,
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 32,
                "v_head_dim": 32,
                "max_position_embeddings": 16384,
                "eos_token_id": 1,
            }
        )
        self._logits = torch.randn(1024, VOCAB, generator=torch.Generator().manual_seed(0))

    def kv_layers(self, config: ModelConfig, dtype: torch.dtype) -> list[int]:
        return [config.kv_lora_rank + config.qk_rope_head_dim] * config.num_hidden_layers

    def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
        if self._weights is not None:
            self._weights.sum()
        return self._logits[: len(batch.logits_rows)]


def decoding_engine(batch: int, num_waiting: int, is_cold: bool) -> Engine:
    """An engine with `batch` sequences past their prompts and more requests in the queue."""
    config = EngineConfig(
        kv_cache=KVCacheConfig(host_gb=1), scheduler=SchedulerConfig(max_num_seqs=batch)
    )
    engine = Engine(config, model=StubModel(is_cold))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=8192, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch + num_waiting):
        engine.add_request(str(i), rng.integers(2, VOCAB, 32 + i % 64).astype(np.int32), params)
    while engine.counters.generation_tokens < 3 * batch:
        engine.step()
    return engine


def step_times(engine: Engine, num_steps: int) -> dict[str, list[float]]:
    """Microseconds of each part, step by step."""
    result: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(num_steps):
        before = engine.counters.snapshot().times
        engine.step()
        after = engine.counters.times
        for part, values in result.items():
            values.append(1e6 * (getattr(after, part) - getattr(before, part)))
    return result


def run(num_steps: int) -> Report:
    results = []
    cases = [*((batch, 0, False) for batch in BATCHES), (64, 10_000, False), (64, 0, True)]
    for batch, waiting, is_cold in cases:
        engine = decoding_engine(batch, waiting, is_cold)
        suffix = f"b{batch}{f'_queue{waiting}' if waiting else ''}{'_cold' if is_cold else ''}"
        times = step_times(engine, num_steps)
        results += [
            Result(f"{part}_{suffix}", round(statistics.median(values), 2), "us")
            for part, values in times.items()
        ]
        p90 = sorted(times["executor"])[num_steps * 9 // 10]
        results.append(Result(f"executor_p90_{suffix}", round(p90, 2), "us"))
        results.append(Result(f"executor_min_{suffix}", round(min(times["executor"]), 2), "us"))
        engine.close()
    return Report("executor", results, environment.collect())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps per row")
    args = parser.parse_args()
    report = run(args.steps)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        for row in report.results:
            print(f"{row.name:28s} {row.value:10.2f} {row.unit}")


if __name__ == "__main__":
    main()
