"""Native core of helicore: one submodule per area."""

from __future__ import annotations
from . import core
from . import quant
from . import comm
from . import nn
from . import kv
from . import attention
from . import moe

__all__: list[str] = [
    "CudaError",
    "InternalError",
    "NotSupportedError",
    "attention",
    "comm",
    "core",
    "kv",
    "moe",
    "nn",
    "quant",
]

class InternalError(RuntimeError):
    pass

class CudaError(RuntimeError):
    pass

class NotSupportedError(RuntimeError):
    pass
