"""`config.json` and `generation_config.json` of a checkpoint folder, checked and frozen.

Every fault is a `ValueError` (or `FileNotFoundError`) that names the file and the field. Both
dialects are read: `rope_scaling` with `type` of older files and `rope_parameters` of newer ones.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helicore.models._fields import Fields

MAX_HEADS = 128
"""Heads that the attention kernels take."""
MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K = 4096, 256, 64
"""What the router takes."""
_LATENT_NORM_EPS = 1e-6
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GENERATION_KEYS = (
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)
_FAMILIES = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; the YaRN fields count only for `kind` "yarn"."""

    kind: str
    """"default" or "yarn"."""
    theta: float
    interleaved: bool
    """Pairs are (2i, 2i + 1) in the checkpoint's row order; else (i, i + dim / 2)."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Router and experts of the mixture-of-experts layers."""

    num_experts: int
    top_k: int
    expert_size: int
    """Width of one expert: `moe_intermediate_size`."""
    shared_size: int
    """Width of the shared expert, 0 for none: `moe_intermediate_size * n_shared_experts`."""
    scoring_func: str
    """"softmax" or "sigmoid"."""
    topk_method: str
    """"greedy", "group_limited_greedy" (group score: maximum) or "noaux_tc" (bias; top two)."""
    n_group: int
    """1 when groups do not matter."""
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_dense: int
    """Layers before this one are dense."""
    layer_freq: int

    def is_moe_layer(self, index: int) -> bool:
        return index >= self.first_dense and index % self.layer_freq == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Weights stored as e4m3 with one fp32 factor per block of 128x128."""

    block_size: tuple[int, int] = (128, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that a model, the executor and the sampler need to know of a checkpoint."""

    family: str
    """Key of the model registry: "deepseek_v2" or "deepseek_v3"."""
    model_type: str
    """As the file says, for messages."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    latent_norm_eps: float = _LATENT_NORM_EPS
    """Of the norms inside attention: the architecture fixes it, the file does not say it."""
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    """Layers of the checkpoint after the model's own; they predict further tokens, unused here."""
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    moe: MoeConfig | None
    quantization: Fp8Config | None
    dtype: torch.dtype
    """Of the checkpoint; what "auto" means for computing."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    generation_defaults: Mapping[str, bool | int | float] = field(default_factory=dict)
    """The sampling keys of `generation_config.json`, under its names."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_moe_layer(self, index: int) -> bool:
        return self.moe is not None and self.moe.is_moe_layer(index)

    @classmethod
    def from_dir(cls, path: Path | str) -> "ModelConfig":
        """Reads a checkpoint folder.

        Raises FileNotFoundError when the folder or its `config.json` is missing, ValueError for
        everything else that is wrong.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"model folder {folder} does not exist")
        if (folder / "adapter_config.json").exists():
            raise ValueError(
                f"{folder} holds adapter_config.json: LoRA adapters are not supported; merge the "
                "adapter into its base model and load the merged folder"
            )
        config = _read_json(folder / "config.json", required=True)
        return cls.from_dict(config, _read_json(folder / "generation_config.json", required=False))

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None
    ) -> "ModelConfig":
        """Parses the two files' contents."""
        f = Fields(config, "config.json")
        family = _family(f)
        _refuse_unsupported(f)
        heads = f.integer("num_attention_heads", low=1, high=MAX_HEADS)
        if f.integer("num_key_value_heads", default=heads, low=1) != heads:
            raise f.error("num_key_value_heads", f"equal to num_attention_heads ({heads})")
        rope_dim = f.integer("qk_rope_head_dim", low=1)
        if rope_dim % 4:
            raise f.error("qk_rope_head_dim", "even, and a multiple of 4")
        vocab_size = f.integer("vocab_size", low=1)
        max_positions = f.integer("max_position_embeddings", "model_max_length", low=1)
        num_layers = f.integer("num_hidden_layers", low=1)
        g = Fields(generation or {}, "generation_config.json")
        return cls(
            family=family,
            model_type=f.text("model_type"),
            vocab_size=vocab_size,
            hidden_size=f.integer("hidden_size", low=1),
            intermediate_size=f.integer("intermediate_size", low=1),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            q_lora_rank=f.integer("q_lora_rank", low=1) if f.has("q_lora_rank") else None,
            kv_lora_rank=f.integer("kv_lora_rank", low=4, multiple=4),
            qk_nope_head_dim=f.integer("qk_nope_head_dim", low=4, multiple=4),
            qk_rope_head_dim=rope_dim,
            v_head_dim=f.integer("v_head_dim", low=4, multiple=4),
            rms_norm_eps=f.number("rms_norm_eps", default=1e-6, above=0.0),
            max_position_embeddings=max_positions,
            num_nextn_predict_layers=f.integer("num_nextn_predict_layers", default=0, low=0),
            tie_word_embeddings=f.boolean("tie_word_embeddings", default=False),
            attention_bias=f.boolean("attention_bias", default=False),
            rope=_rope(f, max_positions, family),
            moe=_moe(f, family),
            quantization=_quantization(f),
            dtype=_dtype(f),
            bos_token_id=_token_id(g if g.has("bos_token_id") else f, "bos_token_id", vocab_size),
            eos_token_ids=_eos(g if g.has("eos_token_id") else f, vocab_size),
            pad_token_id=_token_id(g if g.has("pad_token_id") else f, "pad_token_id", vocab_size),
            generation_defaults=_generation_defaults(g),
        )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            raise FileNotFoundError(f"{path.parent} has no {path.name}") from None
        return {}
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text: {e}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _family(f: Fields) -> str:
    model_type = f.text("model_type")
    if model_type not in _FAMILIES:
        raise f.error("model_type", "a supported architecture: " + ", ".join(sorted(_FAMILIES)))
    return _FAMILIES[model_type]


