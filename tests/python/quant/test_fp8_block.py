"""FP8 blocks against torch's float8_e4m3fn."""

import pytest
import torch
from helicore import _core, ops


def expand(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def test_codes_decode_and_encode_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for code, want in enumerate(codes.float().tolist()):
        got = _core.quant.decode_e4m3(code)
        assert got == want or (got != got and want != want)
    values = torch.cat([torch.randn(2000) * s for s in (1e-3, 1e-2, 1.0, 100.0)]).clamp(-448, 448)
    want_codes = values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert [_core.quant.encode_e4m3(v) for v in values.tolist()] == want_codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (576, 300), (129, 257), (0, 4)])
def test_dequantising_is_exact(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) * 1e-2
    want = (codes.float() * expand(scale, codes.shape)).to(dtype)
    got = ops.dequantize_fp8_block(codes, scale, dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_quantising_uses_the_largest_magnitude_of_each_block() -> None:
    torch.manual_seed(4)
    w = torch.randn(200, 150)
    w[:128, 128:] = 0.0
    codes, scale = ops.quantize_fp8_block(w)
    assert codes.dtype == torch.float8_e4m3fn
    assert float(scale[0, 1]) == 1.0
    torch.testing.assert_close(scale[0, 0], w[:128, :128].abs().max() / 448)
    assert torch.equal(codes.float(), (w / expand(scale, w.shape)).to(torch.float8_e4m3fn).float())
    back = ops.dequantize_fp8_block(codes, scale, torch.float32)
    assert float((back - w).norm() / w.norm()) < 0.04
    assert not torch.equal(back, w)


def test_wrong_scale_shape_is_a_value_error() -> None:
    codes, scale = ops.quantize_fp8_block(torch.randn(200, 150))
    with pytest.raises(ValueError, match="scale_inv"):
        ops.dequantize_fp8_block(codes, scale[:1])
    with pytest.raises(ValueError, match="codes must be float8_e4m3fn or uint8"):
        ops.dequantize_fp8_block(codes.float(), scale)
