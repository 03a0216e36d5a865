"""What the bindings owe to Python: the GIL, the life of what is lent, names in errors."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
from helicore import NotSupportedError, kv
from kv.adaptor import has_gpu

TPB = 4


def make_manager(num_blocks: int = 64) -> kv.KVCacheManager:
    return kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.HostCacheTierConfig(256 * num_blocks)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 256)])],
            event_buffer_size=100,
        )
    )


def run_watched(program: str, seconds: float = 60) -> None:
    """Runs a program that must not hang; the watchdog is another process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")


# Threads hold the lock of one manager most of the time, without the GIL, while others close, drop
# and set. Who waits for the lock with the GIL stops everybody as soon as its holder needs the GIL.
STRESS = """
    import faulthandler, gc, sys, threading
    faulthandler.dump_traceback_later(50, exit=True)
    sys.setswitchinterval(1e-6)
    from helicore import kv
    manager = kv.KVCacheManager(kv.KVCacheManagerConfig(
        tokens_per_block=4,
        cache_tiers=[kv.HostCacheTierConfig(64 * 400), kv.HostCacheTierConfig(64 * 4000)],
        layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 64)])]))
    def work(seed):
        for i in range(150):
            tokens = [seed, *range(i % 90)]
            cache = manager.create_kv_cache(input_tokens=tokens)
            if not cache.resume(): continue
            {body}
            del cache
    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    gc.collect()
    assert manager.num_open_caches == 0
    manager.shutdown()
    print("done")
"""


@pytest.mark.parametrize(
    "body",
    [
        "cache.resize(len(tokens) + 4)",
        "cache.capacity = max(cache.capacity, 8); cache.history_length = cache.capacity",
        "cache.suspend(); ticket = cache.prefetch(); ticket.is_done(); del ticket",
        "cache.resize(len(tokens)); cache.commit(tokens[cache.num_committed_tokens:]); "
        "cache.committed_tokens; manager.num_open_caches; manager.num_available_blocks",
    ],
)
def test_setters_and_destructors_do_not_wait_for_the_lock_with_the_gil(body: str) -> None:
    run_watched(STRESS.replace("{body}", body))


def test_a_cache_dropped_while_the_manager_is_busy_lets_other_threads_run() -> None:
    # The main thread drops a large cache; the time its destructor takes is seen by a thread that
    # counts. With the GIL held no count would pass between the two marks.
    run_watched(
        """
        import sys, threading
        sys.setswitchinterval(1e-6)
        from helicore import kv
        manager = kv.KVCacheManager(kv.KVCacheManagerConfig(
            tokens_per_block=1, cache_tiers=[kv.HostCacheTierConfig(16 * 2_000_000)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 16)])]))
        counts = [0]
        stop = threading.Event()
        def count():
            while not stop.is_set():
                counts[0] += 1
        thread = threading.Thread(target=count)
        best = 0
        thread.start()
        for _ in range(50):
            cache = manager.create_kv_cache()
            assert cache.resume() and cache.resize(1_500_000)
            before = counts[0]
            del cache
            best = max(best, counts[0] - before)
            if best > 1000:
                break
        stop.set()
        thread.join()
        assert best > 1000, best
        print("done")
        """
    )


def test_a_row_is_let_go_when_it_is_replaced_detached_suspended_or_closed() -> None:
    manager = make_manager()
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(8)

    def lend() -> weakref.ref[np.ndarray]:  # type: ignore[type-arg]
        row = np.zeros(16, np.int32)
        cache.set_base_page_index_buf(0, 0, row)
        return weakref.ref(row)

    first = lend()
    gc.collect()
    assert first() is not None, "the cache writes it"
    second = lend()
    assert first() is None
    assert second() is not None
    cache.set_base_page_index_buf(0, 0, None)
    assert second() is None
    third = lend()
    cache.suspend()
    assert third() is None
    assert cache.resume()
    fourth = lend()
    with pytest.raises(ValueError, match="at least"):
        cache.set_base_page_index_buf(0, 0, np.zeros(1, np.int32))
    assert fourth() is not None, "a refused row replaces nothing"
    cache.close()
    assert fourth() is None
    again = manager.create_kv_cache()
    assert again.resume()
    row = np.zeros(16, np.int32)
    kept = weakref.ref(row)
    again.set_base_page_index_buf(0, 0, row)
    del row
    assert kept() is not None
    del again
    assert kept() is None


def test_a_cache_knows_its_manager() -> None:
    manager = make_manager()
    cache = manager.create_kv_cache()
    assert cache.manager is manager
    assert cache.fork().manager is manager


def test_the_reason_of_out_of_pages_is_an_attribute() -> None:
    manager = make_manager(4)
    cache = manager.create_kv_cache()
    assert cache.resume()
    with pytest.raises(kv.OutOfPagesError) as caught:
        cache.capacity = 10_000
    assert isinstance(caught.value.reason, kv.NoRoom)
    assert caught.value.reason == cache.last_failure


def test_events_name_the_layer_groups_of_a_block() -> None:
    manager = make_manager()
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(4)
    cache.commit([1, 2, 3, 4])
    stored = manager.drain_events()[-1]
    assert (stored.layer_group, stored.layer_groups) == (None, [0])
    cache.close()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: kv.HostCacheTierConfig(0), r"HostCacheTierConfig\.quota"),
        (lambda: kv.GpuCacheTierConfig(-1), r"GpuCacheTierConfig\.quota"),
        (lambda: kv.DiskCacheTierConfig(0, "."), r"DiskCacheTierConfig\.quota"),
        (lambda: kv.AttentionLayerConfig(-1, [kv.BufferConfig("k", 1)]), "layer_id must be >= 0"),
        (lambda: kv.SsmLayerConfig(-7, [kv.BufferConfig("k", 1)]), "layer_id must be >= 0"),
    ],
)
def test_bad_numbers_are_refused_by_the_name_of_their_field(make, field: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=field):
        make()


@pytest.mark.cuda
def test_device_memory_has_no_numpy_view() -> None:
    if not has_gpu():
        pytest.skip("needs a CUDA device and a build with CUDA kernels")
    manager = kv.KVCacheManager(
        kv.KVCacheManagerConfig(
            tokens_per_block=TPB,
            cache_tiers=[kv.GpuCacheTierConfig(4 << 20)],
            layers=[kv.AttentionLayerConfig(0, [kv.BufferConfig("latent", 256)])],
        )
    )
    with pytest.raises(NotSupportedError, match="GPU_MEM"):
        manager.get_mem_pool_view(0, "latent")
