"""All-reduce between virtual ranks of one GPU, each a stream, alone and fused; the fused norm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helicore import NotSupportedError, _core, ops
from helicore._core import quant as native
from helicore.comm import CommError, DeviceCommunicator, Shots
from helicore.ops import AllReduceFusion, RowFormat
from torch import Tensor

FUSIONS = [fusion for fusion in AllReduceFusion if fusion != AllReduceFusion.NONE]
BF16, F32 = torch.bfloat16, torch.float32
ONE, TWO = Shots.ONE, Shots.TWO


class VirtualRanks:
    """W communicators, a stream for each."""

    def __init__(self, world: int, **options: Any) -> None:
        self.comms = DeviceCommunicator.virtual(world, **options)
        self.streams = [torch.cuda.Stream() for _ in range(world)]

    def run(self, call: Callable[[int, DeviceCommunicator], None]) -> None:
        """call(rank, its communicator) in its stream; waits for all of them."""
        torch.cuda.synchronize()
        for rank, (comm, stream) in enumerate(zip(self.comms, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                call(rank, comm)
        torch.cuda.synchronize()
        for comm in self.comms:
            comm.check()


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype) + 0.0


def make(world: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    random = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(tokens, width, generator=random, device="cuda").to(dtype) for _ in range(world)
    ]


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int16 if a.dtype == BF16 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("shots", [ONE, TWO])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_sums_are_those_of_the_order_of_ranks_on_every_rank(
    dtype: torch.dtype, world: int, shots: Shots
) -> None:
    ranks = VirtualRanks(world)
    for tokens, width in [(1, 7168), (16, 2048), (130, 512), (3, 100), (2, 1), (5, 9000), (0, 8)]:
        parts = make(world, tokens, width, dtype, seed=tokens)
        outs = [torch.empty_like(part) for part in parts]
        ranks.run(lambda r, comm, p=parts, o=outs: comm.all_reduce(p[r], o[r], shots))
        want = sum_in_order(parts)
        assert all(same_bits(out, want) for out in outs), (tokens, width)


def test_a_call_larger_than_the_memory_goes_in_pieces_and_in_place() -> None:
    ranks = VirtualRanks(2, num_bytes=1 << 20)
    for shots in (ONE, TWO):
        parts = make(2, 301, 7168, BF16)
        want = sum_in_order(parts)
        ranks.run(lambda r, comm, p=parts, s=shots: comm.all_reduce(p[r], p[r], s))
        assert all(same_bits(part, want) for part in parts)


@pytest.mark.parametrize("shots", [ONE, TWO])
def test_negative_zeros_subnormals_and_nan_arrive(shots: Shots) -> None:
    ranks = VirtualRanks(4)
    for dtype in (BF16, F32):
        tiny = torch.finfo(dtype).smallest_normal / 2
        values = torch.tensor([-0.0, 0.0, -tiny, tiny, torch.nan, torch.inf, -1e-40, 1.0])
        parts = [values.roll(r).repeat(3, 40).to(dtype).cuda() for r in range(4)]
        parts.append(torch.full_like(parts[0], -0.0))
        for case in (parts[:4], [parts[4]] * 4):
            outs = [torch.empty_like(part) for part in case]
            ranks.run(lambda r, comm, c=case, o=outs: comm.all_reduce(c[r], o[r], shots))
            want = sum_in_order(case)
            for out in outs:
                assert torch.equal(out.isnan(), want.isnan())
                assert same_bits(out.nan_to_num(0.0), want.nan_to_num(0.0))
                assert not torch.signbit(out[out == 0]).any()


def outputs(fusion: AllReduceFusion, x: Tensor, with_norm: bool) -> dict[str, Tensor]:
    """Memory for what a fusion gives, with rubbish in it."""
    _, has_residual, format, layout = native.fusion_traits(fusion)
    found = {}
    if with_norm or format is None:
        found["norm"] = torch.full_like(x, 7.0)
    if has_residual:
        found["residual_out"] = torch.full_like(x, 7.0)
    if format is None:
        return found
    tokens, width = x.shape
    coded = width // 2 if format == RowFormat.NVFP4 else width
    found["codes"] = torch.full((tokens, coded), 0x55, dtype=torch.uint8, device="cuda")
    _, _, size, dtype = native.scale_shape(format, layout, tokens, width, 0)
    if format != RowFormat.FP8_TENSOR:
        found["scales"] = torch.full((size,), 77, dtype=getattr(torch, dtype), device="cuda")
    return found


def check_rows(
    fusion: AllReduceFusion, x: Tensor, residual: Tensor, weight: Tensor, got: dict[str, Tensor]
) -> None:
    """`got` against float64, and its codes bit for bit against the CPU's of its norm."""
    _, has_residual, format, layout = native.fusion_traits(fusion)
    s = x + residual if has_residual else x
    if has_residual:
        assert same_bits(got["residual_out"], s)
    exact = s.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    bound = 2.0**-7 if x.dtype == BF16 else 2e-6
    torch.testing.assert_close(got["norm"].double(), exact, atol=1e-30, rtol=bound)
    if format is None:
        return
    codes, scales = ops.quantize_rows(got["norm"].cpu(), format, layout, scale=0.25)
    assert torch.equal(got["codes"].cpu(), codes.view(torch.uint8)), fusion
    if scales is not None:
        assert torch.equal(got["scales"].cpu(), scales), fusion


