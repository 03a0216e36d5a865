"""Float64 forms of the operators of `helicore.ops`: slow and obvious."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().transpose(-1, -2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return linear(silu_mul(linear(x, gate_up)), down)


def filtered_distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Probabilities of one row after temperature, min_p, top_k and top_p; ties to the lower id."""
    p = (logits.double() / temperature).softmax(-1)
    p = torch.where(p < min_p * p.max(), 0.0, p)
    order = torch.sort(logits, descending=True, stable=True).indices
    if top_k > 0:
        p[order[top_k:]] = 0.0
    p = p / p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


def penalise(
    logits: Tensor,
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    out = logits.double().clone()
    for token in set(prompt) | set(output):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(output):
        out[token] -= frequency * output.count(token) + presence
    return out
