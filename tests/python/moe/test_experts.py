"""Experts against float64 and the Hugging Face layer."""

import pytest
import torch
from helicore import _core, ops
from reference import moe as reference
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

E, K, D, INTER, SHARED = 8, 3, 48, 20, 24


class Layer:
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        self.w13 = (torch.randn(E, 2 * INTER, D) / 7).to(dtype)
        self.w2 = (torch.randn(E, D, INTER) / 4).to(dtype)
        self.shared = (
            (torch.randn(2 * SHARED, D) / 7).to(dtype),
            (torch.randn(D, SHARED) / 5).to(dtype),
        )
        self.packed = (
            ops.pack_linear(self.w13, groups=2),
            ops.pack_linear(self.w2),
            INTER,
            ops.pack_linear(self.shared[0], groups=2),
            ops.pack_linear(self.shared[1]),
            SHARED,
        )


def assignment(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, E).argsort(-1)[:, :K].to(torch.int32)
    return ids, torch.rand(tokens, K)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 64])
def test_experts_equal_float64(isa: str, dtype: torch.dtype, tokens: int) -> None:
    layer = Layer(dtype)
    x = torch.randn(tokens, D, dtype=dtype)
    ids, weights = assignment(tokens)
    got = ops.moe_forward(x, ids, weights, *layer.packed)
    want = reference.experts(x, ids, weights, layer.w13, layer.w2, layer.shared)
    assert got.dtype == dtype
    if tokens:
        bound = float(want.abs().max()) * (2.0**-7 if dtype == torch.bfloat16 else 1e-5)
        assert float((got.double() - want).abs().max()) <= bound
        relative = (got.double() - want).norm() / want.norm()
        assert float(relative) <= (4e-3 if dtype == torch.bfloat16 else 1e-5)


def test_swapped_slots_are_outside_the_tolerance() -> None:
    layer = Layer(torch.float32)
    x, (ids, weights) = torch.randn(4, D), assignment(4)
    got = ops.moe_forward(x, ids.roll(1, 1).contiguous(), weights, *layer.packed)
    want = reference.experts(x, ids, weights, layer.w13, layer.w2, layer.shared)
    assert float((got.double() - want).norm() / want.norm()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_token_do_not_depend_on_batch_or_threads(isa: str, dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    x, (ids, weights) = torch.randn(900, D, dtype=dtype), assignment(900)
    threads = _core.core.num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            _core.core.set_num_threads(n)
            results.append(ops.moe_forward(x, ids, weights, *layer.packed))
        assert all(torch.equal(results[0], r) for r in results)
        for t in (0, 1, 681, 682, 683, 899):
            one = slice(t, t + 1)
            alone = ops.moe_forward(x[one], ids[one], weights[one], *layer.packed)
            assert torch.equal(alone[0], results[0][t])
        for n in (2, 16, 33, 129):
            part = ops.moe_forward(x[:n], ids[:n], weights[:n], *layer.packed)
            assert torch.equal(part, results[0][:n])
    finally:
        _core.core.set_num_threads(threads)


def test_the_block_equals_the_hugging_face_layer(isa: str) -> None:
    torch.manual_seed(2)
    config = DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=INTER,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    layer = DeepseekV3MoE(config)
    for p in layer.parameters():
        p.data = torch.randn(p.shape) / 6
    layer.gate.e_score_correction_bias = torch.randn(E) * 0.1
    shared = layer.shared_experts
    x = torch.randn(2, 9, D)
    with torch.no_grad():
        want = layer(x)
        got = ops.moe_block(
            x.flatten(0, 1),
            layer.gate.weight,
            layer.gate.e_score_correction_bias,
            ops.RouterConfig(
                num_experts=E,
                top_k=K,
                n_group=2,
                topk_group=1,
                group_score="top2_sum",
                norm_topk_prob=True,
                scaling=1.7,
            ),
            ops.pack_linear(layer.experts.gate_up_proj, groups=2),
            ops.pack_linear(layer.experts.down_proj),
            INTER,
            ops.pack_linear(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), groups=2),
            ops.pack_linear(shared.down_proj.weight),
            2 * INTER,
        )
    torch.testing.assert_close(got.view_as(want), want, rtol=1e-4, atol=1e-5)


def test_the_block_equals_its_two_halves() -> None:
    layer, gate = Layer(torch.bfloat16), torch.randn(E, D)
    config = ops.RouterConfig(num_experts=E, top_k=K, norm_topk_prob=True)
    x = torch.randn(21, D, dtype=torch.bfloat16)
    halves = ops.moe_forward(x, *ops.route(x, gate, None, config), *layer.packed)
    assert torch.equal(ops.moe_block(x, gate, None, config, *layer.packed), halves)


def test_wrong_arguments_are_value_errors() -> None:
    layer = Layer(torch.float32)
    x, (ids, weights) = torch.randn(4, D), assignment(4)
    bad = ids.clone()
    bad[2, 1] = E
    with pytest.raises(ValueError, match=rf"ids\[2, 1\] must be in 0..{E - 1}, got {E}"):
        ops.moe_forward(x, bad, weights, *layer.packed)
    with pytest.raises(ValueError, match="w13 must be the packed form"):
        ops.moe_forward(x, ids, weights, layer.packed[0], layer.packed[1], INTER + 16)
    with pytest.raises(ValueError, match="shared_w13 and shared_w2"):
        ops.moe_forward(x, ids, weights, *layer.packed[:3], layer.packed[3], None, SHARED)
    with pytest.raises(ValueError, match="ids must be int32"):
        ops.moe_forward(x, ids.long(), weights, *layer.packed)
