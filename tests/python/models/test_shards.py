"""A model split over ranks gives the logits of the whole one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helicore.model_path import resolve_model
from helicore.models.base import CausalLM, ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.helix import gather_is_cheaper
from helicore.models.loader import load_model
from helicore.parallel.shards import Shards
from reference.thread_ranks import ThreadCollectives, make_ranks, on_ranks
from torch import Tensor

SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4), (3, 2), (2, 3)]
PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, 4000, 150)]


class RankModel:
    """One rank's model and cache; requests live in pages dealt out in a random order."""

    def __init__(self, shards: Shards, dtype: torch.dtype = torch.float32) -> None:
        self.shards = shards
        self.model: CausalLM = load_model(resolve_model("tiny"), dtype=dtype, shards=shards)
        widths = self.model.kv_layers(self.model.config, dtype)
        block = shards.block_size
        num_pages = 120
        self.caches = [torch.full((num_pages, block, w), torch.nan, dtype=dtype) for w in widths]
        order = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
        self.tables = order.reshape(2, -1)  # two requests

    def forward(self, parts: list[tuple[int, int, list[int]]], num_absorbed: int) -> Tensor:
        """parts: (request, first position, tokens); logits of all tokens."""
        ledger = self.shards.ledger
        positions = np.concatenate(
            [np.arange(first, first + len(tokens)) for _, first, tokens in parts]
        ).astype(np.int32)
        owners = np.concatenate([np.full(len(tokens), r) for r, _, tokens in parts])
        pages = self.tables[owners, positions // ledger.super_block].astype(np.int32)
        slots, bounds = np.empty(len(positions), np.int64), np.empty(len(positions), np.int32)
        ledger.fill_rows(self.shards.context_rank, positions, pages, slots, bounds)
        counts = [len(tokens) for _, _, tokens in parts]
        cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        kv_len = np.array([first + len(tokens) for _, first, tokens in parts], np.int32)
        is_split = self.shards.context_size > 1
        batch = ForwardBatch(
            token_ids=torch.tensor([t for part in parts for t in part[2]], dtype=torch.int32),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            cu_q=torch.from_numpy(cu_q),
            kv_len=torch.from_numpy(kv_len),
            block_table=torch.from_numpy(self.tables[[part[0] for part in parts]]),
            num_absorbed=num_absorbed,
            num_absorbed_tokens=int(cu_q[num_absorbed]),
            logits_rows=torch.arange(len(positions)),
            kv_bound=torch.from_numpy(bounds) if is_split else None,
            local_kv_len=torch.from_numpy(bounds[cu_q[1:] - 1].copy()) if is_split else None,
        )
        with torch.inference_mode():
            return self.model(batch, self.caches)


def make_shards(
    tensor_size: int, context_size: int, block_size: int = 4
) -> tuple[list[Shards], list[ThreadCollectives]]:
    size = tensor_size * context_size
    everyone = make_ranks(size)
    context = [make_ranks(context_size) for _ in range(tensor_size)]
    shards = [
        Shards(
            tensor_size,
            context_size,
            rank,
            block_size,
            everyone[rank] if size > 1 else None,
            context[rank // context_size][rank % context_size] if context_size > 1 else None,
        )
        for rank in range(size)
    ]
    return shards, everyone


def run_all(model: RankModel, prompt: list[int]) -> Tensor:
    """Whole prompts, chunks over cached rows by both kernels, decodes, and verifications of 1 to 8
    tokens, of which half are rewound: over borders of blocks, and so to other owners."""
    half = len(prompt) // 3
    logits = [
        model.forward([(0, 0, prompt[:half])], 0),
        model.forward([(0, half, prompt[half : 2 * half]), (1, 0, prompt[:5])], 0),
        model.forward([(1, 5, prompt[5:9]), (0, 2 * half, prompt[2 * half :])], 1),
    ]
    length = 9
    for step in range(12):
        num_verified = step % 8 + 1
        verified = (1, length, prompt[step : step + num_verified])
        logits.append(model.forward([(0, len(prompt) + step, [7 + step]), verified], 2))
        length += (num_verified + 1) // 2
    return torch.cat(logits)


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return run_all(RankModel(Shards(block_size=16)), PROMPT)


@pytest.mark.parametrize(("tensor_size", "context_size"), SIZES)
def test_logits_are_those_of_one_rank(tensor_size: int, context_size: int, whole: Tensor) -> None:
    shards, _ = make_shards(tensor_size, context_size)
    found = on_ranks(len(shards), lambda rank: run_all(RankModel(shards[rank]), PROMPT))
    for logits in found:
        torch.testing.assert_close(logits, whole, atol=2e-3, rtol=2e-3)
        assert torch.equal(logits, found[0])


@pytest.mark.parametrize(("tensor_size", "context_size"), [(2, 1), (1, 3), (3, 2)])
def test_whole_experts_on_each_rank_give_the_same(
    tensor_size: int, context_size: int, whole: Tensor
) -> None:
    shards = [
        replace(mine, splits_experts=True) for mine in make_shards(tensor_size, context_size)[0]
    ]
    found = on_ranks(len(shards), lambda rank: run_all(RankModel(shards[rank]), PROMPT))
    torch.testing.assert_close(found[0], whole, atol=2e-3, rtol=2e-3)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel"):
        Shards(tensor_size=5, splits_experts=True).own_experts(4)


@pytest.mark.parametrize("fault", ["heads", "ledger", "rescale"])
def test_a_fault_in_the_exchange_is_seen(fault: str, whole: Tensor) -> None:
    """Swapped heads, a ledger that is off by a block, partial results that are not rescaled."""
    shards, _ = make_shards(1, 2)

    class Faulty(ThreadCollectives):
        def merge_partials(self, o: Tensor, stats: Tensor, out: Tensor) -> None:
            if fault == "rescale":
                stats = stats.clone()
                stats[..., 0] = torch.where(stats[..., 1] > 0, 0.0, stats[..., 0])
            super().merge_partials(o, stats, out)
            if fault == "heads":
                out[:, :2] = out[:, [1, 0]]

    def run(rank: int) -> Tensor:
        mine = shards[rank]
        assert isinstance(mine.context, ThreadCollectives)
        faulty = Faulty(mine.context._group, rank, 2)
        model = RankModel(replace(mine, context=faulty))
        if fault == "ledger":
            model.shards = replace(mine, rank=1 - rank)
        return run_all(model, PROMPT)

    found = on_ranks(2, run)
    worst = (found[0] - whole).nan_to_num(nan=1e3).abs().max().item()
    assert worst > 0.05


def test_a_prompt_without_history_is_computed_without_an_exchange() -> None:
    shards, _ = make_shards(1, 2)

    def run(rank: int) -> dict[str, int]:
        model = RankModel(shards[rank])
        model.forward([(0, 0, PROMPT[:40])], 0)
        context = shards[rank].context
        assert isinstance(context, ThreadCollectives)
        return context.num_calls

    assert on_ranks(2, run) == [{}, {}]


def test_values_projected_before_the_exchange_give_the_same(whole: Tensor) -> None:
    shards, _ = make_shards(1, 3)
    before = [replace(mine, project_first_above=0) for mine in shards]
    found = on_ranks(3, lambda rank: run_all(RankModel(before[rank]), PROMPT))
    torch.testing.assert_close(found[0], whole, atol=2e-3, rtol=2e-3)


def test_a_recorded_step_is_that_of_the_modules() -> None:
    """The second batch that is the same object is run from a plan."""
    shards, _ = make_shards(2, 2)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = RankModel(shards[rank])
        model.forward([(0, 0, PROMPT[:20])], 0)
        first = model.forward([(0, 20, [9])], 1)
        batch = model.model._last_batch
        assert isinstance(batch, ForwardBatch)
        with torch.inference_mode():
            return first, model.model(batch, model.caches)

    for first, again in on_ranks(4, run):
        torch.testing.assert_close(first, again, atol=1e-4, rtol=1e-4)


def test_heads_that_can_not_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size \* context_parallel_size"):
        load_model(resolve_model("tiny"), shards=Shards(tensor_size=5))


def test_parts_are_consecutive_and_cover_all() -> None:
    for features in (32, 33, 128, 640, 2048, 4096):
        for size in (1, 2, 3, 6, 8):
            shards = [Shards(tensor_size=size, rank=rank) for rank in range(size)]
            for parts in (
                [s.part_of(features, "x") for s in shards],
                [s.equal_part(features) for s in shards],
            ):
                assert [i for part in parts for i in part] == list(range(features))


def test_own_heads_follow_the_rank_and_lie_in_the_group() -> None:
    for tensor_size, context_size in SIZES:
        for rank in range(tensor_size * context_size):
            shards = Shards(tensor_size, context_size, rank)
            own = shards.own_heads(12)
            assert own.start == rank * len(own)
            assert set(own) <= set(shards.group_heads(12))


def test_rows_are_gathered_where_they_are_fewer_bytes() -> None:
    sizes = {"row_bytes": 1152, "num_heads": 128, "head_bytes": 1032, "ranks": 8}
    assert gather_is_cheaper(1, 0, **sizes)
    assert gather_is_cheaper(2048, 131072, **sizes)
    assert not gather_is_cheaper(8, 131072, **sizes)


def test_configuration_of_the_model_is_whole_on_every_rank(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(resolve_model("tiny"))
    shards, _ = make_shards(2, 1)
    assert load_model(resolve_model("tiny"), shards=shards[1]).config == config
