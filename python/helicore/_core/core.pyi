"""Threads, instruction sets and build facts."""

from __future__ import annotations
import torch

__all__: list[str] = [
    "active_isa",
    "cuda_compiled",
    "cuda_device_count",
    "describe",
    "detected_isa",
    "num_threads",
    "set_isa",
    "set_num_threads",
]

def active_isa() -> str:
    """Instruction set that the CPU kernels use."""

def cuda_compiled() -> bool:
    """Whether this build holds CUDA kernels."""

def cuda_device_count() -> int:
    """CUDA devices that can be used now; 0 without a GPU, a driver or CUDA kernels."""

def describe(tensor: torch.Tensor) -> str:
    """Shape, dtype and device as the native code sees them, e.g. 'bfloat16[2, 8] on cpu'."""

def detected_isa() -> str:
    """Best instruction set of this CPU: generic, avx2, avx512 or avx512bf16."""

def num_threads() -> int:
    """Threads of the CPU kernel pool, the calling one included."""

def set_isa(isa: str) -> None:
    """
    Lower (or restore) the instruction set of the CPU kernels.

    Raises ValueError for an unknown name and NotSupportedError when the CPU lacks it.
    """

def set_num_threads(num_threads: int) -> None:
    """Resize the CPU kernel pool. Raises ValueError unless 1 <= num_threads <= 1024."""
