"""Reading config.json and generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helicore.models.config import ModelConfig
from reference.hf_models import YARN, Spec

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "torch_dtype": "bfloat16",
}
V3: dict[str, Any] = V2_LITE | {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_file_of_the_older_dialect_is_read(tmp_path: Path) -> None:
    c = ModelConfig.from_dir(write(tmp_path, V2_LITE))
    assert (c.family, c.vocab_size, c.q_lora_rank, c.qk_head_dim) == (
        "deepseek_v2",
        102400,
        None,
        192,
    )
    assert c.rope.kind == "yarn"
    assert c.rope.factor == 40.0
    assert c.rope.mscale == c.rope.mscale_all_dim == 0.707
    assert c.moe is not None
    assert (c.moe.top_k, c.moe.shared_size, c.moe.scoring_func) == (6, 2816, "softmax")
    assert not c.moe.norm_topk_prob
    assert [c.is_moe_layer(i) for i in (0, 1, 26)] == [False, True, True]
    assert c.dtype == torch.bfloat16
    assert c.eos_token_ids == (100001,)


def test_a_file_with_fp8_weights_and_groups_is_read(tmp_path: Path) -> None:
    c = ModelConfig.from_dir(write(tmp_path, V3))
    assert c.quantization is not None
    assert c.quantization.block_size == (128, 128)
    assert c.moe is not None
    assert (c.moe.n_group, c.moe.topk_group, c.moe.topk_method) == (8, 4, "noaux_tc")
    assert c.moe.norm_topk_prob


def test_kimi_k2_loads_as_deepseek_v3() -> None:
    c = ModelConfig.from_dict(
        V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64}
    )
    assert (c.family, c.model_type) == ("deepseek_v3", "kimi_k2")


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_both_dialects_of_one_model_give_the_same_configuration(
    family: str, tmp_path: Path
) -> None:
    Spec("m", family, {"rope_parameters": dict(YARN)}).hf_config().save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = rope
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    old["rope_scaling"] = None
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(old).rope.kind == "default"


def test_defaults_of_sampling_and_several_end_ids_come_from_the_generation_file(
    tmp_path: Path,
) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 50,
        "eos_token_id": [7, 9],
        "transformers_version": "5",
    }
    c = ModelConfig.from_dir(write(tmp_path, V2_LITE, generation))
    assert c.eos_token_ids == (7, 9)
    assert c.bos_token_id == 100000
    assert c.generation_defaults == {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 50,
    }


def test_a_model_without_experts_is_dense_everywhere() -> None:
    c = ModelConfig.from_dict(V2_LITE | {"n_routed_experts": None})
    assert c.moe is None
    assert not c.is_moe_layer(5)


def test_every_second_layer_can_be_dense() -> None:
    c = ModelConfig.from_dict(V2_LITE | {"moe_layer_freq": 2})
    assert [c.is_moe_layer(i) for i in range(5)] == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be a supported architecture"),
        ({"model_type": None}, "model_type must be a string, got None"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        ({"num_attention_heads": 129}, "num_attention_heads must be at most 128, got 129"),
        ({"num_attention_heads": "16"}, "num_attention_heads must be an integer, got '16'"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads must be equal to num_attention"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"kv_lora_rank": 510}, "kv_lora_rank must be a multiple of 4, got 510"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, got 0"),
        ({"vocab_size": True}, "vocab_size must be an integer, got True"),
        ({"hidden_size": -1}, "hidden_size must be at least 1, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be greater than 0"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of float32, bfloat16, float16"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope_scaling\.type must be one of"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, r"rope_scaling\.factor must be great"),
        ({"rope_theta": 1}, "rope_theta must be greater than 1, got 1"),
        ({"topk_method": "best"}, "topk_method must be one of greedy"),
        ({"scoring_func": "sqrt"}, "scoring_func must be one of softmax, sigmoid"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok must be at most 64, got 65"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be at least 1, got 0"),
        ({"eos_token_id": [1, 102400]}, r"eos_token_id must be integers in \[0, 102399\]"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method must be one of fp8"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"quantization_config\.weight_block_size must be \[128, 128\], got \[64, 64\]",
        ),
    ],
)
def test_a_bad_value_is_named_with_its_file(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: " + f".*{message}"):
        ModelConfig.from_dict(V2_LITE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 7}, r"n_group must be a divisor of n_routed_experts \(256\), got 7"),
        ({"n_group": 256, "topk_group": 8}, r"n_group must be at most n_routed_experts / 2"),
        ({"topk_group": 9}, "topk_group must be at most 8, got 9"),
        ({"topk_group": 1, "num_experts_per_tok": 33}, r"at most topk_group .* \(32\), got 33"),
    ],
)
def test_a_router_that_cannot_choose_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(V3 | change)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_dir(tmp_path)
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config\.json is not UTF-8"):
        ModelConfig.from_dir(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, got list"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature must be a number"):
        ModelConfig.from_dir(write(tmp_path, V2_LITE, {"temperature": "hot"}))


def test_a_lora_adapter_is_refused(tmp_path: Path) -> None:
    write(tmp_path, V2_LITE)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="LoRA adapters are not supported"):
        ModelConfig.from_dir(tmp_path)
