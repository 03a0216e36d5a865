"""Random small checkpoints made with `transformers`: the oracle of the model tests."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Spec:
    """One small model: its family, what differs from the common sizes, and a seed."""

    name: str
    family: str  # "v2" or "v3"
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def hf_config(self) -> Any:
        values = _SMALL | self.overrides
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        v3 = self.family == "v3"
        cls = transformers.DeepseekV3Config if v3 else transformers.DeepseekV2Config
        return cls(**values)


def random_model(spec: Spec) -> Any:
    """The `transformers` model in fp32 with weights that let no missing term hide: matrices are
    N(0, 1 / fan_in), biases and correction biases are not zero, norm weights are not one."""
    config = spec.hf_config()
    v3 = spec.family == "v3"
    cls = transformers.DeepseekV3ForCausalLM if v3 else transformers.DeepseekV2ForCausalLM
    config._attn_implementation = "eager"
    model = cls(config).float().eval()
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "norm" in name:
                p.copy_(1.0 + normal(p, 0.3))
            elif "e_score_correction_bias" in name or name.endswith("bias"):
                p.copy_(normal(p, 0.3))
            elif "embed_tokens" in name:
                p.copy_(normal(p, 1.0))
            else:
                p.copy_(normal(p, 1.0 / math.sqrt(p.shape[-1])))
    model.tie_weights()
    return model


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> Tensor:
    """fp32 [len(token_ids), vocab]."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits
    return logits[0].float()


def load_hf(folder: Path, dtype: torch.dtype) -> Any:
    """The `transformers` model of a folder, with its plain attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def edit_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Replaces one tensor of the weights file by `change(tensor)`; None removes it. A name that
    is not there is added, from an empty tensor."""
    file = folder / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(file).items()}
    new = change(tensors.pop(name, torch.empty(0)))
    if new is not None:
        tensors[name] = new.contiguous()
    save_file(tensors, file, {"format": "pt"})


def quantise_fp8(folder: Path) -> None:
    """Turns a single-file checkpoint into FP8 blocks of 128x128, as published models are: all
    matrices of the layers but the router."""
    file = folder / "model.safetensors"
    out: dict[str, Tensor] = {}
    for name, t in load_file(file).items():
        if t.ndim != 2 or ".layers." not in name or ".mlp.gate." in name:
            out[name] = t
            continue
        rows, cols = (-(-n // 128) for n in t.shape)
        scale = torch.empty(rows, cols)
        codes = torch.empty(t.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(cols):
                at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scale[i, j] = t[at].abs().max() / 448
                codes[at] = (t[at] / scale[i, j]).to(codes.dtype)
        out[name], out[f"{name}_scale_inv"] = codes, scale
    save_file(out, file, {"format": "pt"})
    edit_json(
        folder / "config.json",
        quantization_config={
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    )


def dequantise_fp8(model: Any, folder: Path) -> None:
    """Gives `model` the weights that the FP8 checkpoint in `folder` stands for."""
    stored = load_file(folder / "model.safetensors")
    plain = {}
    for name, t in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        if scale is None:
            plain[name] = t.float()
            continue
        rows = torch.arange(t.shape[0]) // 128
        cols = torch.arange(t.shape[1]) // 128
        plain[name] = t.float() * scale[rows][:, cols]
    layers = {}
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        parts = name.rsplit(".", 1)
        if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name:
            kinds = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
            layers[name] = torch.stack(
                [
                    torch.cat([plain[f"{parts[0]}.{e}.{kind}_proj.weight"] for kind in kinds])
                    for e in range(p.shape[0])
                ]
            )
        elif name in plain:
            layers[name] = plain[name]
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name in layers:
                p.copy_(layers[name])


def edit_json(path: Path, **changes: Any) -> None:
    """Sets (or, for None, removes) top-level keys of a JSON file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))
