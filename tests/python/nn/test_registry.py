"""The operators as torch custom operators: schema, fake tensors, torch.compile."""

from typing import Any

import pytest
import torch
from helicore import ops
from torch.library import opcheck


def _operands(name: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(16, 8)
    gate_up = ops.pack_linear(torch.randn(12, 8), groups=2)
    experts = ops.pack_linear(torch.randn(4, 12, 8), groups=2)
    down = ops.pack_linear(torch.randn(4, 8, 6))
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    tokens = torch.tensor([1, 2, 3], dtype=torch.int32)
    f32, i32 = torch.ones(3), torch.zeros(3, dtype=torch.int32)
    i64 = torch.zeros(3, dtype=torch.int64)
    codes, scales = ops.quantize_fp8_block(torch.randn(130, 20))
    table: dict[str, tuple[Any, ...]] = {
        "linear": (x, ops.pack_linear(weight), 16),
        "batched_linear": (torch.randn(2, 4, 8), ops.pack_linear(torch.randn(4, 5, 8)), 5),
        "mlp": (x, gate_up, ops.pack_linear(torch.randn(8, 6)), 6, 8),
        "rms_norm": (x, torch.ones(8), 1e-6),
        "add_rms_norm": (x, torch.randn(3, 8), torch.ones(8), 1e-6),
        "silu_mul": (x,),
        "embedding": (tokens, weight),
        "route": (x, torch.randn(4, 8), None, 4, 2, 1, 1, "sigmoid", "none", True, 1.5),
        "moe_forward": (x, ids, torch.rand(3, 2), experts, down, 6),
        # opcheck itself multiplies its operands, which torch cannot do with float8
        "dequantize_fp8_block": (codes.view(torch.uint8), scales),
        "quantize_fp8_block": (torch.randn(130, 20),),
        "sample": (x, f32, i32, f32, torch.zeros(3), i64, i64, True),
        "top_logprobs": (x, tokens, 3),
        "apply_penalties": (x, rows, tokens, rows, tokens, f32 * 1.5, f32, f32),
        "apply_logit_bias": (x, rows, tokens, f32),
        "mask_tokens": (x, rows, tokens),
    }
    return table[name]


NAMES = [
    "linear",
    "batched_linear",
    "mlp",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "embedding",
    "route",
    "moe_forward",
    "dequantize_fp8_block",
    "quantize_fp8_block",
    "sample",
    "top_logprobs",
    "apply_penalties",
    "apply_logit_bias",
    "mask_tokens",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_passes_opcheck(name: str) -> None:
    operator = getattr(torch.ops.helicore, name).default
    opcheck(
        operator,
        _operands(name),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_the_direct_call_equals_the_dispatched_operator() -> None:
    x, packed, n = _operands("linear")
    assert torch.equal(ops.linear(x, packed, n), torch.ops.helicore.linear(x, packed, n))


def test_a_compiled_function_uses_the_operators_without_a_graph_break() -> None:
    torch.manual_seed(1)
    weight, norm = torch.randn(32, 16), torch.ones(16)
    packed, back = ops.pack_linear(weight), ops.pack_linear(weight.t())
    config = ops.RouterConfig(num_experts=4, top_k=2, norm_topk_prob=True)
    gate = torch.randn(4, 16)
    experts = ops.pack_linear(torch.randn(4, 12, 16), groups=2)
    down = ops.pack_linear(torch.randn(4, 16, 6))

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        h = ops.add_rms_norm(x, residual, norm, 1e-6)
        h = ops.linear(ops.linear(h, packed, 32) * 2, back, 16)
        return ops.moe_block(h, gate, None, config, experts, down, 6) + residual

    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    eager_residual = residual.clone()
    want = step(x, eager_residual)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, residual)
    torch.testing.assert_close(got, want)
    assert torch.equal(residual, eager_residual)


def test_fake_tensors_have_the_shapes_of_real_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=torch.bfloat16)
        packed = torch.empty(1, 4, 16, 2, dtype=torch.bfloat16)
        y = torch.ops.helicore.linear(x, packed, 16, out_dtype=torch.float32)
    assert y.shape == (3, 16)
    assert y.dtype == torch.float32


def test_make_fx_records_the_operator_instead_of_uninitialised_memory() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = torch.randn(4, 16), torch.randn(16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, weight, 1e-6)

    graph = make_fx(step)(x)
    assert "helicore.rms_norm" in graph.code
    assert torch.equal(graph(x), step(x))


def test_calls_on_fake_tensors_give_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        y = ops.rms_norm(torch.empty(2, 8), torch.ones(8), 1e-6)
    assert isinstance(y, FakeTensor)


def test_a_tensor_without_memory_is_refused() -> None:
    x = torch.ones(2, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        ops.rms_norm(x, torch.ones(8), 1e-6)


def test_asking_for_a_gradient_is_refused_instead_of_dropping_it() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"ops\.rms_norm has no backward pass"):
        ops.rms_norm(x, torch.ones(8), 1e-6)
    with pytest.raises(RuntimeError, match="no backward pass"):
        ops.route(x, torch.ones(4, 8), None, ops.RouterConfig(num_experts=4, top_k=2))
    with torch.no_grad():
        assert not ops.rms_norm(x, torch.ones(8), 1e-6).requires_grad
