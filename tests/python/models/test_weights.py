"""Checkpoint files: by name and shape, from one file or several, FP8 blocks, broken files."""

import json
from pathlib import Path

import pytest
import torch
from helicore.models.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from safetensors.torch import save_file

F32 = torch.float32


def single(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def sharded(folder: Path, *shards: dict[str, torch.Tensor]) -> Path:
    where = {}
    for i, shard in enumerate(shards):
        file = f"model-{i}.safetensors"
        save_file(shard, folder / file)
        where |= dict.fromkeys(shard, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_a_tensor_is_a_view_of_the_file_until_it_is_converted(tmp_path: Path) -> None:
    a = torch.randn(4, 6)
    ckpt = Checkpoint(single(tmp_path, a=a))
    view = ckpt.take("a", (4, 6), F32)
    assert view.data_ptr() == ckpt.take("a", (4, 6), F32).data_ptr()
    copy = ckpt.take("a", (4, 6), F32, copy=True)
    assert copy.data_ptr() != view.data_ptr()
    assert torch.equal(copy, a)
    assert torch.equal(ckpt.take("a", (4, 6), torch.bfloat16), a.bfloat16())


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    a, b = torch.randn(3), torch.randn(2, 2)
    ckpt = Checkpoint(sharded(tmp_path, {"a": a}, {"b": b}))
    assert torch.equal(ckpt.take("b", (2, 2), F32), b)
    assert torch.equal(ckpt.take("a", (3,), F32), a)
    ckpt.finish(lambda name: False)


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 1), (129, 384), (4, 130)])
def test_fp8_blocks_are_multiplied_by_their_factor(shape: tuple[int, int], tmp_path: Path) -> None:
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.rand(blocks) + 0.5
    expected = torch.empty(shape)
    for i in range(shape[0]):
        for j in range(0, shape[1], 128):
            part = codes[i, j : j + 128].float() * scale[i // 128, j // 128]
            expected[i, j : j + 128] = part
    ckpt = Checkpoint(single(tmp_path, w=codes, w_scale_inv=scale))
    assert torch.equal(ckpt.take("w", shape, F32), expected)
    assert torch.equal(ckpt.take("w", shape, torch.bfloat16), expected.bfloat16())
    ckpt.finish(lambda name: False)


def test_an_fp8_tensor_without_its_factors_is_refused(tmp_path: Path) -> None:
    ckpt = Checkpoint(single(tmp_path, w=torch.zeros(8, 8).to(torch.float8_e4m3fn)))
    with pytest.raises(ValueError, match="tensor w_scale_inv is missing"):
        ckpt.take("w", (8, 8), F32)


def test_fp8_factors_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    codes = torch.zeros(130, 8).to(torch.float8_e4m3fn)
    ckpt = Checkpoint(single(tmp_path, w=codes, w_scale_inv=torch.ones(1, 1)))
    with pytest.raises(ValueError, match=r"tensor w_scale_inv must have shape \[2, 1\]"):
        ckpt.take("w", (130, 8), F32)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    ckpt = Checkpoint(single(tmp_path, a=torch.ones(2)))
    with pytest.raises(ValueError, match="tensor b is missing"):
        ckpt.take("b", (2,), F32)


def test_a_tensor_of_another_shape_is_named_with_its_file(tmp_path: Path) -> None:
    ckpt = Checkpoint(single(tmp_path, a=torch.ones(2, 3)))
    message = r"model\.safetensors: tensor a must have shape \[3, 2\], got \[2, 3\]"
    with pytest.raises(ValueError, match=message):
        ckpt.take("a", (3, 2), F32)


def test_a_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    ckpt = Checkpoint(single(tmp_path, a=torch.ones(2, dtype=torch.int32)))
    with pytest.raises(ValueError, match="tensor a must hold floating point numbers"):
        ckpt.take("a", (2,), F32)


def test_tensors_that_nobody_took_are_named(tmp_path: Path) -> None:
    ckpt = Checkpoint(single(tmp_path, a=torch.ones(2), b=torch.ones(2), c=torch.ones(2)))
    ckpt.take("a", (2,), F32)
    with pytest.raises(ValueError, match=r"tensor b is unexpected .* and 1 more"):
        ckpt.finish(lambda name: False)
    with pytest.raises(ValueError, match=r"tensor c is unexpected for this config\.json$"):
        ckpt.finish(lambda name: name == "b")
    ckpt.finish(lambda name: True)


@pytest.mark.parametrize("keep", [0, 5, 40, -10])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    file = single(tmp_path, a=torch.ones(100)) / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors is named in .* but missing"):
        Checkpoint(tmp_path)


def test_a_shard_without_a_tensor_of_the_index_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    save_file({"c": torch.ones(2)}, tmp_path / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"model-1\.safetensors: tensor b of .* is missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "weight_map must map"),
        ('{"weight_map": {}}', "weight_map must map"),
        ('{"weight_map": {"a": 3}}', r"weight_map\['a'\] must be a file name, got 3"),
        ('{"weight_map": {"a": "../b"}}', r"weight_map\['a'\] must be a file name, got '../b'"),
    ],
)
def test_a_broken_index_is_named(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json.*" + message):
        Checkpoint(tmp_path)
