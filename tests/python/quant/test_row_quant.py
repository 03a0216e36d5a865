"""Quantised rows and fused norms against plain torch, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helicore._core import quant as native
from helicore.comm import Communicator
from helicore.ops.row_quant import (
    AllReduceFusion,
    RowFormat,
    ScaleLayout,
    dequantize_rows,
    fused_norm_quantize,
    quantize_rows,
    scale_view,
)
from reference.thread_ranks import on_ranks
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS, SWIZZLED = ScaleLayout.ROWS, ScaleLayout.COLUMNS, ScaleLayout.SWIZZLED
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = [1, 3, 4, 5, 127, 128, 129]


def make(tokens: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-12, 12, (tokens, 1), generator=random).float())
    return (torch.randn(tokens, width, generator=random) * scale).to(dtype)


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3)


def groups_of(x: Tensor, size: int) -> Tensor:
    """[T, G, size], the last group padded with zeros."""
    missing = -x.shape[1] % size
    return torch.nn.functional.pad(x, (0, missing)).unflatten(1, (-1, size))


def power_up(y: Tensor) -> Tensor:
    """Biased exponents of the least powers of two >= y."""
    mantissa, exponent = torch.frexp(y)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(y > 0, exponent + 127, 0).clamp(0, 254)


def swizzle(scales: Tensor) -> Tensor:
    """[T, G] bytes -> the padded memory, tile by tile."""
    tokens, groups = scales.shape
    padded = torch.zeros(-(-tokens // 128) * 128, -(-groups // 4) * 4, dtype=torch.uint8)
    padded[:tokens, :groups] = scales
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def nearest_e2m1(x: Tensor) -> Tensor:
    """Codes, ties to even codes."""
    distance = (x.abs().clamp(max=6).unsqueeze(-1) - E2M1).abs()
    best = distance.min(-1).values.unsqueeze(-1)
    is_best = distance == best
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = order[is_best[..., order].int().argmax(-1)]
    return code | (torch.signbit(x).long() << 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_fp8_with_one_scale_and_with_one_for_each_token(tokens: int, dtype: torch.dtype) -> None:
    x = make(tokens, 640, dtype=dtype)
    codes, scales = quantize_rows(x, RowFormat.FP8_TENSOR, scale=0.37)
    assert scales is None
    inverse = 1 / torch.tensor(0.37)
    assert torch.equal(codes.view(torch.uint8), to_e4m3(x.float() * inverse).view(torch.uint8))
    codes, scales = quantize_rows(x, RowFormat.FP8_TOKEN)
    assert scales is not None
    want = x.float().abs().amax(1).clamp(min=2**-9) / 448
    assert torch.equal(scales, want)
    want_codes = to_e4m3(x.float() * (1 / want).unsqueeze(1))
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    error = (dequantize_rows(codes, scales, RowFormat.FP8_TOKEN) - x.float()).abs()
    assert (error <= x.float().abs() / 16 + want.unsqueeze(1) * 2**-9).all()


@pytest.mark.parametrize("groups", [1, 4, 5, 6, 13, 54])
@pytest.mark.parametrize("tokens", TOKENS)
def test_fp8_groups_in_rows_and_columns(tokens: int, groups: int) -> None:
    width = groups * 128 - 40 * (groups > 5)
    x = make(tokens, width)
    largest = groups_of(x, 128).abs().amax(-1)
    for layout, leading_dim in ((ROWS, 0), (COLUMNS, 0), (COLUMNS, tokens + 3)):
        codes, memory = quantize_rows(x, RowFormat.FP8_GROUP, layout, leading_dim=leading_dim)
        assert memory is not None
        scales = scale_view(
            memory, RowFormat.FP8_GROUP, layout, tokens, width, leading_dim=leading_dim
        )
        assert torch.equal(scales, largest.clamp(min=1e-4) / 448)
        want = to_e4m3(groups_of(x, 128) * (1 / scales).unsqueeze(-1)).flatten(1)[:, :width]
        assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
        values = dequantize_rows(
            codes, memory, RowFormat.FP8_GROUP, layout, leading_dim=leading_dim
        )
        assert torch.equal(
            values,
            (groups_of(codes.float(), 128) * scales.unsqueeze(-1)).flatten(1)[:, :width],
        )


@pytest.mark.parametrize("groups", [1, 4, 5, 6, 13, 54, 150])
@pytest.mark.parametrize("tokens", [1, 3, 127, 253])
def test_packed_exponents_and_their_padding(tokens: int, groups: int) -> None:
    x = make(tokens, groups * 128)
    codes, memory = quantize_rows(x, RowFormat.FP8_GROUP_PACKED, COLUMNS)
    assert memory is not None
    words, leading_dim = -(-groups // 4), -(-tokens // 4) * 4
    assert memory.numel() == tokens + (words - 1) * leading_dim
    exponents = power_up((groups_of(x, 128).abs().amax(-1) / 448).clamp(min=1e-10))
    packed = torch.nn.functional.pad(exponents, (0, words * 4 - groups)).to(torch.uint8)
    want = packed.view(torch.int32)
    found = scale_view(memory, RowFormat.FP8_GROUP_PACKED, COLUMNS, tokens, groups * 128)
    assert torch.equal(found, want)
    for word in range(words - 1):
        padding = memory[word * leading_dim + tokens : (word + 1) * leading_dim]
        assert not padding.any()
    inverse = torch.exp2(127.0 - exponents).unsqueeze(-1)
    want_codes = to_e4m3(groups_of(x, 128) * inverse).flatten(1)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


@pytest.mark.parametrize("width", [32, 160, 512, 5120])
@pytest.mark.parametrize("tokens", TOKENS)
def test_nvfp4_and_mxfp8_in_rows_and_swizzled(tokens: int, width: int) -> None:
    x = make(tokens, width)
    scale = (448 * 6 / x.abs().max()).item()
    largest = groups_of(x, 16).abs().amax(-1)
    want = to_e4m3(largest / 6 * scale)
    inverse = torch.where(want.float() == 0, 0.0, torch.tensor(scale) / want.float())
    nibbles = nearest_e2m1(groups_of(x, 16) * inverse.unsqueeze(-1)).flatten(1)
    want_codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    for layout in (ROWS, SWIZZLED):
        codes, scales = quantize_rows(x, RowFormat.NVFP4, layout, scale=scale)
        assert scales is not None
        bytes_ = want.view(torch.uint8)
        assert torch.equal(scales, swizzle(bytes_) if layout == SWIZZLED else bytes_.flatten())
        assert torch.equal(codes, want_codes)
        values = dequantize_rows(codes, scales, RowFormat.NVFP4, layout, scale=scale)
        assert (values - x).abs().max() <= x.abs().max() / 4
    exponents = power_up(groups_of(x, 32).abs().amax(-1) / 448)
    want_codes = to_e4m3(groups_of(x, 32) * torch.exp2(127.0 - exponents).unsqueeze(-1)).flatten(1)
    for layout in (ROWS, SWIZZLED):
        codes, scales = quantize_rows(x, RowFormat.MXFP8, layout)
        assert scales is not None
        bytes_ = exponents.to(torch.uint8)
        assert torch.equal(scales, swizzle(bytes_) if layout == SWIZZLED else bytes_.flatten())
        assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


def test_a_scale_that_is_rounded_down_would_saturate() -> None:
    x = make(64, 1024)
    codes, scales = quantize_rows(x, RowFormat.MXFP8)
    assert scales is not None
    assert (dequantize_rows(codes, scales, RowFormat.MXFP8) - x).abs().max() < x.abs().max() / 8
    lower = dequantize_rows(codes, (scales - 1), RowFormat.MXFP8)
    assert (lower - x).abs().max() > x.abs().max() / 3


@pytest.mark.parametrize("format", list(RowFormat))
def test_odd_values(format: RowFormat) -> None:
    layout = COLUMNS if format == RowFormat.FP8_GROUP_PACKED else ROWS
    x = torch.zeros(6, 128)
    x[0] = -0.0
    x[1, 5] = math.nan
    x[1, 6] = 3.0
    x[2, 7], x[2, 8] = math.inf, -math.inf
    x[3] = 1e-42
    x[4] = torch.finfo(torch.float32).max
    codes, scales = quantize_rows(x, format, layout)
    values = dequantize_rows(codes, scales, format, layout)
    assert not values[0].any()
    if format == RowFormat.NVFP4:
        assert values[1, 5] == 0
    else:
        assert values[1, 5].isnan()
    assert (values[1].nan_to_num(0) - x[1].nan_to_num(0)).abs().max() <= 0.5
    assert values[2, 7] > 0
    assert values[2, 8] < 0
    assert values[2].isfinite().all()
    assert (values[4] > 0).all()


def test_rows_may_be_strided_and_do_not_depend_on_others() -> None:
    x = make(40, 512)
    wide = torch.cat([x, torch.full((40, 128), math.nan)], 1)
    whole, scales = quantize_rows(wide[:, :512], RowFormat.FP8_TOKEN)
    assert scales is not None
    for row in (0, 17, 39):
        alone, scale = quantize_rows(x[row : row + 1], RowFormat.FP8_TOKEN)
        assert torch.equal(alone.view(torch.uint8)[0], whole.view(torch.uint8)[row])
        assert scale is not None
        assert scale[0] == scales[row]


def test_what_does_not_fit_is_named() -> None:
    x = torch.zeros(4, 40)
    for call, name in (
        (lambda: quantize_rows(x, RowFormat.NVFP4), "width must be a multiple of 16"),
        (lambda: quantize_rows(x, RowFormat.MXFP8), "width must be a multiple of 32"),
        (lambda: quantize_rows(x, RowFormat.FP8_TOKEN, COLUMNS), "no layout 'columns'"),
        (lambda: quantize_rows(x, RowFormat.FP8_GROUP_PACKED), "no layout 'rows'"),
        (lambda: quantize_rows(x, RowFormat.FP8_TENSOR, scale=0.0), "scale must be > 0"),
        (lambda: quantize_rows(x, RowFormat.FP8_GROUP, COLUMNS, leading_dim=3), "leading_dim"),
        (lambda: quantize_rows(x.double(), RowFormat.FP8_TOKEN), "x"),
        (lambda: quantize_rows(x[0], RowFormat.FP8_TOKEN), "x must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=name):
            call()


# --- fused norms -----------------------------------------------------------------------------


def reference_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
    """(norm, residual_out) with the roundings and the order of sums that are documented."""
    s = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = s.float().numpy()
    lanes = np.zeros((len(values), 16), np.float32)
    for begin in range(0, values.shape[1], 16):
        part = values[:, begin : begin + 16]
        lanes[:, : part.shape[1]] += part * part
    total = np.zeros(len(values), np.float32)
    for lane in range(16):
        total += lanes[:, lane]
    mean = total / np.float32(values.shape[1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    norm = torch.from_numpy(values * inverse[:, None] * weight.float().numpy()).to(x.dtype)
    return norm, (None if residual is None else s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fusion", [f for f in AllReduceFusion if f != AllReduceFusion.NONE])
def test_a_fused_norm_is_its_parts(fusion: AllReduceFusion, dtype: torch.dtype) -> None:
    _, has_residual, format, layout = native.fusion_traits(fusion)
    for tokens, width in ((1, 128), (5, 640), (130, 512)):
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight = torch.rand(width, generator=torch.Generator().manual_seed(2)).to(dtype)
        residual = x.roll(1, 0) * 0.3 if has_residual else None
        found = fused_norm_quantize(x, fusion, weight, residual=residual, scale=2.0)
        norm, residual_out = reference_norm(x, residual, weight, 1e-6)
        assert found.norm is not None
        assert torch.equal(found.norm, norm)
        if has_residual:
            assert found.residual is not None
            assert torch.equal(found.residual, residual_out)
        if format is None:
            assert found.codes is None
            continue
        codes, scales = quantize_rows(norm, format, layout, scale=2.0)
        assert found.codes is not None
        assert torch.equal(found.codes.view(torch.uint8), codes.view(torch.uint8))
        if scales is not None:
            assert found.scales is not None
            assert torch.equal(found.scales, scales)
        bare = fused_norm_quantize(x, fusion, weight, residual=residual, scale=2.0, with_norm=False)
        assert bare.norm is None
        assert bare.codes is not None
        assert torch.equal(bare.codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fusion", [f for f in AllReduceFusion if f != AllReduceFusion.NONE])
def test_a_fused_all_reduce_is_the_sum_and_its_epilogue(
    fusion: AllReduceFusion, dtype: torch.dtype
) -> None:
    world, tokens, width = 3, 7, 640
    _, has_residual, format, _ = native.fusion_traits(fusion)
    ranks = Communicator.virtual(world, 1 << 20)
    weight, residual = make(1, width, 8, dtype)[0], make(tokens, width, 9, dtype)

    def work(rank: int) -> None:
        x = make(tokens, width, rank, dtype)
        total = torch.empty_like(x)
        ranks[rank].all_reduce(x, total)
        want = fused_norm_quantize(
            total, fusion, weight, residual=residual if has_residual else None
        )
        outputs: dict[str, Any] = {"norm": torch.empty_like(x)}
        if has_residual:
            outputs["residual_out"] = torch.empty_like(x)
        if format is not None:
            assert want.codes is not None
            outputs["codes"] = torch.empty_like(want.codes)
            outputs["scales"] = None if want.scales is None else torch.empty_like(want.scales)
        ranks[rank].all_reduce_fused(
            fusion, x, residual=residual if has_residual else None, weight=weight, **outputs
        )
        assert torch.equal(outputs["norm"], want.norm)
        for name, tensor in (("residual_out", want.residual), ("scales", want.scales)):
            if tensor is not None:
                assert torch.equal(outputs[name], tensor)
        if want.codes is not None:
            assert torch.equal(outputs["codes"].view(torch.uint8), want.codes.view(torch.uint8))

    on_ranks(world, work)


def test_tensors_that_a_fusion_lacks_or_does_not_use_are_named() -> None:
    x, weight = torch.zeros(2, 128), torch.ones(128)
    fusions = AllReduceFusion
    with pytest.raises(ValueError, match="residual is needed"):
        fused_norm_quantize(x, fusions.RESIDUAL_RMS_NORM, weight)
    with pytest.raises(ValueError, match="residual is not used"):
        fused_norm_quantize(x, fusions.RMS_NORM, weight, residual=x)
    with pytest.raises(ValueError, match="weight"):
        fused_norm_quantize(x, fusions.RMS_NORM, weight[:100])
    with pytest.raises(ValueError, match="NONE"):
        fused_norm_quantize(x, fusions.NONE, weight)
    (alone,) = Communicator.virtual(1, 1 << 20)
    with pytest.raises(ValueError, match="fusion must not be none"):
        alone.all_reduce_fused(fusions.NONE, x)
    with pytest.raises(ValueError, match="codes is not used"):
        alone.all_reduce_fused(fusions.RMS_NORM, x, weight=weight, norm=x, codes=x)


def test_names_of_fusions_come_from_the_native_module() -> None:
    names = [fusion.name for fusion in AllReduceFusion]
    assert names[:3] == ["NONE", "RMS_NORM", "RESIDUAL_RMS_NORM"]
    assert len(names) == len(set(names)) == 10
    for fusion in AllReduceFusion:
        has_norm, has_residual, format, _ = native.fusion_traits(fusion)
        assert has_residual == fusion.name.startswith("RESIDUAL")
        assert has_norm == (fusion != AllReduceFusion.NONE)
        assert (format is not None) == any(part in fusion.name for part in ("FP8", "FP4"))
