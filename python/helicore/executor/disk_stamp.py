"""What gives the bytes of a stored page their meaning, as 32 bytes.

Pages of one stamp are served to every engine of the same stamp, so it covers all that changes
them: the model's shape and weights, dtypes, row layout and page size. It may differ without need
(pages are computed again then), it must never agree without reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from helicore import _core
from helicore._version import __version__
from helicore.config import EngineConfig
from helicore.executor.pool_shape import PoolShape
from helicore.models.base import CausalLM
from helicore.models.config import ModelConfig

FORMAT = 1
"""Of cached rows; raised when the same inputs make other bytes."""
WHOLE_FILE = 64 << 20
"""Bytes up to which a weights file is hashed whole."""
_SAMPLE = 4096
_NOT_OF_THE_CACHE = (
    "generation_defaults",
    "bos_token_id",
    "eos_token_ids",
    "pad_token_id",
    "max_position_embeddings",
)


def make_stamp(config: EngineConfig, model: ModelConfig, shape: PoolShape, weights: bytes) -> bytes:
    """SHA-256 over everything; `weights` is one of the two digests below."""
    architecture = dataclasses.asdict(dataclasses.replace(model, generation_defaults={}))
    for name in _NOT_OF_THE_CACHE:
        architecture.pop(name)
    fields = {
        "format": FORMAT,
        "architecture": architecture,
        "weights": weights.hex(),
        "compute_dtype": config.dtype,
        "cache_dtype": str(shape.dtype),
        "cache_format": shape.cache_format,
        "row_widths": shape.row_widths,
        "page_size": shape.page_size,
        "numerics": None,
    }
    if config.deterministic:  # then rows must have the bits that this very build computes
        fields["numerics"] = [__version__, _core.core.active_isa()]
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()


def checkpoint_digest(folder: Path) -> bytes:
    """SHA-256 over names, sizes and contents of the safetensors files of a checkpoint.

    Files up to WHOLE_FILE are hashed whole. Of a larger one: its header, and the first, middle and
    last 4 KiB of each tensor, so that retrained weights of equal shapes are told apart.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            if size <= WHOLE_FILE:
                digest.update(file.read())
                continue
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
            digest.update(header)
            for offset, count in _samples(json.loads(header)):
                file.seek(8 + length + offset)
                digest.update(file.read(count))
    return digest.digest()


def model_digest(model: CausalLM) -> bytes:
    """SHA-256 over the weights of a model that was built elsewhere."""
    digest = hashlib.sha256()
    for name, tensor in itertools.chain(model.named_buffers(), model.named_parameters()):
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _samples(header: dict[str, dict[str, list[int]]]) -> Iterator[tuple[int, int]]:
    """Offset in the data and length of what is hashed of each tensor, in the order of the file."""
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    for begin, end in sorted(spans):
        count = min(_SAMPLE, end - begin)
        for offset in sorted({begin, (begin + end - count) // 2, end - count}):
            yield offset, count
