"""Expanded prefill against the float64 reference, against absorbed decoding, and in chunks."""

import itertools

import pytest
import torch
from attention.conftest import assert_close
from attention.problem import Problem, make_problem
from helicore import _core, ops
from reference import mla as reference

BF16, F32 = torch.bfloat16, torch.float32


def make_weights(
    heads: int, nope_dim: int, v_dim: int, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, ops.MlaWeights]:
    gen = torch.Generator().manual_seed(7)
    kv_b = torch.randn((heads * (nope_dim + v_dim), rank), generator=gen).mul(rank**-0.5).to(dtype)
    per_head = kv_b.view(heads, nope_dim + v_dim, rank)
    packed = ops.pack_mla_weights(kv_b, heads, nope_dim, v_dim)
    return per_head[:, :nope_dim], per_head[:, nope_dim:], packed


def prefill(p: Problem, w: ops.MlaWeights, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.mla_prefill_stats(p.q, *p.ragged, w.w_uk, w.w_uv, p.scale, p.rank, v_dim)


def expanded_dtype(*operands: torch.dtype) -> torch.dtype:
    """What keys and values are kept in: bfloat16 where all operands and the products are."""
    products = _core.core.active_isa() == "avx512bf16"
    return BF16 if products and set(operands) == {BF16} else torch.float64


def check(p: Problem, nope_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    w_uk, w_uv, packed = make_weights(p.q.shape[1], nope_dim, v_dim, p.rank, dtype)
    out, stats = prefill(p, packed, v_dim)
    rounded = expanded_dtype(p.q.dtype, p.cache.dtype, dtype)
    want, want_stats = reference.expanded(p.q, *p.ragged, w_uk, w_uv, p.scale, rounded)
    assert_close(out, want, "output_bfloat16" if p.q.dtype == BF16 else "output_float32")
    kind = "stats_bfloat16" if rounded == BF16 else "stats_float32"
    assert_close(stats[..., 0], want_stats[..., 0], kind)
    assert_close(stats[..., 1], want_stats[..., 1], kind)


@pytest.mark.parametrize("cache_dtype", [BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_every_page_size_and_dtype_matches_the_reference(isa, page_size, dtype, cache_dtype):
    p = make_problem(
        num_q=[7, 33, 1],
        kv_len=[7, 150, 65],
        heads=3,
        rank=32,
        rope_dim=16,
        page_size=page_size,
        q_dtype=dtype,
        cache_dtype=cache_dtype,
        q_width=16 + 16,
    )
    check(p, 16, 12, dtype)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("rank", "rope_dim", "nope_dim", "v_dim"),
    [(4, 0, 4, 4), (4, 4, 4, 8), (12, 4, 20, 12), (20, 12, 12, 36), (512, 64, 128, 128)],
)
def test_every_width_matches_the_reference(isa, rank, rope_dim, nope_dim, v_dim, dtype):
    p = make_problem(
        num_q=[5, 40],
        kv_len=[5, 70],
        heads=2,
        rank=rank,
        rope_dim=rope_dim,
        page_size=32,
        q_dtype=dtype,
        cache_dtype=dtype,
        q_width=nope_dim + rope_dim,
    )
    check(p, nope_dim, v_dim, dtype)


@pytest.mark.parametrize("heads", [1, 6, 12, 16, 128])
def test_every_head_count_matches_the_reference(heads):
    p = make_problem(
        num_q=[9],
        kv_len=[20],
        heads=heads,
        rank=32,
        rope_dim=8,
        page_size=16,
        q_dtype=BF16,
        cache_dtype=BF16,
        q_width=24,
    )
    check(p, 16, 16, BF16)


def test_weights_of_another_dtype_than_the_cache_match_the_reference(isa):
    p = make_problem(
        num_q=[20],
        kv_len=[90],
        heads=2,
        rank=32,
        rope_dim=8,
        page_size=64,
        q_dtype=F32,
        cache_dtype=BF16,
        q_width=24,
    )
    check(p, 16, 16, BF16)


def test_idle_and_empty_requests_and_more_queries_than_keys(isa):
    p = make_problem(
        num_q=[0, 3, 4],
        kv_len=[50, 0, 2],
        heads=2,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
        q_width=12,
    )
    check(p, 8, 8, F32)
    _, _, w = make_weights(2, 8, 8, 16, F32)
    out = torch.full((7, 16), torch.nan)
    stats = torch.full((7, 2, 2), torch.nan)
    _core.attention.mla_prefill(p.q, *p.ragged, w.w_uk, w.w_uv, 16, p.scale, out, stats)
    empty = [0, 1, 2, 3, 4]  # request 1, and the first two queries of request 2
    assert torch.equal(out[empty], torch.zeros(5, 16))
    assert torch.equal(stats[empty], torch.tensor([-torch.inf, 0.0]).expand(5, 2, 2))
    assert out[5:].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_absorbed_and_expanded_forms_agree(isa, dtype):
    heads, rank, rope_dim, nope_dim, v_dim = 4, 64, 16, 32, 32
    p = make_problem(
        num_q=[30, 5],
        kv_len=[200, 5],
        heads=heads,
        rank=rank,
        rope_dim=rope_dim,
        page_size=64,
        q_dtype=dtype,
        cache_dtype=dtype,
        q_width=nope_dim + rope_dim,
    )
    _, _, w = make_weights(heads, nope_dim, v_dim, rank, dtype)
    expanded, _ = prefill(p, w, v_dim)
    fused = ops.mla_absorb(p.q, w.w_absorb, rank)
    latent = ops.mla_decode(fused, *p.ragged, p.scale, rank)
    absorbed = ops.mla_project_v(latent, w.w_uv, v_dim)
    kind = "output_float32" if dtype == F32 else "forms_bfloat16"
    assert_close(absorbed, expanded.double(), kind)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("cuts", [[1], [150], [299], [64, 128, 192], [100, 101, 256]])
def test_prefill_in_chunks_has_the_bits_of_one_shot(isa, cuts, dtype):
    total = 300
    p = make_problem(
        num_q=[total],
        kv_len=[total],
        heads=3,
        rank=32,
        rope_dim=8,
        page_size=32,
        q_dtype=dtype,
        cache_dtype=dtype,
        q_width=24,
    )
    _, _, w = make_weights(3, 16, 16, 32, dtype)
    want, want_stats = prefill(p, w, 16)
    edges = [0, *cuts, total]
    for begin, end in itertools.pairwise(edges):
        part = Problem(
            q=p.q[begin:end],
            cache=p.cache,
            block_table=p.block_table,
            cu_q=torch.tensor([0, end - begin], dtype=torch.int32),
            kv_len=torch.tensor([end], dtype=torch.int32),
            scale=p.scale,
            rank=p.rank,
        )
        out, stats = prefill(part, w, 16)
        assert torch.equal(out, want[begin:end])
        assert torch.equal(stats, want_stats[begin:end])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_thread_count(isa, dtype):
    before = _core.core.num_threads()
    p = make_problem(
        num_q=[600, 3, 40],
        kv_len=[700, 2500, 40],  # 2500 tokens are more than one expanded chunk
        heads=2,
        rank=64,
        rope_dim=16,
        page_size=64,
        q_dtype=dtype,
        cache_dtype=dtype,
        q_width=144,
    )
    _, _, w = make_weights(2, 128, 128, 64, dtype)
    try:
        _core.core.set_num_threads(1)
        want, want_stats = prefill(p, w, 128)
        for threads in (2, 5):
            _core.core.set_num_threads(threads)
            out, stats = prefill(p, w, 128)
            assert torch.equal(out, want)
            assert torch.equal(stats, want_stats)
        for b in range(3):
            rows = slice(int(p.cu_q[b]), int(p.cu_q[b + 1]))
            alone = Problem(
                q=p.q[rows],
                cache=p.cache,
                block_table=p.block_table[b : b + 1],
                cu_q=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                kv_len=p.kv_len[b : b + 1],
                scale=p.scale,
                rank=p.rank,
            )
            assert torch.equal(prefill(alone, w, 128)[0], want[rows])
    finally:
        _core.core.set_num_threads(before)


def test_tolerance_sees_swapped_heads_a_lost_token_and_a_shifted_mask():
    p = make_problem(
        num_q=[20],
        kv_len=[40],
        heads=4,
        rank=32,
        rope_dim=8,
        page_size=16,
        q_dtype=BF16,
        cache_dtype=BF16,
        q_width=24,
    )
    w_uk, w_uv, w = make_weights(4, 16, 16, 32, BF16)
    rounded = expanded_dtype(BF16)
    want, _ = reference.expanded(p.q, *p.ragged, w_uk, w_uv, p.scale, rounded)
    out, _ = prefill(p, w, 16)
    assert_close(out, want, "output_bfloat16")
    heads = out.view(20, 4, 16)
    with pytest.raises(AssertionError):
        assert_close(heads[:, [1, 0, 2, 3]].reshape(20, 64), want, "output_bfloat16")
    p.kv_len -= 1
    with pytest.raises(AssertionError):
        assert_close(prefill(p, w, 16)[0], want, "output_bfloat16")


def test_no_tokens_return_at_once():
    _, _, w = make_weights(2, 8, 8, 16, F32)
    zero = torch.zeros(1, dtype=torch.int32)
    out = ops.mla_prefill(
        torch.zeros((0, 2, 12)),
        torch.zeros((1, 16, 20)),
        torch.zeros((0, 1), dtype=torch.int32),
        zero,
        zero[:0],
        w.w_uk,
        w.w_uv,
        1.0,
        16,
        8,
    )
    assert out.shape == (0, 16)


def test_wrong_weights_are_named():
    p = make_problem(
        num_q=[2],
        kv_len=[2],
        heads=2,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
        q_width=12,
    )
    _, _, w = make_weights(2, 8, 8, 16, F32)
    _, _, other = make_weights(3, 8, 8, 16, F32)
    _, _, bf16 = make_weights(2, 8, 8, 16, BF16)
    with pytest.raises(ValueError, match="w_uk must be packed with one matrix for each of 2 heads"):
        prefill(p, w._replace(w_uk=other.w_uk), 8)
    with pytest.raises(ValueError, match="w_uv"):
        prefill(p, w._replace(w_uv=bf16.w_uv), 8)
    with pytest.raises(ValueError, match="kv_b must be"):
        ops.pack_mla_weights(torch.zeros(31, 16), 2, 8, 8)
