"""What a GPU runs through torch, against the native operators: the formulas, on any machine."""

import pytest
import torch
from helicore import ops
from helicore.ops import _torch_nn
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    bound = 2.0**-6 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", ["", "bias", "residual", "bias residual", "silu"])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_linear(dtype: torch.dtype, extras: str, tokens: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(tokens, 40).to(dtype), (torch.randn(24, 40) / 6).to(dtype)
    bias = torch.randn(24).to(dtype) if "bias" in extras else None
    residual = torch.randn(tokens, 24).to(dtype) if "residual" in extras else None
    silu = extras == "silu"
    got = _torch_nn.linear(x, w, 24, bias, residual, silu)
    packed = ops.pack_linear(w, groups=2 if silu else 1)
    assert_near(got, ops.linear(x, packed, 24, bias, residual, silu))


def test_linear_widens_the_result_without_rounding_first() -> None:
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(7, 64).bfloat16()
    got = _torch_nn.linear(x, w, 7, out_dtype=torch.float32)
    assert_near(got, ops.linear(x, ops.pack_linear(w), 7, out_dtype=torch.float32))
    rounded = got.bfloat16().float()
    assert not torch.equal(got, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_linear(dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 3, 20).to(dtype), (torch.randn(3, 12, 20) / 4).to(dtype)
    got = _torch_nn.batched_linear(x, w, 12)
    assert got.is_contiguous()
    assert_near(got, ops.batched_linear(x, ops.pack_linear(w), 12))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_mlp(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 32).to(dtype), torch.rand(32).to(dtype)
    assert_near(_torch_nn.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    ours, theirs = torch.randn(5, 32).to(dtype).clone(), None
    theirs = ours.clone()
    assert_near(
        _torch_nn.add_rms_norm(x, ours, weight, 1e-6), ops.add_rms_norm(x, theirs, weight, 1e-6)
    )
    assert torch.equal(ours, theirs)
    gate_up, down = (torch.randn(2 * 24, 32) / 6).to(dtype), (torch.randn(32, 24) / 5).to(dtype)
    want = ops.mlp(x, ops.pack_linear(gate_up, groups=2), ops.pack_linear(down), 24, 32)
    assert_near(_torch_nn.mlp(x, gate_up, down, 24, 32), want)


def test_embedding_takes_ids_of_the_engine() -> None:
    table = torch.randn(9, 4)
    ids = torch.tensor([8, 0, 3], dtype=torch.int32)
    assert torch.equal(_torch_nn.embedding(ids, table), ops.embedding(ids, table))
