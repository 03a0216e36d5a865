"""Norms, gating, routing and experts on a GPU against their CPU twins, on the same inputs."""

from __future__ import annotations

import math

import pytest
import torch
from helicore import ops
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.is_cuda
    assert got.dtype == want.dtype
    bound = 2.0**-6 if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.cpu().float(), want.float(), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 513), (70_000, 8), (5, 7168)])
def test_norms_and_gating(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, 2 * width).to(dtype)
    x = wide[:, :width]  # rows are strided
    weight, residual = torch.rand(width).to(dtype), torch.randn(rows, width).to(dtype)
    on_gpu = residual.cuda()
    x_gpu = wide.cuda()[:, :width]
    assert_near(ops.rms_norm(x_gpu, weight.cuda(), 1e-6), ops.rms_norm(x, weight, 1e-6))
    got = ops.add_rms_norm(x_gpu, on_gpu, weight.cuda(), 1e-6)
    assert_near(got, ops.add_rms_norm(x.contiguous(), residual, weight, 1e-6))
    assert torch.equal(on_gpu.cpu(), residual)
    assert_near(ops.silu_mul(wide.cuda()), ops.silu_mul(wide))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "group_score"),
    [
        (64, 6, 1, "none"),
        (256, 8, 8, "top2_sum"),
        (160, 6, 8, "max"),
        (2, 1, 1, "none"),
        (4096, 64, 1, "none"),
        (8, 4, 8, "top2_sum"),
    ],
)
def test_router(
    experts: int, top_k: int, groups: int, group_score: str, scoring: str, norm: bool
) -> None:
    torch.manual_seed(1)
    config = ops.RouterConfig(
        experts,
        top_k,
        n_group=groups,
        topk_group=max(1, groups // 2),
        scoring=scoring,
        group_score=group_score,
        norm_topk_prob=norm,
        scaling=2.5,
    )
    x, gate, bias = torch.randn(37, 64), torch.randn(experts, 64) / 8, torch.randn(experts) / 8
    for b in (None, bias):
        ids, weights = ops.route(x.cuda(), gate.cuda(), None if b is None else b.cuda(), config)
        want_ids, want_weights = ops.route(x, gate, b, config)
        same = (ids.cpu() == want_ids).all(-1)
        assert int(same.sum()) >= 36  # a score or two may round across a neighbour
        assert_near(weights[same.cuda()], want_weights[same])


def test_router_breaks_ties_and_passes_over_what_is_no_number() -> None:
    config = ops.RouterConfig(16, 3, scoring="softmax")
    ids, _ = ops.route(torch.zeros(2, 8).cuda(), torch.ones(16, 8).cuda(), None, config)
    assert ids.tolist() == [[0, 1, 2]] * 2
    gate = torch.randn(16, 8)
    gate[4] = math.nan
    ids, weights = ops.route(torch.randn(9, 8).cuda(), gate.cuda(), None, config)
    assert not (ids == 4).any()
    assert not weights.isnan().any()
    gate[:] = math.nan
    ids, weights = ops.route(torch.randn(9, 8).cuda(), gate.cuda(), None, config)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert not weights.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize(("experts", "top_k", "width"), [(8, 3, 16), (40, 40, 8), (64, 6, 20)])
def test_experts(
    dtype: torch.dtype, tokens: int, shared: int, experts: int, top_k: int, width: int
) -> None:
    torch.manual_seed(2)
    d = 64
    x = torch.randn(tokens, d).to(dtype)
    ids = torch.rand(tokens, experts).argsort(-1)[:, :top_k].to(torch.int32)
    weights = torch.rand(tokens, top_k) / top_k
    w13 = (torch.randn(experts, 2 * width, d) / 8).to(dtype)
    w2 = (torch.randn(experts, d, width) / 4).to(dtype)
    both = [torch.randn(2 * shared, d) / 8, torch.randn(d, shared) / 5] if shared else []
    extra = [part.to(dtype) for part in both]

    def run(device: str) -> Tensor:
        first = [ops.pack_linear(w13.to(device), groups=2), ops.pack_linear(w2.to(device))]
        last = [ops.pack_linear(part.to(device), groups=2 - i) for i, part in enumerate(extra)]
        moved = x.to(device), ids.to(device), weights.to(device)
        return ops.moe_forward(*moved, *first, width, *last, *([shared] * bool(last)))

    got, want = run("cuda"), run("cpu")
    bound = 3e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.cpu().float(), want.float(), atol=bound, rtol=bound)
    assert torch.equal(run("cuda"), got), "the order of rows within an expert changed the result"
