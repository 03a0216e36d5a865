"""Norms, gating and embedding against Hugging Face modules and float64."""

import pytest
import torch
from helicore import ops
from reference import nn as reference
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm


def hf_norm(width: int, eps: float, dtype: torch.dtype) -> DeepseekV3RMSNorm:
    norm = DeepseekV3RMSNorm(width, eps=eps)
    norm.weight.data = torch.randn(width)
    return norm.to(dtype)


@pytest.mark.parametrize("width", [4, 33, 256])
def test_rms_norm_equals_hugging_face(isa: str, width: int) -> None:
    x = torch.randn(7, width)
    norm = hf_norm(width, 1e-6, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            ops.rms_norm(x, norm.weight, 1e-6), norm(x), rtol=2e-6, atol=1e-7
        )
        half, x16 = norm.to(torch.bfloat16), x.bfloat16()
        got, want = ops.rms_norm(x16, half.weight, 1e-6), half(x16)
    # Both round twice; a different order of the sum of squares may flip the first rounding.
    differ = got != want
    assert differ.float().mean() < 0.02
    torch.testing.assert_close(got, want, rtol=2.0**-6, atol=0.0)


def test_the_weight_is_applied_after_the_first_rounding() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 64).bfloat16(), torch.randn(64).bfloat16()
    once = reference.rms_norm(x, weight, 1e-6).bfloat16()
    assert not torch.equal(ops.rms_norm(x, weight, 1e-6), once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_add_rms_norm_updates_the_residual(isa: str, dtype: torch.dtype, rows: int) -> None:
    x, residual = torch.randn(rows, 40, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    weight = torch.randn(40, dtype=dtype)
    total = residual + x
    got = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(got, ops.rms_norm(total, weight, 1e-5))


def test_slices_of_a_projection_are_normalised_in_place_of_their_rows() -> None:
    wide, weight = torch.randn(3, 100), torch.ones(30)
    part = wide[:, 20:50]
    got = ops.rms_norm(part, weight, 1e-6)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), reference.rms_norm(part, weight, 1e-6))


def test_a_nan_row_leaves_other_rows_alone(isa: str) -> None:
    x, weight = torch.randn(4, 33), torch.ones(33)
    clean = ops.rms_norm(x, weight, 1e-6)
    x[2, 5] = float("nan")
    got = ops.rms_norm(x, weight, 1e-6)
    assert bool(got[2].isnan().all())
    assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_silu_mul_equals_float64(isa: str) -> None:
    gate_up = torch.randn(5, 66) * 10
    torch.testing.assert_close(
        ops.silu_mul(gate_up).double(), reference.silu_mul(gate_up), rtol=5e-6, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embedding_copies_rows(dtype: torch.dtype) -> None:
    table = torch.randn(50, 7, dtype=torch.bfloat16)
    ids = torch.randint(0, 50, (200,), dtype=dtype)
    assert torch.equal(ops.embedding(ids, table), table[ids.long()])
    with pytest.raises(ValueError, match=r"ids\[1\] must be in 0..49, got 50"):
        ops.embedding(torch.tensor([0, 50], dtype=dtype), table)
