"""The bundled model through the whole engine, and every kind of bad input it must survive."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helicore import LLM, KVCacheConfig, SamplingParams, SchedulerConfig
from helicore.model_path import resolve_model
from helicore.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LIMIT = 600


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_model_len=LIMIT, kv_cache=KVCacheConfig(host_gb=0.2)) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def assert_same_or_tie(a: RequestOutput, b: RequestOutput) -> None:
    """Equal tokens; the first difference is allowed only between two nearly equal log-probabilities
    (bfloat16 rounds differently when a prompt is computed in other chunks)."""
    first, second = a.outputs[0], b.outputs[0]
    assert first.logprobs is not None
    for mine, theirs, entries in zip(
        first.token_ids, second.token_ids, first.logprobs, strict=True
    ):
        if mine != theirs:
            assert theirs in entries
            assert entries[mine].logprob - entries[theirs].logprob < 0.1
            return


PROMPTS = ["def f(self, x):\n", "import os\n", "class Point:\n    def __init__("]


def test_greedy_text_is_python_and_the_same_each_time(llm: LLM) -> None:
    first = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    second = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert texts(first) == texts(second)
    assert all(len(o.outputs[0].token_ids) == 24 for o in first)
    assert all(o.outputs[0].finish_reason == "length" for o in first)
    assert "self" in texts(first)[2]


def test_a_batch_and_single_prompts_give_the_same_text(llm: LLM) -> None:
    together = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    alone = [texts(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]
    assert together == alone


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.encode(PROMPTS[0])
    outputs = llm.generate([PROMPTS[0], {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == ids
    assert texts(outputs)[0] == texts(outputs)[1]
    assert llm.decode(outputs[0].outputs[0].token_ids) == texts(outputs)[0]


def test_streamed_text_equals_the_text_at_once(llm: LLM) -> None:
    whole = texts(llm.generate(PROMPTS[2], GREEDY, use_tqdm=False))[0]
    stream = llm.stream(PROMPTS[2], GREEDY)
    assert "".join(stream) == whole
    assert stream.output.outputs[0].text == whole


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_from_the_middle_of_the_text_ends_it_there(llm: LLM, include: bool) -> None:
    whole = texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0]
    stop = whole[11:16]
    params = SamplingParams(
        temperature=0, max_tokens=24, stop=["\0never", stop], include_stop_str_in_output=include
    )
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    end = whole.index(stop)
    assert completion.text == whole[: end + len(stop) if include else end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_seed_makes_sampling_reproducible_and_n_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=16)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False) for _ in range(2))
    assert texts(first) == texts(second)
    assert len(set(texts(first))) > 1
    assert [c.index for c in first[0].outputs] == [0, 1, 2, 3]


def test_logprobs_are_consistent(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = 0.0
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert entries[token].rank == 1
        assert 3 <= len(entries) <= 4
        values = [entry.logprob for entry in entries.values()]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(v) for v in values) <= 1 + 1e-5
        chosen += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(chosen)
    prompt = output.prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert all(
        entry is not None and token in entry
        for token, entry in zip(output.prompt_token_ids[1:], prompt[1:], strict=True)
    )


def test_a_repeated_prefix_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "# a comment that is new to the cache\n" + PROMPTS[2] * 10
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    cold = llm.generate(prompt, params, use_tqdm=False)[0]
    warm = llm.generate(prompt, params, use_tqdm=False)[0]
    salted = llm.generate({"prompt": prompt, "cache_salt": "other"}, params, use_tqdm=False)[0]
    assert len(cold.prompt_token_ids) > 64
    assert warm.num_cached_tokens >= 64
    assert salted.num_cached_tokens == 0
    assert_same_or_tie(cold, warm)
    assert_same_or_tie(cold, salted)


def test_defaults_come_from_the_model(llm: LLM) -> None:
    default = llm.get_default_sampling_params()
    assert default.temperature > 0
    assert llm.generate("def", use_tqdm=False)[0].finished


def test_chat_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Write a class."}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=8), use_tqdm=False)
    assert output.outputs[0].token_ids
    assert output.prompt is not None
    assert "Write a class." in output.prompt


def test_counters_are_copies_and_count(llm: LLM) -> None:
    before = llm.counters
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    after = llm.counters
    assert after.generation_tokens - before.generation_tokens == 24
    assert after.num_steps > before.num_steps
    metrics = llm.metrics()
    assert metrics["generation_tokens_total"] == after.generation_tokens
    assert metrics["num_requests_running"] == 0
    assert metrics["kv_cache_usage_perc"] == 0
    assert metrics["step_seconds_forward"] > 0


def test_several_threads_share_one_engine(llm: LLM) -> None:
    expected = [texts(llm.generate(prompt, GREEDY, use_tqdm=False)) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda p: texts(llm.generate(p, GREEDY, use_tqdm=False)), PROMPTS))
    assert found == expected


def test_the_tokenizer_can_come_from_another_folder(llm: LLM, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    cache = KVCacheConfig(host_gb=0.1)
    with LLM(checkpoint, tokenizer="tiny", max_model_len=64, kv_cache=cache) as other:
        assert other.encode("def f") == llm.encode("def f")


# Edges of the model length


@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_a_prompt_just_below_the_limit_gets_one_token(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": [7] * (LIMIT - 1)}
    completion = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert len(completion.token_ids) == 1
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 50])
def test_a_prompt_at_the_limit_is_refused_in_the_words_of_the_user(
    llm: LLM, length: int, max_tokens: int | None
) -> None:
    """Both numbers are in the message, and no number that the user never gave."""
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ValueError, match=rf"{length}.*{LIMIT}") as caught:
        llm.generate({"prompt_token_ids": [7] * length}, params, use_tqdm=False)
    assert "prompt_token_ids" in str(caught.value)
    assert "max_tokens" not in str(caught.value)
    assert "-" not in str(caught.value)


# Bad input

BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "prompt"),
    ({"prompt_token_ids": []}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [4096]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.5]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": ["a"]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [2**40]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [[1, 2], [3]]}, {}, "prompt_token_ids"),
    ({"prompt_token_ids": [5] * 5000}, {}, "prompt_token_ids"),
    ("x", {"max_tokens": 0}, "max_tokens"),
    ("x", {"temperature": -1.0}, "temperature"),
    ("x", {"temperature": math.nan}, "temperature"),
    ("x", {"top_p": 0.0}, "top_p"),
    ("x", {"top_p": 1.1}, "top_p"),
    ("x", {"top_k": -5}, "top_k"),
    ("x", {"n": 0}, "n must"),
    ("x", {"n": 10**7}, "n must"),
    ("x", {"stop": 5}, "stop"),
    ("x", {"stop": [""]}, "stop"),
    ("x", {"logprobs": -3}, "logprobs"),
    ("x", {"logprobs": 5000}, "logprobs"),
    ("x", {"prompt_logprobs": 5000}, "prompt_logprobs"),
    ("x", {"seed": -1}, "seed"),
    ("x", {"seed": "a"}, "seed"),
    ("x", {"stop_token_ids": [4096]}, "stop_token_ids"),
    ("x", {"logit_bias": {4096: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize(("prompt", "given", "field"), BAD_REQUESTS, ids=lambda v: repr(v)[:32])
def test_a_bad_request_names_its_field_and_leaves_the_engine_usable(
    llm: LLM, prompt: Any, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        llm.generate(["def", prompt], SamplingParams(**given), use_tqdm=False)
    assert llm.counters.num_requests_running == 0
    assert len(llm.generate("def f", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
    assert llm.counters.num_requests_waiting == 0


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "org/not-here"}, "hf download org/not-here"),
    ({"model": "not-a-model"}, "model"),
    ({"dtype": "int3"}, "dtype"),
    ({"device": "tpu"}, "device"),
    ({"max_model_len": 0}, "max_model_len"),
    ({"max_model_len": -1}, "max_model_len"),
    ({"num_threads": 0}, "num_threads"),
    ({"num_threads": -1}, "num_threads"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ({"deterministic": 1}, "deterministic"),
    ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init"),
    ({"kv_cache": {"block_size": 64}}, "kv_cache"),
    ({"scheduler": 5}, "scheduler"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda v: str(v)[:40])
def test_a_bad_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(**{"model": "tiny", **arguments})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))


def test_a_copied_folder_is_the_same_model(llm: LLM, checkpoint: Path) -> None:
    with LLM(checkpoint, max_model_len=LIMIT, kv_cache=KVCacheConfig(host_gb=0.1)) as copy:
        assert texts(copy.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        )


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN = {
    "unknown architecture": (
        lambda c: _edit(c / "config.json", model_type="gpt9", architectures=["Gpt9"]),
        "model_type|architectures",
    ),
    "broken config.json": (lambda c: (c / "config.json").write_text("{"), r"config\.json"),
    "no config.json": (lambda c: (c / "config.json").unlink(), r"config\.json"),
    "config.json without a field": (
        lambda c: (c / "config.json").write_text('{"model_type": "deepseek_v3"}'),
        "must be|missing|config",
    ),
    "truncated safetensors": (lambda c: _cut(c / "model.safetensors"), "safetensors"),
    "empty safetensors": (lambda c: (c / "model.safetensors").write_bytes(b""), "safetensors"),
    "no safetensors": (lambda c: (c / "model.safetensors").unlink(), "safetensors"),
    "a missing tensor": (
        lambda c: _edit(c / "config.json", tie_word_embeddings=False),
        "lm_head",
    ),
    "no tokenizer": (lambda c: (c / "tokenizer.json").unlink(), r"tokenizer\.json"),
    "broken tokenizer": (lambda c: (c / "tokenizer.json").write_text("{}"), r"tokenizer\.json"),
    "broken generation config": (
        lambda c: _edit(c / "generation_config.json", temperature=-1),
        r"generation_config\.json.*temperature",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(name: str, checkpoint: Path) -> None:
    break_it, message = BROKEN[name]
    break_it(checkpoint)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(checkpoint, kv_cache=KVCacheConfig(host_gb=0.1))


def test_ids_work_without_a_tokenizer(llm: LLM, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    ids = llm.encode(PROMPTS[0])
    cache = KVCacheConfig(host_gb=0.1)
    with LLM(checkpoint, skip_tokenizer_init=True, kv_cache=cache) as bare:
        output = bare.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0].outputs[0]
        assert output.text == ""
        expected = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert output.token_ids == expected
        with pytest.raises(ValueError, match="stop"):
            bare.generate({"prompt_token_ids": ids}, SamplingParams(stop="x"), use_tqdm=False)


def test_more_requests_than_sequences_all_finish() -> None:
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
    cache = KVCacheConfig(host_gb=0.05, block_size=16)
    with LLM("tiny", max_model_len=256, scheduler=scheduler, kv_cache=cache) as small:
        params = SamplingParams(max_tokens=8, n=2, seed=1, ignore_eos=True)
        outputs = small.generate([f"x{i} = " for i in range(7)], params, use_tqdm=False)
    assert [len(c.token_ids) for o in outputs for c in o.outputs] == [8] * 14
    with pytest.raises(RuntimeError, match="closed"):
        small.generate("x", use_tqdm=False)
