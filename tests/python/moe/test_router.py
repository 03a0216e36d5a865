"""The router against the Hugging Face routers and float64."""

from typing import Any

import pytest
import torch
from helicore import ops
from reference import moe as reference
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

V3 = {"scoring": "sigmoid", "group_score": "top2_sum"}


def by_id(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.argsort(-1)
    return ids.gather(1, order).long(), weights.gather(1, order)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group"), [(16, 4, 4, 2), (64, 8, 8, 4), (32, 6, 1, 1)]
)
def test_sigmoid_routing_equals_hugging_face(
    isa: str, experts: int, top_k: int, n_group: int, topk_group: int, norm: bool
) -> None:
    torch.manual_seed(experts)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=48,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk_prob=norm,
            routed_scaling_factor=2.5,
        )
    )
    router.requires_grad_(False)
    router.weight.data = torch.randn(experts, 48) / 7
    router.e_score_correction_bias = torch.randn(experts) * 0.1
    config = ops.RouterConfig(
        num_experts=experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm,
        scaling=2.5,
        **V3,
    )
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(200, 48, dtype=dtype)
        with torch.no_grad():
            _, want_weights, want_ids = router(x)
        want_ids, want_weights = by_id(want_ids, want_weights)
        got_ids, got_weights = by_id(
            *ops.route(x, router.weight, router.e_score_correction_bias, config)
        )
        same = (got_ids == want_ids).all(-1)
        assert float(same.float().mean()) > 0.98  # near ties may fall either way
        torch.testing.assert_close(got_weights[same], want_weights[same], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_softmax_routing_equals_hugging_face(isa: str, method: str) -> None:
    torch.manual_seed(7)
    grouped = method == "group_limited_greedy"
    router = DeepseekV2TopkRouter(
        DeepseekV2Config(
            hidden_size=32,
            n_routed_experts=40,
            num_experts_per_tok=6,
            n_group=8 if grouped else 1,
            topk_group=3 if grouped else 1,
            topk_method=method,
            routed_scaling_factor=16.0,
        )
    )
    router.requires_grad_(False)
    router.weight.data = torch.randn(40, 32) / 5
    config = ops.RouterConfig(
        num_experts=40,
        top_k=6,
        n_group=8 if grouped else 1,
        topk_group=3 if grouped else 1,
        scoring="softmax",
        group_score="max" if grouped else "none",
        scaling=16.0,
    )
    x = torch.randn(200, 32)
    with torch.no_grad():
        _, want_weights, want_ids = router(x)
    want_ids, want_weights = by_id(want_ids, want_weights)
    got_ids, got_weights = by_id(*ops.route(x, router.weight, None, config))
    same = (got_ids == want_ids).all(-1)
    assert float(same.float().mean()) > 0.98
    torch.testing.assert_close(got_weights[same], want_weights[same], rtol=2e-5, atol=1e-6)


CONFIGS: list[dict[str, Any]] = [
    {"top_k": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "scaling": 2.0} | V3,
    {"top_k": 1, "norm_topk_prob": True, "scaling": 3.0},
    {"top_k": 5, "scoring": "softmax"},
    {"top_k": 3, "n_group": 8, "topk_group": 2, "scoring": "softmax", "group_score": "max"},
]


@pytest.mark.parametrize("kwargs", CONFIGS)
def test_order_ids_and_weights_equal_float64(isa: str, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(8)
    x, gate = torch.randn(100, 30).bfloat16(), torch.randn(16, 30) / 5
    bias = torch.randn(16) * 0.1 if kwargs.get("scoring") != "softmax" else None
    ids, weights = ops.route(x, gate, bias, ops.RouterConfig(num_experts=16, **kwargs))
    compared = 0
    for t in range(100):
        want = reference.route(x[t], gate, bias, **kwargs)
        if want.gap < 1e-5:
            continue
        compared += 1
        assert ids[t].tolist() == want.ids
        torch.testing.assert_close(weights[t].tolist(), want.weights, rtol=1e-5, atol=1e-8)
    assert compared > 80


def test_a_router_without_its_bias_chooses_other_experts() -> None:
    torch.manual_seed(9)
    x, gate, bias = torch.randn(50, 30), torch.randn(16, 30) / 5, torch.randn(16)
    config = ops.RouterConfig(num_experts=16, top_k=4)
    assert not torch.equal(ops.route(x, gate, bias, config)[0], ops.route(x, gate, None, config)[0])


def test_no_tokens_and_nan_tokens() -> None:
    gate, config = torch.randn(16, 8), ops.RouterConfig(num_experts=16, top_k=4)
    ids, weights = ops.route(torch.empty(0, 8), gate, None, config)
    assert ids.shape == weights.shape == (0, 4)
    x = torch.randn(3, 8)
    clean = ops.route(x, gate, None, config)
    x[1] = float("nan")
    ids, weights = ops.route(x, gate, None, config)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert weights[1].tolist() == [0.0] * 4
    assert torch.equal(ids[::2], clean[0][::2])
    assert torch.equal(weights[::2], clean[1][::2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_group must be in"),
        ({"topk_group": 9, "n_group": 8, "group_score": "max"}, "topk_group must be in"),
        ({"top_k": 17}, "top_k must be in"),
        ({"top_k": 0}, "top_k must be in"),
        ({"n_group": 4}, "n_group must be 1 without group scores"),
        ({"scoring": "relu"}, "scoring must be sigmoid or softmax, got 'relu'"),
        ({"group_score": "sum"}, "group_score must be none, max or top2_sum, got 'sum'"),
        ({"scaling": float("nan")}, "scaling must be a number"),
    ],
)
def test_a_bad_configuration_is_a_value_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.RouterConfig(**({"num_experts": 16, "top_k": 4} | change))
