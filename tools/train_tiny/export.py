"""A trained model as a Hugging Face folder, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from model import Config, Model
from safetensors.torch import load_file, save_file
from torch import Tensor

BOS, EOS, PAD, END_OF_TURN = 0, 1, 2, 8
_BIAS = "e_score_correction_bias"


_CONFIG_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "dense_layers": "first_k_dense_replace",
    "dense_width": "intermediate_size",
    "heads": "num_attention_heads",
    "q_lora": "q_lora_rank",
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "v": "v_head_dim",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "theta": "rope_theta",
    "context": "max_position_embeddings",
    "eps": "rms_norm_eps",
}


def hf_config(cfg: Config) -> dict[str, Any]:
    fixed = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": cfg.heads,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rope_scaling": None,
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    return fixed | {key: getattr(cfg, field) for field, key in _CONFIG_KEYS.items()}


GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.95,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, END_OF_TURN],
    "pad_token_id": PAD,
}


def _mlp_tensors(model: Model, index: int) -> dict[str, Tensor]:
    """Views of the parameters below `model.layers.<index>.mlp.`, writable where views exist."""
    cfg, p = model.cfg, model.layers[index]["mlp"]
    gate_up, down = p["gate_up"], p["down"]
    if index < cfg.dense_layers:
        return {
            "gate_proj.weight": gate_up[0],
            "up_proj.weight": gate_up[1],
            "down_proj.weight": down,
        }
    bias = model.bias[index - cfg.dense_layers]
    out = {"gate.weight": p["router"], f"gate.{_BIAS}": bias}
    for e in range(cfg.experts):
        out[f"experts.{e}.gate_proj.weight"] = gate_up[e, 0]
        out[f"experts.{e}.up_proj.weight"] = gate_up[e, 1]
        out[f"experts.{e}.down_proj.weight"] = down[e]
    shared, shared_down = gate_up[cfg.experts :], down[cfg.experts :]
    out["shared_experts.gate_proj.weight"] = shared[:, 0].reshape(-1, cfg.hidden)
    out["shared_experts.up_proj.weight"] = shared[:, 1].reshape(-1, cfg.hidden)
    out["shared_experts.down_proj.weight"] = shared_down.permute(1, 0, 2).reshape(cfg.hidden, -1)
    return out


def hf_tensors(model: Model) -> dict[str, Tensor]:
    names = {
        "norm_attn": "input_layernorm",
        "q_a": "self_attn.q_a_proj",
        "norm_q": "self_attn.q_a_layernorm",
        "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa",
        "norm_kv": "self_attn.kv_a_layernorm",
        "kv_b": "self_attn.kv_b_proj",
        "o": "self_attn.o_proj",
    }
    out = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        out |= {f"{at}{names[k]}.weight": v for k, v in layer["attn"].items()}
        out[f"{at}post_attention_layernorm.weight"] = layer["mlp"]["norm_mlp"]
        out |= {f"{at}mlp.{k}": v for k, v in _mlp_tensors(model, i).items()}
    return out


@torch.no_grad()
def round_to_checkpoint(model: Model) -> None:
    """Rounds the parameters as the saved file does; only differences of biases matter, so their
    least becomes zero, which keeps every selection score positive."""
    for p in model.parameters().values():
        p.copy_(p.bfloat16().float())
    model.bias.sub_(model.bias.amin(-1, keepdim=True))


def save(model: Model, tokenizer: Path, out: Path) -> int:
    """Writes a complete model folder; returns the bytes of the weights file."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in hf_tensors(model).items():
        value = value.detach() if name.endswith(_BIAS) else value.detach().bfloat16()
        tensors[name] = value.cpu().contiguous().clone()
    weights = out / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    for name, content in (
        ("config.json", hf_config(model.cfg)),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    for file in sorted(tokenizer.iterdir()):
        shutil.copyfile(file, out / file.name)
    return weights.stat().st_size


@torch.no_grad()
def load(folder: Path, device: str = "cpu") -> Model:
    """The model of a folder that `save` wrote, for evaluation or as the target of a draft."""
    raw = json.loads((folder / "config.json").read_text())
    model = Model(Config(**{field: raw[key] for field, key in _CONFIG_KEYS.items()}), device)
    stored = load_file(folder / "model.safetensors", device=device)
    for name, view in hf_tensors(model).items():
        if "shared_experts" not in name:
            view.copy_(stored[name])
    c = model.cfg
    for i in range(c.dense_layers, c.layers):
        at, p = f"model.layers.{i}.mlp.shared_experts.", model.layers[i]["mlp"]
        for j, kind in enumerate(("gate_proj", "up_proj")):
            shape = (c.shared, c.expert_width, c.hidden)
            p["gate_up"][c.experts :, j] = stored[f"{at}{kind}.weight"].float().view(shape)
        down = stored[f"{at}down_proj.weight"].float().view(c.hidden, c.shared, c.expert_width)
        p["down"][c.experts :] = down.permute(1, 0, 2)
    return model
