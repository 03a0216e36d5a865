"""The native parts from Python, typed and without a model.

Two sequences share cached pages, then one attention step runs over both.

    python examples/python/kv_only.py
"""

import numpy as np
import torch
from helicore import kv, ops

RANK, ROPE, HEADS, PAGE = 32, 16, 4, 16
WIDTH = RANK + ROPE


def make_manager() -> kv.KVCacheManager:
    """One layer of float32 latent rows, 64 pages of host memory."""
    page_bytes = PAGE * WIDTH * 4
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=PAGE,
            cache_tiers=[kv.HostCacheTierConfig(64 * page_bytes)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", page_bytes)])],
        )
    )


def pages_of(manager: kv.KVCacheManager) -> torch.Tensor:
    """The pool as float32 [pages, PAGE, WIDTH], no copy."""
    pool = torch.from_numpy(manager.get_mem_pool_view(0, "latent"))
    return pool.view(torch.float32).view(-1, PAGE, WIDTH)


def open_cache(manager: kv.KVCacheManager, tokens: np.ndarray) -> kv.KVCache:
    """A cache with room for the tokens; it holds whatever prefix of them is known already."""
    cache = manager.create_kv_cache(input_tokens=tokens)
    if not (cache.resume() and cache.resize(len(tokens))):
        raise MemoryError(f"no room: {cache.last_failure}")
    return cache


def write_rows(manager: kv.KVCacheManager, cache: kv.KVCache, tokens: np.ndarray) -> int:
    """Writes a row per token that was not found; returns how many were found."""
    found = int(cache.num_committed_tokens)
    table = np.asarray(cache.get_base_page_indices(0))
    pages = pages_of(manager)
    for position in range(found, len(tokens)):
        generator = torch.Generator().manual_seed(int(tokens[position]))
        pages[table[position // PAGE], position % PAGE] = torch.randn(WIDTH, generator=generator)
    cache.commit(tokens[found:])
    return found


def main() -> None:
    manager = make_manager()
    prefix = np.arange(40, dtype=np.int32)
    prompts = [np.append(prefix, np.int32(100)), np.append(prefix, np.int32(200))]

    caches = []
    for number, tokens in enumerate(prompts):
        cache = open_cache(manager, tokens)
        found = write_rows(manager, cache, tokens)
        print(f"sequence {number}: {found} of {len(tokens)} tokens found in the cache")
        caches.append(cache)

    tables = [torch.from_numpy(np.array(c.get_base_page_indices(0))) for c in caches]
    print("pages:", [table.tolist() for table in tables])
    query = torch.randn(len(caches), HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
    output = ops.mla_decode(
        query,
        pages_of(manager),
        torch.stack(tables).int(),
        torch.arange(len(caches) + 1, dtype=torch.int32),
        torch.tensor([len(tokens) for tokens in prompts], dtype=torch.int32),
        scale=WIDTH**-0.5,
        kv_lora_rank=RANK,
    )
    print("attention output:", list(output.shape), output.dtype)

    for cache in caches:
        cache.close()
    print(f"probe after closing: {manager.probe_reuse(prompts[0])} tokens stay reusable")


if __name__ == "__main__":
    main()
