"""Where scenarios run: CPU levels everywhere, GPU levels where there is one."""

import pytest
from kv.adaptor import has_gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """The device whose kernels read the hot level."""
    name = str(request.param)
    if name == "cuda" and not has_gpu():
        pytest.skip("needs a CUDA device and a build with CUDA kernels; the CPU twin runs here")
    return name
