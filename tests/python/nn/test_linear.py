"""Packed linear layers and the MLP through the Python operators."""

import pytest
import torch
from helicore import _core, ops
from reference import nn as reference

ROWS = [0, 1, 2, 3, 5, 16, 17, 64, 300]


def assert_product(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> None:
    """`scale` is the sum of absolute products, which bounds the rounding error."""
    relative = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-6
    assert got.shape == want.shape
    assert bool(((got.double() - want).abs() <= scale * relative + 1e-6).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 7), (130, 33), (256, 64)])
def test_linear_equals_float64(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight = torch.randn(n, k, dtype=dtype)
    packed = ops.pack_linear(weight)
    for rows in ROWS:
        x = torch.randn(rows, k, dtype=dtype)
        scale = reference.linear(x.abs(), weight.abs())
        assert_product(ops.linear(x, packed, n), reference.linear(x, weight), scale)


def test_a_wrong_product_is_outside_the_tolerance() -> None:
    x, weight = torch.randn(3, 33), torch.randn(17, 33)
    scale = reference.linear(x.abs(), weight.abs())
    wrong = ops.linear(x, ops.pack_linear(weight.roll(1, 0)), 17)
    with pytest.raises(AssertionError):
        assert_product(wrong, reference.linear(x, weight), scale)


def test_a_float32_input_is_not_rounded_by_a_bfloat16_weight(isa: str) -> None:
    x = torch.randn(4, 64)
    weight = torch.randn(32, 64, dtype=torch.bfloat16)
    got = ops.linear(x, ops.pack_linear(weight), 32)
    assert got.dtype == torch.float32
    assert_product(got, reference.linear(x, weight), reference.linear(x.abs(), weight.abs()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_do_not_depend_on_batch_or_threads(isa: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 129, dtype=dtype), torch.randn(203, 129, dtype=dtype)
    packed = ops.pack_linear(weight)
    threads = _core.core.num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            _core.core.set_num_threads(n)
            results.append(ops.linear(x, packed, 203))
        assert all(torch.equal(results[0], r) for r in results)
        for row in (0, 95, 96, 299):
            assert torch.equal(ops.linear(x[row : row + 1], packed, 203)[0], results[0][row])
    finally:
        _core.core.set_num_threads(threads)


def test_strided_rows_bias_residual_and_out_dtype() -> None:
    wide = torch.randn(5, 100, dtype=torch.bfloat16)
    x = wide[:, 10:43]
    weight, bias = torch.randn(20, 33, dtype=torch.bfloat16), torch.randn(20)
    residual = torch.randn(5, 20)
    got = ops.linear(
        x, ops.pack_linear(weight), 20, bias=bias, residual=residual, out_dtype=torch.float32
    )
    torch.testing.assert_close(
        got.double(), reference.linear(x, weight) + bias + residual, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("inter", [16, 20, 64])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_gating_and_mlp_equal_float64(isa: str, inter: int, rows: int) -> None:
    x, gate_up, down = torch.randn(rows, 48), torch.randn(2 * inter, 48), torch.randn(48, inter)
    packed = ops.pack_linear(gate_up, groups=2)
    hidden = ops.linear(x, packed, 2 * inter, silu_mul=True)
    want = reference.silu_mul(reference.linear(x, gate_up))
    torch.testing.assert_close(hidden.double(), want, rtol=1e-4, atol=1e-4)
    got = ops.mlp(x, packed, ops.pack_linear(down), inter, 48, residual=x)
    want = reference.mlp(x, gate_up, down) + x
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


def test_batched_linear_takes_strided_heads(isa: str) -> None:
    q = torch.randn(6, 5, 40, dtype=torch.bfloat16)
    x = q[:, :, 8:]
    weight = torch.randn(5, 24, 32, dtype=torch.bfloat16)
    got = ops.batched_linear(x, ops.pack_linear(weight), 24, out_dtype=torch.float32)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
def test_packing_is_lossless(dtype: torch.dtype, groups: int) -> None:
    weight = torch.randn(3, 34, 7, dtype=dtype)
    packed = ops.pack_linear(weight, groups)
    assert torch.equal(ops.unpack_linear(packed, 34, 7, groups), weight)
    assert packed.data_ptr() % 64 == 0


def test_packing_a_transposed_weight() -> None:
    weight = torch.randn(7, 34).t()
    assert torch.equal(ops.unpack_linear(ops.pack_linear(weight), 34, 7), weight)


def test_wrong_arguments_are_value_errors_that_name_them() -> None:
    x, packed = torch.randn(2, 8), ops.pack_linear(torch.randn(16, 8))
    with pytest.raises(ValueError, match="packed must be the packed form"):
        ops.linear(x, packed, 17)
    with pytest.raises(ValueError, match="packed must be the packed form"):
        ops.linear(x[:, :7], packed, 16)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(x, packed, 16, bias=torch.zeros(15))
    with pytest.raises(ValueError, match="x must be bfloat16 or float32"):
        ops.linear(x.half(), packed, 16, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="groups must divide"):
        ops.pack_linear(torch.randn(3, 4), groups=2)
    with pytest.raises(TypeError):
        _core.nn.linear([[1.0]], packed, torch.empty(1, 16), 16)  # type: ignore[arg-type]
