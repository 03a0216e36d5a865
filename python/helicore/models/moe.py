"""Feed-forward blocks: the gated MLP and the mixture of experts with a shared expert."""

import torch
from torch import Tensor

from helicore import ops
from helicore.models.config import ModelConfig, MoeConfig
from helicore.models.module import WeightModule
from helicore.models.plan import Operators
from helicore.models.weights import WeightReader
from helicore.parallel.shards import Shards


def _gate_up(w: WeightReader, size: int, hidden: int, part: range) -> Tensor:
    """Gate rows, then up rows, of the features `part`: [2 * len(part), hidden]."""
    rows = slice(part.start, part.stop)
    return torch.cat([w.take(f"{n}_proj.weight", size, hidden)[rows] for n in ("gate", "up")])


def _down(w: WeightReader, size: int, hidden: int, part: range) -> Tensor:
    """The columns of the features `part`: [hidden, len(part)]."""
    return w.take("down_proj.weight", hidden, size)[:, part.start : part.stop]


class GatedMlp(WeightModule):
    """down(silu(gate h) * up h), of this rank's intermediate features: ranks sum their results."""

    gate_up: Tensor
    down: Tensor

    def __init__(self, hidden: int, size: int, w: WeightReader, shards: Shards) -> None:
        super().__init__()
        part = shards.part_of(size, "intermediate_size")
        self.hidden, self.size = hidden, len(part)
        self.register_buffer("gate_up", ops.pack_linear(_gate_up(w, size, hidden, part), groups=2))
        self.register_buffer("down", ops.pack_linear(_down(w, size, hidden, part)))
        self.publish()

    def forward(self, h: Tensor, operators: Operators) -> Tensor:
        """h [T, hidden] -> [T, hidden]."""
        return operators.mlp(h, self.gate_up, self.down, self.size, self.hidden)


class MixtureOfExperts(WeightModule):
    """Routed experts, weighted, plus the shared expert, which is not. The router is fp32.

    A rank has its part of every expert's intermediate features, or (expert parallelism) some of
    the experts; ranks sum their results.
    """

    gate: Tensor
    gate_bias: Tensor | None
    gate_up: Tensor
    down: Tensor

    def __init__(self, config: ModelConfig, w: WeightReader, shards: Shards) -> None:
        super().__init__()
        if config.moe is None:
            raise ValueError("config.moe must not be None")
        m, hidden = config.moe, config.hidden_size
        self.moe, self.hidden, self.router = m, hidden, _router(m)
        fp32 = torch.float32
        self.register_buffer("gate", w.own("gate.weight", m.num_experts, hidden, dtype=fp32))
        bias = None
        if m.topk_method == "noaux_tc":
            bias = w.own("gate.e_score_correction_bias", m.num_experts, dtype=fp32)
        self.register_buffer("gate_bias", bias)
        self.own = range(m.num_experts)
        part = range(m.expert_size)
        if shards.splits_experts:
            self.own = shards.own_experts(m.num_experts)
        else:
            part = shards.part_of(m.expert_size, "moe_intermediate_size")
        self._load_experts(w.at("experts"), part)
        self.shared: GatedMlp | None
        shared = None
        if m.shared_size:
            shared = GatedMlp(hidden, m.shared_size, w.at("shared_experts"), shards)
        self.register_module("shared", shared)
        self.publish()

    def _load_experts(self, w: WeightReader, part: range) -> None:
        """Packs expert by expert, so that only one is held unpacked."""
        m, hidden = self.moe, self.hidden
        self.expert_size = len(part)
        for e in set(range(m.num_experts)) - set(self.own):
            w.at(str(e)).leave(*(f"{n}_proj.weight" for n in ("gate", "up", "down")))
        for name in ("gate_up", "down"):
            packed: Tensor | None = None
            for place, e in enumerate(self.own):
                at = w.at(str(e))
                if name == "gate_up":
                    one = ops.pack_linear(_gate_up(at, m.expert_size, hidden, part), groups=2)
                else:
                    one = ops.pack_linear(_down(at, m.expert_size, hidden, part))
                if packed is None:
                    packed = one.new_empty((len(self.own), *one.shape))
                packed[place] = one
            self.register_buffer(name, packed)

    def forward(self, h: Tensor, operators: Operators) -> Tensor:
        """h [T, hidden] -> [T, hidden]."""
        if len(self.own) < self.moe.num_experts:
            out = operators.new(h, *h.shape)
            operators.run(self._run_own, h, out)
            return out
        shared = self.shared
        return operators.moe_block(
            h,
            self.gate,
            self.gate_bias,
            self.router,
            self.gate_up,
            self.down,
            self.expert_size,
            None if shared is None else shared.gate_up,
            None if shared is None else shared.down,
            0 if shared is None else shared.size,
        )

    def _run_own(self, h: Tensor, out: Tensor) -> None:
        """What this rank's experts, and its part of the shared one, add to h [T, hidden]."""
        ids, weights = ops.route(h, self.gate, self.gate_bias, self.router)
        ids = ids - self.own.start
        ids.masked_fill_((ids < 0) | (ids >= len(self.own)), -1)
        shared = self.shared
        result = ops.moe_forward(
            h,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.expert_size,
            None if shared is None else shared.gate_up,
            None if shared is None else shared.down,
            0 if shared is None else shared.size,
        )
        out.copy_(result)


def _router(m: MoeConfig) -> ops.RouterConfig:
    """Groups are scored by their best expert, or by the sum of their two best biased scores."""
    score = "top2_sum" if m.topk_method == "noaux_tc" else "max"
    return ops.RouterConfig(
        num_experts=m.num_experts,
        top_k=m.top_k,
        n_group=m.n_group,
        topk_group=m.topk_group,
        scoring=m.scoring_func,
        group_score=score if m.n_group > 1 else "none",
        norm_topk_prob=m.norm_topk_prob,
        scaling=m.routed_scaling_factor,
    )
