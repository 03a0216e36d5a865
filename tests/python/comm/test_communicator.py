"""Collective calls of ranks that are processes; those of threads are tested in C++."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helicore.comm import CommError, Communicator, ProcessGroupCommunicator, Segment
from reference.thread_ranks import make_ranks, on_ranks
from torch import Tensor, distributed

MAIN = Path(__file__).with_name("rank_main.py")


def run_ranks(folder: Path, world: int, work: str, timeout: float = 60.0) -> list[str]:
    """What each rank printed."""
    command = [sys.executable, str(MAIN), str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(timeout), work], stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    return [process.communicate(timeout=120)[0].strip() for process in processes]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_memory(tmp_path: Path, world: int) -> None:
    assert run_ranks(tmp_path, world, "add_up") == [""] * world


def test_a_process_that_dies_is_named_by_all_others(tmp_path: Path) -> None:
    first, second, third = run_ranks(tmp_path, 3, "die")
    assert second == ""
    for text in (first, third):
        assert text.startswith("CommError: rank 1 (process ")
        assert "has died" in text


def test_a_process_that_gives_up_ends_one_that_would_wait_for_ever(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, "give_up")
    assert first.startswith("CommError: rank 1: no more")
    assert second == ""


def partials(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[5, 6, 16] and [5, 6, 2]; rows 0 and 7 are empty on rank 1, row 3 on all."""
    random = torch.Generator().manual_seed(rank)
    o = torch.randn(5, 6, 16, generator=random).to(dtype)
    stats = torch.rand(5, 6, 2, generator=random) * 30 + 1
    empty = [3, 0, 7] if rank == 1 else [3]
    o.view(30, 16)[empty] = torch.nan
    stats.view(30, 2)[empty] = torch.tensor([-torch.inf, 0.0])
    return o, stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_partials_are_those_of_float64(dtype: torch.dtype) -> None:
    ours, oracle = Communicator.virtual(3, 1 << 20), make_ranks(3)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        o, stats = partials(rank, dtype)
        found, want = torch.empty(5, 2, 16, dtype=dtype), torch.empty(5, 2, 16, dtype=torch.float64)
        ours[rank].merge_partials(o, stats, found)
        oracle[rank].merge_partials(o, stats, want)
        return found, want

    worst = 0.0
    for found, want in on_ranks(3, work):
        tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {}
        torch.testing.assert_close(found, want.to(dtype), **tolerance)
        worst = max(worst, (found.flip(1).double() - want).abs().max().item())
    assert worst > 0.1, "swapped heads must not pass"


def test_a_process_group_gives_the_same_bits(tmp_path: Path) -> None:
    world = 3
    shared = Communicator.virtual(world, 1 << 20)
    store = distributed.HashStore()

    def work(rank: int) -> None:
        timeout = datetime.timedelta(seconds=60)
        group = distributed.ProcessGroupGloo(store, rank, world, timeout)
        messages = ProcessGroupCommunicator(group)
        assert (messages.rank, messages.world_size) == (rank, world)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)
            found, want = torch.empty_like(x), torch.empty_like(x)
            messages.all_reduce(x, found)
            shared[rank].all_reduce(x, want)
            assert torch.equal(found, want)
            o, stats = partials(rank, dtype)
            found, want = torch.empty(2, 5, 2, 16, dtype=dtype)
            messages.merge_partials(o, stats, found)
            shared[rank].merge_partials(o, stats, want)
            torch.testing.assert_close(
                found, want, atol=1e-2 if dtype != torch.float32 else 1e-6, rtol=0
            )
        x = torch.arange(6).view(3, 2) + 10 * rank
        found, want = torch.empty_like(x), torch.empty_like(x)
        messages.all_to_all(x, found)
        shared[rank].all_to_all(x, want)
        assert torch.equal(found, want)
        for data in (b"", b"abc"):
            mine = data if rank == 2 else None
            assert messages.broadcast_bytes(mine, 2) == data
            assert shared[rank].broadcast_bytes(mine, 2) == data
        messages.barrier()
        messages.abort("enough")
        with pytest.raises(CommError, match="enough"):
            messages.barrier()

    on_ranks(world, work)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="world_size"):
        Segment(0, 0)
    with pytest.raises(ValueError, match="num_bytes"):
        Segment(0, 1, 10)
    with pytest.raises(ValueError, match="timeout_s"):
        Communicator.virtual(1, timeout_s=0)
    (alone,) = Communicator.virtual(1, 1 << 20)
    with pytest.raises(ValueError, match="out must be like x"):
        alone.all_reduce(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        alone.all_reduce(torch.zeros(4, 4).T, torch.zeros(4, 4))
    segment = Segment(0, 2, 1 << 20)
    with pytest.raises(CommError, match="rank 1"):
        Communicator.connect(segment, [segment.handle, b"nonsense"])
    with pytest.raises(ValueError, match="handles"):
        Communicator.connect(segment, [segment.handle])
