"""The CUDA attention kernels against their CPU twins, on the same inputs."""

import math

import pytest
import torch
from helicore import NotSupportedError, _core
from reference.latent_batch import RAGGED, Batch, make_batch
from torch import Tensor

attention = _core.attention


def decode_cpu(b: Batch, kv_bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = b.q.new_full((*b.q.shape[:2], b.rank), math.nan)
    stats = torch.full((*b.q.shape[:2], 2), math.nan)
    attention.mla_decode(
        b.q, b.cache, b.block_table, b.cu_q, b.kv_len, b.scale, out, kv_bound, stats
    )
    return out, stats


def decode_cuda(
    b: Batch, kv_bound: Tensor | None = None, fixed_splits: int = 0
) -> tuple[Tensor, Tensor]:
    out = b.q.new_full((*b.q.shape[:2], b.rank), math.nan)
    stats = torch.full((*b.q.shape[:2], 2), math.nan, device=b.q.device)
    args = (b.q, b.cache, b.block_table, b.cu_q, b.kv_len)
    size = attention.cuda_decode_workspace_bytes(*args, out, fixed_splits)
    workspace = torch.empty(size, dtype=torch.uint8, device=b.q.device)
    attention.cuda_mla_decode(*args, b.scale, out, kv_bound, stats, workspace, fixed_splits)
    return out, stats


def assert_twins(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-5
    out, stats = (t.cpu().float() for t in got)
    assert not out.isnan().any()
    torch.testing.assert_close(out, want[0].float(), atol=bound, rtol=bound)
    torch.testing.assert_close(stats, want[1], atol=2e-2 if bound > 1e-3 else 1e-4, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
def test_decode_matches_the_cpu_on_ragged_requests(dtype: torch.dtype, page: int) -> None:
    batch = make_batch(RAGGED, page=page, dtype=dtype)
    assert_twins(decode_cuda(batch.to("cuda")), decode_cpu(batch), dtype)


@pytest.mark.parametrize(
    ("heads", "rank", "rope"),
    [(1, 512, 64), (6, 512, 0), (12, 128, 16), (128, 512, 64), (5, 20, 4), (3, 36, 12)],
)
def test_decode_matches_the_cpu_on_odd_widths_and_heads(heads: int, rank: int, rope: int) -> None:
    batch = make_batch(RAGGED[:6], heads=heads, rank=rank, rope=rope, dtype=torch.float32, page=16)
    assert_twins(decode_cuda(batch.to("cuda")), decode_cpu(batch), torch.float32)


def test_empty_rows_give_zero_and_minus_infinity() -> None:
    batch = make_batch([(1, 0), (2, 0)]).to("cuda")
    out, stats = decode_cuda(batch, fixed_splits=4)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((stats[..., 0] == -math.inf).all())
    assert bool((stats[..., 1] == 0).all())


def test_kv_bound_replaces_the_causal_rule() -> None:
    batch = make_batch([(4, 300), (1, 70)], dtype=torch.float32)
    bound = torch.tensor([300, 0, 17, 150, 64], dtype=torch.int32)
    want = decode_cpu(batch, bound)
    assert_twins(decode_cuda(batch.to("cuda"), bound.cuda()), want, torch.float32)
    causal = decode_cpu(batch)
    assert not torch.allclose(causal[0], want[0])  # the bound matters: the comparison can fail


def test_fixed_splits_make_a_row_independent_of_its_batch() -> None:
    batch = make_batch([(1, 5000), (2, 333), (1, 17)], seed=3).to("cuda")
    together = decode_cuda(batch, fixed_splits=8)
    for b in range(3):
        alone = decode_cuda(batch.rows(b, b + 1), fixed_splits=8)
        lo, hi = int(batch.cu_q[b]), int(batch.cu_q[b + 1])
        assert torch.equal(alone[0], together[0][lo:hi])
        assert torch.equal(alone[1], together[1][lo:hi])


def decode_reference(b: Batch) -> Tensor:
    """The same attention in float64, request by request, where the tensors are."""
    rows = []
    page = b.cache.shape[1]
    for i, n in enumerate(b.kv_len.tolist()):
        lo, hi = int(b.cu_q[i]), int(b.cu_q[i + 1])
        pages = b.block_table[i, : -(-n // page)].long()
        keys = b.cache[pages].flatten(0, 1)[:n].double()
        bound = n - (hi - lo) + 1 + torch.arange(hi - lo, device=keys.device)
        hidden = torch.arange(n, device=keys.device)[None] >= bound[:, None]
        scores = torch.einsum("thd,kd->thk", b.q[lo:hi].double(), keys) * b.scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None], -math.inf), -1).nan_to_num(0.0)
        rows.append(weights @ keys[:, : b.rank])
    return torch.cat(rows)


def relative_error(got: Tensor, want: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - want).norm() / want.norm())


# Probabilities and results are rounded to bfloat16, 2^-9 relative each.
BF16_ERROR = 4e-3
MANY_QUERIES = [(n, 61 * n) for n in range(1, 9)] + [(1, 1), (1, 2049), (2, 2), (1, 0), (8, 700)]


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 6, 12, 16, 17, 32, 33, 96, 128])
def test_bfloat16_decode_matches_float64_for_any_heads_and_pages(heads: int, page: int) -> None:
    batch = make_batch(MANY_QUERIES, heads=heads, page=page, seed=heads + page).to("cuda")
    assert relative_error(decode_cuda(batch)[0], decode_reference(batch)) < BF16_ERROR


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64, 200, 256])
def test_every_split_count_gives_the_same_attention(heads: int, splits: int) -> None:
    lens = [(1, n) for n in (63, 64, 65, 128, 129, 191, 192, 193, 256, 257, 6000)]
    batch = make_batch(lens, heads=heads, page=16, seed=splits).to("cuda")
    want = decode_reference(batch)
    assert relative_error(decode_cuda(batch, fixed_splits=splits)[0], want) < BF16_ERROR


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_without_a_rope_part(heads: int) -> None:
    batch = make_batch(MANY_QUERIES, heads=heads, rope=0).to("cuda")
    assert relative_error(decode_cuda(batch)[0], decode_reference(batch)) < BF16_ERROR


