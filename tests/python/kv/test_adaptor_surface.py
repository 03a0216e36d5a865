"""Every published name is in the adaptor, or the design document says why it is not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from kv import adaptor
from kv.adaptor import KVCacheEventManager, KVCacheManager, _KVCache

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "design" / "kv-cache-api.md"

MODULE = """
NDEBUG DEFAULT_BEAM_INDEX BAD_PAGE_INDEX GPU_LEVEL CACHE_LEVEL1
PageStatus CacheTier PageIndexMode LayerType CacheStatus CommitState AttentionReusePolicy
GpuCacheTierConfig HostCacheTierConfig DiskCacheTierConfig BufferConfig AttentionLayerConfig
SsmLayerConfig KVCacheDesc BatchDesc SwaScratchReuseConfig KVCacheManagerConfig
KVCacheManager _KVCache KVCacheEventManager
BufferId ReuseScope HalfOpenRange ScratchDesc AggregatedPageDesc ExpandedBuffer PlannedDropHandle
MmItemContext PoolDesc PoolGroupDesc SlotDesc
OutOfMemoryError HostOOMError DiskOOMError CuOOMError OutOfPagesError LogicError ResourceBusyError
CuError CorruptedError poison_reason take_poison num_live_managers
sequence_to_blockchain_keys gen_multimodal_cache_key_tokens
KVCacheStatsDelta KVCacheIterationStatsDelta SsmSnapshotIterationStatsDelta ReusedBlocksByLevel
PoolGroupPeakBlockStats StorageStatistics
"""
MANAGER = """
shutdown clear_reusable_blocks create_kv_cache probe_reuse probe_first_new_block_key
get_mem_pool_base_address get_page_stride get_page_index_upper_bound get_page_index_scale
get_page_index_converter get_aggregated_pages pool_group_descs layer_grouping layer_ids num_layers
get_layer_group_id all_buffer_ids cache_tier_list tokens_per_block supports_index_mode
get_life_cycle_pool_group_indices resize get_quota need_adjustment adjust clamp_max_seq_len_for_mem
get_storage_statistics get_committed_stats get_and_reset_iteration_stats
get_and_reset_iteration_peak_block_stats get_and_reset_iteration_peak_block_stats_by_level
get_and_reset_iteration_suspend_resume_stats get_and_reset_iteration_disk_prefetch_blocks
get_and_reset_iteration_cached_tokens_by_level get_and_reset_iteration_reused_blocks_by_level
get_and_reset_ssm_snapshot_iteration_stats record_request_suspended record_request_resumed
mark_stats_dirty clear_stats_dirty mark_stats_excluded clear_stats_excluded is_stats_excluded
get_dirty_stats_kv_cache_ids init_config event_manager allow_seq_rebasing enable_partial_match
commit_min_snapshot
"""
CACHE = """
resume suspend close resize commit stop_committing prefetch plan_committed_block_drop
commit_pending_stats discard_pending_stats set_base_page_index_buf get_base_page_indices
get_aggregated_page_indices get_scratch_desc supports_index_mode cuda_stream capacity
history_length beam_width enable_swa_scratch_reuse text_only id manager status is_active num_blocks
tokens_per_block num_committed_tokens committed_tokens cached_tokens_by_level reuse_scope
has_scratch_slots reuse_status get_ssm_block_base_index
"""
SETTABLE = "cuda_stream capacity history_length beam_width enable_swa_scratch_reuse text_only"
PARAMETERS = {
    KVCacheManager.__init__: "config event_manager cold_page_codec",
    KVCacheManager.create_kv_cache: (
        "reuse_scope input_tokens id custom_priority_callback expected_prompt_length text_only "
        "enable_request_stats"
    ),
    KVCacheManager.get_mem_pool_base_address: "layer_id data_role index_mode",
    KVCacheEventManager.__init__: (
        "max_kv_event_entries window_size attention_dp_rank attention_dp_gather hash_algo "
        "window_size_by_layer_group mm_token_id_offset"
    ),
    _KVCache.commit: "tokens is_end beam_search_indices",
}


def listed() -> set[str]:
    """Names in the first column of the document's table of differences."""
    rows = re.findall(r"^\|(.*?)\|", DOCUMENT.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def missing(owner: object, names: str) -> set[str]:
    return {name for name in names.split() if not hasattr(owner, name)}


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (adaptor, MODULE),
        (KVCacheManager, MANAGER),
        (_KVCache, CACHE),
        (KVCacheEventManager, "flush_iteration_events get_latest_events"),
    ],
)
def test_published_names_exist_or_the_document_says_why_not(owner: object, names: str) -> None:
    assert missing(owner, names) <= listed()
    assert missing(owner, "no_such_name") == {"no_such_name"}, "the check can fail"


def test_names_that_can_be_set_have_setters_and_the_others_have_none() -> None:
    for name in CACHE.split():
        member = inspect.getattr_static(_KVCache, name, None)
        if isinstance(member, property):
            assert (member.fset is not None) == (name in SETTABLE.split()), name


def test_parameters_have_their_published_names_and_order() -> None:
    for function, names in PARAMETERS.items():
        assert list(inspect.signature(function).parameters)[1:] == names.split()


def test_everything_the_adaptor_offers_can_be_imported_by_star() -> None:
    for name in adaptor.__all__:
        assert hasattr(adaptor, name)
    assert isinstance(adaptor.NDEBUG, bool)
    assert (adaptor.BAD_PAGE_INDEX, adaptor.GPU_LEVEL, adaptor.CACHE_LEVEL1) == (-1, 0, 1)
