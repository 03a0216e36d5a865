"""Ranks as threads of one process, whose collectives are plain torch code behind a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class _Group:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.boxes: list[tuple[Tensor, ...]] = [()] * world_size


class ThreadCollectives:
    """The calls of `helicore.parallel.shards.Collectives`, in float64."""

    def __init__(self, group: _Group, rank: int, world_size: int) -> None:
        self._group, self.rank, self.world_size = group, rank, world_size
        self.num_calls: dict[str, int] = {}

    def _meet(self, name: str, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        self._group.boxes[self.rank] = tuple(t.clone() for t in tensors)
        self._group.barrier.wait()
        found = list(self._group.boxes)
        self._group.barrier.wait()
        return found

    def all_reduce(self, x: Tensor, out: Tensor) -> None:
        parts = [part.double() for (part,) in self._meet("all_reduce", x)]
        out.copy_(sum(parts[1:], parts[0]))

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        for row, (part,) in zip(out, self._meet("all_gather", x), strict=True):
            row.copy_(part)

    def merge_partials(self, o: Tensor, stats: Tensor, out: Tensor) -> None:
        parts = self._meet("merge_partials", o, stats)
        heads = slice(self.rank * out.shape[1], (self.rank + 1) * out.shape[1])
        partials = torch.stack([o[:, heads].double() for o, _ in parts])
        m = torch.stack([stats[:, heads, 0].double() for _, stats in parts])
        count = torch.stack([stats[:, heads, 1].double() for _, stats in parts])
        most = m.amax(0)
        weight = torch.where(count > 0, count * torch.exp2(m - most), 0.0)
        total = weight.sum(0)
        terms = torch.where(weight[..., None] > 0, weight[..., None] * partials, 0.0).sum(0)
        out.copy_(torch.where(total[..., None] > 0, terms / total[..., None], 0.0))


def make_ranks(world_size: int) -> list[ThreadCollectives]:
    group = _Group(world_size)
    return [ThreadCollectives(group, rank, world_size) for rank in range(world_size)]


def on_ranks(world_size: int, work: Callable[[int], Result]) -> list[Result]:
    """`work(rank)` on a thread each; the first error is raised here."""
    results: list[Result | None] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]
