"""Frequencies, cos/sin factor and softmax scale."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from helicore.models.config import ModelConfig
from helicore.models.rope import rope_of
from reference.hf_models import YARN, Spec
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def config_of(spec: Spec) -> ModelConfig:
    return ModelConfig.from_dict(spec.hf_config().to_dict())


def real_size(mscale: float, all_dim: float, factor: float) -> ModelConfig:
    config = config_of(
        Spec("m", "v3", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
    )
    rope = dataclasses.replace(
        config.rope,
        kind="yarn",
        factor=factor,
        mscale=mscale,
        mscale_all_dim=all_dim,
        original_max_position_embeddings=4096,
    )
    return dataclasses.replace(config, rope=rope)


@pytest.mark.parametrize(
    ("mscale", "all_dim", "factor", "multiplier"),
    [
        (0.707, 0.707, 40.0, 1.58963),
        (1.0, 1.0, 40.0, 1.87385),
        (1.0, 1.0, 32.0, 1.81326),
        (1.0, 1.0, 64.0, 2.00474),
        (0.707, 1.0, 40.0, 1.87385),
    ],
)
def test_published_models_get_their_softmax_scale(
    mscale: float, all_dim: float, factor: float, multiplier: float
) -> None:
    rope = rope_of(real_size(mscale, all_dim, factor))
    assert rope.softmax_scale * math.sqrt(192) == pytest.approx(multiplier, rel=1e-5)


def test_without_yarn_the_scale_is_plain() -> None:
    config = config_of(Spec("m", "v3"))
    rope = rope_of(config)
    assert rope.softmax_scale == config.qk_head_dim**-0.5
    assert rope.cos_sin_factor == 1.0


def test_equal_magnitudes_hide_in_cos_and_sin_and_unequal_ones_do_not() -> None:
    assert rope_of(real_size(0.707, 0.707, 40.0)).cos_sin_factor == 1.0
    unequal = rope_of(real_size(0.707, 1.0, 40.0)).cos_sin_factor
    assert unequal == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"mscale": 0.5},
        {"mscale_all_dim": 0},
        {"factor": 0.5},
        {"attention_factor": 0.8},
        {"truncate": False},
        {"beta_fast": 32, "beta_slow": 32},
        {"original_max_position_embeddings": 4096, "rope_theta": 50000.0},
    ],
)
def test_frequencies_and_cos_sin_factor_equal_those_of_transformers(
    change: dict[str, Any],
) -> None:
    spec = Spec("m", "v3", {"rope_parameters": YARN | change, "qk_rope_head_dim": 32})
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](spec.hf_config())
    rope = rope_of(config_of(spec))
    torch.testing.assert_close(rope.inv_freq, expected, rtol=1e-6, atol=0)
    assert rope.cos_sin_factor == pytest.approx(factor, rel=1e-12)


def test_the_table_holds_cosines_then_sines_times_the_factor() -> None:
    rope = rope_of(real_size(0.707, 1.0, 40.0))
    table = rope.cos_sin(7)
    assert table.shape == (7, 64)
    angle = 5 * rope.inv_freq
    torch.testing.assert_close(table[5, :32], angle.cos() * rope.cos_sin_factor)
    torch.testing.assert_close(table[5, 32:], angle.sin() * rope.cos_sin_factor)
