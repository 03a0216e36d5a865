"""KV cache manager v2: paged key/value memory with prefix reuse.

How an executor uses it::

    config = KVCacheManagerConfig(
        tokens_per_block=64,
        cache_tiers=[HostCacheTierConfig(quota=1 << 30)],  # the hot level of device "cpu"
        layers=[
            AttentionLayerConfig(i, [BufferConfig("latent", 64 * row_bytes)]) for i in range(n)
        ],
    )
    manager = KVCacheManager(config)

    cache = manager.create_kv_cache(input_tokens=prompt[:-1])  # SUSPENDED; holds the cached prefix
    start = cache.num_committed_tokens  # tokens that need no prefill
    if not cache.resume():  # False: no room, cache.last_failure says why
        ...
    cache.set_base_page_index_buf(0, 0, table[row])  # int32 row, kept up to date in place
    if not cache.resize(len(prompt) + 1):  # False: no room, nothing changed
        ...
    # write rows [start, len(prompt)) through the page table, then
    cache.commit(prompt[start:])  # full blocks become reusable
    cache.close()  # pages go back; cached blocks stay

One decode step for a batch: ``resize_many(caches, capacities)`` (a bool per cache), forward,
``commit_many(caches, tokens)`` (one token each, or ``counts``). ``resume_many`` likewise. Integer
arguments may be lists, int32 numpy arrays or int32 CPU tensors.

Finding a row: base page index ``b`` of block ``k`` (``get_base_page_indices(group)[k]``) and buffer
(layer, role): the block starts at ``get_mem_pool_base_address(layer, role)
+ b * get_page_index_scale(layer, role) * get_page_stride(layer, role)``.
``get_mem_pool_view(layer, role)`` is the same memory as uint8 ``[num_slots, block bytes]``, so
``torch.from_numpy(view).view(dtype)[b]`` is the block. Addresses never change.

Rejected speculative tokens: ``cache.truncate(n)`` (or ``truncate_many``). Parallel samples and
beams: ``cache.fork()``, a suspended twin that shares every block before ``history_length``; whoever
calls ``resize`` or ``resume`` next gets private copies of the blocks that it will write, so call
one of them between ``fork`` and the next write.

Worth keeping: ``create_kv_cache(retention=[RetentionRange(0, 512, priority=80,
duration_ms=60_000)])`` ranks ranges of tokens, ``pin(tokens)`` holds a prefix until the pin is
closed, ``plan_committed_block_drop()`` gives up what only an exact continuation would reuse.
Steps that the device can't see, such as those of an executor that runs ahead: resume with a
``make_step_stream()``, then ``submit_step`` and ``complete_step``; pages freed meanwhile wait.

Rules. ``num_committed <= history_length <= capacity``; history shrinks by ``truncate`` alone;
capacity may shrink, down to history. Commit only tokens whose rows are written. ``commit`` may swap
a block for an identical one that another sequence committed first, so read page tables after it.
With one level ``suspend`` keeps the pages: to give memory back, ``close`` (committed blocks stay
reusable) and create again.
"No room" is ``False`` plus ``cache.last_failure`` (a ``NoRoom``); misuse raises ``ValueError`` or
``LogicError``.

Bug reports: ``manager.start_recording(path)`` before the first cache writes every call to an
operation log; ``replay_operations(OperationLog.load(path))``, or ``helicore kv replay``, runs it
again and tells where it first behaves otherwise.

``PrefixStore`` keeps blocks on disk beyond the process: ``put`` full blocks under
``get_root_key(scope)``; later ``match`` a prompt and ``get`` its blocks into free pages.
"""

from helicore._core.kv import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    HOT_LEVEL,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    AdmissionForecast,
    AttentionLayerConfig,
    AttentionReusePolicy,
    BatchDesc,
    BlockRef,
    BlockStatus,
    BufferConfig,
    BufferId,
    CacheDomain,
    CacheStatus,
    CacheTier,
    CoalescedBuffer,
    CommitState,
    DataLostError,
    DiskCacheTierConfig,
    EventKind,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    IoBackend,
    KVCache,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
    KVCacheStats,
    KVEvent,
    LayerGroupStats,
    LayerType,
    LogEnd,
    LogicError,
    MigrationCounters,
    NoRoom,
    OnMismatch,
    OperationLog,
    OutOfPagesError,
    PageIndexConverter,
    PageIndexMode,
    PageStatus,
    PlannedDrop,
    PoolDesc,
    PoolGroupDesc,
    PoolGroupStatistics,
    PrefetchTicket,
    PrefixMatch,
    PrefixStore,
    PrefixStoreStats,
    RecordingSummary,
    ReplayDifference,
    ReplayReport,
    ResizeResult,
    ResourceBusyError,
    RetentionRange,
    ReuseScope,
    ReuseStatus,
    ScratchDesc,
    SequencePlan,
    SlotDescVariant,
    SsmLayerConfig,
    SwaScratchReuseConfig,
    SyncPolicy,
    get_root_key,
    replay_operations,
)

_KVCache = KVCache

__all__ = [
    "BAD_PAGE_INDEX",
    "DEFAULT_BEAM_INDEX",
    "GPU_LEVEL",
    "HOT_LEVEL",
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "PRIORITY_MIN",
    "AdmissionForecast",
    "AttentionLayerConfig",
    "AttentionReusePolicy",
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
    "DataLostError",
    "DiskCacheTierConfig",
    "EventKind",
    "GpuCacheTierConfig",
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
