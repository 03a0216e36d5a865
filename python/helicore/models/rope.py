"""Rotary frequencies, their cos/sin factor and the softmax scale: the only place that derives them.

YaRN (arXiv 2309.00071) blends the plain frequencies with those divided by `factor`, by a ramp
between the dimensions that turn `beta_fast` and `beta_slow` times over the original context. The
models multiply the logits by m(factor, mscale_all_dim)^2 and cos/sin by the ratio of two m, where
m(s, c) = 1 for s <= 1, else 0.1 c ln s + 1. Kernels take the results and derive nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from helicore.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """What the attention of one model needs to know of its positions."""

    inv_freq: Tensor
    """fp32 [qk_rope_head_dim / 2], radians per position."""
    cos_sin_factor: float
    """Multiplies cos and sin."""
    softmax_scale: float
    """Multiplies the dot products of queries and keys."""

    def cos_sin(self, length: int) -> Tensor:
        """fp32 [length, qk_rope_head_dim]: the cosines of a position, then its sines.

        Angles are rounded to fp32 before cos and sin, as in training.
        """
        positions = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self.cos_sin_factor)


def rope_of(config: ModelConfig) -> Rope:
    """Frequencies, cos/sin factor and softmax scale of a model."""
    dim, rope = config.qk_rope_head_dim, config.rope
    plain_freq = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    scale = config.qk_head_dim**-0.5
    if rope.kind == "default":
        return Rope(1.0 / plain_freq, 1.0, scale)
    kept = 1 - _ramp(rope, dim)
    inv_freq = (1.0 / (rope.factor * plain_freq)) * (1 - kept) + (1.0 / plain_freq) * kept
    if rope.mscale_all_dim is not None:
        scale *= _magnitude(rope.factor, rope.mscale_all_dim) ** 2
    return Rope(inv_freq, _cos_sin_factor(rope), scale)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _cos_sin_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _ramp(rope: RopeConfig, dim: int) -> Tensor:
    """fp32 [dim / 2]: 0 where a frequency stays, 1 where it is divided by the factor."""

    def dim_of_turns(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dim_of_turns(rope.beta_fast), dim_of_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
