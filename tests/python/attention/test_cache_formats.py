"""Quantised caches: what append writes, and attention over it against float64 on what it holds.

The tolerances are those of dense bfloat16 caches: the reference reads the same dequantised values,
so the error of the format is not in them. It is recorded apart, in
`test_the_error_of_each_format_is_recorded`.
"""

from collections.abc import Callable

import pytest
import torch
from attention.conftest import assert_close
from attention.problem import ABSURD_PAGE, Problem, make_problem
from attention.test_prefill import expanded_dtype, make_weights
from helicore import _core, ops
from reference import cache_formats
from reference import mla as reference
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
CODINGS = [("fp8", 1.0), ("fp8", 0.37), ("fp8_ds_mla", 1.0), ("nvfp4", 2.0**-6)]
RANK, ROPE = 128, 16


class Quantised:
    """The twin of a problem: its rows quantised, 0xff (NaN of every kind) where no token lies; the
    problem's cache becomes what the twin holds, as float64."""

    def __init__(self, problem: Problem, name: str, scale: float) -> None:
        self.problem, self.coding = problem, (name, scale)
        dense, rank = problem.cache, problem.rank
        num_pages, page_size, width = dense.shape
        size = cache_formats.row_bytes(name, rank, width - rank)
        pool = torch.full((num_pages, 2, page_size, size), 0xFF, dtype=torch.uint8)
        self.cache = pool[:, 1]
        owned = ~dense[..., 0].isnan()
        slots = owned.flatten().nonzero().flatten()
        rows = dense[owned].float()
        ops.mla_append(rows, self.cache, slots, rank, cache_format=name, cache_scale=scale)
        assert bool((pool[:, 0] == 0xFF).all())
        problem.cache = cache_formats.unpack(self.cache, name, rank, width - rank, scale)

    def decode(self, kv_bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p = self.problem
        ragged = (self.cache, *p.ragged[1:])
        return ops.mla_decode_stats(p.q, *ragged, p.scale, p.rank, kv_bound, *self.coding)

    def check(self, kv_bound: Tensor | None = None) -> None:
        p = self.problem
        out, stats = self.decode(kv_bound)
        want, want_stats = reference.absorbed(p.q, *p.ragged, p.scale, p.rank, kv_bound)
        assert_close(out, want, "output_float32" if p.q.dtype == F32 else "output_bfloat16")
        assert_close(stats, want_stats, "stats_float32")


def quantised(name: str, scale: float, **options: object) -> Quantised:
    arguments: dict[str, object] = {
        "num_q": [1, 3, 1],
        "kv_len": [1, 131, 200],
        "heads": 6,
        "rank": RANK,
        "rope_dim": ROPE,
        "page_size": 64,
        "q_dtype": BF16,
        "cache_dtype": F32,
    }
    return Quantised(make_problem(**(arguments | options)), name, scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "scale"), CODINGS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("rank", "rope_dim"), [(128, 16), (512, 64), (256, 0)])
