"""Runs a test at every instruction set of this CPU."""

from collections.abc import Iterator

import pytest
from helicore import _core


def available_isas() -> list[str]:
    names = ["generic", "avx2", "avx512", "avx512bf16"]
    return names[: names.index(_core.core.detected_isa()) + 1]


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _core.core.set_isa(request.param)
    yield request.param
    _core.core.set_isa(_core.core.detected_isa())
