"""Engines with quantised caches: sizes, sharing of pages, levels, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from executor.fake_model import fake_config
from helicore import LLM, KVCacheConfig, SamplingParams, SchedulerConfig
from helicore.config import EngineConfig, FieldError
from helicore.executor.disk_stamp import make_stamp
from helicore.executor.pool_shape import PoolShape
from helicore.models import load_model
from helicore.models.base import CausalLM
from reference.cache_formats import FORMATS
from reference.hf_models import Spec, random_model

ROW_BYTES = {"float32": 576, "bfloat16": 288, "fp8": 144, "fp8_ds_mla": 164, "nvfp4": 104}
"""Of the bundled model: 128 + 16 wide."""
NUM_LAYERS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [f"# example {i}\ndef f{i}(x):\n    return x + " + "1 + " * (5 * i) for i in range(6)]


def tiny(dtype: str, *, block_size: int = 16, pages: int = 200, **options: Any) -> LLM:
    cache = options.pop("cache", {})
    page = ROW_BYTES[dtype] * NUM_LAYERS * block_size
    return LLM(
        "tiny",
        deterministic=True,
        max_model_len=160,
        seed=0,
        kv_cache=KVCacheConfig(
            dtype=dtype, block_size=block_size, host_gb=(pages + 0.5) * page / 2**30, **cache
        ),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        **options,
    )


def tokens(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ROW_BYTES)
def test_the_tokens_that_fit_follow_the_bytes_of_a_row_and_are_logged(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "helicore"), tiny(dtype, block_size=64, pages=100) as llm:
        pool = llm.engine._pool
        assert pool.num_pages >= 100
        assert all(cache[0].nbytes == 64 * ROW_BYTES[dtype] for cache in pool.caches)
    (line,) = [r.getMessage() for r in caplog.records if "KV cache in" in r.getMessage()]
    assert line == (
        f"KV cache in {dtype}: {ROW_BYTES[dtype] * NUM_LAYERS} bytes a token, "
        f"{pool.num_pages * 64} tokens fit in {pool.num_pages} pages of 64"
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_tokens_do_not_depend_on_the_batch_the_page_size_or_cached_prefixes(
    dtype: str, block_size: int
) -> None:
    with tiny(dtype, block_size=64) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in PROMPTS]
    with tiny(dtype, block_size=block_size, pages=6400 // block_size) as llm:
        assert tokens(llm, PROMPTS) == alone
        again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in again] == alone
        assert block_size == 128 or any(output.num_cached_tokens for output in again)


@pytest.mark.parametrize("dtype", FORMATS)
def test_preempted_sequences_go_on_from_lower_levels_with_the_same_tokens(
    dtype: str, tmp_path: Path
) -> None:
    with tiny(dtype) as llm:
        want = tokens(llm, PROMPTS)
    page = ROW_BYTES[dtype] * NUM_LAYERS * 16 / 2**30
    below = {"swap_host_gb": 40 * page, "swap_disk_gb": 40 * page, "swap_path": str(tmp_path)}
    with tiny(dtype, pages=12, cache=below) as llm:
        assert tokens(llm, PROMPTS) == want


@pytest.mark.parametrize("dtype", FORMATS)
def test_prefixes_on_disk_are_found_by_an_engine_of_the_same_format_alone(
    dtype: str, tmp_path: Path
) -> None:
    disk = {"disk_path": str(tmp_path), "disk_gb": 0.01}
    prompt = [PROMPTS[-1]]
    with tiny(dtype, cache=disk) as llm:
        want = tokens(llm, prompt)
    with tiny(dtype, cache=disk) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens >= 16
        assert [output.outputs[0].token_ids] == want
    other = FORMATS[FORMATS.index(dtype) - 1]
    with tiny(other, cache=disk) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert not output.num_cached_tokens


def test_stamps_of_two_formats_of_one_width_differ() -> None:
    def stamp(name: str) -> bytes:
        shape = PoolShape(
            row_widths=(64,),
            dtype=None,  # type: ignore[arg-type]
            page_size=16,
            num_bytes=1 << 20,
            num_lanes=1,
            max_model_len=32,
            max_model_len_source="as set",
            cache_format=name,
        )
        return make_stamp(EngineConfig(), fake_config(), shape, b"")

    assert stamp("fp8") != stamp("nvfp4")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", FORMATS)
def test_models_of_both_dtypes_and_of_rank_512_are_served(
    tmp_path: Path, cache: str, dtype: str
) -> None:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    random_model(Spec("wide", "v3", widths)).save_pretrained(tmp_path)
    with LLM(
        str(tmp_path),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache=KVCacheConfig(dtype=cache, block_size=16, host_gb=0.01),
    ) as llm:
        (pool,) = {cache.shape[2] for cache in llm.engine._pool.caches}
        assert pool == {"fp8": 576, "fp8_ds_mla": 656, "nvfp4": 416}[cache]
        prompt = {"prompt_token_ids": [5, 6, 7, 8] * 5}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 24


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("fp8_ds_mla", "kv_lora_rank must be a multiple of 128 .* got 24"),
        ("nvfp4", "kv_lora_rank must be a multiple of 64 .* got 24"),
    ],
)
def test_a_model_without_such_rows_is_refused_by_the_field(
    tmp_path: Path, dtype: str, message: str
) -> None:
    random_model(Spec("small", "v3")).save_pretrained(tmp_path)
    model: CausalLM = load_model(tmp_path)
    config = EngineConfig(kv_cache=KVCacheConfig(dtype=dtype))
    with pytest.raises(FieldError, match=rf'dtype="?\'?{dtype}.* does not fit .*{message}') as info:
        PoolShape.fit(config, model)
    assert info.value.param == "dtype"
    assert PoolShape.fit(EngineConfig(kv_cache=KVCacheConfig(dtype="fp8")), model).token_bytes == 96