SHAPES = [(1, 7168), (5, 1024), (131, 384), (3, 9216), (2, 32768 - 128)]


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fused_norms_give_the_codes_of_their_norms(
    dtype: torch.dtype, fusion: AllReduceFusion
) -> None:
    for tokens, width in SHAPES:
        if width * dtype.itemsize > 65536:
            continue
        x, residual = make(2, tokens, width, dtype, seed=width)
        weight = torch.rand(width, device="cuda").to(dtype)
        got = outputs(fusion, x, with_norm=True)
        other = residual if "residual_out" in got else None
        native.norm_quantize(fusion, x, residual=other, weight=weight, scale=0.25, **got)
        check_rows(fusion, x, residual, weight, got)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_nan_and_infinity_give_the_codes_of_the_cpu(fusion: AllReduceFusion) -> None:
    _, has_residual, format, layout = native.fusion_traits(fusion)
    if format is None:
        return
    (x,) = make(1, 4, 512, BF16)
    weight = torch.ones(512, dtype=BF16, device="cuda")
    x[1, 3], weight[9], weight[10] = torch.nan, torch.inf, -0.0
    got = outputs(fusion, x, with_norm=True)
    other = torch.zeros_like(x) if has_residual else None
    native.norm_quantize(fusion, x, residual=other, weight=weight, scale=0.25, **got)
    codes, scales = ops.quantize_rows(got["norm"].cpu(), format, layout, scale=0.25)
    assert torch.equal(got["codes"].cpu(), codes.view(torch.uint8))
    assert scales is None or torch.equal(got["scales"].cpu(), scales)


def test_rows_that_are_no_whole_packets() -> None:
    for dtype, width in itertools.product((BF16, F32), (1, 100, 515, 4097)):
        for fusion in (
            AllReduceFusion.RMS_NORM,
            AllReduceFusion.RESIDUAL_RMS_NORM_FP8,
            AllReduceFusion.RESIDUAL_RMS_NORM_FP8_TOKEN,
            AllReduceFusion.RESIDUAL_RMS_NORM_FP8_BLOCK,
            AllReduceFusion.RESIDUAL_RMS_NORM_FP8_PACKED,
        ):
            x, residual = make(2, 7, width, dtype, seed=width)
            weight = torch.rand(width, device="cuda").to(dtype)
            got = outputs(fusion, x, with_norm=True)
            other = residual if "residual_out" in got else None
            native.norm_quantize(fusion, x, residual=other, weight=weight, scale=0.25, **got)
            check_rows(fusion, x, residual, weight, got)


@pytest.mark.parametrize("shots", [ONE, TWO])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_fused_call_is_a_sum_and_then_the_fused_norm(
    fusion: AllReduceFusion, shots: Shots
) -> None:
    for world, dtype in [(2, BF16), (4, BF16), (3, F32), (8, BF16)]:
        ranks = VirtualRanks(world)
        for tokens, width in [(1, 7168), (33, 1024), (6, 12288)]:
            parts = make(world, tokens, width, dtype, seed=width)
            (residual,) = make(1, tokens, width, dtype, seed=1)
            weight = torch.rand(width, device="cuda").to(dtype)
            got = [outputs(fusion, part, with_norm=True) for part in parts]
            other = residual if "residual_out" in got[0] else None
            ranks.run(
                lambda r, comm, p=parts, g=got, o=other, w=weight: comm.all_reduce_fused(
                    fusion, p[r], residual=o, weight=w, scale=0.25, shots=shots, **g[r]
                )
            )
            total = sum_in_order(parts)
            want = outputs(fusion, total, with_norm=True)
            native.norm_quantize(fusion, total, residual=other, weight=weight, scale=0.25, **want)
            for each in got:
                for name, tensor in want.items():
                    raw = [t.flatten().view(torch.uint8) for t in (each[name], tensor)]
                    assert torch.equal(*raw), (name, world, tokens)


