"""The DeepSeek-V3 architecture as pure functions on plain tensors, arranged for training speed.

Every expert is computed in one matrix product and masked by its routing weight before the down
projection. The result equals dispatching tokens to experts, and at this size the larger product is
cheaper than sorting tokens. The pure functions are compiled one by one, so that all layers share
the compiled code.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Layer = dict[str, Weights]  # "attn" and "mlp"


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the names on the right are those of a Hugging Face `config.json`."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    dense_layers: int = 1  # first_k_dense_replace
    dense_width: int = 640  # intermediate_size
    heads: int = 12
    q_lora: int = 128
    kv_lora: int = 128
    nope: int = 32
    rope: int = 16
    v: int = 32
    experts: int = 16
    top_k: int = 4
    expert_width: int = 32  # moe_intermediate_size
    shared: int = 4  # n_shared_experts
    groups: int = 4  # n_group
    top_groups: int = 2  # topk_group
    scale: float = 2.0  # routed_scaling_factor
    theta: float = 50000.0
    context: int = 16384
    eps: float = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return f.to(x.dtype) * weight.to(x.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs in, halves out; `x` is [..., tokens, heads, rope]."""
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rope_tables(cfg: Config, length: int, device: str) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, cfg.rope, 2, dtype=torch.float32, device=device) / cfg.rope
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angle = torch.outer(positions, cfg.theta**-exponent)
    return angle.cos()[:, None], angle.sin()[:, None]


def dropout(x: Tensor, rate: Tensor | None) -> Tensor:
    """`rate` is a tensor, so that a new value needs no new compilation."""
    if rate is None:
        return x
    keep = torch.rand(x.shape, device=x.device) >= rate
    return x * keep * (1.0 / (1.0 - rate)).to(x.dtype)


def attention(
    x: Tensor, p: Weights, cos: Tensor, sin: Tensor, rate: Tensor | None, cfg: Config
) -> Tensor:
    """Causal latent attention, keys and values expanded; `x` is [batch, tokens, hidden]."""
    batch, length, _ = x.shape
    h = rms_norm(x, p["norm_attn"])
    down = F.linear(h, torch.cat([p["q_a"], p["kv_a"]]).to(x.dtype))
    q_a, latent, k_rope = torch.split(down, [cfg.q_lora, cfg.kv_lora, cfg.rope], -1)
    q = F.linear(rms_norm(q_a, p["norm_q"]), p["q_b"].to(x.dtype))
    q = q.view(batch, length, cfg.heads, cfg.nope + cfg.rope)
    q = torch.cat([q[..., : cfg.nope], apply_rope(q[..., cfg.nope :], cos, sin)], -1)
    k_rope = apply_rope(k_rope.unsqueeze(2), cos, sin)
    kv = F.linear(rms_norm(latent, p["norm_kv"]), p["kv_b"].to(x.dtype))
    kv = kv.view(batch, length, cfg.heads, cfg.nope + cfg.v)
    k = torch.cat([kv[..., : cfg.nope], k_rope.expand(-1, -1, cfg.heads, -1)], -1)
    v = F.pad(kv[..., cfg.nope :], (0, cfg.nope + cfg.rope - cfg.v))  # one head size for flash
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    o = o.transpose(1, 2)[..., : cfg.v].reshape(batch, length, cfg.heads * cfg.v)
    return x + dropout(F.linear(o, p["o"].to(x.dtype)), rate)


def rank(scores: Tensor) -> Tensor:
    """Rank along the last axis, ties to the lower index; unlike `topk` it fuses."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    mine, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return ahead.sum(-1)


def route(h: Tensor, gate: Tensor, bias: Tensor, cfg: Config) -> tuple[Tensor, Tensor]:
    """Weight of every expert (0 where not chosen), and which experts are chosen."""
    scores = F.linear(h.float(), gate.float()).sigmoid()
    choice = (scores + bias).detach()
    if cfg.groups > 1:
        grouped = torch.unflatten(choice, -1, (cfg.groups, -1))
        of_group = (grouped * (rank(grouped) < 2)).sum(-1)
        kept = (rank(of_group) < cfg.top_groups).unsqueeze(-1)
        choice = torch.where(kept, grouped, float("-inf")).flatten(-2)
    chosen = rank(choice) < cfg.top_k
    weight = scores * chosen
    return weight / (weight.sum(-1, keepdim=True) + 1e-20) * cfg.scale, chosen


def moe(
    x: Tensor, p: Weights, bias: Tensor, rate: Tensor | None, cfg: Config
) -> tuple[Tensor, Tensor]:
    """Mixture of experts over `x` [tokens, hidden]; also returns the tokens of each expert."""
    h = rms_norm(x, p["norm_mlp"])
    count, _, width, hidden = p["gate_up"].shape  # the routed experts, then the shared ones
    weight, chosen = route(h, p["router"], bias, cfg)
    gate = F.linear(h, p["gate_up"][:, 0].reshape(count * width, hidden).to(x.dtype))
    up = F.linear(h, p["gate_up"][:, 1].reshape(count * width, hidden).to(x.dtype))
    act = torch.unflatten(F.silu(gate) * up, -1, (count, width))
    ones = torch.ones_like(weight[..., : count - cfg.experts], dtype=x.dtype)
    act = (act * torch.cat([weight.to(x.dtype), ones], -1).unsqueeze(-1)).flatten(-2)
    down = p["down"].permute(1, 0, 2).reshape(hidden, count * width).to(x.dtype)
    return x + dropout(F.linear(act, down), rate), chosen.sum(0).float()


def dense_mlp(x: Tensor, p: Weights, rate: Tensor | None) -> Tensor:
    h = rms_norm(x, p["norm_mlp"])
    gate = F.linear(h, p["gate_up"][0].to(x.dtype))
    up = F.linear(h, p["gate_up"][1].to(x.dtype))
    return x + dropout(F.linear(F.silu(gate) * up, p["down"].to(x.dtype)), rate)


def head(x: Tensor, norm: Tensor, embedding: Tensor) -> Tensor:
    return F.linear(rms_norm(x, norm), embedding.to(x.dtype))


def head_loss(
    x: Tensor, norm: Tensor, embedding: Tensor, target: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Mean loss, and cross entropy per token in nats."""
    logits = head(x, norm, embedding).float()
    lse = logits.logsumexp(-1)
    entropy = lse - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return entropy.mean() + z_loss * lse.pow(2).mean(), entropy.detach()


