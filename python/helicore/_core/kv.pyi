"""KV cache manager."""

from __future__ import annotations
import collections.abc
import enum
import numpy
import numpy.typing
import torch
import typing

__all__: list[str] = [
    "AdmissionForecast",
    "AttentionLayerConfig",
    "AttentionReusePolicy",
    "BAD_PAGE_INDEX",
    "BatchDesc",
    "BlockRef",
    "BlockStatus",
    "BufferConfig",
    "BufferId",
    "CacheDomain",
    "CacheStatus",
    "CacheTier",
    "CoalescedBuffer",
    "CommitState",
    "DEFAULT_BEAM_INDEX",
    "DataLostError",
    "DiskCacheTierConfig",
    "EventKind",
    "GPU_LEVEL",
    "GpuCacheTierConfig",
    "HOT_LEVEL",
    "HostCacheTierConfig",
    "IoBackend",
    "KVCache",
    "KVCacheDesc",
    "KVCacheManager",
    "KVCacheManagerConfig",
    "KVCacheStats",
    "KVEvent",
    "LayerGroupStats",
    "LayerType",
    "LogEnd",
    "LogicError",
    "MigrationCounters",
    "NoRoom",
    "OnMismatch",
    "OperationLog",
    "OutOfPagesError",
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "PRIORITY_MIN",
    "PageIndexConverter",
    "PageIndexMode",
    "PageStatus",
    "PlannedDrop",
    "PoolDesc",
    "PoolGroupDesc",
    "PoolGroupStatistics",
    "PrefetchTicket",
    "PrefixMatch",
    "PrefixStore",
    "PrefixStoreStats",
    "RecordingSummary",
    "ReplayDifference",
    "ReplayReport",
    "ResizeResult",
    "ResourceBusyError",
    "RetentionRange",
    "ReuseScope",
    "ReuseStatus",
    "ScratchDesc",
    "SequencePlan",
    "SlotDescVariant",
    "SsmLayerConfig",
    "SwaScratchReuseConfig",
    "SyncPolicy",
    "get_root_key",
    "replay_operations",
]

class CacheTier(enum.IntEnum):
    """Kind of memory of a cache level."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2

class CacheDomain(enum.IntEnum):
    """Whose pages: pool groups are never shared between domains."""

    TARGET = 0
    DRAFT = 1

class AttentionReusePolicy(enum.Enum):
    """What prefix reuse means for a layer's pages."""

    REQUIRED = 0
    PRIVATE = 1
    OPTIONAL = 2

class LayerType(enum.IntEnum):
    """Kind of a layer's state."""

    ATTENTION = 0
    SSM = 1

class PageStatus(enum.IntEnum):
    """What holds a page."""

    LOCKED = 0
    HELD = 1
    DROPPABLE = 2

class PageIndexMode(enum.IntEnum):
    """Which base address page indices count from."""

    SHARED = 0
    PER_LAYER = 1

class CacheStatus(enum.IntEnum):
    """State of a KVCache."""

    ACTIVE = 0
    SUSPENDED = 1
    CLOSED = 2

class CommitState(enum.IntEnum):
    """Whether a KVCache may commit."""

    ALLOWED = 0
    VIRTUAL_STOP = 1
    USER_STOP = 2

class GpuCacheTierConfig:
    """Memory of a GPU."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, quota: int) -> None: ...
    def __repr__(self) -> str: ...
    def assert_valid(self) -> None:
        """Raises ValueError naming the field that is wrong."""
    @property
    def quota(self) -> int:
        """Bytes."""
    @property
    def tier(self) -> CacheTier: ...

class HostCacheTierConfig:
    """Host memory; as the first tier, the hot level of a CPU manager."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, quota: int) -> None: ...
    def __repr__(self) -> str: ...
    def assert_valid(self) -> None:
        """Raises ValueError naming the field that is wrong."""
    @property
    def quota(self) -> int:
        """Bytes."""
    @property
    def tier(self) -> CacheTier: ...

class DiskCacheTierConfig:
    """Files in an existing directory."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, quota: int, path: str) -> None: ...
    def __repr__(self) -> str: ...
    def assert_valid(self) -> None:
        """Raises ValueError naming the field that is wrong."""
    @property
    def path(self) -> str: ...
    @property
    def quota(self) -> int:
        """Bytes."""
    @property
    def tier(self) -> CacheTier: ...

class BufferConfig:
    """One buffer of a layer: `size` bytes per block."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self, role: str, size: int, tokens_per_block_override: int | None = None
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def tokens_per_block_override(self) -> int | None: ...

