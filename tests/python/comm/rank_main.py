"""A rank as a process: maps the others through files of a folder, then does what it is told.

python rank_main.py FOLDER RANK WORLD TIMEOUT WORK
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from helicore.comm import Communicator, Segment


def meet(folder: Path, rank: int, world: int, timeout_s: float) -> Communicator:
    segment = Segment(rank, world, 1 << 20)
    part = folder / f"{rank}.part"
    part.write_bytes(segment.handle)
    part.rename(folder / f"{rank}.handle")
    handles = []
    for other in range(world):
        path = folder / f"{other}.handle"
        while not path.exists():
            time.sleep(0.001)
        handles.append(path.read_bytes())
    return Communicator.connect(segment, handles, timeout_s)


def add_up(comm: Communicator) -> None:
    for count in (1, 7, 1000, 300_001):
        x = torch.arange(count, dtype=torch.float32) + comm.rank
        want = torch.arange(count, dtype=torch.float32) * comm.world_size
        want += sum(range(comm.world_size))
        comm.all_reduce(x, x)
        assert torch.equal(x, want), count
    for _ in range(200):
        parts = torch.empty(comm.world_size, 3, dtype=torch.int64)
        comm.all_gather(torch.full((3,), comm.rank), parts)
        assert parts.tolist() == [[r] * 3 for r in range(comm.world_size)]
    text = os.urandom(10) * 300_000 if comm.rank == 1 else None
    assert len(comm.broadcast_bytes(text, 1)) == 3_000_000


def die(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    comm.barrier()


def give_up(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.abort("no more")
    else:
        comm.broadcast_bytes(None, 1, wait_forever=True)


if __name__ == "__main__":
    rank, world, timeout = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    communicator = meet(Path(sys.argv[1]), rank, world, timeout)
    try:
        {"add_up": add_up, "die": die, "give_up": give_up}[sys.argv[5]](communicator)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