def test_the_norm_may_be_left_out() -> None:
    fusion = AllReduceFusion.RESIDUAL_RMS_NORM_FP8_BLOCK
    x, residual = make(2, 9, 7168, BF16)
    weight = torch.rand(7168, device="cuda").to(BF16)
    with_norm, without = (outputs(fusion, x, with_norm=norm) for norm in (True, False))
    for got in (with_norm, without):
        native.norm_quantize(fusion, x, residual=residual, weight=weight, **got)
    assert torch.equal(with_norm["codes"], without["codes"])
    assert "norm" not in without


def exchange_rounds(world: int, rounds: int, replays: int) -> int:
    """Elements that were wrong in `rounds` x `replays` calls of changing size and data, by a graph
    whose ranks are delayed at random."""
    ranks = VirtualRanks(world)
    random = torch.Generator().manual_seed(world)
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(world)]
    counts = [torch.zeros((), device="cuda") for _ in range(world)]
    sizes = [(1, 7168), (3, 512), (9, 2048), (40, 256)]
    total = world * (world - 1) / 2

    def rank_rounds(rank: int) -> None:
        comm, count = ranks.comms[rank], counts[rank]
        for number in range(rounds):
            tokens, width = sizes[number % len(sizes)]
            delay = int(torch.randint(0, 20_000, (), generator=random))
            if delay > 15_000:
                torch.cuda._sleep(delay)
            count.copy_((count + 1) % 5)
            x = (count + rank).expand(tokens, width).to(BF16).contiguous()
            out = torch.empty_like(x)
            comm.all_reduce(x, out, ONE if number % 3 else TWO)
            wrong[rank].add_((out.float() != world * count + total).sum())

    warm = [torch.ones(1, 8, dtype=BF16, device="cuda") for _ in range(world)]
    ranks.run(lambda r, comm: comm.all_reduce(warm[r], warm[r]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in ranks.streams:
            stream.wait_stream(main)
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                rank_rounds(rank)
        for stream in ranks.streams:
            main.wait_stream(stream)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    for comm in ranks.comms:
        comm.check()
    return sum(int(each) for each in wrong)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_thousand_replays_with_random_delays_are_exact(world: int) -> None:
    assert exchange_rounds(world, rounds=12, replays=1000) == 0


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = VirtualRanks(3, timeout_s=0.2)
    parts = make(3, 2, 256, BF16)

    def call(rank: int, comm: DeviceCommunicator) -> None:
        if rank != 1:
            comm.all_reduce(parts[rank], parts[rank])

    with pytest.raises(CommError, match=r"rank 1 did not come within 0\.2 s"):
        ranks.run(call)
    with pytest.raises(CommError, match="rank 1"):
        ranks.comms[2].all_reduce(parts[2], parts[2])


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="world_size"):
        DeviceCommunicator.virtual(17)
    with pytest.raises(ValueError, match="num_bytes"):
        DeviceCommunicator.virtual(2, num_bytes=4096)
    with pytest.raises(ValueError, match="timeout_s"):
        DeviceCommunicator.virtual(2, timeout_s=0)
    (comm,) = DeviceCommunicator.virtual(1)
    x = torch.zeros(2, 64, dtype=BF16, device="cuda")
    for bad, message in [
        ((x.cpu(), x.cpu()), "x must be on a GPU"),
        ((x, x.cpu()), "out must be on the device"),
        ((x.half(), x), "x must be float32 or bfloat16"),
        ((x, x[:1]), "out"),
        ((x.T, x.T), "x"),
    ]:
        with pytest.raises(ValueError, match=message):
            comm.all_reduce(*bad)
    long = torch.zeros(1, 32769, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        comm.all_reduce(long, long)
    with pytest.raises(ValueError, match="residual is needed"):
        comm.all_reduce_fused(AllReduceFusion.RESIDUAL_RMS_NORM, x, weight=x[0], norm=x)


def test_without_a_gpu_virtual_ranks_are_refused() -> None:
    if torch.cuda.is_available() and _core.core.cuda_compiled():
        pytest.skip("there is one")
    with pytest.raises((NotSupportedError, ValueError, RuntimeError), match=r"CUDA|device"):
        DeviceCommunicator.virtual(2)