class AttentionLayerConfig:
    """An attention layer's buffers."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self,
        layer_id: int,
        buffers: collections.abc.Sequence[BufferConfig],
        sliding_window_size: int | None = None,
        num_sink_tokens: int | None = None,
        cache_domain: CacheDomain = ...,
        reuse_policy: AttentionReusePolicy = ...,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def buffers(self) -> list[BufferConfig]: ...
    @property
    def cache_domain(self) -> CacheDomain: ...
    @property
    def layer_id(self) -> int: ...
    @property
    def num_sink_tokens(self) -> int | None: ...
    @property
    def reuse_policy(self) -> AttentionReusePolicy: ...
    @property
    def sliding_window_size(self) -> int | None: ...
    @property
    def window_size(self) -> int | None: ...

class SsmLayerConfig:
    """A recurrent layer's state buffers."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, layer_id: int, buffers: collections.abc.Sequence[BufferConfig]) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def buffers(self) -> list[BufferConfig]: ...
    @property
    def layer_id(self) -> int: ...

class KVCacheDesc:
    """One sequence of a planned batch, in tokens."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, capacity: int, history_length: int) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def history_length(self) -> int: ...

class BatchDesc:
    """A planned batch with a shared system prompt."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self, kv_caches: collections.abc.Sequence[KVCacheDesc], system_prompt_length: int = 0
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def kv_caches(self) -> list[KVCacheDesc]: ...
    @property
    def system_prompt_length(self) -> int: ...

class SwaScratchReuseConfig:
    """Scratch blocks for windowed prefill."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, max_rewind_len: int = 0) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def max_rewind_len(self) -> int: ...

class ReuseScope:
    """Namespace of prefix matching; pages are shared only between equal scopes."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self, lora_id: int | None = None, salt: int | str | None = None, lora_generation: int = 0
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def lora_generation(self) -> int: ...
    @property
    def lora_id(self) -> int | None: ...
    @property
    def salt(self) -> None | int | str: ...

class RetentionRange:
    """Tokens [begin, end) have `priority` from their commit on, for duration_ms or for ever; what comes before them gets at least that."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self, begin: int, end: int | None, priority: int, duration_ms: int | None = None
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def duration_ms(self) -> int | None: ...
    @property
    def end(self) -> int | None: ...
    @property
    def priority(self) -> int: ...

class KVCacheManagerConfig:
    """Everything a KVCacheManager is made from; checked at construction."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self,
        tokens_per_block: int,
        cache_tiers: collections.abc.Sequence[
            GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig
        ],
        layers: collections.abc.Sequence[AttentionLayerConfig | SsmLayerConfig],
        *,
        max_util_for_resume: float = 0.97,
        enable_partial_reuse: bool = True,
        reuse_match_backoff: int = 0,
        constraints: collections.abc.Sequence[BatchDesc] = list(),
        typical_step: BatchDesc | None = None,
        initial_pool_ratio: collections.abc.Sequence[float] | None = None,
        swa_scratch_reuse: SwaScratchReuseConfig | None = None,
        commit_min_snapshot: bool = False,
        enable_stats: bool = True,
        text_only: bool = False,
        rebalance_min_sampled_kv_caches: int = 2000,
        rebalance_cooldown_secs: float = 120.0,
        rebalance_target_ratio_update_interval: int = 100,
        rebalance_ratio_threshold: float = 1.25,
        rebalance_moving_average_decay: float = 0.9999,
        event_buffer_size: int = 0,
        draft_reuse_match_backoff: int | None = None,
        device_index: int = 0,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def cache_tiers(
        self,
    ) -> list[GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig]: ...
    @property
    def commit_min_snapshot(self) -> bool: ...
    @property
    def constraints(self) -> list[BatchDesc]: ...
    @property
    def device_index(self) -> int: ...
    @property
    def draft_reuse_match_backoff(self) -> int | None: ...
    @property
    def enable_partial_reuse(self) -> bool: ...
    @property
    def enable_stats(self) -> bool: ...
    @property
    def enable_swa_scratch_reuse(self) -> bool: ...
    @property
    def event_buffer_size(self) -> int: ...
    @property
    def initial_pool_ratio(self) -> list[float] | None: ...
    @property
    def layers(self) -> list[AttentionLayerConfig | SsmLayerConfig]: ...
    @property
    def max_util_for_resume(self) -> float: ...
    @property
    def rebalance_cooldown_secs(self) -> float: ...
    @property
    def rebalance_min_sampled_kv_caches(self) -> int: ...
    @property
    def rebalance_moving_average_decay(self) -> float: ...
    @property
    def rebalance_ratio_threshold(self) -> float: ...
    @property
    def rebalance_target_ratio_update_interval(self) -> int: ...
    @property
    def reuse_match_backoff(self) -> int: ...
    @property
    def swa_scratch_reuse(self) -> SwaScratchReuseConfig | None: ...
    @property
    def text_only(self) -> bool: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def typical_step(self) -> BatchDesc | None: ...

class BufferId:
    """A layer's buffer."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getitem__(self, arg: int, /) -> typing.Any: ...
    def __hash__(self) -> int: ...
    def __init__(self, layer_id: int, role: str) -> None: ...
    def __iter__(self) -> collections.abc.Iterator[typing.Any]: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def layer_id(self) -> int: ...
    @property
    def role(self) -> str: ...

class CoalescedBuffer:
    """Equal-size buffers that lie back to back in a slot, in this order."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def buffer_ids(self) -> list[BufferId]: ...
    @property
    def single_buffer_size(self) -> int: ...

