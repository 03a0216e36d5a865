"""Append, rope, absorb, value projection, merge: against float64; torch dispatch and compile."""

import pytest
import torch
from attention.conftest import assert_close
from attention.problem import make_problem
from helicore import ops
from reference import mla as reference
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_dtype", [BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("rank", "rope_dim"), [(4, 0), (20, 4), (128, 16), (512, 64)])
def test_append_writes_norm_and_rope_of_each_token(
    isa, rank, rope_dim, dtype, cache_dtype, interleaved
):
    gen = torch.Generator().manual_seed(1)
    tokens, page_size = 9, 4
    kv_a = torch.randn((tokens, rank + rope_dim), generator=gen).to(dtype)
    weight = torch.randn(rank, generator=gen).to(dtype)
    table = reference.cos_sin_table(100, rope_dim)
    positions = torch.randperm(100, generator=gen)[:tokens].int()
    slots = torch.randperm(24, generator=gen)[:tokens]
    slots[3] = -1
    pool = torch.full((6, 2, page_size, rank + rope_dim), torch.nan, dtype=cache_dtype)
    cache = pool[:, 1]
    ops.mla_append(
        kv_a,
        cache,
        slots,
        rank,
        positions,
        table if rope_dim else None,
        weight,
        1e-5,
        interleaved,
    )
    written = torch.zeros((6, page_size), dtype=torch.bool)
    for t in range(tokens):
        if slots[t] < 0:
            continue
        page, offset = divmod(int(slots[t]), page_size)
        written[page, offset] = True
        want = torch.cat(
            (
                reference.rms_norm(kv_a[t, :rank], weight, 1e-5),
                reference.rope(kv_a[t, rank:], table[positions[t]], interleaved),
            )
        )
        kind = "rounded_bfloat16" if cache_dtype == BF16 else "output_float32"
        assert_close(cache[page, offset], want, kind)
    assert cache[~written].isnan().all()
    assert pool[:, 0].isnan().all()


