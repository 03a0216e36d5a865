"""Instruction sets to run on, and numeric comparison with one table of tolerances."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from helicore import _core
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= abs + rel * |want| everywhere, and 1 - cosine <= cosine over the tensor."""

    abs: float
    rel: float
    cosine: float


# Kernel error only: the reference works on the values that the kernel read. Statistics are in
# base 2. bfloat16 products round each probability by up to 2^-9, so an output is off by up to
# 2^-9 sum(p |v|); the values of the tests are normal with deviation 1. "forms" compares two forms
# that round their intermediate results at different places.
TOLERANCES = {
    "output_float32": Tolerance(2e-5, 2e-5, 1e-9),
    "output_bfloat16": Tolerance(2.5e-3, 2.0**-6, 1e-5),
    "forms_bfloat16": Tolerance(1.2e-2, 2.0**-6, 1e-4),
    "rounded_bfloat16": Tolerance(1e-5, 2.0**-8, 1e-5),
    "stats_float32": Tolerance(2e-5, 2e-5, 1e-9),
    "stats_bfloat16": Tolerance(2e-3, 2e-3, 1e-5),
}


def assert_close(got: Tensor, want: Tensor, kind: str) -> None:
    tolerance = TOLERANCES[kind]
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan()), "NaN positions differ"
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), "infinite values differ"
    got, want = got[~infinite], want[~infinite]
    excess = (got - want).abs() - tolerance.abs - tolerance.rel * want.abs()
    if excess.numel() and float(excess.max()) > 0.0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{kind}: worst at {worst}: got {float(got[worst]):.7g}, want {float(want[worst]):.7g}"
        )
    norm = float(got.norm() * want.norm())
    if norm > 0.0:
        assert 1.0 - float((got * want).sum()) / norm <= tolerance.cosine, f"{kind}: cosine"


def available_isas() -> list[str]:
    names = ["generic", "avx2", "avx512", "avx512bf16"]
    return names[: names.index(_core.core.detected_isa()) + 1]


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _core.core.active_isa()
    _core.core.set_isa(request.param)
    yield request.param
    _core.core.set_isa(before)
