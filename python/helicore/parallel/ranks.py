"""How a rank reaches the others.

Ranks meet at a key-value store of torch.distributed: `torchrun`'s, or that of the first rank when
`LLM` starts the others. There they say who they are and what they run, and pass what they need to
map each other's memory. Where all of them can, calls go through shared memory, else through a
process group.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from helicore.comm import CommError, Communicator, ProcessGroupCommunicator, Segment
from helicore.config import ParallelConfig
from helicore.parallel.shards import Collectives, Shards

__all__ = ["CommError", "Meeting", "Ranks", "Store"]

_LOGGER = logging.getLogger("helicore")
_PROJECT_FIRST_ABOVE = 18
"""Tokens from which values are projected before the exchange, where it is by messages."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Comm(Collectives, Protocol):
    """`helicore.comm.Communicator`, or its twin over a process group."""

    def broadcast_bytes(
        self, data: bytes | None, root: int = 0, wait_forever: bool = False
    ) -> bytes: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Meeting:
    """The store as one of `size` ranks sees it. Every value is set once."""

    store: Store
    rank: int
    size: int
    timeout_s: float
    check: Callable[[], None] = lambda: None
    """Raises where a rank can not come any more."""

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What each rank gave under this name; TimeoutError names those that did not come."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return [json.loads(self.get(f"{name}/{rank}", rank)) for rank in range(self.size)]

    def get(self, key: str, rank: int) -> bytes:
        """A value that `rank` sets."""
        deadline = time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not come within {self.timeout_s:g} s")
            time.sleep(0.005)
        return self.store.get(key)

    def agree(self, facts: dict[str, Any]) -> None:
        """ValueError naming the first rank and field in which a rank differs from rank 0."""
        found = self.exchange("facts", facts)
        for rank, other in enumerate(found):
            for name in facts:
                if other.get(name) != found[0].get(name):
                    raise ValueError(
                        f"rank {rank} has {name}={other.get(name)!r}, but rank 0 has "
                        f"{found[0].get(name)!r}; all ranks must be started alike"
                    )


class Ranks:
    """This rank among those of one model; its number is tensor_rank * context_size + context_rank.

    `everyone` and `context` (None with one such rank) must be used by all of their ranks alike.
    """

    def __init__(
        self,
        sizes: ParallelConfig,
        everyone: Comm,
        context: Comm | None,
        *,
        num_local: int = 1,
    ) -> None:
        """num_local: ranks of this machine, which share its memory and cores."""
        self.tensor_size = sizes.tensor_parallel_size
        self.context_size = sizes.context_parallel_size
        self.splits_experts = sizes.enable_expert_parallel
        self.rank, self.size = everyone.rank, everyone.world_size
        if self.size != sizes.num_ranks:
            raise ValueError(
                f"tensor_parallel_size * context_parallel_size must be the number of ranks, "
                f"{self.size}, got {self.tensor_size} * {self.context_size}"
            )
        self.everyone, self.context = everyone, context
        self.num_local = num_local
        self._closers: list[Callable[[], None]] = [
            comm.close for comm in (everyone, context) if comm is not None
        ]

    @classmethod
    def meet(cls, meeting: Meeting, sizes: ParallelConfig) -> Ranks:
        """Waits for all ranks; TimeoutError, ValueError or CommError name one where that fails."""
        hosts = meeting.exchange("host", _host())
        ranks = list(range(meeting.size))
        everyone = _connect(meeting, "everyone", ranks, sizes)
        context: Comm | None = None
        if sizes.tensor_parallel_size == 1 and sizes.context_parallel_size > 1:
            context = everyone
        elif sizes.context_parallel_size > 1:
            size = sizes.context_parallel_size
            first = meeting.rank // size * size
            context = _connect(meeting, "context", ranks[first : first + size], sizes)
        return cls(sizes, everyone, context, num_local=hosts.count(hosts[meeting.rank]))

    def shards(self, block_size: int) -> Shards:
        """The part of a model that this rank holds."""
        return Shards(
            tensor_size=self.tensor_size,
            context_size=self.context_size,
            rank=self.rank,
            block_size=block_size,
            everyone=self.everyone,
            context=self.context,
            splits_experts=self.splits_experts,
            project_first_above=(
                _PROJECT_FIRST_ABOVE if isinstance(self.context, ProcessGroupCommunicator) else None
            ),
        )

    def least(self, value: int) -> int:
        """The least value that a rank gives."""
        mine = torch.tensor([value], dtype=torch.int64)
        found = mine.new_empty((self.size, 1))
        self.everyone.all_gather(mine, found)
        return int(found.min())

    def abort(self, message: str) -> None:
        """Current and later calls of the others end with this message. Safe to call again."""
        for comm in (self.everyone, self.context):
            if comm is not None:
                comm.abort(message)

    def at_close(self, call: Callable[[], None]) -> None:
        """`close` calls it after everything else."""
        self._closers.insert(0, call)

    def close(self) -> None:
        """Lets go of the others' memory. Safe to call again."""
        while self._closers:
            self._closers.pop()()


def _connect(meeting: Meeting, name: str, group: list[int], sizes: ParallelConfig) -> Comm:
    """Through shared memory where every rank of every group can, else by messages."""
    place = group.index(meeting.rank)
    problem, segment, handle = None, None, ""
    comm: Comm | None = None
    try:
        segment = Segment(place, len(group), sizes.shared_memory_mb << 20)
        handle = segment.handle.hex()
    except (OSError, MemoryError) as error:
        problem = str(error)
    handles = meeting.exchange(f"{name}/handle", handle)
    if segment is not None:
        try:
            texts = [bytes.fromhex(handles[rank]) for rank in group]
            comm = Communicator.connect(segment, texts, sizes.timeout_s)
        except CommError as error:
            problem = str(error)
    problems = meeting.exchange(f"{name}/problem", problem)
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if comm is not None and failed is None:
        return comm
    if comm is not None:
        comm.close()
    if meeting.rank == 0:
        _LOGGER.warning(
            "ranks exchange messages instead of sharing memory: rank %s: %s",
            failed,
            problems[failed or 0],
        )
    return _process_group(meeting, name, group, sizes.timeout_s)


def _process_group(meeting: Meeting, name: str, group: list[int], timeout_s: float) -> Comm:
    from torch import distributed

    timeout = datetime.timedelta(seconds=timeout_s)
    store = distributed.PrefixStore(f"{name}/{group[0]}", meeting.store)
    gloo = distributed.ProcessGroupGloo(store, group.index(meeting.rank), len(group), timeout)
    return ProcessGroupCommunicator(gloo)


def _host() -> str:
    """One value for all ranks of a machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}/{os.uname().nodename}"