def _refuse_unsupported(f: Fields) -> None:
    f.choice("hidden_act", ("silu",), default="silu")
    if f.boolean("mlp_bias", default=False):
        raise f.error("mlp_bias", "false (biases in MLP layers are not supported)")


def _rope(f: Fields, max_positions: int, family: str) -> RopeConfig:
    name = "rope_scaling" if f.has("rope_scaling") else "rope_parameters"
    r = f.section(name)
    kind_key = "rope_type" if r.has("rope_type") or not r.has("type") else "type"
    kind = r.choice(kind_key, ("default", "yarn"), default="default")
    theta_from = r if r.has("rope_theta") else f
    theta = theta_from.number("rope_theta", default=10000.0, above=1.0)
    interleaved = f.boolean("rope_interleave", default=True)
    if family == "deepseek_v2" and not interleaved:
        raise f.error("rope_interleave", "true for this architecture")
    if r.number("partial_rotary_factor", default=1.0) != 1.0:
        raise r.error("partial_rotary_factor", "1 (the rotated part is qk_rope_head_dim wide)")
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta, interleaved=interleaved)
    original = r.integer("original_max_position_embeddings", default=max_positions, low=1)
    # A zero stands for "not set" in the fields below, as it does for the models' authors.
    return RopeConfig(
        kind=kind,
        theta=theta,
        interleaved=interleaved,
        factor=r.number("factor", default=max_positions / original, above=0.0),
        original_max_position_embeddings=original,
        beta_fast=r.number("beta_fast", default=32.0) or 32.0,
        beta_slow=r.number("beta_slow", default=1.0) or 1.0,
        mscale=r.number("mscale", default=0.0) or None,
        mscale_all_dim=r.number("mscale_all_dim", default=0.0) or None,
        attention_factor=r.number("attention_factor", above=0.0)
        if r.has("attention_factor")
        else None,
        truncate=r.boolean("truncate", default=True),
    )


