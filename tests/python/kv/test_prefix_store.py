"""PrefixStore through the bindings: restart, statuses, lifetime of arrays."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helicore import kv
from numpy.typing import NDArray

TPB = 16
BLOCK = 5000  # bytes; not a multiple of any page
STAMP = hashlib.sha256(b"tiny model, bf16").digest()


def open_store(directory: Path, num_slots: int = 32, stamp: bytes = STAMP) -> kv.PrefixStore:
    return kv.PrefixStore(
        str(directory),
        capacity_bytes=num_slots * 8192,
        block_bytes=BLOCK,
        tokens_per_block=TPB,
        stamp=stamp,
    )


def pages_of(num_blocks: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK), dtype=np.uint8)


def put(
    store: kv.PrefixStore, root: bytes, tokens: list[int], pages: NDArray[np.uint8]
) -> list[kv.BlockStatus]:
    token = store.put(root, tokens, pages)
    assert token is not None
    return store.wait(token)


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    root = kv.get_root_key()
    tokens = list(range(100))  # six full blocks and four tokens
    pages = pages_of(7)
    with open_store(tmp_path) as store:
        assert put(store, root, tokens, pages) == [kv.BlockStatus.OK] * 7
        assert store.flush()
    with open_store(tmp_path) as store:
        assert store.stats().num_loaded == 7
        match = store.match(root, np.arange(100, dtype=np.int32))
        assert (len(match.blocks), match.num_tokens) == (7, 100)
        out = np.zeros((7, BLOCK), np.uint8)
        token = store.get(match.blocks, out)
        assert token is not None
        assert store.wait(token) == [kv.BlockStatus.OK] * 7
        assert np.array_equal(out, pages)
        assert store.match(root, [*range(50), 7]).num_tokens == 48
        assert store.match(kv.get_root_key(3), tokens).num_tokens == 0


def test_a_later_part_of_a_sequence_may_follow(tmp_path: Path) -> None:
    root = kv.get_root_key(kv.ReuseScope(salt="tenant"))
    tokens, pages = list(range(64)), pages_of(4)
    with open_store(tmp_path) as store:
        assert put(store, root, tokens[:32], pages[:2]) == [kv.BlockStatus.OK] * 2
        token = store.put(root, tokens, pages[2:], first_block=2)
        assert token is not None
        while (statuses := store.poll(token)) is None:
            pass
        assert statuses == [kv.BlockStatus.OK] * 2
        assert put(store, root, tokens, pages) == [kv.BlockStatus.DUPLICATE] * 4
        assert store.match(root, tokens).num_tokens == 64


def test_another_stamp_finds_nothing(tmp_path: Path) -> None:
    root = kv.get_root_key()
    with open_store(tmp_path) as store:
        put(store, root, list(range(16)), pages_of(1))
    with open_store(tmp_path, stamp=hashlib.sha256(b"another").digest()) as store:
        assert "stamp" in store.stats().emptied_reason
        assert store.match(root, list(range(16))).num_tokens == 0


def test_a_damaged_block_is_reported_and_forgotten(tmp_path: Path) -> None:
    root, tokens = kv.get_root_key(), list(range(32))
    with open_store(tmp_path) as store:
        put(store, root, tokens, pages_of(2))
    with (tmp_path / "blocks").open("r+b") as data:
        data.seek(8192 + 17)
        data.write(b"damage")
    with open_store(tmp_path) as store:
        match = store.match(root, tokens)
        token = store.get(match.blocks, np.zeros((2, BLOCK), np.uint8))
        assert token is not None
        assert store.wait(token) == [kv.BlockStatus.OK, kv.BlockStatus.CORRUPT]
        assert store.match(root, tokens).num_tokens == 16


def test_a_killed_writer_leaves_a_usable_store(tmp_path: Path) -> None:
    script = f"""
import numpy as np
from helicore import kv
store = kv.PrefixStore({str(tmp_path)!r}, capacity_bytes=8 * 8192, block_bytes={BLOCK},
                       tokens_per_block={TPB}, stamp=bytes.fromhex({STAMP.hex()!r}))
root = kv.get_root_key()
for i in range(10**9):
    pages = np.full((2, {BLOCK}), i % 7, np.uint8)
    tokens = [i % 7] * 32
    store.wait(store.put(root, tokens, pages))
    print(i, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(20):
            assert child.stdout.readline()
        with pytest.raises(kv.ResourceBusyError, match=f"in use by process {child.pid}"):
            open_store(tmp_path, num_slots=8)
        os.kill(child.pid, signal.SIGKILL)
    root = kv.get_root_key()
    served = 0
    with open_store(tmp_path, num_slots=8) as store:
        for value in range(7):
            match = store.match(root, [value] * 32)
            out = np.full((len(match.blocks), BLOCK), 255, np.uint8)
            token = store.get(match.blocks, out)
            assert token is not None
            assert store.wait(token) == [kv.BlockStatus.OK] * len(match.blocks)
            assert np.all(out == value)
            served += len(match.blocks)
    assert served > 0


def test_an_uncollected_read_keeps_its_array_until_the_store_goes(tmp_path: Path) -> None:
    root, pages = kv.get_root_key(), pages_of(2)
    store = open_store(tmp_path)
    put(store, root, list(range(32)), pages)
    match = store.match(root, list(range(32)))
    assert store.get(match.blocks, np.zeros((2, BLOCK), np.uint8)) is not None
    gc.collect()
    del store
    gc.collect()
    open_store(tmp_path).close()


def test_a_cancelled_read_is_collected_like_any_other(tmp_path: Path) -> None:
    root, pages = kv.get_root_key(), pages_of(20)
    with open_store(tmp_path) as store:
        put(store, root, list(range(320)), pages)
        blocks = store.match(root, list(range(320))).blocks
        out = np.zeros((20, BLOCK), np.uint8)
        token = store.get(blocks, out)
        assert token is not None
        num_cancelled = store.cancel(token)
        statuses = store.wait(token)
        assert statuses.count(kv.BlockStatus.CANCELLED) == num_cancelled
        for row, status in enumerate(statuses):
            assert status == kv.BlockStatus.CANCELLED or np.array_equal(out[row], pages[row])


def test_misuse_is_a_value_error_and_a_bad_place_a_reason(tmp_path: Path) -> None:
    root = kv.get_root_key()
    with open_store(tmp_path / "good") as store:
        with pytest.raises(ValueError, match="a row for each block"):
            store.put(root, list(range(16)), pages_of(2))
        with pytest.raises(ValueError, match="root must hold 32 bytes"):
            store.match(b"short", [1])
        with pytest.raises(ValueError, match="block_bytes"):
            store.put(root, list(range(16)), np.zeros((1, BLOCK - 1), np.uint8))
        with pytest.raises(ValueError, match="unknown or was collected"):
            store.wait(12345)
        with pytest.raises(TypeError):
            store.put(root, [1], np.zeros((1, BLOCK), np.int32))
    with pytest.raises(ValueError, match="stamp must hold 32 bytes"):
        open_store(tmp_path, stamp=b"")
    (tmp_path / "plain").write_text("a file")
    store = open_store(tmp_path / "plain" / "below")
    assert "make directory" in store.stats().disabled_reason
    assert put(store, root, list(range(16)), pages_of(1)) == [kv.BlockStatus.DISABLED]
    assert not store.flush()
