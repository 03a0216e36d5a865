"""`helicore bench mla`: absorbed decode over paged latents, beside the same attention in torch.

Bytes are counted as one read of every cached row; that over the time is the bandwidth reached. On
CUDA the pools rotate so that no call finds its rows in the L2 cache, and calls are graph replays
timed with events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from helicore.bench import environment
from helicore.bench.report import Report, Result
from helicore.bench.timing import interleave, medians, timed
from helicore.config import QUANTISED_DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KV_LORA_RANK = 512
ROPE_DIM = 64
PAGE_SIZE = 64
SCALE = 192**-0.5
_ROTATE_BYTES = 300_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode call: `batch` requests of `context` cached tokens, `num_q` query tokens each."""

    batch: int
    context: int
    heads: int
    num_q: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        dtype = {"bfloat16": "bf16", "float32": "fp32"}.get(self.dtype, self.dtype)
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"decode_{dtype}_h{self.heads}_b{self.batch}_l{context}_q{self.num_q}"

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED_DTYPES

    @property
    def cache_bytes(self) -> int:
        from helicore import ops

        return self.batch * self.context * ops.cache_row_bytes(self.dtype, KV_LORA_RANK, ROPE_DIM)


CPU_SHAPES = (
    Shape(1, 1024, 16),
    Shape(1, 4096, 16),
    Shape(1, 4096, 128),
    Shape(16, 1024, 16),
    Shape(1, 4096, 16, num_q=4),
    Shape(1, 4096, 16, dtype="float32"),
)
CUDA_SHAPES = (
    Shape(1, 4096, 16),
    Shape(1, 16384, 16),
    Shape(1, 65536, 16),
    Shape(1, 4096, 128),
    Shape(1, 16384, 128),
    Shape(1, 65536, 128),
    Shape(16, 4096, 16),
    Shape(16, 4096, 128),
    Shape(64, 4096, 16),
    Shape(16, 16384, 128),
    Shape(64, 4096, 128),
    Shape(16, 16384, 64),
    Shape(1, 16384, 16, num_q=4),
    Shape(16, 16384, 16),
    Shape(16, 16384, 16, num_q=4),
    Shape(16, 16384, 128, num_q=2),
    *(Shape(64, 16384, 16, dtype=name) for name in ("bfloat16", *QUANTISED_DTYPES)),
    *(Shape(16, 16384, 128, dtype=name) for name in QUANTISED_DTYPES),
)


@dataclass(slots=True)
class _Case:
    q: Tensor
    cache: Tensor
    block_table: Tensor
    cu_q: Tensor
    kv_len: Tensor
    coding: tuple[str, float] = ("auto", 1.0)


