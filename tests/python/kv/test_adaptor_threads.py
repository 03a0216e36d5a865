"""Several threads on one manager. Nothing may wait for the manager's lock with the GIL held."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
    import faulthandler, gc, sys, threading
    faulthandler.dump_traceback_later({watchdog}, exit=True)
    sys.setswitchinterval(1e-6)
    from kv.adaptor import *
    from kv.adaptor import _KVCache
    from kv.engine import Engine, layer, make_config
    colder = [HostCacheTierConfig(4 << 20)]
    engine = Engine(KVCacheManager(make_config("{device}", 200, colder=colder)))
    manager = engine.manager
    failures = []
    def spawn(*works):
        def guarded(work):
            try:
                work()
            except BaseException as error:
                failures.append(error)
                raise
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
"""
TAIL = """
    gc.collect()
    assert not failures, failures
    manager.shutdown()
    print("done")
"""


def run_watched(device: str, body: str, watchdog: int = 80) -> None:
    """Another process, ended with a dump of its threads when it hangs."""
    program = HEAD.format(watchdog=watchdog, device=device) + body + TAIL
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=watchdog + 40,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("done")


# A thread whose priority callback needs the GIL while it makes and commits caches, another that
# uses setters and lets caches, prefetches and plans die.
@pytest.mark.parametrize(
    "other",
    [
        "cache.capacity = 16; cache.history_length = 9; cache.cuda_stream = engine.stream",
        "assert cache.resize(24); cache.commit(range(20)); cache.stop_committing(); "
        "plan = cache.plan_committed_block_drop(); del cache; del plan",
        "assert cache.resize(24); cache.suspend(); cache.prefetch(0)",
    ],
)
def test_setters_and_destructors_run_beside_priority_callbacks(device: str, other: str) -> None:
    run_watched(
        device,
        f"""
    def priority(ordinal, life_cycle):
        return sum(1 for _ in range(50)) % 3 + 40
    def create():
        for i in range(150):
            tokens = [i % 11] * 30
            cache = manager.create_kv_cache(None, tokens, custom_priority_callback=priority)
            assert cache.resume(engine.stream)
            assert cache.resize(30)
            cache.commit(tokens[cache.num_committed_tokens:])
            cache.close()
    def drop():
        for i in range(150):
            cache = manager.create_kv_cache()
            assert cache.resume(engine.stream)
            {other}
            cache = None
    spawn(create, drop, drop)
""",
    )


def test_statistics_and_probes_go_on_while_a_cache_grows(device: str) -> None:
    run_watched(
        device,
        """
    stop = threading.Event()
    tokens = list(range(64))
    engine.serve(tokens)
    def grow():
        try:
            for _ in range(60):
                cache = manager.create_kv_cache()
                assert cache.resume(engine.stream)
                for capacity in range(0, 400, 16):
                    assert cache.resize(capacity)
                cache.close()
        finally:
            stop.set()
    def poll():
        while not stop.is_set():
            for group in manager.get_storage_statistics(0):
                assert group.free + group.evictable + group.unavailable == group.total
            manager.get_committed_stats()
            manager.get_page_index_upper_bound(0, "k")
    def probe():
        while not stop.is_set():
            assert manager.probe_reuse(None, tokens) in range(65)
    spawn(grow, poll, probe)
""",
    )


def test_many_probes_at_once_find_the_same(device: str) -> None:
    run_watched(
        device,
        """
    prompts = [[s] + list(range(63)) for s in range(4)]
    for prompt in prompts:
        engine.serve(prompt)
    def probe():
        for i in range(500):
            assert manager.probe_reuse(None, prompts[i % 4]) == 64
            assert manager.probe_reuse(None, [99]) == 0
    spawn(*[probe] * 8)
""",
    )


def test_page_tables_of_a_shared_prefix_are_read_at_once(device: str) -> None:
    run_watched(
        device,
        """
    prompt = list(range(64))
    engine.serve(prompt)
    caches = [manager.create_kv_cache(None, prompt) for _ in range(6)]
    for cache in caches:
        assert cache.resume(engine.stream)
    expected = caches[0].get_base_page_indices(0).tolist()
    def read(cache):
        def work():
            for _ in range(300):
                assert cache.get_base_page_indices(0).tolist() == expected
                assert list(cache.get_aggregated_page_indices(0)) == expected
        return work
    spawn(*[read(cache) for cache in caches])
    for cache in caches:
        cache.close()
""",
    )
