"""Mixture of experts: router, routed experts, shared expert.

Shapes: T tokens, D hidden width, E experts, k experts per token, I width of an expert, S width of
the shared expert. Expert weights are packed with `pack_linear`: w13 [E, 2 I, D] (gate rows, then up
rows, groups=2), w2 [E, D, I]; the shared expert likewise without E.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from helicore._core import moe as _moe
from helicore.ops import _torch_moe
from helicore.ops._registry import needs_dispatch, refuse_gradient, register_op


@dataclass(frozen=True)
class RouterConfig:
    """How a router chooses experts. Invalid combinations are a ValueError that names the field.

    Attributes:
        num_experts: E.
        top_k: experts per token, at most those of the kept groups.
        n_group: groups of consecutive experts; divides num_experts.
        topk_group: groups that stay selectable.
        scoring: "sigmoid" or "softmax" (over all experts).
        group_score: "none" (no groups), "max" or "top2_sum".
        norm_topk_prob: divide the weights of a token by their sum (+ 1e-20).
        scaling: factor of the weights, after that.
    """

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    scoring: str = "sigmoid"
    group_score: str = "none"
    norm_topk_prob: bool = False
    scaling: float = 1.0
    native: _moe.RouterConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        native = _moe.RouterConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            n_group=self.n_group,
            topk_group=self.topk_group,
            scoring=self.scoring,
            group_score=self.group_score,
            norm_topk_prob=self.norm_topk_prob,
            scaling=self.scaling,
        )
        object.__setattr__(self, "native", native)


@lru_cache(maxsize=256)
def _native_config(
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    group_score: str,
    norm_topk_prob: bool,
    scaling: float,
) -> _moe.RouterConfig:
    return _moe.RouterConfig(
        num_experts=num_experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        scoring=scoring,
        group_score=group_score,
        norm_topk_prob=norm_topk_prob,
        scaling=scaling,
    )


def _new_choice(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.empty(x.shape[0], top_k, dtype=torch.int32)
    return ids, torch.empty(x.shape[0], top_k, dtype=torch.float32)


def _route_fake(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    group_score: str,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def _route_cuda(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    group_score: str,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    config = RouterConfig(
        num_experts, top_k, n_group, topk_group, scoring, group_score, norm_topk_prob, scaling
    )
    return _torch_moe.route(x, gate, bias, config)


@register_op("route", fake=_route_fake, cuda=_route_cuda)
def _route_op(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    scoring: str,
    group_score: str,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    config = _native_config(
        num_experts, top_k, n_group, topk_group, scoring, group_score, norm_topk_prob, scaling
    )
    ids, weights = _new_choice(x, top_k)
    _moe.route(x, gate, bias, config, ids, weights)
    return ids, weights


def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, config: RouterConfig
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, in float32.

    Args:
        x: [T, D] bfloat16 or float32.
        gate: [E, D] float32.
        bias: [E] float32, added to the scores for the choice only, or None.
        config: how to choose.

    Returns:
        ids int32 [T, k] by descending choice (equal ones: lower id first), distinct and in [0, E);
        weights float32 [T, k]. A NaN logit counts as the worst choice with weight 0.
    """
    refuse_gradient("route", (x, gate, bias))
    if needs_dispatch():
        c = config
        return _route_op(
            x,
            gate,
            bias,
            c.num_experts,
            c.top_k,
            c.n_group,
            c.topk_group,
            c.scoring,
            c.group_score,
            c.norm_topk_prob,
            c.scaling,
        )
    if x.is_cuda:
        return _torch_moe.route(x, gate, bias, config)
    ids, weights = _new_choice(x, config.top_k)
    _moe.route(x, gate, bias, config.native, ids, weights)
    return ids, weights


def _moe_forward_fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_intermediate: int = 0,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_op("moe_forward", fake=_moe_forward_fake, cuda=_torch_moe.moe_forward)
def moe_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_intermediate: int = 0,
) -> Tensor:
    """Weighted sum of the chosen experts, plus the shared expert: [T, D] in the dtype of x.

    Args:
        x: [T, D] bfloat16 or float32.
        ids: int32 [T, k] in [0, E); on a CPU also -1, which adds nothing: the expert is another
            rank's.
        weights: float32 [T, k].
        w13: packed gate and up weights of the experts.
        w2: packed down weights of the experts.
        intermediate: I.
        shared_w13: packed gate and up weight of the shared expert, or None.
        shared_w2: its packed down weight, or None.
        shared_intermediate: S.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _moe.moe_forward(
        x, ids, weights, w13, w2, shared_w13, shared_w2, out, intermediate, shared_intermediate
    )
    return out


def moe_block(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    config: RouterConfig,
    w13: Tensor,
    w2: Tensor,
    intermediate: int,
    shared_w13: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_intermediate: int = 0,
) -> Tensor:
    """`route` and `moe_forward` in one native call: [T, D] in the dtype of x."""
    refuse_gradient("moe_block", (x, gate, bias, w13, w2, shared_w13, shared_w2))
    if needs_dispatch():
        ids, weights = route(x, gate, bias, config)
        return moe_forward(
            x, ids, weights, w13, w2, intermediate, shared_w13, shared_w2, shared_intermediate
        )
    if x.is_cuda:
        ids, weights = _torch_moe.route(x, gate, bias, config)
        return _torch_moe.moe_forward(
            x, ids, weights, w13, w2, intermediate, shared_w13, shared_w2, shared_intermediate
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _moe.moe_block(
        x,
        gate,
        bias,
        config.native,
        w13,
        w2,
        shared_w13,
        shared_w2,
        out,
        intermediate,
        shared_intermediate,
    )
    return out
