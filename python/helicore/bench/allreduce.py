"""Calls between ranks on one machine: shared memory beside gloo, in the same processes."""

from __future__ import annotations

import datetime
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed

from helicore.bench.environment import collect
from helicore.bench.report import Report, Result
from helicore.comm import ProcessGroupCommunicator
from helicore.config import ParallelConfig
from helicore.parallel.ranks import Comm, Meeting, Ranks

_HIDDEN = 7168
_HEADS, _LATENT = 16, 512
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_TIMEOUT_S = 300.0

Call = Callable[[], None]


def run(worlds: tuple[int, ...] = (2, 4), calls: int = 200) -> Report:
    """Medians over `calls` calls of the slowest rank, for each number of ranks."""
    results = []
    for world in worlds:
        for name, ours, gloo in _on_processes(world, calls):
            results.append(
                Result(f"{name}_us", ours * 1e6, "us", "gloo", gloo * 1e6, higher_is_better=False)
            )
    return Report("allreduce", results, collect())


def _on_processes(world: int, calls: int) -> list[tuple[str, float, float]]:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(store.port, rank, world, calls))
        for rank in range(1, world)
    ]
    for process in processes:
        process.start()
    try:
        return _measure(Meeting(store, 0, world, _TIMEOUT_S), calls)
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def _run_rank(port: int, rank: int, world: int, calls: int) -> None:
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    _measure(Meeting(store, rank, world, _TIMEOUT_S), calls)


def _measure(meeting: Meeting, calls: int) -> list[tuple[str, float, float]]:
    """(name, seconds of ours, seconds of gloo); the same on every rank."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(meeting, ParallelConfig(tensor_parallel_size=meeting.size))
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = distributed.PrefixStore("gloo", meeting.store)
    group = distributed.ProcessGroupGloo(store, meeting.rank, meeting.size, timeout)
    found = []
    for name, ours, peer in _cases(ranks.everyone, group):
        mine, theirs = (_slowest(ranks.everyone, call, calls) for call in (ours, peer))
        found.append((name, mine, theirs))
    ranks.close()
    return found


def _cases(comm: Comm, group: Any) -> Iterator[tuple[str, Call, Call]]:
    """(name, ours, gloo's)."""
    world = comm.world_size
    for dtype_name, dtype in _DTYPES.items():
        for tokens in (1, 16, 128):
            x = torch.randn(tokens, _HIDDEN).to(dtype)
            out = torch.empty_like(x)
            yield (
                f"allreduce_{dtype_name}_w{world}_{tokens}x{_HIDDEN}",
                partial(comm.all_reduce, x, out),
                partial(_gloo_all_reduce, group, out),
            )
    messages = ProcessGroupCommunicator(group)
    for tokens in (1, 16):
        o = torch.randn(tokens, _HEADS, _LATENT)
        stats = torch.rand(tokens, _HEADS, 2) + 1
        merged = torch.empty(tokens, _HEADS // world, _LATENT)
        yield (
            f"helix_merge_f32_w{world}_{tokens}x{_HEADS}x{_LATENT}",
            partial(comm.merge_partials, o, stats, merged),
            partial(messages.merge_partials, o, stats, merged),
        )


def _gloo_all_reduce(group: Any, x: torch.Tensor) -> None:
    group.allreduce([x]).wait()


def _slowest(comm: Comm, call: Call, calls: int) -> float:
    """Median over the calls of the seconds of the slowest rank."""
    times = torch.empty(calls)
    one = torch.zeros(1)
    for _ in range(calls // 10 + 1):
        call()
    for i in range(calls):
        comm.all_reduce(one, one)  # all begin together
        start = time.perf_counter()
        call()
        times[i] = time.perf_counter() - start
    every = torch.empty((comm.world_size, calls))
    comm.all_gather(times, every)
    return float(every.amax(0).median())