@pytest.mark.parametrize("heads", [12, 128])
def test_a_context_of_65536(heads: int) -> None:
    batch = make_batch([(1, 65_536), (2, 65_535)], heads=heads).to("cuda")
    assert relative_error(decode_cuda(batch)[0], decode_reference(batch)) < BF16_ERROR


@pytest.mark.parametrize("heads", [16, 128])
def test_a_batch_of_64_ragged_requests(heads: int) -> None:
    lens = [(1 + i % 2, 2 + (i * 397) % 1500) for i in range(64)]
    batch = make_batch(lens, heads=heads, page=32).to("cuda")
    assert relative_error(decode_cuda(batch)[0], decode_reference(batch)) < BF16_ERROR


def test_the_error_bound_sees_one_missing_token() -> None:
    batch = make_batch([(1, 500)]).to("cuda")
    out = decode_cuda(batch)[0]
    batch.kv_len -= 1
    assert relative_error(out, decode_reference(batch)) > BF16_ERROR


@pytest.mark.parametrize("heads", [6, 16, 128])
@pytest.mark.parametrize("splits", [1, 8, 50])
def test_a_row_has_the_same_bits_alone_and_in_a_large_batch(heads: int, splits: int) -> None:
    lens = [(1 + i % 3, 3 + (i * 911) % 4000) for i in range(40)]
    batch = make_batch(lens, heads=heads, seed=7).to("cuda")
    together = decode_cuda(batch, fixed_splits=splits)
    for i in (0, 1, 17, 39):
        alone = decode_cuda(batch.rows(i, i + 1), fixed_splits=splits)
        lo, hi = int(batch.cu_q[i]), int(batch.cu_q[i + 1])
        assert torch.equal(alone[0], together[0][lo:hi])
        assert torch.equal(alone[1], together[1][lo:hi])


