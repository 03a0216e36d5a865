"""Prefixes that outlive the engine. The fake model re-reads every row, so a wrong page fails."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from executor.driving import drain, generate, tokens_of
from executor.fake_model import VOCAB, fake_engine, greedy_output
from helicore import kv
from helicore.config import FieldError
from helicore.executor.engine import Engine
from helicore.sampling_params import SamplingParams

PAGE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [(7 * i) % 40 + 3 for i in range(100)]  # six full pages and four tokens


def run(folder: Path, prompt: list[int] = PROMPT, **options: Any) -> tuple[Engine, int]:
    """A new engine that answers one prompt, and how many tokens it found; it is closed."""
    engine, _ = fake_engine(disk=folder, **options)
    cached = ask(engine, prompt)
    engine.close()
    return engine, cached


def ask(engine: Engine, prompt: list[int], scope: kv.ReuseScope | None = None) -> int:
    engine.add_request("one", prompt, GREEDY, reuse_scope=scope)
    updates = drain(engine)["one", 0]
    assert tokens_of(updates) == greedy_output(prompt, GREEDY.max_tokens or 0, eos=False)
    return updates[0].num_cached_tokens or 0


def damage(folder: Path, page: int) -> None:
    """Flips a byte of one slot of the data file."""
    with (folder / "blocks").open("r+b") as file:
        file.seek(page * 4096 + 99)
        byte = file.read(1)
        file.seek(page * 4096 + 99)
        file.write(bytes([byte[0] ^ 1]))


def test_a_prefix_survives_a_restart(tmp_path: Path) -> None:
    assert run(tmp_path)[1] == 0
    engine, cached = run(tmp_path)
    assert cached == 96
    counters = engine.counters
    assert counters.prefix_cache_hits_disk == counters.prefix_cache_hits == 96
    assert counters.disk_bytes_read == 6 * 4096
    assert counters.computed_prompt_tokens == len(PROMPT) - 96


def test_written_bytes_are_counted_once(tmp_path: Path) -> None:
    engine, _ = fake_engine(disk=tmp_path)
    ask(engine, PROMPT)
    disk = engine._pool.disk
    assert disk is not None
    disk.flush()
    ask(engine, PROMPT)
    assert engine.counters.disk_bytes_written == 6 * 4096
    assert engine.counters.disk_bytes_read == 0  # the tree had it
    engine.close()


def test_output_tokens_are_found_as_part_of_a_later_prompt(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine, _ = fake_engine(disk=tmp_path)
    whole = PROMPT + tokens_of(generate(engine, [PROMPT], params)[0])
    engine.close()
    assert run(tmp_path, whole)[1] == 128


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 96, 97])
def test_page_edges(tmp_path: Path, length: int) -> None:
    prompt = PROMPT[:length]
    run(tmp_path, prompt)
    # The last token is always computed.
    assert run(tmp_path, prompt)[1] == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"weight": 1.0},
        {"hidden_size": 32},
        {"block_size": 32},
    ],
    ids=str,
)
def test_nothing_is_found_by_an_engine_that_is_not_the_same(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run(tmp_path)
    engine, cached = run(tmp_path, **options)
    assert cached == 0
    assert engine.counters.prefix_cache_hits_disk == 0


def test_without_prefix_caching_the_folder_is_not_touched(tmp_path: Path) -> None:
    run(tmp_path / "store", enable_prefix_caching=False)
    assert not (tmp_path / "store").exists()


def test_settings_that_do_not_change_rows_keep_the_store(tmp_path: Path) -> None:
    run(tmp_path)
    assert run(tmp_path, num_pages=40, max_num_seqs=3, seed=5, eos_token_id=9)[1] == 96
    assert run(tmp_path, disk_pages=99)[1] == 96


def test_another_model_empties_the_store_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path)
    with caplog.at_level(logging.WARNING, "helicore"):
        run(tmp_path, weight=1.0)
    assert sum("was emptied" in record.getMessage() for record in caplog.records) == 1
    assert run(tmp_path)[1] == 0


def test_scopes_are_apart(tmp_path: Path) -> None:
    scopes = [None, kv.ReuseScope(None, "a"), kv.ReuseScope(None, "b"), kv.ReuseScope(3, "a")]
    engine, _ = fake_engine(disk=tmp_path)
    ask(engine, PROMPT, scopes[1])
    engine.close()
    engine, _ = fake_engine(disk=tmp_path)
    assert [ask(engine, PROMPT, scope) for scope in scopes] == [0, 96, 0, 0]
    engine.close()


def test_damaged_pages_are_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path)
    damage(tmp_path, 3)  # an engine alone writes its pages to slots in order
    with caplog.at_level(logging.WARNING, "helicore"):
        engine, cached = run(tmp_path)
    assert cached == 48
    assert engine.counters.prefix_cache_hits_disk == 48
    assert sum("damaged" in record.getMessage() for record in caplog.records) == 1
    assert run(tmp_path)[1] == 96  # stored again


def test_a_damaged_page_does_not_harm_rows_that_the_tree_had(tmp_path: Path) -> None:
    run(tmp_path)
    damage(tmp_path, 0)
    engine, _ = fake_engine(disk=tmp_path)
    other = [*PROMPT[:9], 45, 46, 47]
    ask(engine, other)  # a partly filled page with nine equal tokens is in the tree
    assert ask(engine, PROMPT) == 9
    engine.close()


def test_a_whole_page_from_disk_wins_over_a_part_of_it_in_the_tree(tmp_path: Path) -> None:
    run(tmp_path)
    engine, _ = fake_engine(disk=tmp_path)
    ask(engine, [*PROMPT[:9], 45, 46, 47])
    assert ask(engine, PROMPT) == 96
    assert engine.counters.prefix_cache_hits_disk == 96 - 9
    engine.close()


@pytest.mark.parametrize("name", ["journal", "blocks"])
def test_a_file_of_garbage_costs_hits_only(tmp_path: Path, name: str) -> None:
    run(tmp_path)
    path = tmp_path / name
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))
    assert run(tmp_path)[1] == 0
    run(tmp_path)
    assert run(tmp_path)[1] == 96


def test_a_tiny_store_keeps_the_head_of_a_prompt(tmp_path: Path) -> None:
    run(tmp_path, disk_pages=2)
    assert run(tmp_path, disk_pages=2)[1] == 32


def test_a_store_smaller_than_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="disk_gb must hold at least one page of 4096 bytes"):
        fake_engine(disk=tmp_path, disk_pages=0.5)  # type: ignore[arg-type]


def test_a_folder_that_is_in_use_leaves_the_engine_without_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = fake_engine(disk=tmp_path)
    with caplog.at_level(logging.WARNING, "helicore"):
        second, _ = fake_engine(disk=tmp_path)
        assert ask(second, PROMPT) == 0
        assert ask(second, PROMPT) == len(PROMPT) - 1
    assert sum("is not used" in record.getMessage() for record in caplog.records) == 1
    assert ask(first, PROMPT) == 0
    first.close()
    second.close()


def test_resetting_the_prefix_cache_empties_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = fake_engine(disk=tmp_path)
    ask(engine, PROMPT)
    with caplog.at_level(logging.WARNING, "helicore"):
        assert engine.reset_prefix_cache()
    assert not caplog.records
    assert ask(engine, PROMPT) == 0
    engine.close()
    assert run(tmp_path)[1] == 96


def test_prompt_logprobs_read_nothing_and_store_all(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    run(tmp_path, PROMPT[:40])
    engine, _ = fake_engine(disk=tmp_path)
    generate(engine, [PROMPT], params)
    assert engine.counters.prefix_cache_hits_disk == 0
    engine.close()
    assert run(tmp_path)[1] == 96


@pytest.mark.parametrize("num_pages", [9, 14, 40])
def test_random_prompts_over_small_pools_and_many_restarts(tmp_path: Path, num_pages: int) -> None:
    """Shared stems, preemption, eviction in pool and store; every token is checked."""
    rng = random.Random(num_pages)
    stems = [[rng.randrange(3, VOCAB) for _ in range(70)] for _ in range(3)]
    hits = preemptions = 0
    for _ in range(8):
        engine, _ = fake_engine(
            disk=tmp_path, num_pages=num_pages, disk_pages=24, max_num_batched_tokens=40
        )
        expected = {}
        for i in range(10):
            prompt = [*rng.choice(stems)[: rng.randrange(1, 70)], rng.randrange(3, VOCAB)]
            length = rng.randrange(1, 40)
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            engine.add_request(f"{i}", prompt, params)
            expected[f"{i}", 0] = greedy_output(prompt, length, eos=False)
        results = drain(engine)
        assert {key: tokens_of(updates) for key, updates in results.items()} == expected
        hits += engine.counters.prefix_cache_hits_disk
        preemptions += engine.counters.preemptions
        engine.close()
    assert hits > 0
    assert preemptions > 0 or num_pages > 9


# --- a store that behaves badly --------------------------------------------------------------


class Store:
    """The store of an engine with some of its methods replaced."""

    def __init__(self, engine: Engine, **replaced: Any) -> None:
        disk: Any = engine._pool.disk
        self.real: kv.PrefixStore = disk._store
        self.__dict__.update(replaced)
        disk._store = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def test_pages_that_the_queue_refuses_are_offered_again_after_a_step(tmp_path: Path) -> None:
    engine, _ = fake_engine(disk=tmp_path)
    num_refusals = 3
    first_blocks: list[int] = []

    def put(*arguments: Any, first_block: int, block: bool) -> int | None:
        assert not block
        first_blocks.append(first_block)
        if len(first_blocks) <= num_refusals:
            return None
        return store.real.put(*arguments, first_block=first_block, block=block)

    store = Store(engine, put=put)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    generate(engine, [PROMPT], params)
    assert first_blocks[: num_refusals + 1] == [0] * (num_refusals + 1)
    engine.close()
    assert run(tmp_path)[1] == 96


def test_pages_that_are_refused_until_their_lane_leaves_are_stored_by_the_next_one(
    tmp_path: Path,
) -> None:
    engine, _ = fake_engine(disk=tmp_path)
    store = Store(engine, put=lambda *_, **__: None)
    ask(engine, PROMPT)
    del store.put
    assert ask(engine, PROMPT) == len(PROMPT) - 1
    engine.close()
    assert run(tmp_path)[1] == 96


@pytest.mark.parametrize("status", [kv.BlockStatus.GONE, kv.BlockStatus.IO_ERROR])
def test_pages_that_cannot_be_read_are_computed(tmp_path: Path, status: kv.BlockStatus) -> None:
    run(tmp_path)
    engine, _ = fake_engine(disk=tmp_path)

    def wait(token: int) -> list[kv.BlockStatus]:
        statuses = store.real.wait(token)
        statuses[2] = status
        return statuses

    store = Store(engine, wait=wait)
    assert ask(engine, PROMPT) == 32
    engine.close()


def test_a_store_that_became_read_only_is_read_but_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path)
    engine, _ = fake_engine(disk=tmp_path)
    num_puts = 0

    def put(*_: Any, **__: Any) -> int:
        nonlocal num_puts
        num_puts += 1
        return num_puts

    Store(
        engine,
        put=put,
        poll=lambda token: [kv.BlockStatus.DISABLED],
        stats=lambda: SimpleNamespace(disabled_reason="", read_only_reason="the disk is full"),
    )
    other = [*PROMPT[:96], *PROMPT[:40]]
    with caplog.at_level(logging.WARNING, "helicore"):
        assert ask(engine, other) == 96
        assert num_puts == 1
        assert ask(engine, PROMPT[::-1]) == 0
    assert num_puts == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"the disk store {tmp_path} takes no more pages: the disk is full (said once)"
    ]
    engine.close()


@pytest.mark.parametrize("method", ["get", "wait", "put", "poll", "match"])
def test_a_store_that_raises_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    run(tmp_path, PROMPT[:50])
    engine, _ = fake_engine(disk=tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    Store(engine, **{method: fail})
    with caplog.at_level(logging.WARNING, "helicore"):
        ask(engine, PROMPT)
        assert ask(engine, PROMPT[::-1]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"the disk store {tmp_path} is not used any more: RuntimeError: a bug (said once)"
    ]
    engine.close()


def test_a_forked_child_ends_and_leaves_the_store_alone(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from executor.test_disk_prefix import PROMPT, ask, fake_engine\n"
        "engine, _ = fake_engine(disk=Path(sys.argv[1]))\n"
        "ask(engine, PROMPT)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(7)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status))\n"
        "engine.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "7", done.stderr
    assert run(tmp_path)[1] == 96


def test_a_refused_read_is_computed(tmp_path: Path) -> None:
    run(tmp_path)
    engine, _ = fake_engine(disk=tmp_path)
    Store(engine, get=lambda *_: None)
    assert ask(engine, PROMPT) == 0
    engine.close()


def test_a_folder_that_cannot_be_made_leaves_the_engine_without_a_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "helicore"):
        engine, _ = fake_engine(disk=Path("/proc/helicore"))
        assert ask(engine, PROMPT) == 0
        assert ask(engine, PROMPT) == len(PROMPT) - 1
        assert engine.reset_prefix_cache()
        engine.close()
    assert len(caplog.records) == 1
    assert "/proc/helicore is not used" in caplog.text


class Swapped:
    """A match whose blocks are in the wrong order."""

    def __init__(self, match: kv.PrefixMatch) -> None:
        self.blocks = match.blocks[::-1]


def test_wrong_pages_from_the_disk_would_be_noticed(tmp_path: Path) -> None:
    """The negative control of this file."""
    run(tmp_path)
    engine, _ = fake_engine(disk=tmp_path)
    store = Store(engine)
    real = store.real
    vars(store)["match"] = lambda *arguments: Swapped(real.match(*arguments))
    engine.add_request("one", PROMPT, GREEDY)
    updates = drain(engine)["one", 0]
    assert updates[-1].finish_reason == "abort"
    assert "AssertionError" in (updates[-1].error or "")
    engine.close()
