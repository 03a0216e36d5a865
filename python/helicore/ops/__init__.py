"""Native kernels as functions over torch tensors, registered as `torch.ops.helicore.*`."""

import importlib.util

import torch

from helicore import _core
from helicore.ops.nn import (
    add_rms_norm,
    batched_linear,
    embedding,
    linear,
    mlp,
    pack_linear,
    rms_norm,
    silu_mul,
    unpack_linear,
)


def set_num_threads(num_threads: int) -> None:
    """Set the threads of the native kernels and of torch. ValueError unless 1..1024."""
    _core.core.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)


__all__ = [
    "add_rms_norm",
    "batched_linear",
    "embedding",
    "linear",
    "mlp",
    "pack_linear",
    "rms_norm",
    "set_num_threads",
    "silu_mul",
    "unpack_linear",
]

if importlib.util.find_spec("helicore.ops.attention") is not None:
    from helicore.ops.attention import *  # noqa: F403
