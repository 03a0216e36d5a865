"""The bundled model with prefixes on disk: restarts, other salts, other weights, other options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helicore import LLM, KVCacheConfig, SamplingParams
from helicore.executor import disk_stamp
from helicore.model_path import resolve_model
from helicore.outputs import RequestOutput
from safetensors import safe_open
from safetensors.torch import load_file, save_file

PROMPT = (
    "# reads a file and counts its words\n" + "def count(path):\n    with open(path) as f:\n" * 12
)
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def ask(
    folder: Path, model: str | Path = "tiny", salt: str | None = None, **options: Any
) -> RequestOutput:
    """The answer of a new engine."""
    cache = KVCacheConfig(
        disk_path=str(folder),
        disk_gb=0.05,
        host_gb=0.1,
        enable_prefix_caching=options.pop("enable_prefix_caching", True),
        dtype=options.pop("cache_dtype", "auto"),
    )
    options = {"max_model_len": 600, "deterministic": True} | options
    prompt: Any = {"prompt": PROMPT} | ({} if salt is None else {"cache_salt": salt})
    with LLM(model, kv_cache=cache, **options) as llm:
        (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
        metrics = llm.metrics()
    assert metrics["prefix_cache_hits_disk"] == output.num_cached_tokens
    assert (metrics["disk_bytes_read"] > 0) == (output.num_cached_tokens > 0)
    return output


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RequestOutput]:
    """A store that knows PROMPT, and what the engine that filled it answered."""
    folder = tmp_path_factory.mktemp("warm")
    return folder, ask(folder)


@pytest.fixture
def store(warm: tuple[Path, RequestOutput], tmp_path: Path) -> Path:
    return Path(shutil.copytree(warm[0], tmp_path / "store"))


def test_a_later_engine_finds_the_prompt_and_gives_the_same_tokens(
    warm: tuple[Path, RequestOutput], store: Path
) -> None:
    cold, found = warm[1], ask(store)
    assert cold.num_cached_tokens == 0
    assert found.num_cached_tokens == (len(cold.prompt_token_ids) - 1) // 64 * 64 >= 128
    assert found.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"salt": "other"},
        {"enable_prefix_caching": False},
        {"dtype": "float32"},
        {"cache_dtype": "float32"},
        {"deterministic": False},
    ],
    ids=str,
)
def test_nothing_is_found_under_another_salt_or_setting(
    store: Path, options: dict[str, Any]
) -> None:
    assert ask(store, **options).num_cached_tokens == 0


def test_another_process_finds_the_prompt(tmp_path: Path) -> None:
    values = []
    for _ in range(2):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "helicore", "generate", "--prompt", PROMPT, "--json"),
                *("--temperature", "0", "--max-tokens", "8", "--deterministic", "--host-gb", "0.1"),
                *("--disk-path", str(tmp_path / "a" / "b"), "--disk-gb", "0.05"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        values.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = values
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] >= 128
    assert first["outputs"][0]["outputs"] == second["outputs"][0]["outputs"]


# What the weights are


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("tiny"), tmp_path / "model"))


def nudge(folder: Path, name: str) -> None:
    """Doubles one tensor of a checkpoint: equal names, shapes and sizes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] * 2
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    size = path.stat().st_size
    path.unlink()  # a model may have it mapped
    save_file(tensors, path, metadata)
    assert path.stat().st_size == size


def test_a_copy_of_the_checkpoint_is_the_same_model(store: Path, checkpoint: Path) -> None:
    assert ask(store, checkpoint).num_cached_tokens > 0


def test_retrained_weights_are_another_model(store: Path, checkpoint: Path) -> None:
    nudge(checkpoint, "model.layers.1.input_layernorm.weight")
    assert ask(store, checkpoint).num_cached_tokens == 0


@pytest.mark.parametrize("whole_file", [disk_stamp.WHOLE_FILE, 0], ids=["whole", "samples"])
def test_the_digest_of_a_checkpoint_tells_every_tensor(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, whole_file: int
) -> None:
    monkeypatch.setattr(disk_stamp, "WHOLE_FILE", whole_file)
    digest = disk_stamp.checkpoint_digest(checkpoint)
    assert digest == disk_stamp.checkpoint_digest(checkpoint)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        nudge(checkpoint, name)
        digest, before = disk_stamp.checkpoint_digest(checkpoint), digest
        assert digest != before
