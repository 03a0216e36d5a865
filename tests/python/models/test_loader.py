"""Loading whole checkpoints: shards, FP8, other dialects, and every way to be broken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helicore.models import load_model
from helicore.models.loader import why_no_cuda
from helicore.models.weights import INDEX_FILE
from reference.hf_models import (
    YARN,
    Spec,
    dequantise_fp8,
    edit_json,
    edit_tensor,
    hf_logits,
    quantise_fp8,
    random_model,
)
from reference.paged import PagedRequests
from torch import Tensor

IDS = [5, 3, 8, 1, 120, 77, 5, 5, 9, 30]
SPEC = Spec("m", "v3", {"rope_parameters": dict(YARN), "tie_word_embeddings": False}, seed=3)


@pytest.fixture(scope="module")
def original(tmp_path_factory: Any) -> tuple[Path, Tensor]:
    """A sound checkpoint and its logits."""
    folder = tmp_path_factory.mktemp("original")
    hf = random_model(SPEC)
    hf.save_pretrained(folder)
    return folder, hf_logits(hf, IDS)


@pytest.fixture
def folder(original: tuple[Path, Tensor], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original[0], tmp_path / "model"))


def logits_of(folder: Path) -> Tensor:
    return PagedRequests(load_model(folder, dtype=torch.float32)).step({0: IDS})


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4


def test_shards_give_the_same_model(original: tuple[Path, Tensor], tmp_path: Path) -> None:
    random_model(SPEC).save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX_FILE).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(tmp_path), logits_of(original[0]))


def test_the_older_dialect_gives_the_same_model(
    original: tuple[Path, Tensor], folder: Path
) -> None:
    rope = dict(YARN)
    theta, rope["type"] = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_json(
        folder / "config.json",
        rope_parameters=None,
        rope_scaling=rope,
        rope_theta=theta,
        dtype=None,
        torch_dtype="float32",
    )
    assert_close(logits_of(folder), original[1])


def test_kimi_k2_files_give_the_same_model(original: tuple[Path, Tensor], folder: Path) -> None:
    edit_json(folder / "config.json", model_type="kimi_k2")
    assert_close(logits_of(folder), original[1])


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_fp8_blocks_are_dequantised_while_loading(family: str, tmp_path: Path) -> None:
    spec = Spec(
        "fp8",
        family,
        {
            "hidden_size": 160,
            "intermediate_size": 200,
            "moe_intermediate_size": 136,
            "num_attention_heads": 5,
            "q_lora_rank": 132,
            "kv_lora_rank": 140,
            "qk_nope_head_dim": 32,
            "v_head_dim": 28,
        },
        seed=4,
    )
    hf = random_model(spec)
    hf.save_pretrained(tmp_path)
    before = hf_logits(hf, IDS)
    quantise_fp8(tmp_path)
    dequantise_fp8(hf, tmp_path)
    expected = hf_logits(hf, IDS)
    assert (expected - before).abs().max() > 1e-2 * before.abs().max()
    assert_close(logits_of(tmp_path), expected)


def test_tensors_without_a_use_are_ignored(original: tuple[Path, Tensor], folder: Path) -> None:
    for name in (
        "model.layers.3.eh_proj.weight",
        "model.layers.3.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ):
        edit_tensor(folder, name, lambda _: torch.ones(2, 2))
    assert_close(logits_of(folder), original[1])


def test_a_tied_model_may_store_its_head(tmp_path: Path) -> None:
    hf = random_model(Spec("m", "v3", {"tie_word_embeddings": True}))
    hf.save_pretrained(tmp_path)
    edit_tensor(tmp_path, "lm_head.weight", lambda _: torch.zeros(160, 48))
    assert_close(logits_of(tmp_path), hf_logits(hf, IDS))


def test_the_model_needs_its_files_no_longer(original: tuple[Path, Tensor], folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    file = folder / "model.safetensors"
    with file.open("r+b") as f:  # in place: a mapping would see it
        f.write(b"\xff" * file.stat().st_size)
    assert_close(PagedRequests(model).step({0: IDS}), original[1])


def test_progress_counts_up_to_all_parts(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("float16", None, torch.float32),
        ("float32", torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_have_the_wanted_dtype_and_the_router_stays_float32(
    stored: str, wanted: torch.dtype | None, expected: torch.dtype, folder: Path
) -> None:
    edit_json(folder / "config.json", dtype=stored)
    model = load_model(folder, dtype=wanted)
    dtypes = {name: t.dtype for name, t in model.named_buffers()}
    fp32 = {n for n in dtypes if n.endswith((".gate", ".gate_bias")) or n == "cos_sin"}
    assert len(fp32) == 5
    assert all(dtypes[n] == (torch.float32 if n in fp32 else expected) for n in dtypes)
    assert not list(model.parameters())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            lambda _: None,
            r"tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing",
        ),
        ("lm_head.weight", lambda _: None, r"tensor lm_head\.weight is missing"),
        (
            "model.layers.0.self_attn.q_a_proj.weight",
            lambda t: t.T,
            r"safetensors: tensor model\.layers\.0\.self_attn\.q_a_proj\.weight must have shape "
            r"\[32, 48\], got \[48, 32\]",
        ),
        (
            "model.layers.2.mlp.gate.weight",
            lambda t: t[:7],
            r"tensor model\.layers\.2\.mlp\.gate\.weight must have shape \[8, 48\], got \[7, 48\]",
        ),
        (
            "model.layers.1.mlp.experts.8.up_proj.weight",
            lambda _: torch.ones(24, 48),
            r"tensor model\.layers\.1\.mlp\.experts\.8\.up_proj\.weight is unexpected",
        ),
        (
            "model.norm.weight",
            lambda t: t.to(torch.int32),
            r"tensor model\.norm\.weight must hold floating point numbers, got torch\.int32",
        ),
    ],
    ids=["missing expert", "missing head", "transposed", "too few", "unexpected", "integers"],
)
def test_a_wrong_tensor_is_named(
    name: str, change: Callable[[Tensor], Tensor | None], message: str, folder: Path
) -> None:
    edit_tensor(folder, name, change)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        load_model(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="llama")
    with pytest.raises(ValueError, match=r"model_type must be a supported architecture.*'llama'"):
        load_model(folder)


def test_a_lora_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="LoRA adapters are not supported"):
        load_model(folder)


def test_a_loaded_model_cannot_change_its_dtype(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    expected = PagedRequests(model).step({0: IDS})
    with pytest.raises(ValueError, match=r"is packed for torch\.float32"):
        model.bfloat16()
    model.to("cpu")
    assert torch.equal(PagedRequests(model).step({0: IDS}), expected)


def test_bad_arguments_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be bfloat16 or float32"):
        load_model(folder, dtype=torch.float16)
    with pytest.raises(ValueError, match='device must be "cpu" or "cuda", got "meta"'):
        load_model(folder, device="meta")
    if why_no_cuda() is not None:
        with pytest.raises(ValueError, match='device can not be "cuda": '):
            load_model(folder, device="cuda")
