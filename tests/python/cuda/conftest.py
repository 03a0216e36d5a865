"""GPU tests run where torch sees a CUDA device and the build holds CUDA kernels; else skipped.

Every property here has a CPU twin under tests/python/attention that runs on any machine.
"""

import pytest
import torch
from helicore import _core


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device; the CPU twin is under tests/python/attention"
    elif not _core.core.cuda_compiled():
        reason = "this build of helicore has no CUDA kernels"
    for item in items:
        if "tests/python/cuda" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.cuda)
        if reason is not None and "without_a_gpu" not in item.name:
            item.add_marker(pytest.mark.skip(reason=reason))
