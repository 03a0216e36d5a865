"""What a GPU runner does on the host: buckets, padding, uploads."""

from __future__ import annotations

import pytest
import torch
from helicore import ops
from helicore.executor.cuda_runner import Uploads, bucket_of, pad_decode, upload_bytes
from helicore.models.base import ForwardBatch
from helicore.ops import _cuda_attention


def decode_batch(count: int, max_pages: int = 5) -> ForwardBatch:
    iota = torch.arange(count + 1, dtype=torch.int32)
    return ForwardBatch(
        token_ids=iota[1:] * 3,
        positions=iota[1:] * 2,
        slots=iota[1:].long() * 7,
        cu_q=iota,
        kv_len=iota[1:] * 2 + 1,
        block_table=torch.arange(count * max_pages, dtype=torch.int32).view(count, max_pages),
        num_absorbed=count,
        num_absorbed_tokens=count,
        logits_rows=iota[:count].long(),
    )


def test_a_bucket_holds_its_batch_and_never_more_than_the_scheduler_runs() -> None:
    for most in (1, 3, 16, 100, 1000):
        for count in range(1, min(most, 256) + 1):
            bucket = bucket_of(count, most)
            assert bucket is not None
            assert count <= bucket <= most
    assert bucket_of(257, 1000) is None
    assert len({bucket_of(count, 256) for count in range(1, 257)}) <= 20


@pytest.mark.parametrize("count", [1, 3, 8])
def test_padded_rows_read_nothing_and_write_nothing(count: int) -> None:
    batch = pad_decode(decode_batch(count), 8)
    assert batch.token_ids.shape[0] == batch.kv_len.shape[0] == 8
    assert batch.num_absorbed == batch.num_absorbed_tokens == 8
    assert batch.cu_q.tolist() == list(range(9))
    assert batch.slots.tolist()[count:] == [-1] * (8 - count)
    assert batch.kv_len.tolist()[count:] == [0] * (8 - count)
    assert batch.slots.tolist()[:count] == decode_batch(count).slots.tolist()


def test_an_upload_carries_every_part_to_the_same_place_each_time() -> None:
    uploads = Uploads(torch.device("cpu"), upload_bytes(16, 8, 5))
    first = uploads.upload(decode_batch(4))
    want = decode_batch(4)
    places = []
    for name in ("token_ids", "positions", "cu_q", "kv_len", "block_table", "slots", "logits_rows"):
        part = getattr(first, name)
        assert torch.equal(part, getattr(want, name)), name
        places.append(part.data_ptr())
    assert len(set(places)) == len(places)
    again = uploads.upload(decode_batch(4))
    assert again.slots.data_ptr() == first.slots.data_ptr()


def test_the_largest_step_fits_the_upload_memory() -> None:
    tokens, sequences, pages = 33, 7, 11
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int32),
        slots=torch.zeros(tokens, dtype=torch.int64),
        cu_q=torch.zeros(sequences + 1, dtype=torch.int32),
        kv_len=torch.zeros(sequences, dtype=torch.int32),
        block_table=torch.zeros(sequences, pages, dtype=torch.int32),
        num_absorbed=0,
        num_absorbed_tokens=0,
        logits_rows=torch.zeros(tokens + sequences, dtype=torch.int64),
    )
    size = upload_bytes(tokens, sequences, pages)
    uploaded = Uploads(torch.device("cpu"), size).upload(batch)
    assert torch.equal(uploaded.logits_rows, batch.logits_rows)  # the last part, whole
    with pytest.raises(RuntimeError):
        Uploads(torch.device("cpu"), size // 2).upload(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads_at_once", [1, 3, 8])
def test_expanded_attention_by_torch_is_that_of_the_native_kernel(
    dtype: torch.dtype, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    heads, nope, rope, v, rank, page = 8, 16, 8, 12, 24, 4
    kv_b = (torch.randn(heads * (nope + v), rank) / 5).to(dtype)
    shaped = kv_b.view(heads, nope + v, rank)
    cache = torch.randn(9, page, rank + rope).to(dtype)
    table = torch.tensor([[3, 1, 7, 0], [2, 5, 99, 99], [8, 99, 99, 99]], dtype=torch.int32)
    kv_len = torch.tensor([14, 6, 3], dtype=torch.int32)
    cu_q = torch.tensor([0, 5, 5, 8], dtype=torch.int32)
    q = torch.randn(8, heads, nope + rope).to(dtype)
    packed = ops.pack_mla_weights(kv_b, heads, nope, v)
    per_head = 14 * (nope + rope + v) * dtype.itemsize
    monkeypatch.setattr(_cuda_attention, "_MAX_EXPANDED_BYTES", heads_at_once * per_head)
    got = _cuda_attention.mla_prefill(
        q, cache, table, cu_q, kv_len, shaped[:, :nope], shaped[:, nope:], 0.2, rank, v
    )
    want = ops.mla_prefill(q, cache, table, cu_q, kv_len, packed.w_uk, packed.w_uv, 0.2, rank, v)
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)