def test_append_without_norm_and_table_copies_the_row():
    kv_a = torch.randn((3, 24))
    cache = torch.zeros((1, 4, 24))
    ops.mla_append(kv_a, cache, torch.tensor([2, 0, 3]), 16)
    assert torch.equal(cache[0, [2, 0, 3]], kv_a)
    ops.mla_append(kv_a[:0], cache, torch.zeros(0, dtype=torch.int64), 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([4, 0])}, "slots must be in -1..3, got 4"),
        ({"slots": torch.tensor([-2, 0])}, "slots must be in -1..3, got -2"),
        ({"slots": torch.tensor([0, 1, 2])}, "slots"),
        ({"positions": torch.tensor([0, 10], dtype=torch.int32)}, "positions must be in 0..9"),
        ({"positions": torch.tensor([0, -1], dtype=torch.int32)}, "positions must be in 0..9"),
        ({"positions": None}, "positions must be given"),
        ({"kv_lora_rank": 15}, "kv_lora_rank must be a multiple of 4"),
        ({"kv_lora_rank": 28}, "cache rows must hold kv_lora_rank"),
        ({"norm_weight": torch.ones(8)}, "norm_weight"),
        ({"eps": -1.0}, "eps must be in"),
        ({"cos_sin": torch.zeros((10, 4))}, "cos_sin"),
    ],
)
def test_append_names_wrong_arguments_and_writes_nothing(change, message):
    cache = torch.zeros((1, 4, 24))
    arguments = {
        "kv_a": torch.ones((2, 24)),
        "cache": cache,
        "slots": torch.tensor([1, 2]),
        "kv_lora_rank": 16,
        "positions": torch.tensor([0, 9], dtype=torch.int32),
        "cos_sin": torch.zeros((10, 8)),
        "norm_weight": torch.ones(16),
    } | change
    with pytest.raises(ValueError, match=message):
        ops.mla_append(**arguments)
    assert not cache.any()


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("rank", "rope_dim", "nope_dim", "v_dim"),
    [(4, 4, 4, 4), (20, 0, 12, 36), (128, 16, 32, 32), (36, 12, 20, 12)],
)
def test_absorb_and_project_match_the_reference(
    isa, rank, rope_dim, nope_dim, v_dim, dtype, tokens
):
    gen = torch.Generator().manual_seed(2)
    heads = 3
    kv_b = torch.randn((heads * (nope_dim + v_dim), rank), generator=gen).mul(0.2).to(dtype)
    per_head = kv_b.view(heads, nope_dim + v_dim, rank).double()
    w = ops.pack_mla_weights(kv_b, heads, nope_dim, v_dim)
    q = torch.randn((tokens, heads, nope_dim + rope_dim), generator=gen).to(dtype)
    table = reference.cos_sin_table(200, rope_dim)
    positions = torch.arange(100, 100 + tokens, dtype=torch.int32)
    kind = "rounded_bfloat16" if dtype == BF16 else "output_float32"

    fused = ops.mla_absorb(q, w.w_absorb, rank, positions, table if rope_dim else None)
    want = torch.zeros((tokens, heads, rank + rope_dim), dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            want[t, h, :rank] = q[t, h, :nope_dim].double() @ per_head[h, :nope_dim]
            want[t, h, rank:] = reference.rope(q[t, h, nope_dim:], table[positions[t]], True)
    assert_close(fused, want, kind)

    o_lat = torch.randn((tokens, heads, rank), generator=gen).to(dtype)
    out = ops.mla_project_v(o_lat, w.w_uv, v_dim)
    want_v = torch.einsum("thr,hvr->thv", o_lat.double(), per_head[:, nope_dim:]).flatten(1)
    assert_close(out, want_v, kind)

    if rope_dim:
        roped = q.clone()
        ops.rope_q(roped, positions, table)
        assert torch.equal(roped[..., :nope_dim], q[..., :nope_dim])
        assert torch.equal(roped[..., nope_dim:], fused[..., rank:])


def test_scores_do_not_depend_on_the_storage_order_of_the_raw_rope_vectors():
    table = reference.cos_sin_table(50, 8)
    split = torch.randn(2, 1, 12)
    split[..., :4] = 0.0
    pairs = split.clone()
    pairs[..., 4:] = split[..., 4:].view(2, 1, 2, 4).transpose(-1, -2).reshape(2, 1, 8)
    positions = torch.tensor([3, 40], dtype=torch.int32)
    ops.rope_q(split, positions, table, interleaved=False)
    ops.rope_q(pairs, positions, table, interleaved=True)
    assert torch.equal(split, pairs)


def test_rope_of_no_width_and_identity_rotation_give_equal_attention():
    p = make_problem(
        num_q=[2],
        kv_len=[40],
        heads=3,
        rank=16,
        rope_dim=8,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
    )
    identity = torch.cat((torch.ones(50, 4), torch.zeros(50, 4)), dim=1)
    q = p.q.clone()
    ops.rope_q(q, torch.tensor([3, 4], dtype=torch.int32), identity, interleaved=False)
    assert torch.equal(q, p.q)
    p.q[..., 16:] = 0.0
    wide = ops.mla_decode(p.q, *p.ragged, p.scale, 16)
    narrow = ops.mla_decode(
        p.q[..., :16].contiguous(),
        p.cache[..., :16].contiguous(),
        *p.ragged[1:],
        p.scale,
        16,
    )
    assert_close(narrow, wide.double(), "output_float32")


def split_states(
    dtype: torch.dtype, split: int, total: int
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """States of tokens [0, split), [split, total) and [0, total) for the same queries."""
    p = make_problem(
        num_q=[1],
        kv_len=[total],
        heads=5,
        rank=36,
        rope_dim=4,
        page_size=1,
        q_dtype=dtype,
        cache_dtype=dtype,
    )
    whole = ops.mla_decode_stats(p.q, *p.ragged, p.scale, p.rank)
    parts = []
    for begin, end in ((0, split), (split, total)):
        parts.append(
            ops.mla_decode_stats(
                p.q,
                p.cache,
                p.block_table[:, begin:].contiguous(),
                p.cu_q,
                torch.tensor([end - begin], dtype=torch.int32),
                p.scale,
                p.rank,
            )
        )
    return parts, whole


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("split", [0, 1, 150, 299, 300])
def test_merge_of_two_parts_is_the_whole(isa, split, dtype):
    (a, b), whole = split_states(dtype, split, 300)
    out, stats = ops.merge_states(a[0], a[1], b[0], b[1])
    kind = "output_float32" if dtype == F32 else "output_bfloat16"
    assert_close(out, whole[0].double(), kind)
    assert_close(stats, whole[1].double(), "stats_float32")
    want, want_stats = reference.merge(a[0], a[1], b[0], b[1])
    assert_close(out, want, "output_float32" if dtype == F32 else "rounded_bfloat16")
    assert_close(stats, want_stats, "stats_float32")
    if split in (0, 300):
        assert torch.equal(out, whole[0])
        assert torch.equal(stats, whole[1])


@pytest.mark.parametrize("split", [1, 150, 299])
def test_merge_with_statistics_of_another_base_or_sign_would_be_seen(split):
    (a, b), whole = split_states(F32, split, 300)
    natural = [s.clone() for s in (a[1], b[1])]
    for s in natural:
        s[..., 0] /= 1.4427
    out, _ = ops.merge_states(a[0], natural[0], b[0], natural[1])
    with pytest.raises(AssertionError):
        assert_close(out, whole[0].double(), "output_float32")


def test_merge_skips_a_side_of_weight_zero_even_if_it_is_nan(isa):
    o = torch.randn(4, 20)
    bad = torch.full((4, 20), torch.nan)
    stats = torch.tensor([[1.0, 2.0]] * 4)
    empty = torch.tensor(
        [[-torch.inf, 0.0], [5.0, 0.0], [-torch.inf, 3.0], [-400.0, 1.0]]
    )  # no keys, no sum, no maximum, underflow
    for first, second in (((o, stats), (bad, empty)), ((bad, empty), (o, stats))):
        out, merged = ops.merge_states(*first, *second)
        assert torch.equal(out, o)
        assert torch.equal(merged, stats)


def test_merge_of_two_empty_sides_is_empty():
    bad = torch.full((2, 3, 8), torch.nan)
    empty = torch.tensor([-torch.inf, 0.0]).expand(2, 3, 2).contiguous()
    out, stats = ops.merge_states(bad, empty, bad, empty)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(stats, empty)


def test_cost_rule_follows_the_number_of_query_tokens():
    dims = {"kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
    assert ops.absorbed_is_cheaper(1, 4096, **dims)
    assert ops.absorbed_is_cheaper(100, 100_000, **dims)
    assert ops.absorbed_is_cheaper(165, 100_000, **dims)
    assert not ops.absorbed_is_cheaper(185, 100_000, **dims)
    assert not ops.absorbed_is_cheaper(4096, 4096, **dims)


def test_operators_pass_torch_checks_and_compile():
    p = make_problem(
        num_q=[2],
        kv_len=[20],
        heads=2,
        rank=16,
        rope_dim=4,
        page_size=16,
        q_dtype=F32,
        cache_dtype=F32,
        q_width=12,
    )
    kv_b = torch.randn(2 * 16, 16)
    w = ops.pack_mla_weights(kv_b, 2, 8, 8)
    table = reference.cos_sin_table(30, 4)
    positions = torch.tensor([18, 19], dtype=torch.int32)
    fused = ops.mla_absorb(p.q, w.w_absorb, 16, positions, table)
    cache = p.cache.contiguous()
    ragged = (cache, p.block_table, p.cu_q, p.kv_len)
    state = ops.mla_decode_stats(fused, *ragged, 0.2, 16)
    weights = (w.w_uk, w.w_uv)
    calls = {
        "mla_append": (torch.randn(2, 20), torch.zeros(2, 4, 20), torch.tensor([0, 5]), 16),
        "mla_absorb": (p.q, w.w_absorb, 16, positions, table),
        "mla_project_v": (state[0], w.w_uv, 8),
        "rope_q": (p.q.clone(), positions, table),
        "mla_decode": (fused, *ragged, 0.2, 16),
        "mla_decode_stats": (fused, *ragged, 0.2, 16),
        "mla_prefill": (p.q, *ragged, *weights, 0.2, 16, 8),
        "mla_prefill_stats": (p.q, *ragged, *weights, 0.2, 16, 8),
        "merge_states": (*state, *state),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.helicore, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))

    def step(q: Tensor) -> Tensor:
        fused = ops.mla_absorb(q, w.w_absorb, 16, positions, table)
        return ops.mla_project_v(ops.mla_decode(fused, *ragged, 0.2, 16), w.w_uv, 8)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(p.q), step(p.q))
