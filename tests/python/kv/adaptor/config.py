"""Mutable configuration objects; the manager takes a deep copy and makes the native ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from helicore import _core, kv

from .names import AttentionReusePolicy, CacheDomain, CacheTier


def has_gpu() -> bool:
    """Whether the hot level of a manager can be GPU memory here."""
    return bool(_core.core.cuda_compiled()) and torch.cuda.is_available()


@dataclass
class GpuCacheTierConfig:
    """Memory of the device that runs the kernels: of a GPU, or of the host where there is none."""

    quota: int

    @property
    def tier(self) -> CacheTier:
        return CacheTier.GPU_MEM

    def native(self) -> kv.GpuCacheTierConfig | kv.HostCacheTierConfig:
        kind = kv.GpuCacheTierConfig if has_gpu() else kv.HostCacheTierConfig
        return kind(self.quota)

    def assert_valid(self) -> None:
        self.native()


@dataclass
class HostCacheTierConfig:
    """Host memory; as the first tier, the hot level of a manager for CPU kernels."""

    quota: int

    @property
    def tier(self) -> CacheTier:
        return CacheTier.HOST_MEM

    def native(self) -> kv.HostCacheTierConfig:
        return kv.HostCacheTierConfig(self.quota)

    def assert_valid(self) -> None:
        self.native()


@dataclass
class DiskCacheTierConfig:
    """Anonymous files in an existing directory."""

    quota: int
    path: str

    @property
    def tier(self) -> CacheTier:
        return CacheTier.DISK

    def native(self) -> kv.DiskCacheTierConfig:
        return kv.DiskCacheTierConfig(self.quota, str(self.path))

    def assert_valid(self) -> None:
        self.native()


CacheTierConfig = GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig


@dataclass
class BufferConfig:
    """`size` bytes for one block, or for `tokens_per_block_override` tokens."""

    role: str
    size: int
    tokens_per_block_override: int | None = None

    def native(self) -> kv.BufferConfig:
        return kv.BufferConfig(self.role, self.size, self.tokens_per_block_override)


@dataclass
class AttentionLayerConfig:
    """An attention layer; the window leaves out the sinks."""

    layer_id: int
    buffers: list[BufferConfig]
    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None
    reuse_policy: AttentionReusePolicy = AttentionReusePolicy.REQUIRED
    cache_domain: CacheDomain = CacheDomain.TARGET

    @property
    def window_size(self) -> int | None:
        return self.sliding_window_size

    def native(self) -> kv.AttentionLayerConfig:
        return kv.AttentionLayerConfig(
            self.layer_id,
            [buffer.native() for buffer in self.buffers],
            self.sliding_window_size,
            self.num_sink_tokens,
            self.cache_domain,
            self.reuse_policy,
        )


@dataclass
class SsmLayerConfig:
    """A recurrent layer."""

    layer_id: int
    buffers: list[BufferConfig]

    def native(self) -> kv.SsmLayerConfig:
        return kv.SsmLayerConfig(self.layer_id, [buffer.native() for buffer in self.buffers])


LayerConfig = AttentionLayerConfig | SsmLayerConfig


@dataclass
class KVCacheDesc:
    """One sequence of a planned batch."""

    capacity: int
    history_length: int

    def native(self) -> kv.KVCacheDesc:
        return kv.KVCacheDesc(self.capacity, self.history_length)


@dataclass
class BatchDesc:
    """A planned batch with a shared system prompt."""

    kv_caches: list[KVCacheDesc]
    system_prompt_length: int = 0

    def native(self) -> kv.BatchDesc:
        return kv.BatchDesc([desc.native() for desc in self.kv_caches], self.system_prompt_length)


@dataclass
class SwaScratchReuseConfig:
    """Scratch blocks for windowed prefill."""

    max_rewind_len: int = 0

    def native(self) -> kv.SwaScratchReuseConfig:
        return kv.SwaScratchReuseConfig(self.max_rewind_len)


@dataclass
class KVCacheManagerConfig:
    """Everything a manager is made from."""

    tokens_per_block: int
    cache_tiers: Sequence[CacheTierConfig]
    layers: Sequence[LayerConfig]
    max_util_for_resume: float = 0.97
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0
    constraints: list[BatchDesc] = field(default_factory=list)
    typical_step: BatchDesc | None = None
    initial_pool_ratio: list[float] | None = None
    swa_scratch_reuse: SwaScratchReuseConfig | None = None
    commit_min_snapshot: bool = False
    enable_stats: bool = True
    text_only: bool = False
    rebalance_min_sampled_kv_caches: int = 2000
    rebalance_cooldown_secs: float = 120.0
    rebalance_target_ratio_update_interval: int = 100
    rebalance_ratio_threshold: float = 1.25
    rebalance_moving_average_decay: float = 0.9999

    @property
    def enable_swa_scratch_reuse(self) -> bool:
        return self.swa_scratch_reuse is not None

    def native(self, event_buffer_size: int = 0) -> kv.KVCacheManagerConfig:
        scratch = self.swa_scratch_reuse
        step = self.typical_step
        return kv.KVCacheManagerConfig(
            tokens_per_block=self.tokens_per_block,
            cache_tiers=[tier.native() for tier in self.cache_tiers],
            layers=[layer.native() for layer in self.layers],
            max_util_for_resume=self.max_util_for_resume,
            enable_partial_reuse=self.enable_partial_reuse,
            reuse_match_backoff=self.reuse_match_backoff,
            constraints=[batch.native() for batch in self.constraints],
            typical_step=None if step is None else step.native(),
            initial_pool_ratio=self.initial_pool_ratio,
            swa_scratch_reuse=None if scratch is None else scratch.native(),
            commit_min_snapshot=self.commit_min_snapshot,
            enable_stats=self.enable_stats,
            text_only=self.text_only,
            rebalance_min_sampled_kv_caches=self.rebalance_min_sampled_kv_caches,
            rebalance_cooldown_secs=self.rebalance_cooldown_secs,
            rebalance_target_ratio_update_interval=self.rebalance_target_ratio_update_interval,
            rebalance_ratio_threshold=self.rebalance_ratio_threshold,
            rebalance_moving_average_decay=self.rebalance_moving_average_decay,
            event_buffer_size=event_buffer_size,
        )

    def assert_valid(self) -> None:
        self.native()
