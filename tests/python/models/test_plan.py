"""Recorded decode steps compute what the modules compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helicore.models import load_model
from helicore.models.deepseek import DeepseekModel
from helicore.models.plan import MAX_TOKENS
from reference.hf_models import YARN, Spec, random_model
from reference.paged import PagedRequests

SPECS = [
    Spec("moe", "v3", {"rope_parameters": dict(YARN), "n_group": 4, "topk_group": 2}),
    Spec("bias_no_q_lora", "v2", {"q_lora_rank": None, "attention_bias": True}),
    Spec("dense_one_layer", "v3", {"num_hidden_layers": 1}),
]


@pytest.fixture(scope="module", params=SPECS, ids=lambda s: s.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param.name)
    random_model(request.param).save_pretrained(path)
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekModel:
    model = load_model(folder, dtype=dtype)
    assert isinstance(model, DeepseekModel)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_step", [1, 3])
def test_replayed_steps_have_the_bits_of_the_modules(
    folder: Path, dtype: torch.dtype, per_step: int
) -> None:
    model = load(folder, dtype)
    plain = PagedRequests(load(folder, dtype), num_requests=3, dtype=dtype)
    planned = PagedRequests(model, num_requests=3, dtype=dtype, reuse_batches=True)
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        ids = torch.randint(0, 160, (3, per_step), generator=generator).tolist()
        tokens = dict(enumerate(ids))
        assert torch.equal(planned.step(tokens), plain.step(tokens))
        assert (model._plan is None) == (step == 0)


def test_a_plan_ends_with_its_batch(folder: Path) -> None:
    model = load(folder)
    plain = PagedRequests(load(folder), num_requests=3)
    planned = PagedRequests(model, num_requests=3, reuse_batches=True)
    steps: list[tuple[dict[int, list[int]], bool]] = [
        ({0: [1, 2, 3, 4], 1: [5, 6]}, True),
        ({0: [9], 1: [8]}, False),
        ({0: [7], 1: [6]}, False),
        ({0: [7], 1: [6]}, False),
        ({0: [3], 1: [2], 2: [1]}, False),
        ({0: [3]}, False),
        ({0: [4]}, False),
        ({0: [5], 1: [5, 6, 7]}, True),
        ({0: [6], 1: [5, 6, 7]}, True),
        ({0: [6]}, False),
    ]
    for tokens, expanded in steps:
        logits = planned.step(tokens, expanded=expanded)
        assert torch.equal(logits, plain.step(tokens, expanded=expanded))


def test_a_plan_belongs_to_its_caches(folder: Path) -> None:
    model = load(folder)
    a = PagedRequests(model, reuse_batches=True)
    logits = [a.step({0: [5 + i]}) for i in range(4)]
    assert model._plan is not None
    b = PagedRequests(model, reuse_batches=True)
    assert all(torch.equal(b.step({0: [5 + i]}), logits[i]) for i in range(4))


def test_long_and_expanded_steps_are_not_planned(folder: Path) -> None:
    model = load(folder)
    requests = PagedRequests(model, capacity=256, reuse_batches=True)
    for _ in range(3):
        requests.step({0: [3] * (MAX_TOKENS + 1)})
        assert model._plan is None
    for _ in range(3):
        requests.step({0: [3] * 4}, expanded=True)
        assert model._plan is None


def test_moving_a_model_drops_its_plan(folder: Path) -> None:
    model = load(folder)
    requests = PagedRequests(model, reuse_batches=True)
    for token in range(3):
        requests.step({0: [token]})
    assert model._plan is not None
    model.to("cpu")
    assert model._plan is None


def test_a_result_is_not_overwritten_by_the_next_step(folder: Path) -> None:
    requests = PagedRequests(load(folder), reuse_batches=True)
    results = [requests.step({0: [token]}) for token in range(5)]
    copies = [r.clone() for r in results]
    requests.step({0: [77]})
    assert all(torch.equal(r, c) for r, c in zip(results, copies, strict=True))
