"""Whole models through the executor against `transformers` and against themselves.

"Identical" allows a first difference only where the reference's two best logits are closer than
the tolerance; such ties are counted and must stay rare.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from executor.driving import generate, tokens_of
from helicore.config import EngineConfig, KVCacheConfig, SchedulerConfig
from helicore.executor.engine import Engine
from helicore.executor.updates import TokenLogprobs
from helicore.models import CausalLM, load_model
from helicore.sampling_params import SamplingParams
from reference.hf_models import YARN, Spec, hf_logits, random_model

TOLERANCE = 1e-4  # of the largest logit
NUM_TOKENS = 64
VOCAB = 160
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

SPECS = [
    Spec("v3", "v3", {"n_group": 4, "topk_group": 2}),
    Spec("v3_yarn_no_q_lora", "v3", {"rope_parameters": dict(YARN), "q_lora_rank": None}, seed=1),
    Spec("v2", "v2", {"num_attention_heads": 3}, seed=2),
]


class Loaded:
    """A random checkpoint, the reference model and ours."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.reference = random_model(spec)
        self.reference.save_pretrained(folder)
        self.model: CausalLM = load_model(folder, dtype=torch.float32)
        self.num_ties = 0

    def engine(self, **options: Any) -> Engine:
        scheduler = SchedulerConfig(
            max_num_seqs=options.pop("max_num_seqs", 16),
            max_num_batched_tokens=options.pop("max_num_batched_tokens", 2048),
        )
        kv_cache = KVCacheConfig(
            block_size=options.pop("block_size", 16),
            host_gb=options.pop("num_pages", 512) * self.page_bytes(16) / 2**30,
            enable_prefix_caching=options.pop("enable_prefix_caching", True),
        )
        config = EngineConfig(
            dtype="float32", seed=0, scheduler=scheduler, kv_cache=kv_cache, **options
        )
        return Engine(config, model=self.model)

    def page_bytes(self, block_size: int) -> int:
        return sum(self.model.kv_layers(self.model.config, torch.float32)) * block_size * 4

    def greedy(self, prompt: list[int]) -> list[int]:
        output = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def assert_identical(
        self, prompt: list[int], got: Sequence[int], expected: Sequence[int]
    ) -> None:
        assert len(got) == len(expected)
        for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                logits = hf_logits(self.reference, [*prompt, *expected[:i]])[-1]
                best = logits.topk(2)
                gap = float(best.values[0] - best.values[1])
                assert {ours, theirs} == set(best.indices.tolist()), f"token {i} is not a tie"
                assert gap < TOLERANCE * float(logits.abs().max()), f"token {i}: gap {gap}"
                self.num_ties += 1
                return


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: spec.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(SPECS[0], tmp_path_factory.mktemp("v3_alone"))