def _quantised(case: _Case, name: str) -> _Case:
    """The same rows in a quantised format; `case` keeps what is left of them, for the peer."""
    import torch

    from helicore import ops
    from helicore._core import attention

    rows = case.cache
    num_pages, page_size, width = rows.shape
    coding = (name, {"fp8": 2.0**-6, "fp8_ds_mla": 1.0, "nvfp4": 2.0**-8}[name])
    row_bytes = ops.cache_row_bytes(name, KV_LORA_RANK, ROPE_DIM)
    pages = torch.empty((num_pages, page_size, row_bytes), dtype=torch.uint8, device=rows.device)
    slots = torch.arange(num_pages * page_size, device=rows.device)
    positions = torch.zeros(len(slots), dtype=torch.int32, device=rows.device)
    table = torch.tensor([[1.0] * (ROPE_DIM // 2) + [0.0] * (ROPE_DIM // 2)], device=rows.device)
    rest = (positions, table, None, 1e-6, False)
    ops.mla_append(rows.view(-1, width), pages, slots, KV_LORA_RANK, *rest, *coding)
    order = torch.arange(num_pages, dtype=torch.int32, device=rows.device)
    attention.cuda_gather_rows(pages, order, rows.view(-1, width), KV_LORA_RANK, *coding)
    return replace(case, cache=pages, coding=coding)


def _make_case(shape: Shape, device: torch.device, seed: int) -> _Case:
    import torch

    g = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if shape.is_quantised else getattr(torch, shape.dtype)
    pages = -(-shape.context // PAGE_SIZE)
    width = KV_LORA_RANK + ROPE_DIM
    table = torch.randperm(shape.batch * pages, generator=g).view(shape.batch, pages)
    cache = torch.empty((shape.batch * pages, PAGE_SIZE, width), dtype=dtype, device=device)
    q = torch.randn(shape.batch * shape.num_q, shape.heads, width, generator=g)
    return _Case(
        q.to(device, dtype),
        cache.normal_(),
        table.to(device, torch.int32),
        (torch.arange(shape.batch + 1) * shape.num_q).to(device, torch.int32),
        torch.full((shape.batch,), shape.context).to(device, torch.int32),
    )


def torch_decode(q: Tensor, cache: Tensor, block_table: Tensor, num_q: int) -> Tensor:
    """The peer: gather the pages, two matrix products and a softmax, per batch of equal lengths."""
    import torch

    batch, pages = block_table.shape
    keys = cache[block_table.long()].view(batch, pages * PAGE_SIZE, -1)
    scores = torch.matmul(q.view(batch, num_q * q.shape[1], -1), keys.transpose(1, 2)) * SCALE
    if num_q > 1:
        scores += causal_mask(num_q, q.shape[1], keys.shape[1], q)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, keys[..., :KV_LORA_RANK]).view(*q.shape[:2], KV_LORA_RANK)


def causal_mask(num_q: int, heads: int, context: int, like: Tensor) -> Tensor:
    """[num_q * heads, context]: -inf where a query token must not look."""
    import torch

    bound = context - num_q + 1 + torch.arange(num_q, device=like.device)
    hidden = torch.arange(context, device=like.device)[None] >= bound[:, None]
    mask = torch.zeros((num_q, context), dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(heads, 0)


def _ours(case: _Case, out: Tensor) -> Callable[[], object]:
    import torch

    from helicore._core import attention

    args = (case.q, case.cache, case.block_table, case.cu_q, case.kv_len)
    if case.q.device.type == "cpu":
        return lambda: attention.mla_decode(*args, SCALE, out, None, None, *case.coding)
    rest = (0, *case.coding)
    size = attention.cuda_decode_workspace_bytes(*args, out, *rest)
    workspace = torch.empty(size, dtype=torch.uint8, device=case.q.device)
    return lambda: attention.cuda_mla_decode(*args, SCALE, out, None, None, workspace, *rest)


def _graphed(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """All calls once as one CUDA graph; returns seconds per call."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def figure() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(calls)

    return figure


def _cpu_figure(call: Callable[[], object]) -> Callable[[], float]:
    call()
    return lambda: statistics.median(timed(call) for _ in range(5))


def run(
    device_name: str = "cpu",
    rounds: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Medians over `rounds` interleaved rounds; every shape is checked against the peer first.

    Raises:
        ValueError: `device_name` is neither cpu nor a usable CUDA device.
    """
    import torch

    from helicore._core import core

    if device_name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device_name!r}")
    device = torch.device(device_name)
    if device.type == "cuda" and not (core.cuda_compiled() and torch.cuda.is_available()):
        raise ValueError(f"device {device_name!r}: this build or this machine has no CUDA")
    report = Report("mla", [], environment.collect() | {"device": device_name})
    for shape in CPU_SHAPES if device.type == "cpu" else CUDA_SHAPES:
        progress(shape.name)
        _measure(shape, device, rounds, report)
    return report


def _measure(shape: Shape, device: torch.device, rounds: int, report: Report) -> None:
    import torch

    copies = 1
    if device.type == "cuda":
        copies = max(2, -(-_ROTATE_BYTES // shape.cache_bytes))
    cases = [_make_case(shape, device, seed) for seed in range(copies)]
    out = cases[0].q.new_empty((*cases[0].q.shape[:2], KV_LORA_RANK))
    ours_cases = cases
    if shape.is_quantised:
        ours_cases = [_quantised(case, shape.dtype) for case in cases]
    ours = [_ours(case, out) for case in ours_cases]

    def peer_call(case: _Case) -> Callable[[], object]:
        return lambda: torch_decode(case.q, case.cache, case.block_table, shape.num_q)

    peers = [peer_call(case) for case in cases]
    ours[0]()
    want = peers[0]()
    assert isinstance(want, torch.Tensor)
    error = float((out.double() - want.double()).norm() / want.double().norm())
    if not error < 2e-2:
        report.failures.append(f"{shape.name}: relative difference {error:.2e} from torch")
    if device.type == "cuda":
        sides = {"ours": _graphed(ours), "torch": _graphed(peers)}
    else:
        sides = {"ours": _cpu_figure(ours[0]), "torch": _cpu_figure(peers[0])}
    figures = medians(interleave(sides, rounds))
    report.results.append(
        Result(shape.name, figures["ours"] * 1e6, "us", "torch", figures["torch"] * 1e6, False)
    )
    bandwidth = shape.cache_bytes / figures["ours"] / 1e9
    report.results.append(Result(f"{shape.name}_cache_gbps", bandwidth, "GB/s"))
