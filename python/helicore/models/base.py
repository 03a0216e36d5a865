"""What the executor and a model agree on: one step's inputs, and the model's interface."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from helicore import ops
from helicore.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. All tensors are on the model's device, contiguous; T tokens of B requests.

    Requests are in the order of their query tokens; those that run the absorbed kernel (few query
    tokens: decode, small chunks) come first. A caller that fills the tensors anew may pass the same
    object again: a model may keep what follows from their memory and shapes, never from contents.
    """

    token_ids: Tensor
    """int32 [T], each in [0, vocab_size)."""
    positions: Tensor
    """int32 [T], each in [0, max_position_embeddings)."""
    slots: Tensor
    """int64 [T], where a token's row goes: page * page_size + offset in the page; -1 = nowhere."""
    cu_q: Tensor
    """int32 [B + 1], request b owns tokens cu_q[b] .. cu_q[b + 1]."""
    kv_len: Tensor
    """int32 [B], rows of the request that are in the cache after this step's append."""
    block_table: Tensor
    """int32 [B, max_pages]; entries past ceil(kv_len / page_size) are arbitrary."""
    num_absorbed: int
    """The first `num_absorbed` requests run the absorbed kernel, the rest the expanded one."""
    num_absorbed_tokens: int
    """cu_q[num_absorbed], kept on the host."""
    logits_rows: Tensor
    """int64 [n], tokens (rows of the hidden states) whose logits are wanted."""
    host_cu_q: Tensor | None = None
    """cu_q in host memory, where the batch is on a GPU and has expanded requests."""
    host_kv_len: Tensor | None = None
    """kv_len likewise."""
    cache_format: str = "auto"
    """How rows of all layers are coded, as in `helicore.ops`; "auto" where they are dense."""
    kv_bound: Tensor | None = None
    """int32 [T], where ranks split the sequence: rows of this rank's cache that a token sees."""
    local_kv_len: Tensor | None = None
    """int32 [B] likewise: rows of the request in this rank's cache after the append; kv_len counts
    those of all ranks."""


class CausalLM(nn.Module):
    """A decoder-only language model over a paged latent cache.

    Weights are buffers (they are packed for the kernels and never trained), so `to()` moves them.
    The cache belongs to the caller: `caches[i]` is the strided view [num_pages, page_size, width]
    of layer i, bf16 or fp32 with the width that `kv_layers` names, or uint8 with the bytes of
    `kv_row_bytes` where the batch names a quantised format.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def kv_layers(cls, config: ModelConfig, cache_dtype: torch.dtype) -> list[int]:
        """Elements of one token's cache row, layer by layer: what the caller must provide."""
        del cache_dtype  # rows of both supported dtypes have the same number of elements
        return [config.kv_lora_rank + config.qk_rope_head_dim] * config.num_hidden_layers

    @classmethod
    def kv_row_bytes(cls, config: ModelConfig, cache_format: str) -> list[int]:
        """Bytes of one token's row in a quantised format, layer by layer.

        ValueError where rows of this model have no such form.
        """
        widths = (config.kv_lora_rank, config.qk_rope_head_dim)
        return [ops.cache_row_bytes(cache_format, *widths)] * config.num_hidden_layers

    @abstractmethod
    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        """Appends the step's rows to the caches and returns fp32 logits [n, vocab_size]."""
        raise NotImplementedError
