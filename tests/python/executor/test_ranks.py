"""Engines of several ranks, as threads of this process: the tokens are those of one engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from executor.driving import drain, tokens_of
from helicore.comm import CommError, Communicator
from helicore.config import EngineConfig, KVCacheConfig, ParallelConfig, SchedulerConfig
from helicore.executor.engine import Engine
from helicore.executor.leading import LeadingEngine, follow
from helicore.model_path import resolve_model
from helicore.parallel.ranks import Ranks
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer

SIZES = [(2, 1), (1, 2), (2, 2), (1, 3), (1, 4), (3, 2)]
RANDOM = np.random.default_rng(5)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257)
PROMPTS = {f"p{n}": RANDOM.integers(3, 4000, n).tolist() for n in LENGTHS}


def make_config(tensor_size: int = 1, context_size: int = 1, **changes: Any) -> EngineConfig:
    cache = {"block_size": 16, "host_gb": 0.02} | changes.pop("cache", {})
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 512} | changes.pop("scheduler", {})
    return EngineConfig(
        model="tiny",
        dtype="float32",
        device="cpu",
        max_model_len=changes.pop("max_model_len", 400),
        num_threads=1,
        seed=1,
        kv_cache=KVCacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor_size, context_parallel_size=context_size, timeout_s=60
        ),
        **changes,
    )


@contextmanager
def ranks_of(config: EngineConfig, tokenizer: Tokenizer | None = None) -> Iterator[LeadingEngine]:
    """The first rank's engine; the others follow on threads of their own."""
    size, context_size = config.parallel.num_ranks, config.parallel.context_parallel_size
    everyone = Communicator.virtual(size, 8 << 20)
    groups = [Communicator.virtual(context_size, 8 << 20) for _ in range(size // context_size)]
    errors: list[BaseException] = []

    def ranks(rank: int) -> Ranks:
        context = groups[rank // context_size][rank % context_size] if context_size > 1 else None
        return Ranks(config.parallel, everyone[rank], context, num_local=size)

    def run(rank: int) -> None:
        mine = ranks(rank)
        try:
            follow(Engine(config, ranks=mine), mine, tokenizer)
        except BaseException as error:
            mine.abort(str(error))
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    engine = LeadingEngine(config, ranks(0))
    try:
        yield engine
    finally:
        engine.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    if errors:
        raise errors[0]


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def run_all(engine: Engine, prompts: dict[str, list[int]], params: SamplingParams) -> Any:
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    return {key: tokens_of(updates) for key, updates in drain(engine).items()}


def first_differences(found: Any, want: Any) -> int:
    assert found.keys() == want.keys()
    return sum(found[key] != want[key] for key in want)


def close_choices(prompts: dict[str, list[int]], want: Any) -> int:
    """How many outputs have a token whose two best logits are nearly equal."""
    engine = Engine(make_config())
    close = 0
    for (request_id, _), tokens in want.items():
        engine.add_request("x", prompts[request_id] + tokens, greedy(1, prompt_logprobs=2))
        updates = drain(engine)["x", 0]
        entries = [e for u in updates for e in (u.prompt_logprobs or [])][-len(tokens) :]
        gaps = [e.top_logprobs[0] - e.top_logprobs[1] for e in entries]
        close += min(gaps) < 1e-3
    engine.close()
    return close


@pytest.fixture(scope="module")
def alone() -> Any:
    engine = Engine(make_config())
    found = run_all(engine, PROMPTS, greedy())
    engine.close()
    return found


@pytest.fixture(scope="module")
def alone_for_long() -> Any:
    engine = Engine(make_config())
    found = run_all(engine, PROMPTS, greedy(40))
    engine.close()
    return found


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("tensor_size", "context_size"), SIZES)
def test_greedy_tokens_are_those_of_one_rank(
    tensor_size: int, context_size: int, block_size: int, alone: Any
) -> None:
    config = make_config(tensor_size, context_size, cache={"block_size": block_size})
    with ranks_of(config) as engine:
        found = run_all(engine, PROMPTS, greedy())
        again = run_all(engine, PROMPTS, greedy())
        assert engine.counters.prefix_cache_hits > 0
    for tokens in (found, again):
        assert first_differences(tokens, alone) == 0


@pytest.mark.parametrize(("tensor_size", "context_size"), [(2, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_chunks_preemption_and_lower_levels(
    tensor_size: int, context_size: int, deterministic: bool, alone_for_long: Any
) -> None:
    """Pages for a third of what runs, prompts in pieces of 48 tokens, a host level below."""
    page_bytes = 8 * 144 * 4 * 16
    config = make_config(
        tensor_size,
        context_size,
        deterministic=deterministic,
        max_model_len=300,
        cache={
            "host_gb": page_bytes * (24 // context_size + 2) / 2**30,
            "swap_host_gb": page_bytes * 12 / 2**30,
        },
        scheduler={"max_num_batched_tokens": 48},
    )
    with ranks_of(config) as engine:
        found = run_all(engine, PROMPTS, greedy(40))
        assert engine.counters.preemptions > 0
    assert first_differences(found, alone_for_long) == 0


@pytest.mark.parametrize(("tensor_size", "context_size"), [(1, 2), (2, 2), (1, 4)])
def test_prompts_of_2k_tokens_in_chunks(tensor_size: int, context_size: int) -> None:
    prompts = {name: RANDOM.integers(3, 4000, 2048).tolist() for name in ("a", "b")}
    prompts["c"] = prompts["a"][:1500]  # reuses what "a" has by then, or computes it beside
    settings = {"max_model_len": 2100, "cache": {"host_gb": 0.1, "block_size": 32}}
    engine = Engine(make_config(**settings))
    want = run_all(engine, prompts, greedy())
    engine.close()
    with ranks_of(make_config(tensor_size, context_size, **settings)) as engine:
        assert first_differences(run_all(engine, prompts, greedy()), want) == 0


def test_siblings_seeds_aborts_and_resets_are_repeated(alone: Any) -> None:
    sampled = SamplingParams(temperature=1, max_tokens=20, n=3, ignore_eos=True)
    with ranks_of(make_config(2, 2)) as engine:
        engine.add_request("n", PROMPTS["p33"], sampled)
        engine.add_request("gone", PROMPTS["p64"], greedy(100))
        for _ in range(5):
            engine.step()
        engine.abort("gone")
        engine.abort("unknown")
        results = drain(engine)
        outputs = {tuple(tokens_of(results["n", i])) for i in range(3)}
        assert len(outputs) == 3
        assert engine.reset_prefix_cache()
        assert run_all(engine, {"p257": PROMPTS["p257"]}, greedy()) == {
            ("p257", 0): alone["p257", 0]
        }


def test_stop_strings_end_a_request_on_every_rank() -> None:
    tokenizer = Tokenizer(resolve_model("tiny"))
    from helicore.executor.detokenizer import DetokenizerFactory

    params = dataclasses.replace(greedy(60), stop=("\n",))
    prompt = tokenizer.encode("import os, sys")
    with ranks_of(make_config(1, 2), tokenizer) as engine:
        engine.add_request(
            "a",
            prompt,
            params,
            detokenizer_factory=lambda: DetokenizerFactory(tokenizer)(params, prompt),
        )
        engine.add_request("b", prompt, greedy(50))
        results = drain(engine)
    assert results["a", 0][-1].finish_reason == "stop"
    assert len(tokens_of(results["b", 0])) == 50


def test_a_request_that_is_refused_leaves_all_ranks_in_step() -> None:
    with ranks_of(make_config(2, 1)) as engine:
        with pytest.raises(ValueError, match="prompt_token_ids"):
            engine.add_request("a", [5000], greedy())
        for i in range(3):
            run_all(engine, {f"r{i}": [5, 6, 7]}, SamplingParams(temperature=1, max_tokens=9))


def test_a_rank_whose_decisions_differ_ends_the_job() -> None:
    """A digest that differs: here because a rank's state was changed behind its back."""
    config = make_config(2, 1)
    with pytest.raises(RuntimeError, match="decisions differ"), ranks_of(config) as engine:
        original = Engine.state_digest
        try:
            Engine.state_digest = lambda self: original(self) + self._ranks.rank  # type: ignore
            with pytest.raises(RuntimeError, match=r"rank 1: .*decisions differ"):
                run_all(engine, {"a": [5, 6, 7]}, greedy(40))
        finally:
            Engine.state_digest = original  # type: ignore[method-assign]


def test_an_error_of_one_rank_is_told_by_all() -> None:
    config = make_config(1, 2)
    with pytest.raises(MemoryError), ranks_of(config) as engine:
        compute = Engine._compute

        def fail_on_second(self: Engine, step: Any) -> Any:
            assert self._ranks is not None
            if self._ranks.rank == 1:
                raise MemoryError("not a byte left")
            return compute(self, step)

        try:
            Engine._compute = fail_on_second  # type: ignore[method-assign]
            with pytest.raises(CommError, match=r"rank 1: MemoryError: not a byte left"):
                run_all(engine, {"a": [5, 6, 7]}, greedy(40))
            with pytest.raises(RuntimeError, match="stopped"):
                engine.step()
        finally:
            Engine._compute = compute  # type: ignore[method-assign]


def test_what_ranks_can_not_do_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size \* context_parallel_size"):
        Ranks(ParallelConfig(tensor_parallel_size=2), Communicator.virtual(1, 1 << 20)[0], None)
    for changes, name in (
        ({"cache": {"disk_path": "/tmp/x", "disk_gb": 1}}, "disk_path"),
        ({"device": "cuda"}, "device"),
    ):
        with pytest.raises(RuntimeError, match=name):
            dataclasses.replace(make_config(2, 1), **_flat(changes))


def _flat(changes: dict[str, Any]) -> dict[str, Any]:
    cache = changes.pop("cache", None)
    return changes | ({} if cache is None else {"kv_cache": KVCacheConfig(**cache)})


def test_memory_of_a_rank_holds_more_tokens_where_the_sequence_is_split() -> None:
    sizes = {}
    for context_size in (1, 2):
        with ranks_of(make_config(2 // context_size, context_size)) as engine:
            sizes[context_size] = engine.counters.kv_pages_total or engine._pool.num_pages
            sizes[context_size] *= engine._pool.page_size
    assert sizes[2] >= 1.99 * sizes[1]


def test_ranks_run_quantised_caches() -> None:
    engine = Engine(make_config(cache={"dtype": "fp8"}))
    want = run_all(engine, PROMPTS, greedy(6))
    engine.close()
    for name in ("fp8",):
        with ranks_of(make_config(1, 2, cache={"dtype": name})) as split:
            found = run_all(split, PROMPTS, greedy(6))
        assert first_differences(found, want) <= 2


def test_torch_threads_are_left_alone() -> None:
    before = torch.get_num_threads()
    with ranks_of(make_config(2, 1)):
        pass
    assert torch.get_num_threads() in (1, before)