class Model:
    """Parameters in fp32 and the forward pass in the given dtype."""

    def __init__(self, cfg: Config, device: str, seed: int = 0, compiled: bool = False) -> None:
        self.cfg, self.device = cfg, device
        self._generator = torch.Generator().manual_seed(seed)
        self.layers = [self._layer(i) for i in range(cfg.layers)]
        self.embedding = self._matrix(cfg.vocab, cfg.hidden, gain=0.5)
        self.norm = self._ones(cfg.hidden)
        moe_layers = cfg.layers - cfg.dense_layers
        self.bias = torch.zeros(moe_layers, cfg.experts, device=device)
        self.load = torch.zeros(moe_layers, cfg.experts, device=device)
        self.cos, self.sin = rope_tables(cfg, cfg.context, device)
        self._eager: dict[str, Callable[..., Any]] = {
            f.__name__: f for f in (attention, moe, dense_mlp, head_loss)
        }
        self._compiled = dict(self._eager)
        if compiled:
            self._compiled = {k: torch.compile(f, dynamic=False) for k, f in self._eager.items()}

    def _matrix(self, *shape: int, gain: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=self._generator) * (gain / math.sqrt(shape[-1]))
        return values.to(self.device).requires_grad_()

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device, requires_grad=True)

    def _layer(self, index: int) -> Layer:
        c, small = self.cfg, 0.3 / math.sqrt(self.cfg.layers)
        attn = {
            "norm_attn": self._ones(c.hidden),
            "q_a": self._matrix(c.q_lora, c.hidden),
            "norm_q": self._ones(c.q_lora),
            "q_b": self._matrix(c.heads * (c.nope + c.rope), c.q_lora),
            "kv_a": self._matrix(c.kv_lora + c.rope, c.hidden),
            "norm_kv": self._ones(c.kv_lora),
            "kv_b": self._matrix(c.heads * (c.nope + c.v), c.kv_lora),
            "o": self._matrix(c.hidden, c.heads * c.v, gain=small),
        }
        mlp = {"norm_mlp": self._ones(c.hidden)}
        if index < c.dense_layers:
            mlp["gate_up"] = self._matrix(2, c.dense_width, c.hidden)
            mlp["down"] = self._matrix(c.hidden, c.dense_width, gain=small)
        else:
            count = c.experts + c.shared
            mlp["router"] = self._matrix(c.experts, c.hidden)
            mlp["gate_up"] = self._matrix(count, 2, c.expert_width, c.hidden)
            mlp["down"] = self._matrix(count, c.hidden, c.expert_width, gain=small)
        return {"attn": attn, "mlp": mlp}

    def parameters(self) -> dict[str, Tensor]:
        named = {"embedding": self.embedding, "norm": self.norm}
        for i, layer in enumerate(self.layers):
            for weights in layer.values():
                named |= {f"{i}.{k}": v for k, v in weights.items()}
        return named

    def count(self) -> int:
        """Parameters, the correction biases counted in."""
        return sum(v.numel() for v in self.parameters().values()) + self.bias.numel()

    def trunk(
        self,
        ids: Tensor,
        dtype: torch.dtype,
        rate: Tensor | None = None,
        taps: Sequence[int] = (),
        compiled: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:
        """Residual stream before the last norm, and after each layer named in `taps`."""
        fn = self._compiled if compiled else self._eager
        batch, length = ids.shape
        cos, sin = self.cos[:length], self.sin[:length]
        x = dropout(self.embedding[ids].to(dtype), rate)
        kept = []
        for i, layer in enumerate(self.layers):
            x = fn["attention"](x, layer["attn"], cos, sin, rate, self.cfg).flatten(0, 1)
            j = i - self.cfg.dense_layers
            if j < 0:
                x = fn["dense_mlp"](x, layer["mlp"], rate)
            else:
                x, load = fn["moe"](x, layer["mlp"], self.bias[j], rate, self.cfg)
                self.load[j].copy_(load.detach())
            x = x.view(batch, length, -1)
            if i in taps:
                kept.append(x)
        return x, kept

    def loss(
        self,
        ids: Tensor,
        target: Tensor,
        dtype: torch.dtype,
        rate: Tensor | None = None,
        z_loss: float = 0.0,
        compiled: bool = True,
    ) -> tuple[Tensor, Tensor]:
        fn = self._compiled if compiled else self._eager
        x, _ = self.trunk(ids, dtype, rate, compiled=compiled)
        mean, entropy = fn["head_loss"](
            x.flatten(0, 1), self.norm, self.embedding, target.flatten(), z_loss
        )
        return mean, entropy.view(target.shape)

    @torch.no_grad()
    def logits(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        x, _ = self.trunk(ids, dtype, compiled=False)
        return head(x, self.norm, self.embedding)

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Moves the correction biases towards an even load, by the load of the last forward."""
        self.bias.add_(torch.sign(self.load.mean(-1, keepdim=True) - self.load), alpha=step)
