"""The operators of `helicore.ops.moe` over tensors of a GPU.

Shapes depend on the number of tokens alone and nothing is read back, so a graph may capture them.
Selection, sort and sum are native kernels there; beside them stands the same formula in torch,
which runs on any device.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from helicore._core import moe as _moe
from helicore.ops._torch_nn import mlp, silu_mul


class Routing(Protocol):
    """What `route` reads of a RouterConfig."""

    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def n_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def scoring(self) -> str: ...
    @property
    def group_score(self) -> str: ...
    @property
    def norm_topk_prob(self) -> bool: ...
    @property
    def scaling(self) -> float: ...
    @property
    def native(self) -> _moe.RouterConfig: ...


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest of each row, descending; equal ones: lower index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route(x: Tensor, gate: Tensor, bias: Tensor | None, config: Routing) -> tuple[Tensor, Tensor]:
    logits = x.float() @ gate.T
    if x.is_cuda:
        ids = torch.empty((len(x), config.top_k), dtype=torch.int32, device=x.device)
        weights = torch.empty_like(ids, dtype=torch.float32)
        _moe.cuda_select_experts(logits, bias, config.native, ids, weights)
        return ids, weights
    is_nan = logits.isnan()
    logits = logits.masked_fill(is_nan, -torch.inf)
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    scores = scores.nan_to_num(0.0)  # a row of nothing but NaN has no softmax
    choice = scores if bias is None else scores + bias
    choice = choice.masked_fill(is_nan, torch.finfo(torch.float32).min)
    if config.group_score != "none":
        groups = choice.view(len(x), config.n_group, -1)
        if config.group_score == "max":
            group_scores = groups.amax(-1)
        else:
            group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, _best(group_scores, config.topk_group), True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).view_as(choice)
    ids = _best(choice, config.top_k)
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * config.scaling


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
    shared = None
    if shared_w13 is not None and shared_w2 is not None:
        shared = mlp(x, shared_w13, shared_w2, shared_intermediate, x.shape[1])
    aligned = x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and intermediate % 8 == 0
    if aligned and x.is_cuda:
        return _grouped_on_gpu(x, ids, weights, w13, w2, shared)
    routed = _grouped if aligned else _expert_by_expert
    out = routed(x, ids, weights, w13, w2)
    if shared is not None:
        out += shared
    return out.to(x.dtype)


def _grouped_on_gpu(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, shared: Tensor | None
) -> Tensor:
    ends = torch.empty(len(w13), dtype=torch.int32, device=x.device)
    tokens = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    rows = torch.empty_like(ids)
    _moe.cuda_sort_by_expert(ids, ends, tokens, rows)
    inner = silu_mul(F.grouped_mm(x.index_select(0, tokens), w13.transpose(1, 2), offs=ends))
    y = F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _moe.cuda_combine(y, rows, weights, shared, out)
    return out


def _grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Rows sorted by expert, one grouped product each way: float32 [T, D]."""
    tokens, k = ids.shape
    flat = ids.view(-1).long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(w13), dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)
    rows = x.index_select(0, order // k)
    gate, up = F.grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = F.silu(gate.float()).mul_(up).to(x.dtype)
    sorted_out = F.grouped_mm(inner, w2.transpose(1, 2), offs=ends)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    return (out.view(tokens, k, -1).float() * weights[..., None]).sum(1)


def _expert_by_expert(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Every expert on every token: for dtypes and widths without a grouped product."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w13)):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        out += weight * mlp(x, w13[expert], w2[expert], w13.shape[1] // 2, x.shape[1])
    return out
