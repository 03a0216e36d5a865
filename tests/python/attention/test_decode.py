"""Absorbed decoding against the float64 reference, and what may not change its bits."""

import pytest
import torch
from attention.conftest import assert_close
from attention.problem import ABSURD_PAGE, Problem, make_problem
from helicore import _core, ops
from reference import mla as reference

BF16, F32 = torch.bfloat16, torch.float32


def decode(p: Problem, kv_bound: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.mla_decode_stats(p.q, *p.ragged, p.scale, p.rank, kv_bound)


def check(p: Problem, kv_bound: torch.Tensor | None = None) -> None:
    out, stats = decode(p, kv_bound)
    want, want_stats = reference.absorbed(p.q, *p.ragged, p.scale, p.rank, kv_bound)
    exact = p.q.dtype == F32
    assert_close(out, want, "output_float32" if exact else "output_bfloat16")
    assert_close(stats[..., 0], want_stats[..., 0], "stats_float32")
    assert_close(stats[..., 1], want_stats[..., 1], "stats_float32")


@pytest.mark.parametrize("cache_dtype", [BF16, F32])
@pytest.mark.parametrize("q_dtype", [BF16, F32])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_every_page_size_and_dtype_matches_the_reference(isa, page_size, q_dtype, cache_dtype):
    check(
        make_problem(
            num_q=[1, 1, 3, 1],
            kv_len=[1, 200, 65, 130],
            heads=6,
            rank=32,
            rope_dim=16,
            page_size=page_size,
            q_dtype=q_dtype,
            cache_dtype=cache_dtype,
        )
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("heads", [1, 3, 6, 12, 16, 96, 128])
def test_every_head_count_matches_the_reference(isa, heads, dtype):
    check(
        make_problem(
            num_q=[1, 2],
            kv_len=[70, 131],
            heads=heads,
            rank=64,
            rope_dim=16,
            page_size=64,
            q_dtype=dtype,
            cache_dtype=dtype,
        )
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("rank", "rope_dim"), [(4, 0), (4, 4), (12, 4), (20, 12), (36, 0), (60, 20), (512, 64)]
)
def test_every_width_matches_the_reference(isa, rank, rope_dim, dtype):
    check(
        make_problem(
            num_q=[1, 2, 1],
            kv_len=[3, 66, 129],
            heads=5,
            rank=rank,
            rope_dim=rope_dim,
            page_size=16,
            q_dtype=dtype,
            cache_dtype=dtype,
        )
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ragged_queries_match_the_reference(isa, dtype):
    check(
        make_problem(
            num_q=[4, 0, 1, 8, 2],
            kv_len=[4, 50, 0, 300, 1],  # whole prompt, idle, empty, verify, fewer keys than queries
            heads=4,
            rank=32,
            rope_dim=8,
            page_size=32,
            q_dtype=dtype,
            cache_dtype=dtype,
        )
    )


def test_long_context_with_many_chunks_matches_the_reference(isa):
    p = make_problem(
        num_q=[1, 2],
        kv_len=[9001, 2049],
        heads=2,
        rank=16,
        rope_dim=4,
        page_size=64,
        q_dtype=F32,
        cache_dtype=F32,
    )
    # A planted key makes the result depend on one token far into the context.
    p.cache[p.block_table[0, 8300 // 64], 8300 % 64] = 3.0 * p.q[0, 0]
    check(p)


@pytest.mark.parametrize("multiplier", [1.0, 1.59, 1.87])
def test_a_scale_multiplier_of_long_context_models_reaches_every_chunk(isa, multiplier):
    p = make_problem(
        num_q=[1, 2],
        kv_len=[2, 400],  # several chunks; a single key could not show a scale
        heads=3,
        rank=16,
        rope_dim=4,
        page_size=64,
        q_dtype=F32,
        cache_dtype=F32,
    )
    p.scale = multiplier * 20**-0.5
    check(p)


def test_visible_bound_per_token_replaces_the_causal_rule(isa):
    p = make_problem(
        num_q=[3, 2],
        kv_len=[100, 40],
        heads=3,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
    )
    check(p, torch.tensor([100, 0, 37, 16, 17], dtype=torch.int32))


def test_rows_past_every_bound_may_be_nan_and_their_pages_absurd():
    p = make_problem(
        num_q=[2],
        kv_len=[100],
        heads=3,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=BF16,
        cache_dtype=BF16,
    )
    bound = torch.tensor([33, 31], dtype=torch.int32)
    p.cache[p.block_table[0, 2], 1:] = torch.nan
    p.block_table[0, 3:] = ABSURD_PAGE
    check(p, bound)


def test_output_of_an_empty_request_replaces_nan():
    p = make_problem(
        num_q=[1, 1],
        kv_len=[0, 5],
        heads=2,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
    )
    out = torch.full((2, 2, 16), torch.nan)
    stats = torch.full((2, 2, 2), torch.nan)
    _core.attention.mla_decode(p.q, *p.ragged, p.scale, out, None, stats)
    assert torch.equal(out[0], torch.zeros(2, 16))
    assert torch.equal(stats[0], torch.tensor([[-torch.inf, 0.0]] * 2))
    merged, merged_stats = ops.merge_states(out[:1], stats[:1], out[1:], stats[1:])
    assert torch.equal(merged, out[1:])
    assert torch.equal(merged_stats, stats[1:])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_thread_count(isa, dtype):
    before = _core.core.num_threads()
    p = make_problem(
        num_q=[1, 3, 1, 2],
        kv_len=[5, 700, 2300, 64],
        heads=12,
        rank=32,
        rope_dim=8,
        page_size=64,
        q_dtype=dtype,
        cache_dtype=dtype,
    )
    try:
        _core.core.set_num_threads(1)
        want, want_stats = decode(p)
        for threads in (2, 3, 5):
            _core.core.set_num_threads(threads)
            out, stats = decode(p)
            assert torch.equal(out, want)
            assert torch.equal(stats, want_stats)
            for b in range(4):
                rows = slice(int(p.cu_q[b]), int(p.cu_q[b + 1]))
                alone, _ = ops.mla_decode_stats(
                    p.q[rows].contiguous(),
                    p.cache,
                    p.block_table[b : b + 1],
                    torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                    p.kv_len[b : b + 1],
                    p.scale,
                    p.rank,
                )
                assert torch.equal(alone, want[rows])
    finally:
        _core.core.set_num_threads(before)


def test_a_verified_token_has_the_bits_of_a_decoded_one(isa):
    p = make_problem(
        num_q=[6],
        kv_len=[2055],
        heads=4,
        rank=32,
        rope_dim=8,
        page_size=64,
        q_dtype=BF16,
        cache_dtype=BF16,
    )
    together = ops.mla_decode(p.q, *p.ragged, p.scale, p.rank)
    one = torch.tensor([0, 1], dtype=torch.int32)
    for i in range(6):
        length = torch.tensor([2050 + i], dtype=torch.int32)
        alone = ops.mla_decode(p.q[i : i + 1], p.cache, p.block_table, one, length, p.scale, p.rank)
        assert torch.equal(alone[0], together[i])


def test_tolerance_sees_swapped_heads_a_lost_token_and_a_wrong_scale():
    p = make_problem(
        num_q=[1],
        kv_len=[300],
        heads=4,
        rank=32,
        rope_dim=8,
        page_size=64,
        q_dtype=BF16,
        cache_dtype=BF16,
    )
    want, _ = reference.absorbed(p.q, *p.ragged, p.scale, p.rank)
    out, _ = decode(p)
    assert_close(out, want, "output_bfloat16")
    with pytest.raises(AssertionError):
        assert_close(out[:, [1, 0, 2, 3]], want, "output_bfloat16")
    p.kv_len -= 1
    with pytest.raises(AssertionError):
        assert_close(decode(p)[0], want, "output_bfloat16")
    p.kv_len += 1
    p.scale *= 1.1
    with pytest.raises(AssertionError):
        assert_close(decode(p)[0], want, "output_bfloat16")


def test_a_nan_query_gives_nan_and_leaves_the_other_rows_alone(isa):
    p = make_problem(
        num_q=[1, 1],
        kv_len=[40, 40],
        heads=3,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=BF16,
        cache_dtype=BF16,
    )
    want, _ = decode(p)
    p.q[0, 1, 3] = torch.nan
    out, _ = decode(p)
    assert out[0, 1].isnan().all()
    keep = torch.ones((2, 3), dtype=torch.bool)
    keep[0, 1] = False
    assert torch.equal(out[keep], want[keep])


def test_no_tokens_and_no_requests_return_at_once():
    cache = torch.zeros((2, 16, 20))
    empty = torch.zeros((0, 4), dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    out = ops.mla_decode(torch.zeros((0, 2, 20)), cache, empty, zero, zero[:0], 1.0, 16)
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": float("nan")}, "scale must be positive"),
        ({"kv_len": torch.tensor([-1], dtype=torch.int32)}, "kv_len must be >= 0"),
        ({"kv_len": torch.tensor([1000], dtype=torch.int32)}, "block_table has room"),
        ({"kv_len": torch.tensor([40])}, "kv_len"),
        ({"cu_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_q must end at"),
        ({"cu_q": torch.tensor([1, 1], dtype=torch.int32)}, "cu_q must start at 0"),
        ({"block_table": torch.full((1, 4), -1, dtype=torch.int32)}, "block_table must hold"),
        ({"block_table": torch.full((1, 4), 99, dtype=torch.int32)}, "block_table must hold"),
        ({"q": torch.zeros((1, 3, 24))}, "q"),
        ({"q": torch.zeros((1, 3, 20), dtype=torch.float16)}, "q must be bfloat16 or float32"),
        ({"q": torch.zeros((1, 20, 3)).transpose(1, 2)}, "q"),
        ({"cache": torch.zeros((6, 16, 20), dtype=torch.uint8)}, "cache must be"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    p = make_problem(
        num_q=[1],
        kv_len=[40],
        heads=3,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
    )
    for name, value in change.items():
        setattr(p, name, value)
    with pytest.raises(ValueError, match=message):
        decode(p)
