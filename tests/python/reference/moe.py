"""Float64 forms of router and experts: one token at a time."""

from dataclasses import dataclass

import torch
from reference import nn
from torch import Tensor


@dataclass
class Choice:
    """ids and weights of one token, and the smallest gap between neighbours that decided them."""

    ids: list[int]
    weights: list[float]
    gap: float


def _order(values: Tensor) -> Tensor:
    return torch.sort(values, descending=True, stable=True).indices


def _gap(values: Tensor, order: Tensor, k: int) -> float:
    ordered = values[order]
    steps = (ordered[:-1] - ordered[1:])[:k]
    steps = steps[~steps.isnan()]
    return float(steps.min()) if len(steps) else float("inf")


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    group_score: str = "none",
    norm_topk_prob: bool = False,
    scaling: float = 1.0,
) -> Choice:
    """`x` [D] of one token, `gate` [E, D]."""
    logits = gate.double() @ x.double()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    gap = float("inf")
    if group_score != "none" and topk_group < n_group:
        grouped = choice.view(n_group, -1)
        best = grouped.sort(-1, descending=True).values
        of_group = best[:, 0] if group_score == "max" else best[:, :2].sum(-1)
        order = _order(of_group)
        gap = _gap(of_group, order, topk_group)
        grouped = grouped.clone()
        grouped[order[topk_group:]] = float("-inf")
        choice = grouped.flatten()
    order = _order(choice)
    ids = order[:top_k]
    weights = scores[ids]
    if norm_topk_prob:
        weights = weights / (weights.sum() + 1e-20)
    gap = min(gap, _gap(choice, order, top_k))
    return Choice(ids.tolist(), (weights * scaling).tolist(), gap)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`x` [T, D], `w13` [E, 2 I, D], `w2` [E, D, I], `shared` its two weights."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            out[t] += float(weights[t, s]) * nn.mlp(x[t], w13[e], w2[e])
        if shared is not None:
            out[t] += nn.mlp(x[t], *shared)
    return out
