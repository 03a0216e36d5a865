"""Multi-head latent attention over the paged latent cache.

The cache row of a token is its normalised latent and its rotated key part, shared by all heads.
Few query tokens use the absorbed form (queries are taken into the latent space, keys are never
expanded); longer chunks use the expanded form. Both read the same rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helicore import ops
from helicore.models.base import ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.helix import GatheredPages
from helicore.models.module import WeightModule
from helicore.models.plan import Operators
from helicore.models.weights import WeightReader
from helicore.parallel.shards import Shards


@dataclass(slots=True)
class AttentionPart:
    """The requests of a step that run one kernel, renumbered from zero."""

    tokens: slice
    positions: Tensor
    cu_q: Tensor
    kv_len: Tensor
    block_table: Tensor
    kv_bound: Tensor | None = None
    """int32 [tokens]: what each sees of this rank's rows, where ranks split the sequence."""
    gathered: GatheredPages | None = None
    """The expanded kernel's pages there."""


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
    def of(
        cls, batch: ForwardBatch, cos_sin: Tensor, operators: Operators, shards: Shards
    ) -> "AttentionStep":
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
        if shards.context_size > 1:
            step._split_sequence(batch, shards)
        return step

    def _split_sequence(self, batch: ForwardBatch, shards: Shards) -> None:
        assert batch.kv_bound is not None
        assert batch.local_kv_len is not None
        if self.absorbed is not None:
            self.absorbed.kv_bound = batch.kv_bound[self.absorbed.tokens]
            self.absorbed.kv_len = batch.local_kv_len[: batch.num_absorbed]
        if self.expanded is not None:
            self.expanded.gathered = pages = GatheredPages.of(batch, shards)
            self.expanded.block_table = pages.block_table


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
    rows [q_a | kv_a] with a query bottleneck, [q | kv_a] without.

    A rank holds the queries and the absorbed keys of its group's heads, all else of its own heads;
    ranks sum their results.
    """

    qkv_a: Tensor
    qkv_a_bias: Tensor | None
    q_norm: Tensor | None
    q_b: Tensor | None
    kv_norm: Tensor
    w_absorb: Tensor
    w_uk: Tensor
    w_uv: Tensor
    w_uv_group: Tensor | None
    o_proj: Tensor
    o_bias: Tensor | None

    def __init__(
        self, config: ModelConfig, w: WeightReader, softmax_scale: float, shards: Shards
    ) -> None:
        super().__init__()
        c, self.shards = config, shards
        self.all_heads, self.head_dim = c.num_attention_heads, c.qk_head_dim
        self.group_heads = shards.group_heads(self.all_heads)
        self.own_heads = shards.own_heads(self.all_heads)
        self.num_heads = len(self.group_heads)
        first_own = self.own_heads.start - self.group_heads.start
        self.own_in_group = slice(first_own, first_own + len(self.own_heads))
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
        o_proj = w.take("o_proj.weight", self.hidden, self.all_heads * self.v)
        columns = _rows(self.own_heads, self.v)
        self.register_buffer("o_proj", ops.pack_linear(o_proj[:, columns]))
        o_bias = w.own_if(c.attention_bias, "o_proj.bias", self.hidden)
        # Ranks sum what they return: one of them adds the bias.
        self.register_buffer("o_bias", o_bias if shards.rank == 0 else None)
        self.publish()

    def _load_queries(self, c: ModelConfig, w: WeightReader) -> None:
        first = "q_a_proj" if c.q_lora_rank else "q_proj"
        whole = c.q_lora_rank or self.all_heads * self.head_dim
        part = slice(None) if c.q_lora_rank else _rows(self.group_heads, self.head_dim)
        a = w.take(f"{first}.weight", whole, self.hidden)[part]
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
            weight = w.take("q_b_proj.weight", self.all_heads * self.head_dim, c.q_lora_rank)
            q_b = ops.pack_linear(weight[_rows(self.group_heads, self.head_dim)])
        self.register_buffer("q_norm", q_norm)
        self.register_buffer("q_b", q_b)

    def _load_heads(self, w: WeightReader) -> None:
        """kv_b_proj has, head by head, the rows of the keys and then those of the values."""
        rows = self.nope + self.v
        kv_b = w.take("kv_b_proj.weight", self.all_heads * rows, self.rank)
        part = kv_b[_rows(self.group_heads, rows)]
        packed = ops.pack_mla_weights(part, self.num_heads, self.nope, self.v)
        own = self.own_in_group
        is_split = self.shards.context_size > 1
        self.register_buffer("w_absorb", packed.w_absorb)
        self.register_buffer("w_uk", packed.w_uk[own].clone() if is_split else packed.w_uk)
        self.register_buffer("w_uv", packed.w_uv[own].clone() if is_split else packed.w_uv)
        projects_first = is_split and self.shards.project_first_above is not None
        self.register_buffer("w_uv_group", packed.w_uv if projects_first else None)

    def forward(self, h: Tensor, step: AttentionStep, cache: Tensor) -> Tensor:
        """h [T, hidden] -> [T, hidden]; appends the step's rows to the cache first."""
        do = step.ops
        first = do.linear(h, self.qkv_a, self.first_width + self.kv_width, self.qkv_a_bias)
        q, kv_a = first[:, : self.first_width], first[:, self.first_width :]
        self._append(kv_a, cache, step.slots, step.positions, step)
        if self.q_norm is not None:
            q = do.rms_norm(q, self.q_norm, self.norm_eps)
        o = self._attend(q, kv_a, step, cache)
        o = do.linear(o, self.o_proj, self.hidden, self.o_bias)
        if self.shards.everyone is not None:
            do.run(self.shards.everyone.all_reduce, o, o)
        return o

    def _coding(self, step: AttentionStep) -> tuple[str, float]:
        """How the rows of this layer are coded."""
        return step.cache_format, self.cache_scales[step.cache_format]

    def _attend(self, q: Tensor, kv_a: Tensor, step: AttentionStep, cache: Tensor) -> Tensor:
        """q [T, q_lora_rank] normalised, or [T, heads * width] -> [T, own heads * v]."""
        if self.shards.context_size > 1:
            return self._attend_split(q, kv_a, step, cache)
        q = self._queries(q, step.ops)
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

    def _attend_split(self, q: Tensor, kv_a: Tensor, step: AttentionStep, cache: Tensor) -> Tensor:
        """Likewise, where ranks split the sequence."""
        outputs = []
        if step.absorbed is not None:
            heads = self._queries(q[step.absorbed.tokens], step.ops)
            outputs.append(self._absorbed_split(heads, step, step.absorbed, cache))
        if step.expanded is not None:
            tokens = step.expanded.tokens
            heads = self._queries(q[tokens], step.ops, own=True)
            pages = self._gathered(kv_a[tokens], step, step.expanded, cache)
            outputs.append(self._expanded(heads, step, step.expanded, pages))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _queries(self, q: Tensor, do: Operators, own: bool = False) -> Tensor:
        """[t, heads, nope + rope] of the group's heads, or of the rank's own."""
        part = self.own_in_group if own else slice(0, self.num_heads)
        if self.q_b is None:
            return q.view(q.shape[0], self.num_heads, self.head_dim)[:, part]
        begin, end = part.start * self.head_dim, part.stop * self.head_dim
        if own:
            q = ops.linear_slice(q, self.q_b, self.q_width, begin, end)
        else:
            q = do.linear(q, self.q_b, self.q_width)
        return q.view(q.shape[0], part.stop - part.start, self.head_dim)

    def _absorbed(
        self, q: Tensor, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> Tensor:
        """q [t, heads, nope + rope] not rotated -> [t, heads * v]."""
        do = step.ops
        o = do.mla_decode(self._into_latents(q, step, part), *self._over_cache(step, part, cache))
        return do.mla_project_v(o, self.w_uv, self.v)

    def _absorbed_split(
        self, q: Tensor, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> Tensor:
        """q [t, heads of the group, nope + rope] not rotated -> [t, own heads * v]."""
        do, shards = step.ops, self.shards
        assert shards.context is not None
        q = self._into_latents(q, step, part)
        o, stats = do.mla_decode_stats(q, *self._over_cache(step, part, cache))
        tokens, own = q.shape[0], len(self.own_heads)
        if self.w_uv_group is not None and tokens > (shards.project_first_above or 0):
            o = do.mla_project_v(o, self.w_uv_group, self.v).view(tokens, self.num_heads, self.v)
            merged = do.new(o, tokens, own, self.v)
            do.run(shards.context.merge_partials, o, stats, merged)
            return merged.view(tokens, own * self.v)
        merged = do.new(o, tokens, own, self.rank)
        do.run(shards.context.merge_partials, o, stats, merged)
        return do.mla_project_v(merged, self.w_uv, self.v)

    def _into_latents(self, q: Tensor, step: AttentionStep, part: AttentionPart) -> Tensor:
        return step.ops.mla_absorb(
            q, self.w_absorb, self.rank, part.positions, step.cos_sin, self.interleaved
        )

    def _over_cache(
        self, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> tuple[Any, ...]:
        return (
            cache,
            part.block_table,
            part.cu_q,
            part.kv_len,
            self.softmax_scale,
            self.rank,
            part.kv_bound,
            *self._coding(step),
        )

    def _gathered(
        self, kv_a: Tensor, step: AttentionStep, part: AttentionPart, cache: Tensor
    ) -> Tensor:
        """All rows of the part's requests: those that ranks keep, and those of this step."""
        assert part.gathered is not None
        assert self.shards.context is not None
        pages = part.gathered.gather(cache, self.shards.context)
        self._append(kv_a, pages, part.gathered.slots, part.positions, step)
        return pages

    def _append(
        self, kv_a: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, step: AttentionStep
    ) -> None:
        step.ops.mla_append(
            kv_a,
            cache,
            slots,
            self.rank,
            positions,
            step.cos_sin,
            self.kv_norm,
            self.norm_eps,
            self.interleaved,
            *self._coding(step),
        )

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


def _rows(heads: range, width: int) -> slice:
    """The rows of consecutive heads of `width` rows each."""
    return slice(heads.start * width, heads.stop * width)


def nvfp4_scale(norm_weight: Tensor) -> float:
    """The least power of two under which no latent of this norm is out of range.

    |c| <= sqrt(R) max|w|, and the largest values are 6 (of a code) times 448 (of a group's scale).
    """
    most = norm_weight.abs().max().item() * norm_weight.numel() ** 0.5
    if not 0.0 < most < math.inf:
        return 1.0
    return 2.0 ** min(max(math.ceil(math.log2(most / (6 * 448))), -64), 64)
