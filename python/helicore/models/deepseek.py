"""The decoder that the DeepSeek families share: latent attention, dense and expert layers.

A family adds what its checkpoints hold besides; see `deepseek_v2.py` and `deepseek_v3.py`.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from helicore import ops
from helicore.models.base import CausalLM, ForwardBatch
from helicore.models.config import ModelConfig
from helicore.models.mla import AttentionStep, LatentAttention
from helicore.models.module import WeightModule
from helicore.models.moe import GatedMlp, MixtureOfExperts
from helicore.models.plan import MAX_TOKENS, Eager, Operators, Plan, Recorder
from helicore.models.rope import rope_of
from helicore.models.weights import Checkpoint, WeightReader
from helicore.parallel.shards import Shards

Progress = Callable[[int, int], None]
"""Called with (parts loaded, all parts)."""


class DecoderLayer(WeightModule):
    """Attention and a feed-forward block, each after a norm and around a residual."""

    input_norm: Tensor
    post_norm: Tensor

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        w: WeightReader,
        softmax_scale: float,
        shards: Shards,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.everyone = shards.everyone
        self.eps = config.rms_norm_eps
        self.register_buffer("input_norm", w.own("input_layernorm.weight", hidden))
        self.register_buffer("post_norm", w.own("post_attention_layernorm.weight", hidden))
        self.attention = LatentAttention(config, w.at("self_attn"), softmax_scale, shards)
        self.mlp: GatedMlp | MixtureOfExperts
        if config.is_moe_layer(index):
            self.mlp = MixtureOfExperts(config, w.at("mlp"), shards)
        else:
            self.mlp = GatedMlp(hidden, config.intermediate_size, w.at("mlp"), shards)
        self.publish()

    def forward(
        self, delta: Tensor | None, residual: Tensor, step: AttentionStep, cache: Tensor
    ) -> Tensor:
        """Adds `delta` and the attention's output to `residual` in place; returns the feed-forward
        block's output, which the next layer adds. All [T, hidden]."""
        do = step.ops
        if delta is None:
            h = do.rms_norm(residual, self.input_norm, self.eps)
        else:
            h = do.add_rms_norm(delta, residual, self.input_norm, self.eps)
        h = self.attention(h, step, cache)
        h = do.add_rms_norm(h, residual, self.post_norm, self.eps)
        out: Tensor = self.mlp(h, do)
        if self.everyone is not None:
            do.run(self.everyone.all_reduce, out, out)
        return out


