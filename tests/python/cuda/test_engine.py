"""The engine on a GPU against the engine on the CPU: the same tokens from the same requests."""

from __future__ import annotations

from typing import Any

import pytest
from helicore import LLM, KVCacheConfig, NotSupportedError, SamplingParams, SchedulerConfig
from helicore.outputs import RequestOutput

WORDS = "a list of numbers that are sorted, then a loop which adds them up and prints the sum "
PROMPTS = [f"# example {i}\ndef f{i}(x):\n    " + WORDS[3 * i : 3 * i + 40] for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def run(
    device: str,
    params: SamplingParams = GREEDY,
    *,
    prompts: list[str] = PROMPTS,
    dtype: str = "float32",
    cache: dict[str, Any] | None = None,
    **scheduler: Any,
) -> tuple[list[RequestOutput], dict[str, float]]:
    memory = {"gpu_gb": 0.25} if device == "cuda" else {"host_gb": 0.25}
    with LLM(
        "tiny",
        device=device,
        dtype=dtype,
        max_model_len=512,
        seed=0,
        scheduler=SchedulerConfig(**{"max_num_seqs": 16, **scheduler}),
        kv_cache=KVCacheConfig(**{"block_size": 16, **memory, **(cache or {})}),
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        assert tokens(again) == tokens(outputs)
        return outputs, llm.metrics()


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("chunk", [512, 48])
def test_greedy_tokens_are_those_of_the_cpu(chunk: int) -> None:
    want, _ = run("cpu", max_num_batched_tokens=chunk)
    got, _ = run("cuda", max_num_batched_tokens=chunk)
    assert tokens(got) == tokens(want)


def test_one_sequence_and_odd_batches_are_those_of_the_cpu() -> None:
    """Graphs of several buckets, padded and full."""
    for count in (1, 3, 5):
        want, _ = run("cpu", prompts=PROMPTS[:count])
        got, _ = run("cuda", prompts=PROMPTS[:count])
        assert tokens(got) == tokens(want)


def test_drawn_tokens_and_their_logprobs_are_those_of_the_cpu() -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.95, seed=7, max_tokens=16, logprobs=3, n=2, ignore_eos=True
    )
    want, _ = run("cpu", params)
    got, _ = run("cuda", params)
    assert tokens(got) == tokens(want)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-2)


def test_penalties_bias_and_prompt_logprobs_are_those_of_the_cpu() -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        repetition_penalty=1.3,
        logit_bias={5: 2.0},
        prompt_logprobs=2,
        ignore_eos=True,
    )
    want, _ = run("cpu", params)
    got, _ = run("cuda", params)
    assert tokens(got) == tokens(want)


def test_tokens_do_not_depend_on_preemption_or_a_level_below() -> None:
    """Pages of the GPU go to host memory and come back."""
    want, _ = run("cpu", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    with LLM("tiny", device="cuda", dtype="float32", max_model_len=512) as llm:
        page = sum(cache[0].nbytes for cache in llm.engine._pool.caches) / 2**30
        page *= 16 / llm.engine._pool.page_size
    small = {"gpu_gb": 20 * page, "swap_host_gb": 200 * page}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(
        "tiny",
        device="cuda",
        dtype="float32",
        max_model_len=200,
        scheduler=SchedulerConfig(max_num_seqs=16),
        kv_cache=KVCacheConfig(block_size=16, **small),
    ) as llm:
        got = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.metrics()
    assert tokens(got) == tokens(want)
    assert metrics["num_preemptions_total"] > 0


def test_bfloat16_agrees_with_the_cpu_on_nearly_all_first_tokens() -> None:
    want, _ = run("cpu", SamplingParams(temperature=0, max_tokens=1), dtype="bfloat16")
    got, _ = run("cuda", SamplingParams(temperature=0, max_tokens=1), dtype="bfloat16")
    same = sum(a == b for a, b in zip(tokens(got), tokens(want), strict=True))
    assert same >= len(PROMPTS) - 1


def test_a_cached_prompt_is_found_on_the_gpu() -> None:
    with LLM("tiny", device="cuda", kv_cache=KVCacheConfig(block_size=16, gpu_gb=0.25)) as llm:
        prompt = " ".join(PROMPTS)
        first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        second = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert (first.num_cached_tokens or 0) == 0
    assert (second.num_cached_tokens or 0) >= len(second.prompt_token_ids) - 17
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"deterministic": True}, "deterministic"), ({"kv_cache": {"disk_path": "/tmp"}}, "disk")],
)
def test_what_a_gpu_does_not_serve_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    if "kv_cache" in settings:
        settings = {"kv_cache": KVCacheConfig(disk_path="/tmp", disk_gb=1)}
    with pytest.raises(NotSupportedError, match=name):
        LLM("tiny", device="cuda", **settings)


def test_memory_for_the_wrong_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="host_gb"):
        LLM("tiny", device="cuda", kv_cache=KVCacheConfig(host_gb=1))
    with pytest.raises(ValueError, match="gpu_gb"):
        LLM("tiny", device="cuda", kv_cache=KVCacheConfig(gpu_gb=10_000))