class SlotDescVariant:
    """How one layer group reads a slot: one entry per pool."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def coalesced_buffers(self) -> list[CoalescedBuffer]: ...
    @property
    def layer_group_id(self) -> int: ...

class PoolDesc:
    """One pool: equal pieces of `slot_bytes` from `base_address`."""
    @property
    def base_address(self) -> int: ...
    @property
    def pool_index(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...

class PoolGroupDesc:
    """Pools that share slot ids."""
    @property
    def domain(self) -> CacheDomain: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def pool_group_index(self) -> int: ...
    @property
    def pools(self) -> list[PoolDesc]: ...
    @property
    def variants(self) -> list[SlotDescVariant]: ...

class ScratchDesc:
    """The blocks [begin, end) of a step that share slots, and those slots."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self, range: tuple[int, int], slot_ids: collections.abc.Sequence[int]) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def range(self) -> tuple[int, int]: ...
    @property
    def slot_ids(self) -> list[int]: ...

class PageIndexConverter:
    """Turns base page indices into the page indices of one buffer."""
    def __call__(
        self,
        base_indices: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor,
        index_mode: PageIndexMode = ...,
        scratch: ScratchDesc | None = None,
    ) -> list[int]:
        """Page indices of every block, from block 0 on; blocks of `scratch` need PER_LAYER."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self,
        scale: int,
        expansion: int,
        layer_offset: int,
        scratch_pages_per_block: int = 1,
        scratch_page: int = 0,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def expansion(self) -> int: ...
    @property
    def layer_offset(self) -> int: ...
    @property
    def scale(self) -> int: ...
    @property
    def scratch_page(self) -> int:
        """Which of them this one is."""
    @property
    def scratch_pages_per_block(self) -> int:
        """Buffers of the layer in the piece."""

class NoRoom:
    """Why a resize or a resume returned False."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __str__(self) -> str: ...
    @property
    def data_lost(self) -> bool:
        """Pages could not be read back: close the cache."""
    @property
    def domain(self) -> CacheDomain: ...
    @property
    def evictable(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def level(self) -> int: ...
    @property
    def needed(self) -> int:
        """Slots that the call needed."""
    @property
    def over_utilisation(self) -> bool:
        """Refused by max_util_for_resume, not by the count."""
    @property
    def pending(self) -> int:
        """Slots that come free when a submitted step is done."""
    @property
    def pool_group(self) -> int: ...

class PoolGroupStatistics:
    """Slots of a pool group, now."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def available(self) -> int: ...
    @property
    def domain(self) -> CacheDomain: ...
    @property
    def evictable(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def pool_group(self) -> int: ...
    @property
    def slot_sizes(self) -> list[int]: ...
    @property
    def total(self) -> int: ...
    @property
    def unavailable(self) -> int: ...

class KVCacheStats:
    """Counters since the manager was made."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def allocated_blocks(self) -> int: ...
    @property
    def committed_blocks(self) -> int: ...
    @property
    def copied_blocks(self) -> int: ...
    @property
    def evicted_blocks(self) -> int: ...
    @property
    def failed_resizes(self) -> int: ...
    @property
    def failed_resumes(self) -> int: ...
    @property
    def full_reused_blocks(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def lookup_tokens(self) -> int: ...
    @property
    def lost_pages(self) -> int: ...
    @property
    def missed_blocks(self) -> int: ...
    @property
    def num_forks(self) -> int: ...
    @property
    def num_lookups(self) -> int: ...
    @property
    def num_resumes(self) -> int: ...
    @property
    def num_suspends(self) -> int: ...
    @property
    def partial_reused_blocks(self) -> int: ...
    @property
    def rebased_blocks(self) -> int: ...
    @property
    def skipped_snapshots(self) -> int: ...

class LayerGroupStats:
    """Pages of one layer group since the manager was made."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def allocated_pages(self) -> int:
        """New ones, copies included."""
    @property
    def committed_pages(self) -> int:
        """Became reusable."""
    @property
    def copied_pages(self) -> int:
        """Private copies of shared pages."""
    @property
    def domain(self) -> CacheDomain: ...
    @property
    def pool_group(self) -> int: ...
    @property
    def released_pages(self) -> int:
        """Went out of the window."""
    @property
    def reused_pages(self) -> int:
        """Found at creation and held."""
    @property
    def reused_tokens(self) -> int:
        """In them."""

class MigrationCounters:
    """Pages of one layer group that passed through one level."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def dropped_pages(self) -> int: ...
    @property
    def offloaded_bytes(self) -> int: ...
    @property
    def offloaded_pages(self) -> int:
        """Came from above."""
    @property
    def onboarded_bytes(self) -> int: ...
    @property
    def onboarded_pages(self) -> int:
        """Left for above."""
    @property
    def unwritten_pages(self) -> int:
        """Offloaded to a copy that was still there."""

class EventKind(enum.Enum):
    """What a KVEvent tells."""

    CREATED = 0
    STORED = 1
    REMOVED = 2
    UPDATED = 3

class KVEvent:
    """One change of the tree of reusable blocks. Fields that the kind does not name are None, empty, -1 or 0."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def id(self) -> int:
        """Consecutive from 0; a gap tells that events were dropped."""
    @property
    def key(self) -> bytes:
        """The 32-byte chain key, as get_chain_keys and get_root_key give it."""
    @property
    def kind(self) -> EventKind: ...
    @property
    def layer_group(self) -> int | None:
        """The one layer group whose page came or went; None: the whole block."""
    @property
    def layer_groups(self) -> list[int]:
        """Groups whose pages cover every token of a stored block, ascending."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the block that the page of layer_group covers."""
    @property
    def ordinal(self) -> int: ...
    @property
    def parent_key(self) -> bytes | None: ...
    @property
    def priority(self) -> int: ...
    @property
    def reuse_scope(self) -> ReuseScope | None: ...
    @property
    def tokens(self) -> list[int]: ...

class RecordingSummary:
    """What a recording holds."""
    @property
    def data(self) -> bytes:
        """The log, when it was recorded in memory."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_operations(self) -> int: ...
    @property
    def problem(self) -> str:
        """Why the recording ended early; empty: it did not."""

class LogEnd(enum.Enum):
    """How an operation log ends."""

    COMPLETE = 0
    OPEN = 1
    TORN = 2
    DAMAGED = 3

class OperationLog:
    """The calls on a manager, in the order in which they happened."""
    @staticmethod
    def load(path: str) -> OperationLog:
        """Raises ValueError when the file is no log, NotSupportedError when another version wrote it. Damage behind the header is told by `end`."""
    @staticmethod
    def parse(data: bytes) -> OperationLog:
        """The same for bytes."""
    def __len__(self) -> int: ...
    def describe(self, index: int, max_list: int = 12) -> str:
        """An operation in words, with its results; lists are cut after max_list entries."""
    @property
    def config(self) -> KVCacheManagerConfig: ...
    @property
    def end(self) -> LogEnd: ...
    @property
    def is_anonymised(self) -> bool: ...
    @property
    def problem(self) -> str:
        """Why the recording ended early, or what is damaged."""
    @property
    def state_every(self) -> int: ...

class ReplayDifference:
    """Where a replay first behaved otherwise."""
    @property
    def index(self) -> int: ...
    @property
    def operation(self) -> str:
        """In words, with the recorded results."""
    @property
    def what(self) -> str: ...

class ReplayReport:
    """What came of a replay."""
    def __str__(self) -> str: ...
    @property
    def difference(self) -> ReplayDifference | None: ...
    @property
    def end(self) -> LogEnd: ...
    @property
    def note(self) -> str:
        """About the end of the log; empty when it is complete."""
    @property
    def num_operations(self) -> int: ...
    @property
    def num_replayed(self) -> int: ...

class LogicError(RuntimeError):
    pass

class ResourceBusyError(RuntimeError):
    pass

class DataLostError(RuntimeError):
    pass

class OutOfPagesError(RuntimeError):
    """There are not enough pages; `reason` tells of what and where."""
    @property
    def reason(self) -> NoRoom: ...

class PrefetchTicket:
    """Pages on their way to a hotter level."""
    def cancel(self) -> None:
        """Start nothing more."""
    def is_done(self) -> bool:
        """Nothing is left to do. Starts the next batch when one has arrived: poll it per step."""
    @property
    def is_complete(self) -> bool:
        """Every page arrived."""

class PlannedDrop:
    """Pages that only the exact continuation of a sequence would reuse. They go at drop(), or when this object does; the last of the plans that name a page takes it."""
    def drop(self) -> None:
        """Raises LogicError the second time."""
    @property
    def num_pages(self) -> int: ...

class ReuseStatus:
    """What a cache has of a layer group. Of tokens that no later step reads nothing is said."""
    @property
    def complete(self) -> bool:
        """The group has the rows of all tokens that later steps read."""
    @property
    def coverage(self) -> list[tuple[int, int]]:
        """Ranges [begin, end) of tokens whose rows it has, ascending."""
    @property
    def endpoint(self) -> int:
        """Tokens: where the last covered range ends; 0 without any."""
    @property
    def group_id(self) -> int: ...
    @property
    def policy(self) -> AttentionReusePolicy: ...

class KVCache:
    """
    The pages of one sequence; made by KVCacheManager.create_kv_cache().

    SUSPENDED -> resume() -> ACTIVE -> suspend() -> SUSPENDED; close() from both. One thread at a time may drive it.
    """
    def close(self) -> None:
        """Give every page back. Idempotent."""
    def commit(
        self,
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
        is_end: bool = False,
    ) -> None:
        """Declare the next tokens final; full blocks become reusable. Page tables may change."""
    def fork(self, id: int | None = None) -> KVCache:
        """A SUSPENDED twin that shares every block before history_length; takes no page. Call resize() or resume() before writing rows: it copies what others share, or returns False when there is no room."""
    def get_aggregated_page_indices(
        self, group: int, beam: int = 0, valid_only: bool = False
    ) -> list[int]:
        """Slots of every block, active or not."""
    def get_base_page_indices(
        self, group: int = 0, beam: int = 0
    ) -> numpy.typing.NDArray[numpy.int32]:
        """Zero-copy int32 slots of the blocks. Valid until the next resize, commit, suspend, set_base_page_index_buf or close of this cache."""
    def get_scratch_desc(self, group: int = 0) -> ScratchDesc | None:
        """The scratch blocks of the step and their slots; None without any. Valid until the next call that sets capacity or history, suspends or closes."""
    def plan_committed_block_drop(self) -> PlannedDrop | None:
        """A plan to drop what only this sequence's exact continuation would reuse: window pages at its end, its last snapshot. After stop_committing(); None when the committed tokens can't all be reused."""
    def prefetch(self, level: int = 0) -> PrefetchTicket:
        """Bring the pages of a SUSPENDED cache up to `level` in the background; best effort."""
    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        """
        Set the cursors, in tokens; None keeps one. False when there is no room: nothing changed.

        Raises ValueError when history would shrink or capacity < history.
        """
    def resume(self, stream: int | None = None) -> bool:
        """Lock the pages and fill the page tables. False when there is no room (last_failure)."""
    def select_optional_reuse(self, groups: collections.abc.Sequence[int]) -> None:
        """
        Before the first resume: OPTIONAL layer groups that are not named begin with empty pages.

        Raises ValueError for another group, LogicError after a resume.
        """
    def set_base_page_index_buf(
        self, beam: int, group: int, buf: numpy.typing.NDArray[numpy.int32] | torch.Tensor | None
    ) -> None:
        """Keep the page table in `buf` (int32, contiguous) from now on; the rest is filled with BAD_PAGE_INDEX. None detaches. suspend() and close() detach too."""
    def stop_committing(self) -> None:
        """Publish the committed part of the last block; nothing may be committed afterwards."""
    def supports_index_mode(self, index_mode: PageIndexMode) -> bool:
        """PER_LAYER always; SHARED unless enable_swa_scratch_reuse."""
    def suspend(self) -> None:
        """Unlock the pages but keep them; page tables read BAD_PAGE_INDEX."""
    def truncate(self, num_tokens: int) -> None:
        """Rewind capacity and history to num_tokens, in [num_committed_tokens, capacity]; blocks past the end go at once. Needs no page."""
    @property
    def beam_width(self) -> int: ...
    @property
    def cached_tokens_by_level(self) -> list[int]:
        """num_reused_tokens by the level of the coldest page of their block."""
    @property
    def capacity(self) -> int:
        """Tokens with storage. Setting it raises OutOfPagesError when there is no room."""
    @capacity.setter
    def capacity(self, arg: int, /) -> None: ...
    @property
    def commit_state(self) -> CommitState: ...
    @property
    def committed_tokens(self) -> list[int]: ...
    @property
    def cuda_stream(self) -> int | None:
        """While ACTIVE, the new stream goes on after what the old one has by now."""
    @cuda_stream.setter
    def cuda_stream(self, arg: int, /) -> None: ...
    @property
    def enable_swa_scratch_reuse(self) -> bool:
        """Whether blocks that no later step reads share slots. Can be set only where the step has no such blocks either way."""
    @enable_swa_scratch_reuse.setter
    def enable_swa_scratch_reuse(self, arg: bool, /) -> None: ...
    @property
    def has_scratch_slots(self) -> bool: ...
    @property
    def history_length(self) -> int: ...
    @history_length.setter
    def history_length(self, arg: int, /) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def is_active(self) -> bool: ...
    @property
    def is_lost(self) -> bool:
        """Pages were lost: the cache can only be closed."""
    @property
    def last_failure(self) -> NoRoom | None:
        """Why the last resume or resize returned False; None after a success."""
    @property
    def manager(self) -> KVCacheManager: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_committed_tokens(self) -> int: ...
    @property
    def num_reused_tokens(self) -> int:
        """Tokens that creation found in the cache."""
    @property
    def priority(self) -> int: ...
    @property
    def reuse_scope(self) -> ReuseScope: ...
    @property
    def reuse_status(self) -> list[ReuseStatus]:
        """One ReuseStatus per layer group: what creation found, or, once OPTIONAL pages were lost while SUSPENDED, what is there of the history."""
    @property
    def ssm_base_index(self) -> int:
        """Slot of the recurrent state."""
    @property
    def status(self) -> CacheStatus: ...
    @property
    def tokens_per_block(self) -> int: ...

class ResizeResult:
    """What became of a resize of a level."""
    def __bool__(self) -> bool: ...
    def __repr__(self) -> str: ...
    @property
    def done(self) -> bool:
        """Every pool group has the slots of the new quota."""
    @property
    def minimum(self) -> int:
        """Bytes: the least that the level can have."""
    @property
    def pending(self) -> list[int]:
        """Slots still to be given back (> 0) or to be had (< 0), per pool group."""
    @property
    def quota(self) -> int:
        """Bytes in effect: the old ones until the memory is back."""
    @property
    def reason(self) -> NoRoom | None:
        """What is in the way; None when it is only time."""
    @property
    def slots(self) -> list[int]:
        """That each pool group hands out now."""

class SequencePlan:
    """How far a sequence will go, in tokens."""
    @staticmethod
    def of_request(
        prompt_length: int, output_tokens: int, reused_blocks: int, tokens_per_block: int
    ) -> SequencePlan:
        """Slots for the prompt at its first step, then output_tokens - 1 steps. reused_blocks: blocks of the prompt that running sequences hold."""
    def __init__(
        self,
        capacity: int,
        history_length: int,
        final_capacity: int,
        *,
        tokens_per_step: int = 1,
        lookahead: int = 0,
        shared_blocks: int = 0,
    ) -> None: ...
    @property
    def capacity(self) -> int:
        """Of the step at hand."""
    @property
    def final_capacity(self) -> int:
        """Of the last step."""
    @property
    def history_length(self) -> int:
        """Of the step at hand."""
    @property
    def lookahead(self) -> int:
        """Tokens at the end of capacity that never become history."""
    @property
    def shared_blocks(self) -> int:
        """Blocks from the start that others hold as well."""
    @property
    def tokens_per_step(self) -> int: ...

class AdmissionForecast:
    """When a request fits."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def fits_now(self) -> bool: ...
    @property
    def limiting_pool_group(self) -> int:
        """The one that is short for longest, or has the fewest slots to spare."""
    @property
    def peak_needed(self) -> int:
        """Slots of that group: the most that the request holds."""
    @property
    def steps_until_fits(self) -> int | None:
        """Until it can run to its end without preempting anyone; None: never."""

class KVCacheManager:
    """Owns the pools, the pages and the radix tree of reusable blocks."""
    def __init__(self, config: KVCacheManagerConfig) -> None:
        """Raises ValueError, NotSupportedError (naming the field) or MemoryError."""
    def adjust(self) -> bool:
        """Start to move memory between pool groups; maintain() goes on. False: nothing to do."""
    def clamp_max_seq_len_for_mem(self, batch_size: int, upper: int) -> int:
        """The most tokens, <= upper, that one sequence can have next to batch_size - 1 of one token."""
    def clear_reusable_blocks(self) -> None:
        """Forget every cached prefix. Raises ResourceBusyError while caches are open."""
    def commit_many(
        self,
        caches: collections.abc.Sequence[KVCache],
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
        counts: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor
        | None = None,
    ) -> None:
        """commit() for a whole step: counts[i] tokens each, concatenated; default one each."""
    def complete_step(self, stream: int, step: int) -> None:
        """Steps up to this one are done."""
    def create_kv_cache(
        self,
        reuse_scope: int | ReuseScope | None = None,
        input_tokens: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor
        | None = None,
        id: int | None = None,
        *,
        priority: int = 35,
        expected_prompt_length: int | None = None,
        retention: collections.abc.Sequence[RetentionRange] = list(),
    ) -> KVCache:
        """A SUSPENDED cache that holds the longest cached prefix of input_tokens. `retention`: ranges that are worth more than `priority`, and for how long."""
    def drain_events(self, max_events: int | None = None) -> list[KVEvent]:
        """The oldest recorded changes of the tree of reusable blocks; they leave the buffer (config.event_buffer_size). When it overflows the oldest are dropped: see num_dropped_events and snapshot_events."""
    def forecast_admission(
        self,
        running: collections.abc.Sequence[KVCache],
        final_capacities: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor,
        request: SequencePlan,
        tokens_per_step: int = 1,
        lookahead: int = 0,
    ) -> AdmissionForecast:
        """When a request can run to its end without preempting anyone. `running`: active caches and the capacity that each will end with; others keep what they have."""
    def get_chain_keys(
        self,
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
        reuse_scope: int | ReuseScope | None = None,
    ) -> list[bytes]:
        """SHA-256 chain keys (32 bytes) of the full blocks of `tokens`."""
    def get_layer_group_domain(self, group: int) -> CacheDomain: ...
    def get_layer_group_id(self, layer_id: int) -> int: ...
    def get_layer_group_stats(self) -> list[LayerGroupStats]:
        """Counters of pages, one entry per layer group, since the manager was made."""
    def get_mem_pool_base_address(
        self, layer_id: int, role: str, index_mode: PageIndexMode | None = None
    ) -> int:
        """Address that page indices of the buffer count from. None is SHARED; with config.swa_scratch_reuse the mode must be given."""
    def get_mem_pool_view(self, layer_id: int, role: str) -> numpy.typing.NDArray[numpy.uint8]:
        """Writable uint8 [num_slots, block bytes] over the pool; row s is the block in slot s."""
    def get_migration_stats(self) -> list[list[MigrationCounters]]:
        """[level][layer group] counters since the manager was made."""
    def get_page_index_converter(self, layer_id: int, role: str) -> PageIndexConverter: ...
    def get_page_index_scale(self, layer_id: int, role: str) -> int:
        """Base page index times this is the page index (times expansion, see the converter)."""
    def get_page_index_upper_bound(self, layer_id: int, role: str) -> int: ...
    def get_page_stride(self, layer_id: int, role: str) -> int:
        """Bytes of one kernel page; page index i starts at base + i * stride."""
    def get_pool_group_of(self, group: int) -> int: ...
    def get_pool_ratios(self, level: int = 0) -> list[float]:
        """Share of the level's bytes per pool group."""
    def get_quota(self, level: int = 0) -> int:
        """Bytes in effect."""
    def get_stats(self) -> KVCacheStats: ...
    def get_storage_statistics(self, level: int = 0) -> list[PoolGroupStatistics]:
        """One entry per pool group: total, free and evictable slots."""
    def get_target_ratios(self, level: int = 0) -> list[float] | None:
        """What the traffic asks for; None before the first were learnt."""
    def get_tier(self, level: int) -> CacheTier: ...
    def is_stats_excluded(self, id: int) -> bool: ...
    def maintain(self, max_pages: int) -> int:
        """Between steps: work on levels that are on their way to other sizes, at most max_pages pages; how many moved."""
    def make_step_stream(self) -> int:
        """A stream for resume() that stands for steps which the device can't see: pages freed by its caches are used again once the steps submitted until then are complete."""
    def mark_stats_excluded(self, id: int) -> None:
        """Caches of this id count for nothing in adjust()."""
    def pin(
        self,
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
        reuse_scope: int | ReuseScope | None = None,
    ) -> KVCache:
        """Keeps the longest cached prefix of the tokens, on whatever level, until the returned cache is closed or let go of. Counted in no statistics."""
    def probe_reuse(
        self,
        input_tokens: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor,
        reuse_scope: int | ReuseScope | None = None,
    ) -> int:
        """Tokens that create_kv_cache would find now. Any thread."""
    def resize(self, level: int, quota: int, best_effort: bool = False) -> ResizeResult:
        """
        Take a level to `quota` bytes, rounded up, while sequences run; no address changes. Shrinking changes nothing when pages are in the way (reason); with best_effort it returns at once and maintain() goes on.

        Raises ValueError for a quota out of range, MemoryError when it can't grow.
        """
    def resize_many(
        self,
        caches: collections.abc.Sequence[KVCache],
        capacities: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor,
        history_lengths: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor
        | None = None,
    ) -> list[bool]:
        """resize() for a whole step: one bool per cache, in order. A throw changes nothing."""
    def resume_many(
        self, caches: collections.abc.Sequence[KVCache], stream: int | None = None
    ) -> list[bool]:
        """resume() for several caches: one bool per cache, in order."""
    def shutdown(self) -> None:
        """Refuse further use. Raises ResourceBusyError while caches are open."""
    def snapshot_events(self) -> list[KVEvent]:
        """CREATED and STORED events that make the tree as it is, parents first, all with the id that the next event will have; empties the buffer."""
    def start_recording(
        self,
        path: str | None = None,
        *,
        max_bytes: int = 1073741824,
        state_every: int = 64,
        anonymise: bool = False,
        write_ahead: bool = False,
    ) -> None:
        """
        Write every call from now on to an operation log: a file, or memory without a path. Begins before the first cache.

        max_bytes: where the recording ends. state_every: every n-th operation a digest of the whole state (0: never). anonymise: tokens, salts, ids and streams become numbers in the order of their appearance. write_ahead: a call is in the file before it runs.
        """
    def stop_recording(self) -> RecordingSummary:
        """Raises LogicError when no recording is running."""
    def submit_step(self, stream: int) -> int:
        """Its number, from 1."""
    def supports_index_mode(self, index_mode: PageIndexMode) -> bool | None:
        """None when it depends on the cache."""
    def truncate_many(
        self,
        caches: collections.abc.Sequence[KVCache],
        num_tokens: collections.abc.Sequence[int]
        | numpy.typing.NDArray[numpy.int32]
        | torch.Tensor,
    ) -> None:
        """truncate() for a whole step, one length per cache. A throw changes nothing."""
    @property
    def init_config(self) -> KVCacheManagerConfig: ...
    @property
    def is_recording(self) -> bool: ...
    @property
    def is_resizing(self) -> bool:
        """maintain() has something to do."""
    @property
    def layer_grouping(self) -> list[list[int]]: ...
    @property
    def need_adjustment(self) -> bool:
        """The lengths of closed sequences ask for other shares of the pool groups."""
    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be had now, evicting what nobody holds."""
    @property
    def num_dropped_events(self) -> int: ...
    @property
    def num_layer_groups(self) -> int: ...
    @property
    def num_levels(self) -> int: ...
    @property
    def num_open_caches(self) -> int: ...
    @property
    def num_total_blocks(self) -> int:
        """Blocks that fit when nothing else is there."""
    @property
    def pool_group_descs(self) -> list[PoolGroupDesc]: ...
    @property
    def tokens_per_block(self) -> int: ...

class OnMismatch(enum.IntEnum):
    """What opening does with files that do not fit."""

    EMPTY = 0
    REFUSE = 1

class SyncPolicy(enum.IntEnum):
    """When a store syncs its files."""

    NEVER = 0
    BATCH = 1

class IoBackend(enum.IntEnum):
    """How file I/O is done."""

    AUTO = 0
    URING = 1
    THREADS = 2

class BlockStatus(enum.IntEnum):
    """How the put or get of one block ended."""

    OK = 0
    DUPLICATE = 1
    NO_PARENT = 2
    NO_ROOM = 3
    GONE = 4
    CORRUPT = 5
    IO_ERROR = 6
    CANCELLED = 7
    DISABLED = 8

class BlockRef:
    """A stored block as match() found it."""
    def __eq__(self, other: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def slot(self) -> int: ...

class PrefixMatch:
    """The stored prefix of a token sequence."""
    @property
    def blocks(self) -> list[BlockRef]: ...
    @property
    def num_tokens(self) -> int: ...

class PrefixStoreStats:
    """Counters and reasons of a PrefixStore; a copy."""
    @property
    def direct_io(self) -> bool: ...
    @property
    def disabled_reason(self) -> str:
        """Why nothing works, or ''."""
    @property
    def emptied_reason(self) -> str:
        """Why opening started empty, or ''."""
    @property
    def io_backend(self) -> str: ...
    @property
    def journal_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_compactions(self) -> int: ...
    @property
    def num_corrupt(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def num_duplicate(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_get(self) -> int: ...
    @property
    def num_gone(self) -> int: ...
    @property
    def num_io_errors(self) -> int: ...
    @property
    def num_loaded(self) -> int: ...
    @property
    def num_put(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def read_only_reason(self) -> str:
        """Why puts are refused, or ''."""
    @property
    def slot_bytes(self) -> int: ...
    @property
    def torn_bytes(self) -> int: ...

class PrefixStore:
    """
    KV cache blocks on disk, found again after a restart.

    A failing disk degrades it, see stats(); a wrong page is never served. Any thread may call it.
    """
    def __enter__(self) -> PrefixStore: ...
    def __exit__(
        self,
        exc_type: typing.Any | None,
        exc_value: typing.Any | None,
        traceback: typing.Any | None,
    ) -> None: ...
    def __init__(
        self,
        directory: str,
        *,
        capacity_bytes: int,
        block_bytes: int,
        tokens_per_block: int,
        stamp: bytes,
        on_mismatch: OnMismatch = ...,
        sync: SyncPolicy = ...,
        direct_io: bool = True,
        max_queued_blocks: int = 0,
        io_backend: IoBackend = ...,
    ) -> None:
        """
        Open or make the store. `stamp` (32 bytes) says what the pages mean: SHA-256 over model, dtype and layout.

        Raises ValueError, ResourceBusyError when the directory is in use, NotSupportedError when io_backend can't be had. Other trouble disables the store.
        """
    def cancel(self, token: int) -> int:
        """Take back the reads of a get that have not started; how many."""
    def close(self) -> None:
        """End what was put and release the directory. Idempotent."""
    def flush(self) -> bool:
        """Until everything put before is on the disk; False when the disk refused."""
    def forget(self, token: int) -> None:
        """Do not ask how a put ends."""
    def get(
        self,
        blocks: collections.abc.Sequence[BlockRef],
        out: numpy.typing.NDArray[numpy.uint8],
        *,
        block: bool = True,
    ) -> int | None:
        """Read blocks into the rows of `out`, uint8 [blocks, block_bytes]. Returns a token; the rows are valid once it was collected, where the status is OK."""
    def match(
        self,
        root: bytes,
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
    ) -> PrefixMatch:
        """The longest stored chain over `tokens` from a scope's root key (32 bytes)."""
    def poll(self, token: int) -> list[BlockStatus] | None:
        """As wait(), or None while it is not done."""
    def put(
        self,
        root: bytes,
        tokens: collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32] | torch.Tensor,
        pages: numpy.typing.NDArray[numpy.uint8],
        *,
        first_block: int = 0,
        block: bool = True,
    ) -> int | None:
        """Write the blocks of a sequence from first_block on: one row of `pages`, uint8 [blocks, block_bytes], each. Copies. Returns a token, or None when the queue is full and block is False."""
    def stats(self) -> PrefixStoreStats: ...
    def wait(self, token: int) -> list[BlockStatus]:
        """One status per block. A token is collected once."""

def get_root_key(reuse_scope: int | ReuseScope | None = None) -> bytes:
    """The 32-byte key that a scope's chains start from."""

def replay_operations(
    log: OperationLog, *, check_every: int = 64, config: KVCacheManagerConfig | None = None
) -> ReplayReport:
    """Runs a log on a manager of its own, up to the first difference. Pages have no memory; every check_every-th operation is followed by a check of all invariants (0: none). `config` takes the place of the log's."""

BAD_PAGE_INDEX: int = -1
DEFAULT_BEAM_INDEX: int = 0
GPU_LEVEL: int = 0
HOT_LEVEL: int = 0
PRIORITY_DEFAULT: int = 35
PRIORITY_MAX: int = 100
PRIORITY_MIN: int = 0
