"""How large the KV pool is, and how long a sequence may be in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from helicore.config import QUANTISED_DTYPES, EngineConfig, FieldError
from helicore.executor.device import CPU, gpu_bytes
from helicore.models.base import CausalLM
from helicore.models.config import ModelConfig
from helicore.parallel.ranks import Ranks

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Everything the pool is built from; made once from the settings and the model."""

    row_widths: tuple[int, ...]
    """Elements of a token's row, layer by layer."""
    dtype: torch.dtype
    """uint8 where rows are quantised."""
    page_size: int
    """Tokens of a page; where ranks split the sequence each has its part of their rows."""
    num_bytes: int
    num_lanes: int
    max_model_len: int
    max_model_len_source: str
    swap_host_bytes: int = 0
    """Of the host level below the hot one; 0 is none. Likewise on disk."""
    swap_disk_bytes: int = 0
    swap_path: Path | None = None
    device: torch.device = CPU
    """Where the hot level is."""
    cache_format: str = "auto"
    """How rows are coded, as in `helicore.ops`: "auto" for elements of `dtype`."""
    context_size: int = 1
    """Ranks that split the sequence."""

    @property
    def page_rows(self) -> int:
        """Rows of a page on this rank."""
        return self.page_size // self.context_size

    @property
    def format_name(self) -> str:
        """As `KVCacheConfig.dtype` spells it."""
        dense = str(self.dtype).removeprefix("torch.")
        return dense if self.cache_format == "auto" else self.cache_format

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(self.row_widths) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, on this rank."""
        return self.token_bytes * self.page_rows

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    @classmethod
    def fit(
        cls,
        config: EngineConfig,
        model: CausalLM,
        device: torch.device = CPU,
        ranks: Ranks | None = None,
    ) -> PoolShape:
        """FieldError when the memory can't hold a useful sequence, or not the one asked for.

        Sizes are those of each of the ranks, which agree on the least that one of them has.
        """
        is_quantised = config.kv_cache.dtype in QUANTISED_DTYPES
        dtype = torch.uint8 if is_quantised else cache_dtype(config, model.config)
        widths = tuple(
            quantised_rows(config.kv_cache.dtype, model)
            if is_quantised
            else model.kv_layers(model.config, dtype)
        )
        context_size = config.parallel.context_parallel_size
        page_size = config.kv_cache.block_size * context_size
        page_bytes = sum(widths) * config.kv_cache.block_size * dtype.itemsize
        is_gpu = device.type == "cuda"
        name = "gpu_gb" if is_gpu else "host_gb"
        if is_gpu:
            num_bytes = gpu_bytes(config.kv_cache.gpu_gb, device)
        else:
            num_bytes = host_bytes(config.kv_cache.host_gb, 1 if ranks is None else ranks.num_local)
        if ranks is not None:
            num_bytes = ranks.least(num_bytes)
        # One page stays free for the copy of a partly matched one, so a lone sequence always runs.
        pool_tokens = (num_bytes // page_bytes - 1) * page_size
        if pool_tokens < 2:
            raise FieldError(
                name,
                f"{name} gives {num_bytes} bytes of KV cache, but two pages of {page_bytes} bytes "
                "are the least that works",
            )
        length, source = model_length(config, model.config, pool_tokens)
        return cls(
            row_widths=widths,
            dtype=dtype,
            page_size=page_size,
            num_bytes=num_bytes,
            num_lanes=config.scheduler.max_num_seqs,
            max_model_len=length,
            max_model_len_source=source,
            swap_host_bytes=swap_bytes(config.kv_cache.swap_host_gb, "swap_host_gb", page_bytes),
            swap_disk_bytes=swap_bytes(config.kv_cache.swap_disk_gb, "swap_disk_gb", page_bytes),
            swap_path=swap_folder(config.kv_cache.swap_path),
            device=device,
            cache_format=config.kv_cache.dtype if is_quantised else "auto",
            context_size=context_size,
        )


def quantised_rows(name: str, model: CausalLM) -> list[int]:
    """Bytes of a token's row, layer by layer; FieldError when the model has no such rows."""
    try:
        return model.kv_row_bytes(model.config, name)
    except ValueError as error:
        raise FieldError(
            "dtype", f"KVCacheConfig dtype={name!r} does not fit this model: {error}"
        ) from None


def cache_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Dtype of dense rows: as set, else what the model computes in."""
    for name in (config.kv_cache.dtype, config.dtype):
        if name != "auto":
            dtype: torch.dtype = getattr(torch, name)
            return dtype
    return model.dtype if model.dtype is torch.bfloat16 else torch.float32


def host_bytes(host_gb: float | None, num_ranks: int = 1) -> int:
    """Bytes of a rank's hot tier on a CPU: as set, else a quarter of the machine's memory for all
    its ranks together.

    FieldError when the machine has less memory than that.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if host_gb is None:
        return memory // 4 // num_ranks
    if host_gb * _GIB * num_ranks > memory:
        each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise FieldError(
            "host_gb",
            f"host_gb must be at most the machine's memory of {memory / _GIB:.1f} GiB, "
            f"got {host_gb:g}{each}",
        )
    return int(host_gb * _GIB)


def swap_bytes(gb: float, name: str, page_bytes: int) -> int:
    """Bytes of a level below the hot one; FieldError when too few pages fit to be of use."""
    num_bytes = int(gb * _GIB)
    if gb and num_bytes < 2 * page_bytes:
        raise FieldError(
            name, f"{name} must hold two pages of {page_bytes} bytes, got {num_bytes} bytes"
        )
    return num_bytes


def swap_folder(path: str | None) -> Path | None:
    """The folder of the files, made when it is not there; FieldError when it can not be."""
    if path is None:
        return None
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FieldError("swap_path", f"swap_path {path!r} can not be made: {error}") from error
    return folder


def model_length(config: EngineConfig, model: ModelConfig, pool_tokens: int) -> tuple[int, str]:
    """Longest sequence (prompt and output) and where that limit comes from."""
    model_len = model.max_position_embeddings
    wanted = config.max_model_len
    if wanted is None:
        if pool_tokens < model_len:
            return pool_tokens, f"what the KV pool holds; the model allows {model_len}"
        return model_len, "max_position_embeddings of the model"
    if wanted > model_len:
        raise FieldError(
            "max_model_len",
            f"max_model_len must be at most {model_len} (max_position_embeddings of the model), "
            f"got {wanted}",
        )
    if wanted > pool_tokens:
        raise FieldError(
            "max_model_len",
            f"max_model_len {wanted} does not fit the KV pool of {pool_tokens} tokens; "
            "lower max_model_len or raise host_gb",
        )
    return wanted, "as set"
