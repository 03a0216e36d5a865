"""A range of a linear layer's outputs has the bits of the whole layer's."""

from __future__ import annotations

import pytest
import torch
from helicore import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_slice_is_that_of_the_whole(dtype: torch.dtype, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(203, 70, generator=random).to(dtype)
    packed = ops.pack_linear(weight)
    bias = torch.randn(203, generator=random).to(dtype) if has_bias else None
    for tokens in (0, 1, 9, 40):
        x = torch.randn(tokens, 70, generator=random).to(dtype)
        whole = ops.linear(x, packed, 203, bias)
        for start, end in ((0, 203), (0, 1), (16, 32), (5, 37), (15, 17), (200, 203), (202, 203)):
            part = ops.linear_slice(x, packed, 203, start, end, bias)
            assert torch.equal(part, whole[:, start:end]), (start, end)
    assert not torch.equal(part, whole[:, 201:202]), "a shifted range must not pass"


@pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 3), (-1, 10), (0, 33), (32, 33)])
def test_a_range_that_is_none_is_refused(start: int, end: int) -> None:
    packed = ops.pack_linear(torch.zeros(32, 8))
    with pytest.raises(ValueError, match="start and end must be a range within the 32 output"):
        ops.linear_slice(torch.zeros(2, 8), packed, 32, start, end)