def _moe(f: Fields, family: str) -> MoeConfig | None:
    num_experts = f.integer("n_routed_experts", "num_experts", default=0, low=0, high=MAX_EXPERTS)
    if num_experts == 0:
        return None
    v3 = family == "deepseek_v3"
    method = f.choice(
        "topk_method",
        ("greedy", "group_limited_greedy", "noaux_tc"),
        default="noaux_tc" if v3 else "greedy",
    )
    scoring = f.choice(
        "scoring_func", ("softmax", "sigmoid"), default="sigmoid" if v3 else "softmax"
    )
    most = min(num_experts, MAX_TOP_K)
    top_k = f.integer("num_experts_per_tok", "num_experts_per_token", low=1, high=most)
    n_group, topk_group = 1, 1
    if method != "greedy":
        n_group, topk_group = _groups(f, num_experts, top_k, method)
    expert_size = f.integer("moe_intermediate_size", low=1)
    shared = f.integer("n_shared_experts", "num_shared_experts", default=0, low=0)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=expert_size,
        shared_size=expert_size * shared,
        scoring_func=scoring,
        topk_method=method,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=f.boolean("norm_topk_prob", "moe_renormalize", default=v3),
        routed_scaling_factor=f.number("routed_scaling_factor", default=1.0),
        first_dense=f.integer("first_k_dense_replace", default=0, low=0),
        layer_freq=f.integer("moe_layer_freq", default=1, low=1),
    )


def _groups(f: Fields, num_experts: int, top_k: int, method: str) -> tuple[int, int]:
    most = min(num_experts, MAX_GROUPS)
    n_group = f.integer("n_group", "num_expert_group", default=1, low=1, high=most)
    topk_group = f.integer("topk_group", default=n_group, low=1, high=n_group)
    if num_experts % n_group:
        raise f.error("n_group", f"a divisor of n_routed_experts ({num_experts})")
    per_group = num_experts // n_group
    if n_group > 1 and method == "noaux_tc" and per_group < 2:
        raise f.error("n_group", f"at most n_routed_experts / 2 ({num_experts // 2})")
    if top_k > topk_group * per_group:
        raise f.error(
            "num_experts_per_tok",
            f"at most topk_group * n_routed_experts / n_group ({topk_group * per_group})",
        )
    return n_group, topk_group


def _quantization(f: Fields) -> Fp8Config | None:
    if not f.has("quantization_config"):
        return None
    q = f.section("quantization_config")
    q.choice("quant_method", ("fp8",))
    q.choice("fmt", ("e4m3",), default="e4m3")
    if q.raw("weight_block_size") != [128, 128]:
        raise q.error("weight_block_size", "[128, 128]")
    return Fp8Config()


def _dtype(f: Fields) -> torch.dtype:
    name = "dtype" if f.has("dtype") else "torch_dtype"
    return _DTYPES[f.choice(name, tuple(_DTYPES), default="bfloat16")]


def _token_id(f: Fields, name: str, vocab_size: int) -> int | None:
    if not f.has(name):
        return None
    if isinstance(f.raw(name), list):  # a list of one is in use
        ids = f.integers(name, low=0)
        return ids[0] if ids else None
    return f.integer(name, low=0, high=vocab_size - 1 if name != "pad_token_id" else None)


def _eos(f: Fields, vocab_size: int) -> tuple[int, ...]:
    if not f.has("eos_token_id"):
        return ()
    if isinstance(f.raw("eos_token_id"), list):
        return f.integers("eos_token_id", low=0, high=vocab_size - 1)
    return (f.integer("eos_token_id", low=0, high=vocab_size - 1),)


def _generation_defaults(g: Fields) -> dict[str, bool | int | float]:
    defaults: dict[str, bool | int | float] = {}
    for key in _GENERATION_KEYS:
        if not g.has(key):
            continue
        if key == "do_sample":
            defaults[key] = g.boolean(key)
        elif key in ("top_k", "max_new_tokens"):
            defaults[key] = g.integer(key)
        else:
            defaults[key] = g.number(key)
    return defaults
