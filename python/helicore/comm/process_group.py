"""The collective calls of `Communicator` by messages of a process group of torch.distributed."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import Tensor

from helicore._core.comm import CommError

_HEADER = 8  # bytes of the length in front of a broadcast
_FOREVER = datetime.timedelta(days=365)


class ProcessGroupCommunicator:
    """One rank of a group of torch.distributed (a `ProcessGroupGloo`, or one of `new_group`).

    Sums are made from gathered parts in the order of ranks, so that the bits are those of
    `Communicator`. Raises CommError when the group does; a rank that is missing is named where the
    group says which.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self._failure: str | None = None

    def barrier(self) -> None:
        self._wait("barrier", lambda: self._group.barrier())

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        """out = the sum of x over the ranks, float32 or bfloat16; out may be x."""
        parts = x.new_empty((self.world_size, *x.shape))
        self.all_gather(x, parts)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """out[r] = x of rank r; out is [W, *x.shape], of any dtype."""
        mine = _as_bytes(x)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait("all_gather", lambda: self._group.allgather([parts], [mine]))
        for row, part in zip(out, parts, strict=True):
            row.copy_(part.view(x.dtype).view(x.shape))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """out[r] = x[this rank] of rank r; x and out are [W, ...], of any dtype."""
        parts = x.new_empty((self.world_size, *x.shape))
        self.all_gather(x, parts)
        out.copy_(parts[:, self.rank])

    def merge_partials(self, o: Tensor, stats: Tensor, out: Tensor) -> None:
        """See `Communicator.merge_partials`."""
        world, own = self.world_size, out.shape[1]
        tokens, _, width = o.shape
        sent_o = o.view(tokens, world, own, width).transpose(0, 1).contiguous()
        sent_stats = stats.view(tokens, world, own, 2).transpose(0, 1).contiguous()
        partials, found = torch.empty_like(sent_o), torch.empty_like(sent_stats)
        self._exchange(sent_o, partials)
        self._exchange(sent_stats, found)
        m, count = found[..., 0], found[..., 1]
        is_empty = ~(count > 0)
        most = m.masked_fill(is_empty, -torch.inf).amax(0)
        weight = (count * torch.exp2(m - most)).masked_fill_(is_empty, 0.0)
        total = weight.sum(0)
        weight = torch.where(total > 0, weight / total, 0.0).unsqueeze(-1)
        merged = torch.zeros(out.shape, dtype=torch.float32)
        for part, share in zip(partials, weight, strict=True):
            merged += torch.where(share > 0, share * part.float(), 0.0)
        out.copy_(merged)

    def broadcast_bytes(
        self, data: bytes | None, root: int = 0, wait_forever: bool = False
    ) -> bytes:
        """The bytes that `root` gives, on every rank."""
        length = torch.zeros(1, dtype=torch.int64)
        if data is not None:
            length[0] = len(data)
        self._broadcast(length, root, wait_forever)
        content = torch.empty(int(length), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if content.numel():
            self._broadcast(content, root, False)
        return content.numpy().tobytes()

    def abort(self, message: str) -> None:
        """Ends this rank's part; the others notice when they next wait for it."""
        self._failure = self._failure or message
        self._group = None

    def close(self) -> None:
        self.abort("the communicator is closed")

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        """all_to_all of equal parts along the first dimension, each sent once."""
        parts = [_as_bytes(part) for part in sent]
        found = [torch.empty_like(part) for part in parts]
        self._wait("all_to_all", lambda: self._group.alltoall(found, parts))
        for row, part in zip(received, found, strict=True):
            row.copy_(part.view(sent.dtype).view(row.shape))

    def _broadcast(self, tensor: Tensor, root: int, wait_forever: bool) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = root
        if wait_forever:
            options.timeout = _FOREVER
        self._wait("broadcast", lambda: self._group.broadcast([tensor], options))

    def _wait(self, name: str, call: Any) -> None:
        if self._failure is not None:
            raise CommError(self._failure)
        try:
            call().wait()
        except RuntimeError as error:
            self._failure = f"{name} of rank {self.rank} of {self.world_size}: {error}"
            raise CommError(self._failure) from error


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
