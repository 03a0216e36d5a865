"""Mixture of experts: router and experts."""

from __future__ import annotations
import torch
import typing

__all__: list[str] = [
    "RouterConfig",
    "cuda_combine",
    "cuda_select_experts",
    "cuda_sort_by_expert",
    "moe_block",
    "moe_forward",
    "route",
    "select_experts",
]

class RouterConfig:
    """Frozen settings of a router; invalid ones are a ValueError."""
    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        n_group: int = 1,
        topk_group: int = 1,
        scoring: str = "sigmoid",
        group_score: str = "none",
        norm_topk_prob: bool = False,
        scaling: float = 1.0,
    ) -> None: ...
    @property
    def n_group(self) -> int: ...
    @property
    def norm_topk_prob(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def topk_group(self) -> int: ...

def cuda_combine(
    y: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out[t] = sum of weights[t, j] * y[rows[t, j]] (+ shared[t])."""

def cuda_select_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    config: RouterConfig,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """select_experts on CUDA tensors."""

def cuda_sort_by_expert(
    ids: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
) -> None:
    """Rows in the order of experts: where each expert's end, the token of a row, the row of a choice. All int32."""

def moe_block(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    config: RouterConfig,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor | None,
    shared_w2: torch.Tensor | None,
    out: torch.Tensor,
    intermediate: int,
    shared_intermediate: int = 0,
) -> None:
    """Router and experts in one call. See helicore.ops.moe_block."""

def moe_forward(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor | None,
    shared_w2: torch.Tensor | None,
    out: torch.Tensor,
    intermediate: int,
    shared_intermediate: int = 0,
) -> None:
    """Routed and shared experts. See helicore.ops.moe_forward."""

def route(
    x: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    config: RouterConfig,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Choose experts. See helicore.ops.route."""

def select_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    config: RouterConfig,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Choose experts from float32 logits [T, E]."""
