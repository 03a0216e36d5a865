"""A model that checks its inputs: every step it re-reads the whole history of each sequence from
the cache, through the block table, and makes logits from it by a hash.

A row of layer i for token t at position p is (t, p, i, 1): one page mixed up, written late or
given away too early, and an assertion fails. The logits of a position depend on all tokens before
it and on nothing else, so what a sequence must produce is known without any scheduling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helicore.config import EngineConfig, KVCacheConfig, SchedulerConfig
from helicore.executor.engine import Engine
from helicore.models import ForwardBatch, ModelConfig
from numpy.typing import NDArray
from torch import Tensor

VOCAB = 50
EOS = 1
MAX_LEN = 200
NUM_LAYERS = 2
ROW = 32  # elements; four are in use. A page of 16 tokens fills the pool's grain of 4 KiB
POISON = float("nan")


def fake_config(**overrides: Any) -> ModelConfig:
    """A valid configuration; only what the executor reads of it matters."""
    fields: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    return ModelConfig.from_dict(fields | overrides)


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    """fp32 [VOCAB], a function of the tokens alone."""
    key = np.array(tokens, np.int32).tobytes()
    digest = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(digest).standard_normal(VOCAB).astype(np.float32)


def greedy_output(prompt: Sequence[int], max_tokens: int, *, eos: bool = True) -> list[int]:
    """What greedy sampling must give, the end-of-sequence token included."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
        if eos and tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """Stands in for a CausalLM."""

    def __init__(self, **overrides: Any) -> None:
        self.config = fake_config(**overrides)
        self.batches: list[tuple[int, int]] = []
        """(requests, tokens) of each call."""
        self.computed: list[tuple[int, int]] = []
        """(first position, tokens) of each request of each call."""
        self.last_batch: ForwardBatch | None = None
        self.broken_token: int | None = None
        """A token that makes the whole call fail."""
        self.weight = torch.zeros(1)
        """What tells two models apart."""

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return [("weight", self.weight)]

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return []

    def kv_layers(self, config: ModelConfig, dtype: torch.dtype) -> list[int]:
        return [ROW] * NUM_LAYERS

    def __call__(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        num_requests, num_tokens = len(batch.kv_len), len(batch.token_ids)
        self.batches.append((num_requests, num_tokens))
        self.last_batch = batch
        if self.broken_token is not None and self.broken_token in batch.token_ids.tolist():
            raise RuntimeError(f"token {self.broken_token} broke the step")
        self._check_shapes(batch)
        cu_q = batch.cu_q.tolist()
        histories: dict[int, list[int]] = {}
        for request in range(num_requests):
            begin, end = cu_q[request], cu_q[request + 1]
            self._append(batch, request, begin, end, caches)
            history = self._read(batch, request, caches)
            first = len(history) - (end - begin)
            self.computed.append((first, end - begin))
            for row in range(begin, end):
                histories[row] = history[: first + row - begin + 1]
        rows = [logits_after(histories[row]) for row in batch.logits_rows.tolist()]
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCAB))

    def _check_shapes(self, batch: ForwardBatch) -> None:
        num_tokens = len(batch.token_ids)
        assert batch.token_ids.dtype == batch.positions.dtype == torch.int32
        assert batch.cu_q.dtype == batch.kv_len.dtype == batch.block_table.dtype == torch.int32
        assert batch.slots.dtype == batch.logits_rows.dtype == torch.int64
        assert batch.cu_q[0] == 0
        assert batch.cu_q[-1] == num_tokens == len(batch.positions) == len(batch.slots)
        assert batch.block_table.is_contiguous()
        assert len(batch.block_table) == len(batch.kv_len) == len(batch.cu_q) - 1
        assert batch.num_absorbed_tokens == int(batch.cu_q[batch.num_absorbed])
        assert len(set(batch.slots.tolist())) == num_tokens, "two tokens share a slot"

    def _append(
        self, batch: ForwardBatch, request: int, begin: int, end: int, caches: Sequence[Tensor]
    ) -> None:
        kv_len, page_size = int(batch.kv_len[request]), caches[0].shape[1]
        assert end > begin
        positions = np.arange(kv_len - (end - begin), kv_len)
        assert (batch.positions[begin:end].numpy() == positions).all()
        pages = batch.block_table[request].numpy()[positions // page_size].astype(np.int64)
        offsets = positions % page_size
        assert (batch.slots[begin:end].numpy() == pages * page_size + offsets).all()
        rows = np.full((end - begin, ROW), POISON, np.float32)
        rows[:, 0] = batch.token_ids[begin:end].numpy()
        rows[:, 1] = positions
        rows[:, 3] = 1
        for layer, cache in enumerate(caches):
            rows[:, 2] = layer
            cache.numpy()[pages, offsets] = rows

    def _read(self, batch: ForwardBatch, request: int, caches: Sequence[Tensor]) -> list[int]:
        page_size = caches[0].shape[1]
        positions = np.arange(int(batch.kv_len[request]))
        pages = batch.block_table[request].numpy()[positions // page_size]
        tokens: list[int] = []
        for layer, cache in enumerate(caches):
            rows = cache.numpy()[pages, positions % page_size, :4]
            assert (rows[:, 1] == positions).all(), f"layer {layer} of request {request}: {rows}"
            assert (rows[:, 2] == layer).all()
            assert (rows[:, 3] == 1).all()
            found = rows[:, 0].astype(np.int64).tolist()
            assert not layer or found == tokens
            tokens = found
        return tokens


def fake_engine(
    *,
    num_pages: int = 64,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int | None = None,
    enable_prefix_caching: bool = True,
    max_concurrent_prefills: int = 8,
    seed: int = 0,
    weight: float = 0,
    disk: Path | None = None,
    disk_pages: int = 256,
    swap_pages: int = 0,
    swap_disk_pages: int = 0,
    swap_path: Path | None = None,
    **overrides: Any,
) -> tuple[Engine, FakeModel]:
    """An engine over a FakeModel with a pool of num_pages pages (more for tiny pages).

    swap_pages: of the host level below it; swap_disk_pages: of the level in files of swap_path.
    """
    page_bytes = block_size * ROW * NUM_LAYERS * 4
    config = EngineConfig(
        max_model_len=max_model_len,
        seed=seed,
        kv_cache=KVCacheConfig(
            block_size=block_size,
            host_gb=num_pages * page_bytes / 2**30,
            enable_prefix_caching=enable_prefix_caching,
            disk_path=None if disk is None else str(disk),
            disk_gb=0 if disk is None else disk_pages * page_bytes / 2**30,
            swap_host_gb=swap_pages * page_bytes / 2**30,
            swap_disk_gb=swap_disk_pages * page_bytes / 2**30,
            swap_path=None if swap_path is None else str(swap_path),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_concurrent_prefills=max_concurrent_prefills,
        ),
    )
    model = FakeModel(**overrides)
    model.weight.fill_(weight)
    return Engine(config, model=model), model  # type: ignore[arg-type]
