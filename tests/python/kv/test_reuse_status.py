"""What each layer group has of a reused prefix, natively and through the published names."""

from __future__ import annotations

import pytest
from helicore import kv
from kv import adaptor

TPB = 4
BLOCK_BYTES = 4096
OPTIONAL = 1


def make_manager() -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(BLOCK_BYTES * 64)],
            layers=[
                kv.AttentionLayerConfig(0, [kv.BufferConfig("k", BLOCK_BYTES)]),
                kv.AttentionLayerConfig(
                    1,
                    [kv.BufferConfig("k", 2 * BLOCK_BYTES)],
                    reuse_policy=kv.AttentionReusePolicy.OPTIONAL,
                ),
            ],
            max_util_for_resume=1.0,
        )
    )


def put(manager: kv.KVCacheManager, tokens: list[int]) -> None:
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens)
    cache.close()


def test_status_tells_what_every_group_found() -> None:
    manager = make_manager()
    put(manager, list(range(8)))
    cache = manager.create_kv_cache(input_tokens=list(range(8)))
    required, optional = cache.reuse_status
    assert (required.group_id, optional.group_id) == (0, OPTIONAL)
    assert optional.policy == kv.AttentionReusePolicy.OPTIONAL
    assert required.coverage == optional.coverage == [(0, 8)]
    assert optional.complete
    assert optional.endpoint == 8
    cache.close()
    assert cache.reuse_status == []


def test_groups_that_are_not_selected_begin_empty() -> None:
    manager = make_manager()
    put(manager, list(range(8)))
    cache = manager.create_kv_cache(input_tokens=list(range(8)))
    with pytest.raises(ValueError, match="groups must be OPTIONAL layer groups, got 0"):
        cache.select_optional_reuse([0])
    cache.select_optional_reuse([])
    assert cache.reuse_status[OPTIONAL].coverage == []
    assert cache.resume()
    assert (cache.get_base_page_indices(OPTIONAL) >= 0).all()
    with pytest.raises(kv.LogicError, match="was resumed"):
        cache.select_optional_reuse([OPTIONAL])


@pytest.mark.parametrize(
    ("groups", "covered"), [(None, [(0, 8)]), ([OPTIONAL], [(0, 8)]), ([], [])]
)
def test_the_first_resume_selects_under_the_published_name(
    groups: list[int] | None, covered: list[tuple[int, int]]
) -> None:
    manager = adaptor.KVCacheManager(
        adaptor.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[adaptor.HostCacheTierConfig(BLOCK_BYTES * 64)],
            layers=[
                adaptor.AttentionLayerConfig(0, [adaptor.BufferConfig("k", BLOCK_BYTES)]),
                adaptor.AttentionLayerConfig(
                    1,
                    [adaptor.BufferConfig("k", 2 * BLOCK_BYTES)],
                    reuse_policy=adaptor.AttentionReusePolicy.OPTIONAL,
                ),
            ],
            max_util_for_resume=1.0,
        )
    )
    first = manager.create_kv_cache()
    assert first.resume(0)
    assert first.resize(8)
    first.commit(list(range(8)))
    first.close()
    cache = manager.create_kv_cache(input_tokens=list(range(8)))
    with pytest.raises(ValueError, match="layer group 0 is not OPTIONAL"):
        cache.resume(0, optional_reuse_groups=[0])
    assert cache.status == adaptor.CacheStatus.SUSPENDED
    assert cache.resume(0, optional_reuse_groups=groups)
    status = cache.reuse_status[OPTIONAL]
    assert [tuple(tokens) for tokens in status.coverage] == covered
    assert status.complete == bool(covered)
    cache.suspend()
    assert cache.resume(0, optional_reuse_groups=[OPTIONAL]), "the first choice stays"
    assert [tuple(tokens) for tokens in cache.reuse_status[OPTIONAL].coverage] == covered
    cache.close()
    manager.shutdown()
