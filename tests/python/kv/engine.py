"""A fake engine: writes a value per (layer, buffer, token) into pages and re-reads the history.

The value of a token depends on every token before it, so that a page of another prefix, a page
that was taken away too early and a copy that came too late all read wrong. Before it writes, a step
checks everything that its queries would attend to: sinks and windows, or the whole history.
"""

from __future__ import annotations

import ctypes
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kv.adaptor import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTier,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    SsmLayerConfig,
    _KVCache,
)
from kv.adaptor.tokens import encode
from numpy.typing import NDArray

ROW = 64  # bytes of a token in a buffer
_MASK = (1 << 64) - 1


def hot_tier(device: str, quota: int) -> GpuCacheTierConfig | HostCacheTierConfig:
    """The first level of a manager for kernels of this device."""
    return GpuCacheTierConfig(quota) if device == "cuda" else HostCacheTierConfig(quota)


def layer(
    layer_id: int, tokens_per_block: int, roles: str = "k v", **options: Any
) -> AttentionLayerConfig:
    """An attention layer with one buffer of ROW bytes per token for each role."""
    buffers = [BufferConfig(role, tokens_per_block * ROW) for role in roles.split()]
    return AttentionLayerConfig(layer_id, buffers, **options)


def make_config(
    device: str, num_blocks: int = 64, tokens_per_block: int = 8, **options: Any
) -> KVCacheManagerConfig:
    """Two full-attention layers unless `layers` says otherwise; room for about num_blocks."""
    layers = options.pop("layers", [layer(i, tokens_per_block) for i in range(2)])
    per_block = sum(b.size for x in layers for b in x.buffers)
    tiers = [hot_tier(device, num_blocks * per_block), *options.pop("colder", [])]
    return KVCacheManagerConfig(tokens_per_block, tiers, layers, **options)


def colder_tiers(path: str, num_bytes: int) -> list[HostCacheTierConfig | DiskCacheTierConfig]:
    """A host level and a disk level."""
    return [HostCacheTierConfig(num_bytes), DiskCacheTierConfig(num_bytes, path)]


def free_slots(manager: KVCacheManager, level: int = 0) -> int:
    """Slots of the tightest pool group that can be had now."""
    return min(group.available for group in manager.get_storage_statistics(level))


class _CudaMemory:
    """Device memory as torch takes it in."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "<i8",
            "version": 3,
        }


def memory(device: str, address: int, shape: tuple[int, ...]) -> torch.Tensor:
    """int64 memory at an address, not owned."""
    if device == "cuda":
        return torch.as_tensor(_CudaMemory(address, shape), device="cuda")
    count = int(np.prod(shape))
    raw = (ctypes.c_int64 * count).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(raw).reshape(shape))


@dataclass
class Buffer:
    """One buffer of one layer: rows [page, token in page, words]."""

    layer_id: int
    role: str
    group: int
    salt: int
    pages: torch.Tensor
    converter: Any
    window: int | None
    sinks: int
    is_state: bool


@dataclass
class Sequence:
    """A cache with the tokens it stands for; `written` of them have rows."""

    cache: _KVCache
    tokens: list[int] = field(default_factory=list)
    written: int = 0
    chain: list[int] = field(default_factory=list)
    tables: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def values(self, buffer: Buffer, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the rows at the positions must hold."""
        value = self.chain[-1] if self.chain else 0x9E3779B97F4A7C15
        for token in encode(self.tokens[len(self.chain) :]):
            value = (value * 6364136223846793005 + token * 0x9E3779B1 + 1442695040888963407) & _MASK
            self.chain.append(value)
        chain = np.array(self.chain, np.uint64)[positions]
        return (chain ^ np.uint64(buffer.salt)).astype(np.int64)


