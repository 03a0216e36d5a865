"""Small tensors only: one thread each, so that tests do not fight for the cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helicore import _core, ops


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    native, of_torch = _core.core.num_threads(), torch.get_num_threads()
    ops.set_num_threads(1)
    yield
    _core.core.set_num_threads(native)
    torch.set_num_threads(of_torch)
