"""From a checkpoint folder to a model that is ready to run."""

import os
from pathlib import Path

import torch

from helicore._core.core import cuda_compiled
from helicore.models.base import CausalLM
from helicore.models.config import ModelConfig
from helicore.models.deepseek import DeepseekModel, Progress
from helicore.models.deepseek_v2 import DeepseekV2
from helicore.models.deepseek_v3 import DeepseekV3
from helicore.models.weights import Checkpoint
from helicore.parallel.shards import Shards

FAMILIES: dict[str, type[DeepseekModel]] = {
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
}
"""`ModelConfig.family` -> class."""

_COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    progress: Progress | None = None,
    shards: Shards | None = None,
) -> CausalLM:
    """Loads a Hugging Face checkpoint folder.

    Args:
        path: folder with config.json and safetensors weights.
        dtype: bfloat16 or float32; None takes the checkpoint's (float32 where that is float16).
        device: "cpu", or a CUDA device that torch sees.
        max_model_len: positions that are ever used; None is the checkpoint's number.
        progress: called with (parts loaded, all parts) after each part.
        shards: the part of this rank; None loads all.

    Raises:
        FileNotFoundError: the folder, its configuration or a weights file does not exist.
        ValueError: anything wrong inside them, named with its file; or a bad argument.
    """
    where = _usable(device)
    if dtype is not None and dtype not in _COMPUTE_DTYPES:
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype}")
    config = ModelConfig.from_dir(path)
    if dtype is None:
        dtype = config.dtype if config.dtype in _COMPUTE_DTYPES else torch.float32
    num_positions = config.max_position_embeddings
    if max_model_len is not None:
        num_positions = min(num_positions, max_model_len)
    _check_positions(config, num_positions)
    family = FAMILIES[config.family]
    model = family(
        config,
        Checkpoint(Path(path)),
        dtype,
        progress,
        num_positions=num_positions,
        device=where,
        shards=shards,
    )
    return model.eval()


def _usable(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got "{device}"')
    reason = why_no_cuda() if where.type == "cuda" else None
    if reason is not None:
        raise ValueError(f'device can not be "{device}": {reason}')
    return where


def why_no_cuda() -> str | None:
    """What keeps models from running on a GPU here; None when nothing does."""
    if not cuda_compiled():
        return "this build of helicore has no CUDA kernels"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _check_positions(config: ModelConfig, num_positions: int) -> None:
    """Before anything is allocated: the table of cosines and sines must be small in memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = memory // 8 // (4 * config.qk_rope_head_dim)
    if num_positions > most:
        raise ValueError(
            f"config.json: max_position_embeddings must be at most {most} on a machine with "
            f"{memory >> 30} GiB of memory, got {config.max_position_embeddings}; "
            "set max_model_len to use fewer positions"
        )