def ragged_prompts(count: int = 16, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


def run_one_by_one(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [tokens_of(generate(engine, [prompt], GREEDY)[0]) for prompt in prompts]


def test_greedy_tokens_are_those_of_transformers(loaded: Loaded) -> None:
    engine = loaded.engine()
    prompts = ragged_prompts(6)
    for prompt, got in zip(prompts, generate(engine, prompts, GREEDY), strict=True):
        loaded.assert_identical(prompt, tokens_of(got), loaded.greedy(prompt))
    assert loaded.num_ties <= 1


def test_a_ragged_batch_gives_the_tokens_of_one_by_one(loaded: Loaded) -> None:
    prompts = ragged_prompts()
    alone = run_one_by_one(loaded.engine(enable_prefix_caching=False), prompts)
    together = generate(loaded.engine(enable_prefix_caching=False), prompts, GREEDY)
    loaded.num_ties = 0
    for prompt, expected, got in zip(prompts, alone, together, strict=True):
        loaded.assert_identical(prompt, tokens_of(got), expected)
    assert loaded.num_ties <= 1


def test_cached_prefixes_give_the_tokens_of_a_cold_start(loaded: Loaded) -> None:
    stem = ragged_prompts(1, seed=5)[0] * 3
    prompts = [[*stem[: 20 + 9 * i], 3 + i, 4, 5] for i in range(8)]
    cold = run_one_by_one(loaded.engine(enable_prefix_caching=False), prompts)
    engine = loaded.engine()
    generate(engine, [stem], GREEDY)
    loaded.num_ties = 0
    for prompt, expected in zip(prompts, cold, strict=True):
        updates = generate(engine, [prompt], GREEDY)[0]
        assert (updates[0].num_cached_tokens or 0) >= 16
        loaded.assert_identical(prompt, tokens_of(updates), expected)
    assert loaded.num_ties <= 1


def test_chunked_prefill_gives_the_tokens_of_whole_prompts(loaded: Loaded) -> None:
    prompts = ragged_prompts(8, seed=3)
    whole = generate(loaded.engine(), prompts, GREEDY)
    chunked = generate(loaded.engine(max_num_batched_tokens=19), prompts, GREEDY)
    loaded.num_ties = 0
    for prompt, expected, got in zip(prompts, whole, chunked, strict=True):
        loaded.assert_identical(prompt, tokens_of(got), tokens_of(expected))
    assert loaded.num_ties <= 1


def test_preempted_sequences_give_the_tokens_of_an_ample_pool(v3: Loaded) -> None:
    prompts = ragged_prompts(8, seed=4)
    ample = generate(v3.engine(), prompts, GREEDY)
    engine = v3.engine(num_pages=24)
    v3.num_ties = 0
    for prompt, expected, got in zip(
        prompts, ample, generate(engine, prompts, GREEDY), strict=True
    ):
        v3.assert_identical(prompt, tokens_of(got), tokens_of(expected))
    assert engine.counters.preemptions > 0
    assert v3.num_ties <= 1


# --- deterministic ---------------------------------------------------------------------------

EVERYTHING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=-1)


def all_logprobs(updates: list[Any]) -> list[TokenLogprobs]:
    return [entry for update in updates for entry in update.new_logprobs]


def test_deterministic_logits_do_not_depend_on_batch_cuts_cache_or_preemption(v3: Loaded) -> None:
    prompts = ragged_prompts(16, seed=6)
    plain = v3.engine(deterministic=True, enable_prefix_caching=False)
    alone = [all_logprobs(generate(plain, [prompt], EVERYTHING)[0]) for prompt in prompts]
    warm = v3.engine(deterministic=True)
    generate(warm, prompts[8:], EVERYTHING)
    engines = {
        "batch": v3.engine(deterministic=True, enable_prefix_caching=False),
        "chunks": v3.engine(deterministic=True, max_num_batched_tokens=17),
        "cache": warm,
        "preemption": v3.engine(deterministic=True, num_pages=20),
    }
    for name, engine in engines.items():
        for i, got in enumerate(generate(engine, prompts, EVERYTHING)):
            assert all_logprobs(got) == alone[i], f"{name}: prompt {i} differs in some bit"
    assert engines["preemption"].counters.preemptions > 0
    assert engines["cache"].counters.prefix_cache_hits > 0


def test_bfloat16_logits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    random_model(SPECS[0]).save_pretrained(tmp_path)
    config = EngineConfig(
        model=tmp_path,
        dtype="bfloat16",
        deterministic=True,
        kv_cache=KVCacheConfig(host_gb=0.01, block_size=32, enable_prefix_caching=False),
    )
    engine = Engine(config)
    prompts = ragged_prompts(16, seed=14)
    alone = [all_logprobs(generate(engine, [prompt], EVERYTHING)[0]) for prompt in prompts]
    together = [all_logprobs(updates) for updates in generate(engine, prompts, EVERYTHING)]
    assert together == alone
    engine.close()


def test_a_seeded_request_draws_the_same_tokens_in_any_batch(v3: Loaded) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=7, max_tokens=20, ignore_eos=True)
    prompts = ragged_prompts(8, seed=8)
    engine = v3.engine(deterministic=True)
    alone = tokens_of(generate(engine, [prompts[0]], params)[0])
    together = generate(v3.engine(deterministic=True), prompts, params)
    assert tokens_of(together[0]) == alone
    assert len({tuple(tokens_of(updates)) for updates in together}) == 8


def test_siblings_draw_different_tokens_and_the_first_is_that_of_a_single_one(v3: Loaded) -> None:
    from executor.driving import drain

    single = SamplingParams(temperature=1.5, seed=3, max_tokens=16, ignore_eos=True)
    many = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=16, ignore_eos=True)
    prompt = ragged_prompts(1, seed=9)[0]
    alone = tokens_of(generate(v3.engine(deterministic=True), [prompt], single)[0])
    engine = v3.engine(deterministic=True)
    engine.add_request("many", prompt, many)
    results = {key: tokens_of(updates) for key, updates in drain(engine).items()}
    assert results["many", 0] == alone
    assert len({tuple(tokens) for tokens in results.values()}) == 4


# --- log-probabilities -----------------------------------------------------------------------


def test_logprobs_are_those_of_transformers(v3: Loaded) -> None:
    prompt = ragged_prompts(1, seed=10)[0]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    updates = generate(v3.engine(), [prompt], params)[0]
    tokens = tokens_of(updates)
    table = torch.log_softmax(hf_logits(v3.reference, prompt + tokens), -1)[len(prompt) - 1 : -1]
    for row, token, entry in zip(table, tokens, all_logprobs(updates), strict=True):
        best = row.topk(3)
        assert entry.token_id == token
        assert entry.rank == 1
        assert entry.top_ids == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("budget", [16, 2048])
def test_prompt_logprobs_are_those_of_transformers(v3: Loaded, budget: int) -> None:
    prompt = ragged_prompts(1, seed=11)[0] + ragged_prompts(1, seed=12)[0]
    engine = v3.engine(max_num_batched_tokens=budget)
    generate(engine, [prompt], GREEDY)  # what is in the cache must not shorten the answer
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    entries = generate(engine, [prompt], params)[0][0].prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    table = torch.log_softmax(hf_logits(v3.reference, prompt), -1)
    for row, token, entry in zip(table, prompt[1:], entries[1:], strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert entry.rank == 1 + int((row > row[token]).sum())
        assert entry.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_a_wrong_token_is_not_taken_for_a_tie(v3: Loaded) -> None:
    prompt = ragged_prompts(1, seed=13)[0]
    expected = v3.greedy(prompt)
    wrong = [*expected[:10], (expected[10] + 1) % VOCAB, *expected[11:]]
    with pytest.raises(AssertionError, match="token 10"):
        v3.assert_identical(prompt, wrong, expected)
