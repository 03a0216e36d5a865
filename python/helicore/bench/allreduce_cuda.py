"""All-reduce between virtual ranks of one GPU: fused, beside the same sum and then the fused norm.

Each rank is a stream; all of them are branches of one CUDA graph with several calls in a row, as
the layers of a decode step are. Ranks of one GPU share its memory: what NVLink adds does not show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from helicore import ops
from helicore._core import quant as _quant
from helicore.bench.environment import collect
from helicore.bench.report import Report, Result
from helicore.comm import DeviceCommunicator, Shots
from helicore.ops import AllReduceFusion

TOKENS, HIDDEN = (1, 16, 128), 7168
FUSION = AllReduceFusion.RESIDUAL_RMS_NORM_FP8_BLOCK
_CALLS = 20  # of a graph

Call = Callable[[], None]


def run(worlds: tuple[int, ...] = (2, 4, 8), rounds: int = 30) -> Report:
    """Medians over `rounds` replays, in microseconds a call; the two sides take turns."""
    results = []
    for world in worlds:
        comms = DeviceCommunicator.virtual(world)
        for tokens in TOKENS:
            ranks = [_Rank(comm, tokens) for comm in comms]
            graphs = [
                _graph([rank.fused for rank in ranks]),
                _graph([rank.apart for rank in ranks]),
            ]
            ours, apart = _medians(graphs, rounds)
            name = f"fused_fp8_block_w{world}_{tokens}x{HIDDEN}_us"
            results.append(Result(name, ours, "us", "unfused", apart, higher_is_better=False))
        for comm in comms:
            comm.check()
    return Report("allreduce", results, collect())


class _Rank:
    """Tensors of one rank, and its calls."""

    def __init__(self, comm: DeviceCommunicator, tokens: int, shots: Shots = Shots.AUTO) -> None:
        self._comm, self._shots = comm, shots
        random = torch.Generator("cuda").manual_seed(comm.rank)
        shape = (tokens, HIDDEN)
        self._x = torch.randn(shape, generator=random, device="cuda").to(torch.bfloat16)
        self._sum = torch.empty_like(self._x)
        weight = torch.rand(HIDDEN, generator=random, device="cuda").to(torch.bfloat16)
        made = ops.fused_norm_quantize(
            self._x, FUSION, weight, residual=torch.zeros_like(self._x), with_norm=False
        )
        self._tensors: dict[str, Any] = {
            "residual": torch.randn_like(self._x),
            "weight": weight,
            "residual_out": made.residual,
            "codes": made.codes,
            "scales": made.scales,
        }

    def fused(self) -> None:
        self._comm.all_reduce_fused(FUSION, self._x, shots=self._shots, **self._tensors)

    def apart(self) -> None:
        self._comm.all_reduce(self._x, self._sum, self._shots)
        _quant.norm_quantize(FUSION, self._sum, **self._tensors)


def _graph(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """_CALLS of each in a row, the ranks side by side."""
    streams = [torch.cuda.Stream() for _ in calls]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(_CALLS):
                    call()
        for stream in streams:
            main.wait_stream(stream)
    return graph


def _medians(graphs: list[torch.cuda.CUDAGraph], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(rounds + 3):
        for side, graph in enumerate(graphs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                times[side].append(start.elapsed_time(end) * 1e3 / _CALLS)
    return [statistics.median(side) for side in times]
