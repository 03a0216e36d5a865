"""Multi-head latent attention over the paged latent cache.

The cache row of a token is its normalised latent and its rotated key part, shared by all heads.
Few query tokens use the absorbed form (queries are taken into the latent space, keys are never
expanded); longer chunks use the expanded form. Both read the same rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from helicore import ops
from helicore.models.base import ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.module import WeightModule
from helicore.models.plan import Operators
from helicore.models.weights import WeightReader


@dataclass(slots=True)
class AttentionPart:
    """The requests of a step that run one kernel, renumbered from zero."""

    tokens: slice
    positions: Tensor
    cu_q: Tensor
    kv_len: Tensor
    block_table: Tensor


@dataclass(slots=True)
class AttentionStep:
    """What all layers share in one step; made once per forward."""

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    ops: Operators
    cache_format: str
    absorbed: AttentionPart | None
    expanded: AttentionPart | None

    @classmethod
    def of(cls, batch: ForwardBatch, cos_sin: Tensor, operators: Operators) -> "AttentionStep":
        requests, tokens = batch.kv_len.shape[0], batch.token_ids.shape[0]
        n, t = batch.num_absorbed, batch.num_absorbed_tokens
        step = cls(batch.positions, batch.slots, cos_sin, operators, batch.cache_format, None, None)
        if n > 0:
            step.absorbed = _part(batch, 0, n, 0, t)
        if n < requests:
            step.expanded = _part(batch, n, requests, t, tokens)
            if batch.host_cu_q is not None and batch.host_kv_len is not None:
                step.expanded.cu_q = batch.host_cu_q[n:] - t
                step.expanded.kv_len = batch.host_kv_len[n:]
        return step


def _part(batch: ForwardBatch, first: int, last: int, begin: int, end: int) -> AttentionPart:
    tokens = slice(begin, end)
    if first == 0 and last == batch.kv_len.shape[0]:
        return AttentionPart(tokens, batch.positions, batch.cu_q, batch.kv_len, batch.block_table)
    cu_q = batch.cu_q[first : last + 1]
    return AttentionPart(
        tokens,
        batch.positions[tokens],
        cu_q - begin if begin else cu_q,
        batch.kv_len[first:last],
        batch.block_table[first:last],
    )


class LatentAttention(WeightModule):
    """One attention layer. The first product makes all that depends on the hidden state alone:
    rows [q_a | kv_a] with a query bottleneck, [q | kv_a] without."""

    qkv_a: Tensor
    qkv_a_bias: Tensor | None
    q_norm: Tensor | None
    q_b: Tensor | None
    kv_norm: Tensor
    w_absorb: Tensor
    w_uk: Tensor
    w_uv: Tensor
    o_proj: Tensor
    o_bias: Tensor | None

    def __init__(self, config: ModelConfig, w: WeightReader, softmax_scale: float) -> None:
        super().__init__()
        c = config
        self.num_heads, self.head_dim = c.num_attention_heads, c.qk_head_dim
        self.rank, self.nope, self.v = c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
        self.kv_width = c.kv_lora_rank + c.qk_rope_head_dim
        self.q_width = self.num_heads * self.head_dim
        self.first_width = c.q_lora_rank or self.q_width
        self.hidden = c.hidden_size
        self.norm_eps, self.softmax_scale = c.latent_norm_eps, softmax_scale
        self.interleaved = c.rope.interleaved
        self._load_queries(c, w)
        self._load_heads(w)
        self.register_buffer("kv_norm", w.own("kv_a_layernorm.weight", self.rank))
        self.cache_scales = {
            "auto": 1.0,
            "fp8": w.scalar("kv_scale", "k_scale", "k_proj.k_scale") or 1.0,
            "fp8_ds_mla": 1.0,
            "nvfp4": nvfp4_scale(self.kv_norm),
        }
        o_proj = w.take("o_proj.weight", self.hidden, self.num_heads * self.v)
        self.register_buffer("o_proj", ops.pack_linear(o_proj))
        self.register_buffer("o_bias", w.own_if(c.attention_bias, "o_proj.bias", self.hidden))
        self.publish()

    def _load_queries(self, c: ModelConfig, w: WeightReader) -> None:
        first = "q_a_proj" if c.q_lora_rank else "q_proj"
        a = w.take(f"{first}.weight", self.first_width, self.hidden)
        kv_a = w.take("kv_a_proj_with_mqa.weight", self.kv_width, self.hidden)
        self.register_buffer("qkv_a", ops.pack_linear(torch.cat([a, kv_a])))
        bias = None
        if c.attention_bias:
            # q_proj has none
            first_bias = torch.zeros(self.first_width, dtype=w.dtype, device=w.device)
            if c.q_lora_rank:
                first_bias = w.take("q_a_proj.bias", self.first_width)
            bias = torch.cat([first_bias, w.take("kv_a_proj_with_mqa.bias", self.kv_width)])
        self.register_buffer("qkv_a_bias", bias)
        q_norm, q_b = None, None
        if c.q_lora_rank:
            q_norm = w.own("q_a_layernorm.weight", c.q_lora_rank)
            q_b = ops.pack_linear(w.take("q_b_proj.weight", self.q_width, c.q_lora_rank))
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("q_b", q_b)

    def _load_heads(self, w: WeightReader) -> None:
        """kv_b_proj has, head by head, the rows of the keys and then those of the values."""
        rows = self.nope + self.v
        kv_b = w.take("kv_b_proj.weight", self.num_heads * rows, self.rank)
        packed = ops.pack_mla_weights(kv_b, self.num_heads, self.nope, self.v)
        self.register_buffer("w_absorb", packed.w_absorb)
        self.register_buffer("w_uk", packed.w_uk)
        self.register_buffer("w_uv", packed.w_uv)

    def forward(self, h: Tensor, step: AttentionStep, cache: Tensor) -> Tensor:
        """h [T, hidden] -> [T, hidden]; appends the step's rows to the cache first."""
        do = step.ops
        first = do.linear(h, self.qkv_a, self.first_width + self.kv_width, self.qkv_a_bias)
        q, kv_a = first[:, : self.first_width], first[:, self.first_width :]
        do.mla_append(
            kv_a,
            cache,
            step.slots,
            self.rank,
            step.positions,
            step.cos_sin,
            self.kv_norm,
            self.norm_eps,
            self.interleaved,
            *self._coding(step),
        )
        if self.q_b is not None and self.q_norm is not None:
            q = do.linear(do.rms_norm(q, self.q_norm, self.norm_eps), self.q_b, self.q_width)
        q = q.view(q.shape[0], self.num_heads, self.head_dim)
        o = self._attend(q, step, cache)
        return do.linear(o, self.o_proj, self.hidden, self.o_bias)

    def _coding(self, step: AttentionStep) -> tuple[str, float]:
        """How the rows of this layer are coded."""
        return step.cache_format, self.cache_scales[step.cache_format]

    def _attend(self, q: Tensor, step: AttentionStep, cache: Tensor) -> Tensor:
        if step.expanded is None:
            assert step.absorbed is not None
            return self._absorbed(q, step, step.absorbed, cache)
        if step.absorbed is None:
            return self._expanded(q, step, step.expanded, cache)
        return torch.cat(
            [
                self._absorbed(q[step.absorbed.tokens], step, step.absorbed, cache),
                self._expanded(q[step.expanded.tokens], step, step.expanded, cache),
            ]
        )

    def _absorbed(
        self, q: Tensor, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> Tensor:
        """q [t, heads, nope + rope] not rotated -> [t, heads * v]."""
        do, scale = step.ops, self.softmax_scale
        q = do.mla_absorb(
            q, self.w_absorb, self.rank, part.positions, step.cos_sin, self.interleaved
        )
        o = do.mla_decode(
            q,
            cache,
            part.block_table,
            part.cu_q,
            part.kv_len,
            scale,
            self.rank,
            None,
            *self._coding(step),
        )
        return do.mla_project_v(o, self.w_uv, self.v)

    def _expanded(
        self, q: Tensor, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> Tensor:
        """q [t, heads, nope + rope] not rotated, overwritten -> [t, heads * v]."""
        q = q.contiguous()
        ops.rope_q(q, part.positions, step.cos_sin, self.interleaved)
        return ops.mla_prefill(
            q,
            cache,
            part.block_table,
            part.cu_q,
            part.kv_len,
            self.w_uk,
            self.w_uv,
            self.softmax_scale,
            self.rank,
            self.v,
            *self._coding(step),
        )


def nvfp4_scale(norm_weight: Tensor) -> float:
    """The least power of two under which no latent of this norm is out of range.

    |c| <= sqrt(R) max|w|, and the largest values are 6 (of a code) times 448 (of a group's scale).
    """
    most = norm_weight.abs().max().item() * norm_weight.numel() ** 0.5
    if not 0.0 < most < math.inf:
        return 1.0
    return 2.0 ** min(max(math.ceil(math.log2(most / (6 * 448))), -64), 64)
