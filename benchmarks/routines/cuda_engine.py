"""The engine on a GPU with a model of the size of DeepSeek-V2-Lite, its weights random.

    python benchmarks/routines/cuda_engine.py [--json FILE] [--layers N] [--rounds N]

`decode_b<n>_l<context>`: milliseconds of a step of n sequences, sampling and scheduling included,
medians over steps after the graphs are captured; beside it the floor: bytes of weights (of the
experts that so many tokens hit on average) and cached rows, over 4.0 TB/s. `ttft_<n>`: milliseconds
from a request of n tokens to its first token, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helicore import KVCacheConfig, SamplingParams, SchedulerConfig
from helicore.config import EngineConfig
from helicore.executor.engine import Engine
from helicore.models.config import ModelConfig
from helicore.models.deepseek_v2 import DeepseekV2
from helicore.models.weights import Checkpoint
from torch import Tensor

SIZES: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
BANDWIDTH = 4.0e12


class RandomCheckpoint(Checkpoint):
    """Any tensor that is asked for, drawn on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False
    ) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(0, shape[-1] ** -0.5)

    def finish(self, ignored: Any) -> None:
        del ignored


def make_engine(layers: int) -> Engine:
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(SIZES | {"num_hidden_layers": layers})
        (Path(folder) / "config.json").write_text(text)
        config = ModelConfig.from_dir(folder)
    model = DeepseekV2(config, RandomCheckpoint(device), torch.bfloat16, device=device)
    settings = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        max_model_len=20_000,
        kv_cache=KVCacheConfig(gpu_gb=30, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
    )
    return Engine(settings, model=model.eval())


def floor_ms(batch: int, context: int, layers: int) -> float:
    """Weights that are read once each, and the rows of the context."""
    s = SIZES
    hidden, heads = s["hidden_size"], s["num_attention_heads"]
    qk = s["qk_nope_head_dim"] + s["qk_rope_head_dim"]
    row = s["kv_lora_rank"] + s["qk_rope_head_dim"]
    attention = hidden * (heads * qk + row) + heads * s["v_head_dim"] * hidden
    attention += heads * s["kv_lora_rank"] * (s["qk_nope_head_dim"] + s["v_head_dim"])
    miss = 1 - s["num_experts_per_tok"] / s["n_routed_experts"]
    hit = s["n_routed_experts"] * (1 - miss**batch) + s["n_shared_experts"]
    experts = 3 * hidden * s["moe_intermediate_size"] * hit
    dense = 3 * hidden * s["intermediate_size"]
    weights = layers * attention + (layers - 1) * experts + dense + hidden * s["vocab_size"]
    return 2 * (weights + layers * batch * context * row) / BANDWIDTH * 1e3


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed).integers(10, 100_000, (count, length))
    return draw.tolist()  # type: ignore[no-any-return]


def decode_ms(engine: Engine, batch: int, context: int, steps: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts(batch, context, batch)):
        engine.add_request(f"{i}", prompt, params)
    started: set[str] = set()
    while len(started) < batch:
        started |= {update.request_id for update in engine.step()}
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(steps - 8):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    while engine.has_unfinished():
        engine.step()
    return times


def ttft_ms(engine: Engine, length: int, rounds: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for i in range(rounds + 1):
        (prompt,) = prompts(1, length, 100 + i)
        begin = time.perf_counter()
        engine.add_request("x", prompt, params)
        while engine.has_unfinished():
            engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="also trace some steps of batch 1")
    args = parser.parse_args()
    engine = make_engine(args.layers)
    rows = []
    for batch, context in ((1, 4096), (16, 4096), (64, 4096)):
        times = decode_ms(engine, batch, context, 64)
        rows.append(
            {
                "name": f"decode_b{batch}_l4k",
                "ms": round(statistics.median(times), 3),
                "floor_ms": round(floor_ms(batch, context, args.layers), 3),
            }
        )
        print(rows[-1], flush=True)
    for length in (1024, 4096, 16384):
        times = ttft_ms(engine, length, args.rounds)
        rows.append({"name": f"ttft_{length}", "ms": round(statistics.median(times), 2)})
        print(rows[-1], flush=True)
    times_of = engine.counters.snapshot().times
    print("seconds by part:", times_of, flush=True)
    if args.profile is not None:
        with torch.profiler.profile() as profiler:
            decode_ms(engine, 1, 4096, 16)
        table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25)
        args.profile.write_text(table)
    if args.json is not None:
        head = {"device": torch.cuda.get_device_name(0), "layers": args.layers}
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