class DeepseekModel(WeightModule, CausalLM):
    """A DeepSeek-architecture language model, built from a checkpoint."""

    embedding: Tensor
    cos_sin: Tensor
    norm: Tensor
    lm_head: Tensor
    _plan: Plan | None
    _last_batch: ForwardBatch | None

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: Progress | None = None,
        *,
        num_positions: int | None = None,
        device: torch.device | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Takes every weight of the checkpoint; ValueError for one that is missing or misshapen,
        or unexpected. num_positions: of those the config allows, how many are ever used. device:
        where the weights lie and the model runs; None is the CPU. shards: the part of this rank;
        None is all."""
        super().__init__(config)
        self.shards = shards or Shards()
        report = progress or (lambda done, total: None)
        parts = config.num_hidden_layers + 1
        w = WeightReader(checkpoint, dtype, device=device)
        rope = rope_of(config)
        cos_sin = rope.cos_sin(num_positions or config.max_position_embeddings)
        self.register_buffer("cos_sin", cos_sin.to(w.device))
        self._load_ends(w)
        report(1, parts)
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            at = w.at(f"model.layers.{i}")
            self.layers.append(DecoderLayer(config, i, at, rope.softmax_scale, self.shards))
            report(i + 2, parts)
        self.publish()
        checkpoint.finish(lambda name: self.ignores(config, name))

    def _load_ends(self, w: WeightReader) -> None:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        self.vocab = self.shards.equal_part(vocab)
        rows = slice(self.vocab.start, self.vocab.stop)
        table = w.own("model.embed_tokens.weight", vocab, hidden)
        if self.shards.size > 1:
            table = table[rows].clone()
        self.register_buffer("embedding", table)
        self.register_buffer("norm", w.own("model.norm.weight", hidden))
        tied = self.config.tie_word_embeddings
        head = table if tied else w.take("lm_head.weight", vocab, hidden)[rows]
        self.register_buffer("lm_head", ops.pack_linear(head))

    @classmethod
    def ignores(cls, config: ModelConfig, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model has no use for it."""
        tied_head = config.tie_word_embeddings and name == "lm_head.weight"
        # The scale of cached keys is that of the latent, so of the values too.
        return tied_head or name.endswith((".rotary_emb.inv_freq", ".v_scale"))

    def publish(self) -> None:
        super().publish()
        self._plan = self._last_batch = None

    def forward(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Tensor:
        plan = None if torch.compiler.is_compiling() else self._plan_for(batch, caches)
        if plan is not None:
            delta, residual = plan.run()
        else:
            eager = cast("Operators", ops) if self.shards.size == 1 else Eager()
            delta, residual = self._run_layers(batch, caches, eager)
        rows = batch.logits_rows
        residual, delta = residual.index_select(0, rows), delta.index_select(0, rows)
        h = ops.add_rms_norm(delta, residual, self.norm, self.config.rms_norm_eps)
        return self._logits(h)

    def _logits(self, h: Tensor) -> Tensor:
        """h [n, hidden] -> float32 [n, vocab_size]; each rank computes its part of the tokens."""
        logits = ops.linear(h, self.lm_head, len(self.vocab), out_dtype=torch.float32)
        everyone = self.shards.everyone
        if everyone is None:
            return logits
        width = -(-self.config.vocab_size // everyone.world_size)
        mine = logits.new_zeros((h.shape[0], width))
        mine[:, : len(self.vocab)] = logits
        parts = logits.new_empty((everyone.world_size, *mine.shape))
        everyone.all_gather(mine, parts)
        whole = parts.transpose(0, 1).reshape(h.shape[0], everyone.world_size * width)
        return whole[:, : self.config.vocab_size].contiguous()

    def _embed(self, ids: Tensor, operators: Operators) -> Tensor:
        """int32 [T] -> [T, hidden]; each rank has the rows of its part of the tokens."""
        everyone = self.shards.everyone
        if everyone is None:
            return operators.embedding(ids, self.embedding)
        # The residual stream of all layers: not memory that `new` hands out again.
        out = self.embedding.new_empty((ids.shape[0], self.config.hidden_size))
        operators.run(_embed_part, ids, self.embedding, self.vocab.start, out)
        operators.run(everyone.all_reduce, out, out)
        return out

    def _run_layers(
        self, batch: ForwardBatch, caches: Sequence[Tensor], operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """(output of the last layer, residual stream without it), both [T, hidden]."""
        step = AttentionStep.of(batch, self.cos_sin, operators, self.shards)
        residual = self._embed(batch.token_ids, operators)
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, caches, strict=True):
            if isinstance(operators, Recorder):
                operators.begin_layer()
            delta = layer(delta, residual, step, cache)
        assert delta is not None
        return delta, residual

    def _plan_for(self, batch: ForwardBatch, caches: Sequence[Tensor]) -> Plan | None:
        """The plan of this batch; made when it comes for the second time in a row."""
        plan = self._plan
        if plan is not None and plan.batch is batch and plan.caches is caches:
            return plan
        seen, self._last_batch = self._last_batch is batch, batch
        absorbed = batch.num_absorbed == batch.kv_len.shape[0]
        if (
            batch.token_ids.is_cuda
            or not seen
            or not absorbed
            or batch.token_ids.shape[0] > MAX_TOKENS
        ):
            return None
        recorder = Recorder()
        delta, residual = self._run_layers(batch, caches, recorder)
        self._plan = Plan(batch, caches, recorder.calls, delta, residual)
        return self._plan


def _embed_part(ids: Tensor, table: Tensor, first: int, out: Tensor) -> None:
    """Rows of `table`, which begins with token `first`, for the ids in it, zeros for the others."""
    rows = ids.to(torch.int64) - first
    is_absent = (rows < 0) | (rows >= table.shape[0])
    if table.shape[0] == 0:
        out.zero_()
        return
    torch.index_select(table, 0, rows.masked_fill_(is_absent, 0), out=out)
    out.masked_fill_(is_absent.unsqueeze(1), 0)