def test_append_writes_the_bytes_of_the_format(isa, name, scale, page_size, dtype, rank, rope_dim):
    gen = torch.Generator().manual_seed(rank + page_size)
    num_pages, tokens = 6, 5
    size = cache_formats.row_bytes(name, rank, rope_dim)
    pool = torch.full((num_pages, 2, page_size, size), 0xFF, dtype=torch.uint8)
    cache = pool[:, 1]
    rows = torch.randn((tokens, rank + rope_dim), generator=gen)
    rows *= torch.exp2(torch.randint(-12, 9, rows.shape, generator=gen))
    rows[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    rows[1] = 0.0
    rows = rows.to(dtype)
    slots = torch.randperm(num_pages * page_size, generator=gen)[:tokens]
    slots[2] = -1
    ops.mla_append(rows, cache, slots, rank, cache_format=name, cache_scale=scale)
    dense = torch.zeros((num_pages, page_size, rank + rope_dim))
    written = torch.zeros((num_pages, page_size), dtype=torch.bool)
    for t in range(tokens):
        if slots[t] >= 0:
            at = divmod(int(slots[t]), page_size)
            dense[at], written[at] = rows[t].float(), True
    want = cache_formats.unpack(
        cache_formats.pack(dense, name, rank, scale), name, rank, rope_dim, scale
    )
    got = cache_formats.unpack(cache, name, rank, rope_dim, scale)
    assert torch.equal(got[written], want[written])
    assert got[~written].isnan().all()
    assert (pool[:, 0] == 0xFF).all()
    assert got[written][:, :rank].isfinite().all()


@pytest.mark.parametrize(("name", "scale"), CODINGS)
def test_append_quantises_the_normed_and_rotated_row(isa, name, scale):
    gen = torch.Generator().manual_seed(4)
    kv_a = torch.randn((9, 512 + 64), generator=gen).bfloat16()
    weight = torch.rand(512, generator=gen).bfloat16() + 0.5
    table = reference.cos_sin_table(100, 64)
    positions = torch.randperm(100, generator=gen)[:9].int()
    dense = torch.zeros((1, 16, 576))
    rest = (torch.arange(9), 512, positions, table, weight, 1e-6, True)
    ops.mla_append(kv_a, dense, *rest)
    cache = torch.zeros((1, 16, cache_formats.row_bytes(name, 512, 64)), dtype=torch.uint8)
    ops.mla_append(kv_a, cache, *rest, name, scale)
    want = cache_formats.round_trip(dense[0, :9], name, 512, scale)
    got = cache_formats.unpack(cache, name, 512, 64, scale)[0, :9]
    assert torch.equal(got.float(), want)


@pytest.mark.parametrize(("name", "scale"), CODINGS)
@pytest.mark.parametrize("q_dtype", [BF16, F32])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_decode_matches_the_reference_on_the_dequantised_cache(page_size, q_dtype, name, scale):
    quantised(name, scale, page_size=page_size, q_dtype=q_dtype).check()


@pytest.mark.parametrize(("name", "scale"), CODINGS)
@pytest.mark.parametrize(("rank", "rope_dim", "heads"), [(512, 64, 16), (256, 0, 3), (128, 4, 1)])
def test_decode_matches_at_other_widths_and_head_counts(isa, rank, rope_dim, heads, name, scale):
    quantised(name, scale, rank=rank, rope_dim=rope_dim, heads=heads).check()


@pytest.mark.parametrize(("name", "scale"), CODINGS)
def test_long_contexts_of_many_chunks_match(name, scale):
    quantised(name, scale, num_q=[1, 2], kv_len=[9001, 2049], heads=2).check()


@pytest.mark.parametrize(("name", "scale"), CODINGS)
def test_empty_rows_give_zero_and_poison_past_a_bound_is_not_read(isa, name, scale):
    twin = quantised(name, scale, num_q=[3, 1], kv_len=[100, 0], page_size=16)
    p = twin.problem
    p.block_table[0, 3:] = ABSURD_PAGE
    bound = torch.tensor([48, 0, 17, 0], dtype=torch.int32)
    twin.check(bound)
    out, stats = twin.decode(bound)
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    assert torch.equal(stats[3], torch.tensor([[-torch.inf, 0.0]]).expand(6, 2))


@pytest.mark.parametrize(("name", "scale"), CODINGS)
@pytest.mark.parametrize("q_dtype", [BF16, F32])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_prefill_matches_the_reference_on_the_dequantised_cache(page_size, q_dtype, name, scale):
    check_prefill(name, scale, page_size=page_size, q_dtype=q_dtype)


@pytest.mark.parametrize(("name", "scale"), CODINGS)
@pytest.mark.parametrize("q_dtype", [BF16, F32])
def test_prefill_matches_on_every_instruction_set(isa, q_dtype, name, scale):
    check_prefill(name, scale, num_q=[3, 34], kv_len=[3, 70], q_dtype=q_dtype)


def check_prefill(name: str, scale: float, **options: object) -> None:
    heads, nope, v = 3, 32, 32
    ragged = {"num_q": [4, 70, 5], "kv_len": [4, 130, 77], "heads": heads, "q_width": nope + ROPE}
    twin = quantised(name, scale, **(ragged | options))
    p = twin.problem
    q_dtype = p.q.dtype
    w_uk, w_uv, packed = make_weights(heads, nope, v, RANK, q_dtype)
    weights = (packed.w_uk, packed.w_uv, p.scale, RANK, v)
    out, stats = ops.mla_prefill_stats(p.q, twin.cache, *p.ragged[1:], *weights, *twin.coding)
    rounded = expanded_dtype(q_dtype)
    want, want_stats = reference.expanded(p.q, *p.ragged, w_uk, w_uv, p.scale, rounded)
    # Keys and values are rounded before the scale of "fp8" comes in: at places of their own.
    kind = "forms_bfloat16" if scale == 0.37 else "output_bfloat16"
    assert_close(out, want, kind if q_dtype == BF16 else "output_float32")
    if scale != 0.37:
        kind = "stats_bfloat16" if rounded == BF16 else "stats_float32"
        assert_close(stats, want_stats, kind)


@pytest.mark.parametrize(("name", "scale"), CODINGS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_thread_count(isa, name, scale):
    before = _core.core.num_threads()
    twin = quantised(name, scale, num_q=[1, 3, 2], kv_len=[5, 700, 2300], heads=12)
    p = twin.problem
    try:
        _core.core.set_num_threads(1)
        want, want_stats = twin.decode()
        for threads in (2, 5):
            _core.core.set_num_threads(threads)
            out, stats = twin.decode()
            assert torch.equal(out, want)
            assert torch.equal(stats, want_stats)
        for b in range(3):
            rows = slice(int(p.cu_q[b]), int(p.cu_q[b + 1]))
            alone = ops.mla_decode(
                p.q[rows].contiguous(),
                twin.cache,
                p.block_table[b : b + 1],
                torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                p.kv_len[b : b + 1],
                p.scale,
                p.rank,
                None,
                *twin.coding,
            )
            assert torch.equal(alone, want[rows])
    finally:
        _core.core.set_num_threads(before)


def _swap_nibbles(cache: Tensor) -> None:
    codes = cache.view(cache.shape[0], -1)[:, : cache.shape[1] * RANK // 2]
    codes.copy_(codes << 4 | codes >> 4)


def _shift_group_scales(cache: Tensor) -> None:
    cache[..., RANK : RANK + 4] = cache[..., RANK : RANK + 4].roll(1, 1)


@pytest.mark.parametrize(
    ("name", "scale", "damage"),
    [
        ("fp8", 1.0, lambda cache: cache.copy_(cache.roll(1, -1))),
        ("fp8_ds_mla", 1.0, _shift_group_scales),
        ("nvfp4", 2.0**-6, _swap_nibbles),
    ],
)
def test_the_tolerance_sees_wrong_bytes_and_a_wrong_scale(
    name: str, scale: float, damage: Callable[[Tensor], None]
) -> None:
    twin = quantised(name, scale, cache_dtype=F32, kv_len=[64, 128, 192])
    rows = torch.randn(twin.problem.cache.shape) * torch.exp2(-(torch.arange(64) % 4))[:, None]
    ops.mla_append(
        rows.view(-1, rows.shape[-1]),
        twin.cache,
        torch.arange(rows.shape[0] * rows.shape[1]),
        RANK,
        cache_format=name,
        cache_scale=scale,
    )
    twin.problem.cache = cache_formats.unpack(twin.cache, name, RANK, ROPE, scale)
    want, _ = reference.absorbed(
        twin.problem.q, *twin.problem.ragged, twin.problem.scale, twin.problem.rank
    )
    assert_close(twin.decode()[0], want, "output_bfloat16")
    whole = twin.cache.clone()
    damage(twin.cache)
    with pytest.raises(AssertionError):
        assert_close(twin.decode()[0], want, "output_bfloat16")
    twin.cache.copy_(whole)
    if name != "fp8_ds_mla":
        twin.coding = (name, scale * 2)
        with pytest.raises(AssertionError):
            assert_close(twin.decode()[0], want, "output_bfloat16")


OUTPUT_ERRORS = {"fp8": 0.08, "fp8_ds_mla": 0.08, "nvfp4": 0.2}
"""Bounds of the relative difference of an output over 500 normal rows."""


@pytest.mark.parametrize(("name", "scale"), [CODINGS[0], CODINGS[2], CODINGS[3]])
def test_the_error_of_each_format_is_that_of_its_bits(name, scale, record_property):
    """What quantising costs an output of normal rows, in float64: some, and within its rounding."""
    p = make_problem(
        num_q=[1],
        kv_len=[500],
        heads=16,
        rank=512,
        rope_dim=64,
        page_size=64,
        q_dtype=F32,
        cache_dtype=F32,
    )
    want, _ = reference.absorbed(p.q, *p.ragged, p.scale, p.rank)
    Quantised(p, name, scale)
    got, _ = reference.absorbed(p.q, *p.ragged, p.scale, p.rank)
    error = float((got - want).norm() / want.norm())
    record_property(f"relative_rms_{name}", error)
    assert 1e-3 < error < OUTPUT_ERRORS[name], error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_format": "fp16"}, "cache_format must be one of auto, fp8, fp8_ds_mla, nvfp4"),
        ({"cache_format": "nvfp4"}, "cache rows must have 72 bytes"),
        ({"cache_format": "auto"}, "cache must be bfloat16 or float32"),
        ({"cache_scale": 0.0}, "cache_scale must be in"),
        ({"cache_scale": float("inf")}, "cache_scale must be in"),
        ({"kv_lora_rank": 126}, "kv_lora_rank must be a multiple of 4"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "kv_a": torch.zeros((1, RANK + ROPE)),
        "cache": torch.zeros(
            (1, 4, RANK + ROPE - 2 * (change.get("cache_format") == "nvfp4")), dtype=torch.uint8
        ),
        "slots": torch.zeros(1, dtype=torch.int64),
        "kv_lora_rank": RANK,
        "cache_format": "fp8",
    }
    with pytest.raises(ValueError, match=message):
        ops.mla_append(**(arguments | change))


def test_row_bytes_are_the_published_ones_and_misfits_are_named():
    sizes = [ops.cache_row_bytes(name, 512, 64) for name in ("float32", "bfloat16")]
    assert sizes == [2304, 1152]
    for name in cache_formats.FORMATS:
        for widths in ((512, 64), (128, 16), (256, 0)):
            assert ops.cache_row_bytes(name, *widths) == cache_formats.row_bytes(name, *widths)
    with pytest.raises(ValueError, match="kv_lora_rank must be a multiple of 128"):
        ops.cache_row_bytes("fp8_ds_mla", 64, 16)
    with pytest.raises(ValueError, match="kv_lora_rank must be a multiple of 64"):
        ops.cache_row_bytes("nvfp4", 96, 16)
    with pytest.raises(ValueError, match="rope width"):
        ops.cache_row_bytes("fp8", 64, 6)


def test_a_rope_width_without_a_table_is_bounded_like_one_with_it():
    with pytest.raises(ValueError, match="rope width must be at most 1024"):
        ops.mla_append(
            torch.zeros((1, 4 + 1028)), torch.zeros((1, 4, 4 + 1028)), torch.tensor([0]), 4
        )


@pytest.mark.parametrize(("name", "scale"), CODINGS)
def test_operators_pass_the_checks_of_torch(name, scale):
    twin = quantised(name, scale)
    p = twin.problem
    decode = (p.q, twin.cache, *p.ragged[1:], p.scale, p.rank, None, *twin.coding)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.helicore.mla_decode.default, decode, test_utils=checks)
    append = (torch.randn((2, RANK + ROPE)), twin.cache.clone(), torch.tensor([0, 5]), RANK)
    options = {"cache_format": name, "cache_scale": scale}
    operator = torch.ops.helicore.mla_append.default
    torch.library.opcheck(operator, append, options, test_utils=checks)
