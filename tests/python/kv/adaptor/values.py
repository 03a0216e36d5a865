"""Value types: tuples and frozen dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from helicore import kv

from .names import AttentionReusePolicy, LogicError, translated


class BufferId(NamedTuple):
    """A layer's buffer."""

    layer_id: int
    role: str


class ReuseScope(NamedTuple):
    """Namespace of prefix matching."""

    lora_id: int | None = None
    salt: int | str | None = None


class HalfOpenRange(NamedTuple):
    """[beg, end): true when something is in it."""

    beg: int
    end: int

    def __bool__(self) -> bool:
        return self.beg < self.end


class ScratchDesc(NamedTuple):
    """Scratch blocks of a cache and the slots they share."""

    range: HalfOpenRange
    slot_ids: list[int]


class ReuseStatus(NamedTuple):
    """What a cache has of a layer group."""

    group_id: int
    policy: AttentionReusePolicy
    endpoint: int
    complete: bool
    coverage: tuple[HalfOpenRange, ...]


class ExpandedBuffer(NamedTuple):
    """A buffer inside a run of aggregated pages; `expansion` kernel pages per block."""

    id: BufferId
    expansion: int


class AggregatedPageDesc(NamedTuple):
    """Slot i holds the buffers back to back in [base + stride * i, base + stride * i + size)."""

    base: int
    size: int
    stride: int
    layer_group_id: int
    buffers: tuple[ExpandedBuffer, ...]


class MmItemContext(NamedTuple):
    """A token that stands for a piece of media."""

    digest: bytes
    uuid: str | None = None


@dataclass(frozen=True)
class CoalescedBuffer:
    """Equal-size buffers back to back, in memory order."""

    single_buffer_size: int
    buffer_ids: tuple[BufferId, ...]

    @property
    def size(self) -> int:
        return self.single_buffer_size * len(self.buffer_ids)

    @property
    def num_buffers(self) -> int:
        return len(self.buffer_ids)


@dataclass(frozen=True)
class SlotDescVariant:
    """How one layer group reads a slot, pool by pool."""

    layer_group_id: int
    coalesced_buffers: tuple[CoalescedBuffer, ...]


@dataclass(frozen=True)
class SlotDesc:
    """Every way to read a slot."""

    variants: tuple[SlotDescVariant, ...]


@dataclass(frozen=True)
class PoolDesc:
    """One pool."""

    pool_index: int
    base_address: int
    slot_bytes: int


@dataclass(frozen=True)
class PoolGroupDesc:
    """Pools that share slot ids."""

    pool_group_index: int
    num_slots: int
    slot_desc: SlotDesc
    pools: tuple[PoolDesc, ...]


def pool_group_desc(native: kv.PoolGroupDesc) -> PoolGroupDesc:
    """The published form of a native description."""
    variants = tuple(
        SlotDescVariant(
            variant.layer_group_id,
            tuple(
                CoalescedBuffer(
                    buffer.single_buffer_size,
                    tuple(BufferId(b.layer_id, b.role) for b in buffer.buffer_ids),
                )
                for buffer in variant.coalesced_buffers
            ),
        )
        for variant in native.variants
    )
    pools = tuple(PoolDesc(p.pool_index, p.base_address, p.slot_bytes) for p in native.pools)
    return PoolGroupDesc(native.pool_group_index, native.num_slots, SlotDesc(variants), pools)


@dataclass(frozen=True)
class AttentionLifeCycle:
    """What a priority callback learns of a layer group."""

    window_size: int | None
    num_sink_blocks: int
    id: int


@dataclass(frozen=True)
class SsmLifeCycle:
    """The same, of recurrent layers."""

    id: int


LifeCycle = AttentionLifeCycle | SsmLifeCycle


class PageIndexConverter:
    """Base page indices to the page indices of one buffer."""

    def __init__(self, native: kv.PageIndexConverter) -> None:
        self._native = native
        self.scale = native.scale
        self.expansion = native.expansion
        self.layer_offset = native.layer_offset

    def __call__(
        self,
        base_page_indices: list[int],
        index_mode: kv.PageIndexMode | None = None,
        scratch: ScratchDesc | None = None,
    ) -> list[int]:
        mode = kv.PageIndexMode.SHARED if index_mode is None else index_mode
        native = None if scratch is None else kv.ScratchDesc(tuple(scratch.range), scratch.slot_ids)
        return self._native(base_page_indices, mode, native)


class PlannedDropHandle:
    """Pages that go when drop() is called, or when the handle is let go of."""

    def __init__(self, apply: Callable[[], object]) -> None:
        self._apply: Callable[[], object] | None = apply

    def drop(self) -> None:
        if self._apply is None:
            raise LogicError("drop() was called before")
        apply, self._apply = self._apply, None
        with translated():
            apply()

    def __del__(self) -> None:
        if self._apply is not None:
            self.drop()
