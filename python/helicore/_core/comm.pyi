"""Collective calls of ranks that share memory."""

from __future__ import annotations
import collections.abc
import enum
import helicore._core.quant
import torch
import typing

__all__: list[str] = ["CommError", "Communicator", "DeviceCommunicator", "Segment", "Shots"]

class CommError(RuntimeError):
    pass

class Segment:
    """This rank's memory that other processes of the machine map. It has no name in the file system: nothing is left of it, whatever way processes end."""
    def __init__(self, rank: int, world_size: int, num_bytes: int = 67108864) -> None:
        """Raises ValueError naming the argument, MemoryError when there is no such memory."""
    @property
    def handle(self) -> bytes:
        """What peers need to map this memory."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

class Shots(enum.Enum):
    """How an all-reduce on GPUs goes about it."""

    AUTO = 0
    ONE = 1
    TWO = 2

class DeviceCommunicator:
    """
    One of W ranks that address each other's GPU memory. All ranks make the same calls in the
    same order, each in one stream, torch's current one; calls may be captured into graphs.
    Tensors are contiguous, on the communicator's device.

    A rank that waits longer than the time limit gives up: check() and later calls raise
    CommError naming the rank that did not come.
    """
    @staticmethod
    def virtual(
        world_size: int,
        device: int = 0,
        num_bytes: int = 67108864,
        timeout_s: float = 10.0,
        max_blocks: int = 0,
    ) -> list[DeviceCommunicator]:
        """
        Communicators for streams of one GPU, with num_bytes of it each.

        max_blocks: blocks of a call of one rank; those of all ranks must be on the GPU
        at once. 0: its multiprocessors, divided by the ranks.
        """
    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, shots: Shots = ...) -> None:
        """
        out = the sum of x [T, H] over the ranks: in float32 in the order of ranks, rounded
        once, -0 made +0, the same bits on every rank. float32 or bfloat16; out may be x.
        """
    def all_reduce_fused(
        self,
        fusion: helicore._core.quant.AllReduceFusion,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        codes: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        scale: float = 1.0,
        eps: float = 1e-06,
        leading_dim: int = 0,
        shots: Shots = ...,
    ) -> None:
        """
        all_reduce of x [T, H] and the fusion's rows of helicore.ops.fused_norm_quantize in one
        kernel. Outputs are given: those that the fusion has, and no others (ValueError names
        the tensor).
        """
    def check(self) -> None:
        """Raises CommError when a call of this rank has given up. Does not wait."""
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

class Communicator:
    """
    One of W ranks that share memory. All ranks make the same calls in the same order, one
    thread at a time each; tensors are contiguous, on the CPU.

    Raises CommError naming the rank that did not come within the time limit, has died, has
    given up or made another call; after that every call does.
    """
    @staticmethod
    def connect(
        segment: Segment, handles: collections.abc.Sequence[bytes], timeout_s: float = 60.0
    ) -> Communicator:
        """
        This rank's communicator, over the memory of all ranks; `handles` in order of
        rank. Maps memory and waits for nobody. Raises CommError naming the rank whose
        memory can not be mapped.
        """
    @staticmethod
    def virtual(
        world_size: int, num_bytes: int = 67108864, timeout_s: float = 60.0
    ) -> list[Communicator]:
        """Communicators for threads of this process."""
    def abort(self, message: str) -> None:
        """Ends current and later calls of all ranks with this message. From any thread."""
    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[r] = x of rank r; out is [W, *x.shape], of any dtype."""
    def all_reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """
        out = the sum of x over the ranks: in float32 in the order of ranks, rounded once, the
        same bits on every rank. float32 or bfloat16; out may be x.
        """
    def all_reduce_fused(
        self,
        fusion: helicore._core.quant.AllReduceFusion,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        codes: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        scale: float = 1.0,
        eps: float = 1e-06,
        leading_dim: int = 0,
    ) -> None:
        """
        all_reduce of x [T, H], rounded to its dtype, and the fusion's rows of
        helicore.ops.fused_norm_quantize in one call. Outputs are given: those that the fusion
        has, and no others (ValueError names the tensor).
        """
    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[r] = x[this rank] of rank r; x and out are [W, ...], of any dtype."""
    def barrier(self) -> None:
        """Returns when all ranks have come."""
    def broadcast_bytes(
        self, data: bytes | None, root: int = 0, wait_forever: bool = False
    ) -> bytes:
        """
        The bytes that `root` gives (the others give None), on every rank. wait_forever: no
        time limit for the root to come; its death is noticed all the same.
        """
    def close(self) -> None:
        """Lets go of the memory; later calls raise CommError."""
    def merge_partials(self, o: torch.Tensor, stats: torch.Tensor, out: torch.Tensor) -> None:
        """
        Merges partial attention over disjoint keys.

        o [T, H, R] float32 or bfloat16 and stats float32 [T, H, 2] (maximum in base 2, sum)
        of every rank -> out [T, H / W, R] for heads rank * H / W and on. In float32 in the
        order of ranks, rounded once. A partial of weight 0 is not read; a row that is empty
        everywhere gives 0.
        """
    @property
    def rank(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def world_size(self) -> int: ...
