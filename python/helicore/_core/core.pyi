"""Threads, instruction sets and build facts."""

from __future__ import annotations
import numpy
import numpy.typing
import torch

__all__: list[str] = [
    "Ledger",
    "active_isa",
    "cuda_compiled",
    "cuda_device_count",
    "describe",
    "detected_isa",
    "num_threads",
    "set_isa",
    "set_num_threads",
]

class Ledger:
    """Which rank of a context-parallel group keeps which position of a sequence: blocks of `block` positions go to the `world` ranks in turn."""
    def __init__(self, block: int, world: int) -> None:
        """Raises ValueError unless both are >= 1."""
    def fill_rows(
        self,
        rank: int,
        positions: numpy.typing.NDArray[numpy.int32],
        pages: numpy.typing.NDArray[numpy.int32],
        slots: numpy.typing.NDArray[numpy.int64],
        bounds: numpy.typing.NDArray[numpy.int32],
    ) -> None:
        """
        For tokens at positions int32 [T], whose super-blocks are the pages int32 [T] of
        `block` rows on `rank`: slots int64 [T] gets page * block + offset where the rank keeps
        the token, else -1; bounds int32 [T] the rows of the rank that the token sees, its own
        included.
        """
    def local_len(self, length: int, rank: int) -> int:
        """Rows that `rank` keeps of the first `length` positions."""
    def owner(self, position: int) -> int:
        """The rank that keeps a position."""
    def position(self, slot: int, rank: int) -> int:
        """The position of row `slot` of `rank`."""
    def slot(self, position: int) -> int:
        """The row of a position on its owner."""
    @property
    def block(self) -> int:
        """Positions that go to one rank in a row."""
    @property
    def super_block(self) -> int:
        """block * world positions."""
    @property
    def world(self) -> int:
        """Ranks."""

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
