"""The bundled model with levels below the hot one: greedy tokens do not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helicore import LLM, KVCacheConfig, SamplingParams, SchedulerConfig
from helicore.outputs import RequestOutput

WORDS = "a list of numbers that are sorted, then a loop which adds them up and prints the sum "
PROMPTS = [f"# example {i}\ndef f{i}(x):\n    " + WORDS[3 * i : 3 * i + 40] for i in range(8)]
BLOCK = 16


def page_gb(llm: LLM) -> float:
    pool = llm.engine._pool
    return sum(cache[0].nbytes for cache in pool.caches) / 2**30


@pytest.fixture(scope="module")
def one_page() -> float:
    """GiB of a page of BLOCK tokens."""
    with LLM("tiny", max_model_len=64, kv_cache=KVCacheConfig(block_size=BLOCK)) as llm:
        return page_gb(llm)


def run(
    cache: dict[str, Any], params: SamplingParams, max_num_batched_tokens: int = 512
) -> tuple[list[RequestOutput], dict[str, float]]:
    options = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=max_num_batched_tokens)
    with LLM(
        "tiny",
        deterministic=True,
        max_model_len=160,
        seed=0,
        scheduler=options,
        kv_cache=KVCacheConfig(block_size=BLOCK, **cache),
    ) as llm:
        priorities = [i % 3 for i in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, params, priority=priorities, use_tqdm=False)
        return outputs, llm.metrics()


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def levels(one_page: float, folder: Path, name: str) -> dict[str, Any]:
    """Settings with a hot level of 12 pages, of which one sequence needs up to 10."""
    cache: dict[str, Any] = {"host_gb": 12 * one_page}
    if "host" in name:
        cache["swap_host_gb"] = 40 * one_page
    if "disk" in name:
        cache |= {"swap_disk_gb": 60 * one_page, "swap_path": str(folder / "swap")}
    return cache


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=70, ignore_eos=True),
    "siblings": SamplingParams(n=4, temperature=1.2, seed=5, max_tokens=40, ignore_eos=True),
}


@pytest.fixture(scope="module", params=PARAMS)
def ample(request: pytest.FixtureRequest) -> tuple[SamplingParams, list[list[list[int]]]]:
    params = PARAMS[request.param]
    outputs, metrics = run({"host_gb": 0.2}, params)
    assert metrics["num_preemptions_total"] == 0
    return params, tokens(outputs)


@pytest.mark.parametrize("name", ["host", "disk", "host and disk"])
@pytest.mark.parametrize("budget", [32, 512])
def test_swapped_sequences_give_the_tokens_of_an_ample_pool(
    ample: tuple[SamplingParams, list[list[list[int]]]],
    one_page: float,
    tmp_path: Path,
    name: str,
    budget: int,
) -> None:
    params, expected = ample
    outputs, metrics = run(levels(one_page, tmp_path, name), params, budget)
    assert tokens(outputs) == expected
    assert metrics["num_resumes_total"] > 0
    assert metrics["kv_offloaded_pages_level1"] > 0
    assert metrics["kv_onboarded_bytes_level1"] > 0


def test_prefixes_that_moved_down_are_found_and_reported_by_level(
    one_page: float, tmp_path: Path
) -> None:
    cache = KVCacheConfig(block_size=BLOCK, **levels(one_page, tmp_path, "host and disk"))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM("tiny", deterministic=True, max_model_len=160, kv_cache=cache) as llm:
        cold = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
        warm = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
        metrics = llm.metrics()
    assert tokens(warm) == tokens(cold)
    for output in warm:
        assert len(output.cached_tokens_by_level) == 3
        assert sum(output.cached_tokens_by_level) == output.num_cached_tokens > 0
    found = [sum(o.cached_tokens_by_level[level] for o in cold + warm) for level in range(3)]
    assert found[1] + found[2] > 0
    assert found == [metrics[f"kv_hit_tokens_level{level}"] for level in range(3)]


def test_without_lower_levels_all_hits_are_on_the_hot_one() -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM("tiny", max_model_len=160, kv_cache=KVCacheConfig(host_gb=0.1)) as llm:
        llm.generate(PROMPTS[0], params, use_tqdm=False)
        (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert output.cached_tokens_by_level == [output.num_cached_tokens]
    assert output.num_cached_tokens > 0