class Engine:
    """Runs steps of sequences on one manager and one stream."""

    def __init__(self, manager: KVCacheManager, delay: int = 0) -> None:
        self.manager = manager
        self.device = "cuda" if manager.hot_tier == CacheTier.GPU_MEM else "cpu"
        self.torch_stream = torch.cuda.Stream() if self.device == "cuda" else None
        self.stream = 0 if self.torch_stream is None else int(self.torch_stream.cuda_stream)
        self.delay = delay  # cycles that every step takes on the GPU
        self.buffers = list(self._buffers())
        self._flags: list[tuple[str, torch.Tensor]] = []
        self.num_checked = 0

    def _buffers(self) -> Any:
        config = self.manager.init_config
        for buffer in self.manager.all_buffer_ids:
            found = next(x for x in config.layers if x.layer_id == buffer.layer_id)
            part = next(b for b in found.buffers if b.role == buffer.role)
            rows = part.tokens_per_block_override or config.tokens_per_block
            stride = self.manager.get_page_stride(*buffer)
            count = self.manager.get_page_index_upper_bound(*buffer)
            is_state = isinstance(found, SsmLayerConfig)
            rows = 1 if is_state else rows
            base = self.manager.get_mem_pool_base_address(*buffer)
            yield Buffer(
                layer_id=buffer.layer_id,
                role=buffer.role,
                group=self.manager.get_layer_group_id(buffer.layer_id),
                salt=zlib.crc32(f"{buffer.layer_id} {buffer.role}".encode()) << 20,
                pages=memory(self.device, base, (count, rows, stride // rows // 8)),
                converter=self.manager.get_page_index_converter(*buffer),
                window=getattr(found, "sliding_window_size", None),
                sinks=getattr(found, "num_sink_tokens", None) or 0,
                is_state=is_state,
            )

    def on_stream(self) -> AbstractContextManager[Any]:
        if self.torch_stream is None:
            return nullcontext()
        return torch.cuda.stream(self.torch_stream)

    def start(self, tokens: list[int], reuse_scope: object = None, **options: Any) -> Sequence:
        """A cache for these tokens; what it found counts as written."""
        cache = self.manager.create_kv_cache(reuse_scope, tokens, **options)
        return Sequence(cache, list(tokens), cache.num_committed_tokens)

    def run(self, sequence: Sequence, end: int | None = None) -> None:
        """Checks the history and writes the rows up to `end`; capacity must be there."""
        end = len(sequence.tokens) if end is None else end
        with self.on_stream():
            if self.delay and self.device == "cuda":
                torch.cuda._sleep(self.delay)
            for buffer in self.buffers:
                self._run_buffer(sequence, buffer, end)
        sequence.written = end

    def _run_buffer(self, sequence: Sequence, buffer: Buffer, end: int) -> None:
        start = sequence.written
        if buffer.is_state:
            slot = [sequence.cache.get_ssm_block_base_index()]
            page = self._index(buffer.converter(slot))
            if start > 0:
                self._check(sequence, buffer, page, page * 0, np.array([start - 1]))
            value = self._tensor(sequence.values(buffer, np.array([end - 1])))
            buffer.pages[page, page * 0] = value[:, None]
            return
        begin = 0 if buffer.window is None else max(0, start + 1 - buffer.window)
        history = np.concatenate(
            [np.arange(min(buffer.sinks, begin, start)), np.arange(min(begin, start), start)]
        )
        if len(history):
            self._check(sequence, buffer, *self._rows(sequence, buffer, history), history)
        # Rows of a long prefill that fall out of the window at once need not exist.
        kept = 0 if buffer.window is None else max(0, end + 1 - buffer.window)
        new = np.arange(start, end)
        new = new[(new >= kept) | (new < buffer.sinks)]
        if len(new):
            values = self._tensor(sequence.values(buffer, new))
            buffer.pages[self._rows(sequence, buffer, new, may_skip=False)] = values[:, None]

    def _rows(
        self,
        sequence: Sequence,
        buffer: Buffer,
        positions: NDArray[np.int64],
        may_skip: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = sequence.tables.get(buffer.group)
        if table is None:
            table = sequence.cache.get_base_page_indices(buffer.group)
        pages = np.array(buffer.converter(table[: sequence.cache.num_blocks].tolist()), np.int64)
        rows = buffer.pages.shape[1]
        wanted = pages[positions // rows]
        assert may_skip or (wanted >= 0).all(), f"layer {buffer.layer_id}: a page in use is BAD"
        return self._index(wanted), self._index(positions % rows)

    def _index(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(np.array(values, np.int64)).to(self.device)

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _check(
        self,
        sequence: Sequence,
        buffer: Buffer,
        pages: torch.Tensor,
        rows: torch.Tensor,
        positions: NDArray[np.int64],
    ) -> None:
        expected = self._tensor(sequence.values(buffer, positions))[:, None]
        wrong = (buffer.pages[pages, rows] != expected).any()
        name = f"cache {sequence.cache.id}, layer {buffer.layer_id} {buffer.role}"
        self._flags.append((name, wrong))
        self.num_checked += len(positions)

    def verify(self) -> None:
        """Every row that was read held what it must."""
        if self.torch_stream is not None:
            self.torch_stream.synchronize()
        wrong = [name for name, flag in self._flags if bool(flag)]
        self._flags.clear()
        assert not wrong, f"wrong values read: {wrong[:3]} and {max(0, len(wrong) - 3)} more"

    # ---- whole steps

    def prefill(self, sequence: Sequence) -> bool:
        """Resume, grow, write and commit all tokens. False when there was no room."""
        cache = sequence.cache
        if not cache.resume(self.stream):
            return False
        if not cache.resize(len(sequence.tokens)):
            cache.suspend()
            return False
        self.run(sequence)
        cache.commit(sequence.tokens[cache.num_committed_tokens :])
        return True

    def decode(self, sequence: Sequence, token: int, commit: bool = True) -> bool:
        """One more token of an active sequence."""
        cache = sequence.cache
        if not cache.resize(len(sequence.tokens) + 1, len(sequence.tokens)):
            return False
        sequence.tokens.append(token)
        self.run(sequence)
        if commit:
            cache.commit(sequence.tokens[cache.num_committed_tokens :])
        return True

    def serve(self, tokens: list[int], reuse_scope: object = None) -> int:
        """A request from start to close; returns the tokens it found cached."""
        sequence = self.start(tokens, reuse_scope)
        found = sequence.written
        assert self.prefill(sequence)
        sequence.cache.close()
        self.verify()
        return found
