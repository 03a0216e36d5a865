"""What a GPU runs through torch, against the native router and experts: on any machine."""

import math

import pytest
import torch
from helicore import ops
from helicore.ops import _torch_moe

D, E = 32, 16


GROUPED = {"n_group": 4, "topk_group": 2}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("group", ["none", "max", "top2_sum"])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_router(scoring: str, group: str, norm: bool, has_bias: bool) -> None:
    torch.manual_seed(3)
    config = ops.RouterConfig(
        E,
        3,
        scoring=scoring,
        group_score=group,
        norm_topk_prob=norm,
        scaling=2.5,
        **(GROUPED if group != "none" else {}),
    )
    x, gate = torch.randn(50, D), torch.randn(E, D) / 6
    bias = torch.randn(E) / 8 if has_bias else None
    ids, weights = _torch_moe.route(x, gate, bias, config)
    want_ids, want_weights = ops.route(x, gate, bias, config)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


def test_equal_scores_go_to_lower_ids() -> None:
    config = ops.RouterConfig(E, 3)
    ids, _ = _torch_moe.route(torch.zeros(2, D), torch.randn(E, D), None, config)
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_a_logit_that_is_no_number_is_the_worst_choice() -> None:
    config = ops.RouterConfig(E, 3, scoring="softmax")
    gate = torch.randn(E, D)
    gate[4] = math.nan
    x = torch.randn(20, D)
    ids, weights = _torch_moe.route(x, gate, None, config)
    want_ids, want_weights = ops.route(x, gate, None, config)
    assert torch.equal(ids, want_ids)
    assert not (ids == 4).any()
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("tokens", [1, 17])
def test_experts(dtype: torch.dtype, width: int, shared: int, tokens: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(tokens, D).to(dtype)
    ids = torch.rand(tokens, E).argsort(-1)[:, :3].to(torch.int32)
    weights = torch.rand(tokens, 3)
    w13 = (torch.randn(E, 2 * width, D) / 6).to(dtype)
    w2 = (torch.randn(E, D, width) / 4).to(dtype)
    both: list[torch.Tensor] = []
    if shared:
        both = [
            (torch.randn(2 * shared, D) / 6).to(dtype),
            (torch.randn(D, shared) / 5).to(dtype),
        ]
    got = _torch_moe.moe_forward(x, ids, weights, w13, w2, width, *both, *([shared] * bool(both)))
    packed = [ops.pack_linear(part, groups=2 - i) for i, part in enumerate(both)]
    want = ops.moe_forward(
        x,
        ids,
        weights,
        ops.pack_linear(w13, groups=2),
        ops.pack_linear(w2),
        width,
        *packed,
        *([shared] * bool(both)),
    )
    assert got.dtype == dtype
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)