def test_decode_replays_in_a_graph_while_lengths_change() -> None:
    batch = make_batch([(1, 2000), (1, 900)], seed=5).to("cuda")
    out = torch.empty((2, 16, batch.rank), dtype=batch.q.dtype, device="cuda")
    args = (batch.q, batch.cache, batch.block_table, batch.cu_q, batch.kv_len)
    size = attention.cuda_decode_workspace_bytes(*args, out)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    attention.cuda_mla_decode(*args, batch.scale, out, None, None, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.cuda_mla_decode(*args, batch.scale, out, None, None, workspace)
    for lens in ([2000, 900], [1, 0], [64, 899], [1999, 65]):
        batch.kv_len.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        want = decode_cpu(batch.to("cpu"))[0]
        torch.testing.assert_close(out.cpu().float(), want.float(), atol=2e-2, rtol=2e-2)


def test_more_tokens_than_a_grid_dimension_of_65535() -> None:
    batch = make_batch([(65_537, 65_537)], heads=1, rank=16, rope=4, dtype=torch.float32)
    out, _ = decode_cuda(batch.to("cuda"))
    assert not out.isnan().any()
    last = batch.rows(0, 1)
    last.q = batch.q[-4:].contiguous()
    last.cu_q = torch.tensor([0, 4], dtype=torch.int32)
    want = decode_cpu(last)
    torch.testing.assert_close(out[-4:].cpu(), want[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_append_and_rope_match_the_cpu(dtype: torch.dtype, interleaved: bool) -> None:
    g = torch.Generator().manual_seed(1)
    tokens, rank, rope, page = 37, 512, 64, 16
    kv_a = torch.randn(tokens, rank + rope + 8, generator=g).to(dtype)[:, : rank + rope]
    cos_sin = torch.randn(100, rope, generator=g)
    positions = torch.randint(0, 100, (tokens,), generator=g, dtype=torch.int32)
    slots = torch.randperm(8 * page, generator=g)[:tokens].contiguous()
    slots[5] = -1
    weight = (torch.randn(rank, generator=g) + 1).to(dtype)
    caches = [
        torch.full((8, page, rank + rope), 7.0, dtype=dtype, device=d) for d in ("cpu", "cuda")
    ]
    args = (slots, rank, positions, cos_sin, weight, 1e-6, interleaved)
    attention.mla_append(kv_a, caches[0], *args)
    moved = [a.cuda() if isinstance(a, Tensor) else a for a in args]
    attention.cuda_mla_append(kv_a.cuda(), caches[1], *moved)
    bound = 1.6e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(caches[1].cpu(), caches[0], atol=bound, rtol=bound)
    assert int((caches[1].cpu() != 7.0).any(-1).sum()) == tokens - 1

    q = torch.randn(tokens, 6, 48 + rope, generator=g).to(dtype)
    on_gpu = q.cuda()
    attention.rope_q(q, positions, cos_sin, interleaved)
    attention.cuda_rope_q(on_gpu, positions.cuda(), cos_sin.cuda(), interleaved)
    torch.testing.assert_close(on_gpu.cpu(), q, atol=bound, rtol=bound)


def test_merge_skips_a_side_of_weight_zero() -> None:
    o_a = torch.full((2, 3, 32), math.nan, device="cuda")
    stats_a = torch.tensor([-math.inf, 0.0], device="cuda").expand(2, 3, 2).contiguous()
    o_b = torch.randn(2, 3, 32, device="cuda")
    stats_b = torch.rand(2, 3, 2, device="cuda") + 0.5
    out, stats = torch.empty_like(o_b), torch.empty_like(stats_b)
    attention.cuda_merge_states(o_a, stats_a, o_b, stats_b, out, stats)
    assert torch.equal(out, o_b)
    assert torch.equal(stats, stats_b)
    attention.cuda_merge_states(o_a, stats_a, o_a, stats_a, out, stats)
    assert torch.equal(out, torch.zeros_like(out))


def test_offsets_past_two_to_the_31_elements() -> None:
    rank, rope, page = 512, 64, 64
    num_pages = (2**31 // (page * (rank + rope))) + 16
    cache = torch.empty((num_pages, page, rank + rope), dtype=torch.bfloat16, device="cuda")
    cache[-2:] = torch.randn(2, page, rank + rope, device="cuda").to(torch.bfloat16)
    table = torch.tensor([[num_pages - 2, num_pages - 1]], dtype=torch.int32)
    q = torch.randn(1, 4, rank + rope).to(torch.bfloat16)
    cu_q, kv_len = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([128], dtype=torch.int32)
    small = Batch(
        q, cache[-2:].cpu(), torch.tensor([[0, 1]], dtype=torch.int32), cu_q, kv_len, rank
    )
    large = Batch(q.cuda(), cache, table.cuda(), cu_q.cuda(), kv_len.cuda(), rank)
    assert_twins(decode_cuda(large), decode_cpu(small), torch.bfloat16)


def test_zero_tokens_return_at_once() -> None:
    batch = make_batch([(0, 10)]).to("cuda")
    out, stats = decode_cuda(batch)
    assert out.shape == (0, 16, 512)
    assert stats.shape == (0, 16, 2)


def test_tensors_on_two_devices_are_refused_by_name() -> None:
    batch = make_batch([(1, 10)]).to("cuda")
    batch.kv_len = batch.kv_len.cpu()
    with pytest.raises(ValueError, match="kv_len must be on the CUDA device of q"):
        decode_cuda(batch)


def test_cpu_tensors_are_refused_without_a_gpu() -> None:
    batch = make_batch([(1, 10)])
    with pytest.raises((ValueError, NotSupportedError), match="q must be on the CUDA device"):
        decode_cuda(batch)
