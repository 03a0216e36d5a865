"""Quantised caches on a GPU: bytes and attention of their CPU twins, values of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from helicore import LLM, KVCacheConfig, SamplingParams, ops
from helicore._core import attention
from reference.cache_formats import FORMATS, pack, round_trip, row_bytes, unpack
from reference.latent_batch import RAGGED, Batch, make_batch
from torch import Tensor

SCALES = {"fp8": 0.02, "fp8_ds_mla": 1.0, "nvfp4": 2.0**-6}
NAN_CODES = 0xFF


def quantise(batch: Batch, name: str) -> Batch:
    """The same rows as bytes; rows that no request has are NaN codes."""
    pages = batch.cache.float()
    unused = pages.isnan().all(-1)
    coded = pack(pages.nan_to_num(0.0), name, batch.rank, SCALES[name])
    if name == "nvfp4":  # planes: only whole pages can be spoilt
        coded[unused.all(-1)] = NAN_CODES
    else:
        coded[unused] = NAN_CODES
    return Batch(
        batch.q, coded, batch.block_table, batch.cu_q, batch.kv_len, batch.rank, batch.scale
    )


def decode_on_cpu(b: Batch, name: str) -> Tensor:
    return ops.mla_decode(
        b.q, b.cache, b.block_table, b.cu_q, b.kv_len, b.scale, b.rank, None, name, SCALES[name]
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_append_writes_the_bytes_of_the_cpu(name: str, dtype: torch.dtype, page: int) -> None:
    torch.manual_seed(0)
    rank, rope, tokens = 512, 64, 37
    kv_a = torch.randn(tokens, rank + rope) * torch.logspace(-3, 2, tokens)[:, None]
    kv_a[3, 5], kv_a[4, 7], kv_a[5] = math.nan, math.inf, 0.0
    kv_a = kv_a.to(dtype)
    num_pages = -(-tokens // page) + 1
    cache = torch.full((num_pages, page, row_bytes(name, rank, rope)), 7, dtype=torch.uint8)
    slots = torch.randperm(num_pages * page)[:tokens]
    slots[1] = -1
    positions = torch.zeros(tokens, dtype=torch.int32)  # no rotation: the products round alike
    table = torch.cat([torch.ones(1, rope // 2), torch.zeros(1, rope // 2)], 1)
    on_gpu = cache.cuda()
    rest = (None, 1e-6, True, name, SCALES[name])
    ops.mla_append(kv_a, cache, slots, rank, positions, table, *rest)
    ops.mla_append(kv_a.cuda(), on_gpu, slots.cuda(), rank, positions.cuda(), table.cuda(), *rest)
    assert torch.equal(on_gpu.cpu(), cache)
    assert bool((cache != 7).any())


@pytest.mark.parametrize("name", FORMATS)
def test_append_norms_and_rotates_like_the_cpu(name: str) -> None:
    torch.manual_seed(1)
    rank, rope, tokens, page = 512, 64, 64, 64
    kv_a, weight = torch.randn(tokens, rank + rope).bfloat16(), torch.rand(rank).bfloat16() + 0.5
    cache = torch.zeros((1, page, row_bytes(name, rank, rope)), dtype=torch.uint8)
    slots, positions = torch.arange(tokens), torch.arange(tokens, dtype=torch.int32) * 97
    angles = torch.arange(tokens * 97)[:, None] * torch.logspace(0, -4, rope // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    on_gpu = cache.cuda()
    rest = (1e-6, True, name, SCALES[name])
    ops.mla_append(kv_a, cache, slots, rank, positions, table, weight, *rest)
    args = [t.cuda() for t in (kv_a, slots, positions, table, weight)]
    ops.mla_append(args[0], on_gpu, args[1], rank, *args[2:], *rest)
    want = unpack(cache, name, rank, rope, SCALES[name])
    got = unpack(on_gpu.cpu(), name, rank, rope, SCALES[name])
    off = (got - want).abs() > 1e-6
    assert off.double().mean() < 1e-3  # a sum in another order may round to the next code
    assert float((got - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_decode_is_that_of_the_cpu(name: str, page: int, heads: int) -> None:
    batch = quantise(make_batch(RAGGED, page=page, heads=heads), name)
    want = decode_on_cpu(batch, name).float()
    b = batch.to("cuda")
    got, stats = ops.mla_decode_stats(
        b.q, b.cache, b.block_table, b.cu_q, b.kv_len, b.scale, b.rank, None, name, SCALES[name]
    )
    assert not got.isnan().any()
    torch.testing.assert_close(got.cpu().float(), want, atol=2e-2, rtol=2e-2)
    empty = torch.arange(8)[batch.kv_len == 0]
    for request in empty.tolist():
        row = int(batch.cu_q[request])
        assert bool((stats[row, :, 1] == 0).all())


@pytest.mark.parametrize("name", FORMATS)
def test_decode_sees_the_quantised_rows_and_no_others(name: str) -> None:
    """Against float64 over the rounded rows; the rows before rounding are further off."""
    dense = make_batch([(1, 4096), (2, 777)], heads=16)
    batch = quantise(dense, name).to("cuda")
    rows = unpack(quantise(dense, name).cache, name, 512, 64, SCALES[name])

    def reference(cache: Tensor) -> Tensor:
        out = []
        for i, n in enumerate(dense.kv_len.tolist()):
            lo, hi = int(dense.cu_q[i]), int(dense.cu_q[i + 1])
            keys = cache[dense.block_table[i, : -(-n // 64)].long()].flatten(0, 1)[:n].double()
            for t in range(lo, hi):
                seen = keys[: n - (hi - lo) + 1 + t - lo]
                weights = torch.softmax(dense.q[t].double() @ seen.T * dense.scale, -1)
                out.append(weights @ seen[:, :512])
        return torch.stack(out)

    b = batch
    got = ops.mla_decode(
        b.q, b.cache, b.block_table, b.cu_q, b.kv_len, b.scale, b.rank, None, name, SCALES[name]
    )
    want = reference(rows)
    error = float((got.cpu().double() - want).norm() / want.norm())
    of_format = float((reference(dense.cache) - want).norm() / want.norm())
    assert error < 5e-3
    assert of_format > 2 * error


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rank", "rope", "heads"), [(128, 16, 6), (512, 0, 16), (256, 32, 12)])
def test_other_widths_and_float32_queries(name: str, rank: int, rope: int, heads: int) -> None:
    batch = quantise(
        make_batch(RAGGED[:6], heads=heads, rank=rank, rope=rope, page=16, dtype=torch.float32),
        name,
    )
    b = batch.to("cuda")
    got = ops.mla_decode(
        b.q, b.cache, b.block_table, b.cu_q, b.kv_len, b.scale, b.rank, None, name, SCALES[name]
    )
    torch.testing.assert_close(got.cpu(), decode_on_cpu(batch, name), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_gathered_rows_are_the_values_of_the_reference(name: str) -> None:
    torch.manual_seed(2)
    rows = torch.randn(5, 16, 576)
    pages = torch.tensor([3, 0, 4], dtype=torch.int32)
    want = round_trip(rows[pages.long()].reshape(48, 576), name, 512, SCALES[name])[:41]
    out = torch.empty(41, 576, device="cuda")
    coded = pack(rows, name, 512, SCALES[name]).cuda()
    attention.cuda_gather_rows(coded, pages.cuda(), out, 512, name, SCALES[name])
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("name", FORMATS)
def test_engine_with_a_quantised_cache_gives_the_tokens_of_the_cpu(name: str) -> None:
    prompts = [f"# example {i}\ndef f{i}(x):\n    return x + " + "1 + " * (5 * i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def run(device: str) -> list[list[int]]:
        memory = {"gpu_gb": 0.1} if device == "cuda" else {"host_gb": 0.1}
        with LLM(
            "tiny",
            device=device,
            dtype="float32",
            max_model_len=256,
            kv_cache=KVCacheConfig(dtype=name, block_size=16, **memory),
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

    want, got = run("cpu"), run("cuda")
    same = sum(a == b for a, b in zip(want, got, strict=True))
    assert same >= len(prompts) - 1  # a code may round the other way
