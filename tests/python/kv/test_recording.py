"""Operation logs from Python: recording, reading, replaying, and the command line over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helicore import NotSupportedError
from helicore.cli.main import app
from helicore.kv import (
    AttentionLayerConfig,
    BufferConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    LogEnd,
    LogicError,
    OperationLog,
    RecordingSummary,
    replay_operations,
)
from typer.testing import CliRunner

PROMPT = list(range(300, 310))


def make_manager() -> KVCacheManager:
    layers = [AttentionLayerConfig(0, [BufferConfig("latent", 4 * 1024)])]
    return KVCacheManager(
        KVCacheManagerConfig(4, [HostCacheTierConfig(32 * 1024)], layers, max_util_for_resume=1.0)
    )


def some_calls(manager: KVCacheManager) -> None:
    for _ in range(2):
        cache = manager.create_kv_cache(input_tokens=PROMPT)
        assert cache.resume()
        assert cache.resize(10)
        cache.commit(PROMPT[cache.num_committed_tokens :])
        cache.close()
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert not cache.resize(4000)
    with pytest.raises(ValueError, match="capacity"):
        cache.truncate(1)
    cache.close()


def record(path: Path | None = None, *, anonymise: bool = False) -> RecordingSummary:
    manager = make_manager()
    manager.start_recording(None if path is None else str(path), state_every=1, anonymise=anonymise)
    assert manager.is_recording
    some_calls(manager)
    return manager.stop_recording()


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    path = tmp_path / "calls.ops"
    record(path)
    return path


def test_a_recording_in_memory_replays_as_recorded() -> None:
    summary = record()
    assert summary.num_operations == 15
    assert summary.num_bytes == len(summary.data)
    assert summary.problem == ""
    log = OperationLog.parse(summary.data)
    assert len(log) == 15
    assert log.end == LogEnd.COMPLETE
    assert log.config == make_manager().init_config
    report = replay_operations(log, check_every=1)
    assert report.difference is None
    assert report.num_replayed == report.num_operations == 15
    assert "all as recorded" in str(report)


def test_operations_are_described_in_words(log_file: Path) -> None:
    log = OperationLog.load(str(log_file))
    assert log.describe(0).startswith("create_kv_cache(tokens=[300, 301")
    assert "matched=0" in log.describe(0)
    assert "matched=10" in log.describe(5)
    assert "resize(cache=2, capacity=4000) -> no room" in log.describe(12)
    assert "threw, error=InvalidArgument" in log.describe(13)
    with pytest.raises(ValueError, match="index"):
        log.describe(15)


def test_calls_about_sizes_are_recorded_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "sizes.ops"
    manager = make_manager()
    manager.start_recording(str(path), state_every=1)
    manager.mark_stats_excluded(7)
    cache = manager.create_kv_cache()
    assert cache.resume()
    assert cache.resize(20)
    quota = manager.get_quota(0)
    assert not manager.resize(0, quota // 2, best_effort=True).done
    assert manager.maintain(4) == 0
    cache.close()
    manager.maintain(4)
    assert not manager.is_resizing
    assert manager.resize(0, 2 * quota).done
    assert not manager.adjust()
    assert manager.stop_recording().problem == ""
    assert replay_operations(OperationLog.load(str(path)), check_every=1).difference is None
    shown = CliRunner().invoke(app, ["kv", "show", str(path)]).stdout
    assert "mark_stats_excluded(id=7) -> done" in shown
    assert f"KVCacheManager.resize(level=0, quota={quota // 2}, best_effort=1) -> no room" in shown
    assert "maintain(max_pages=4) -> num_moved=0" in shown
    assert "adjust() -> started=0" in shown


def test_an_anonymised_log_shows_no_token_and_keeps_the_hits() -> None:
    log = OperationLog.parse(record(anonymise=True).data)
    assert log.is_anonymised
    text = "\n".join(log.describe(i) for i in range(len(log)))
    assert "300" not in text
    assert "matched=10" in log.describe(5)
    assert replay_operations(log).difference is None


def test_recording_begins_before_the_first_cache() -> None:
    manager = make_manager()
    with pytest.raises(LogicError, match="no recording"):
        manager.stop_recording()
    manager.create_kv_cache().close()
    with pytest.raises(LogicError, match="before the first cache"):
        manager.start_recording()
    with pytest.raises(ValueError, match="state_every"):
        make_manager().start_recording(state_every=-1)


def test_show_prints_one_operation_a_line(log_file: Path) -> None:
    result = CliRunner().invoke(app, ["kv", "show", str(log_file), "--first", "12", "--count", "2"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["12", "resize(cache=2,"]
    assert lines[1].split()[0] == "13"
    shown = CliRunner().invoke(app, ["kv", "show", str(log_file), "--json"])
    values = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(values) == 16
    assert values[-1]["num_operations"] == 15


def test_replay_tells_success_by_its_exit_code(log_file: Path) -> None:
    result = CliRunner().invoke(app, ["kv", "replay", str(log_file), "--json"])
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["difference"] is None
    assert values["num_replayed"] == 15


def test_replay_of_a_torn_log_runs_what_is_there(log_file: Path) -> None:
    log_file.write_bytes(log_file.read_bytes()[:-30])
    result = CliRunner().invoke(app, ["kv", "replay", str(log_file)])
    assert result.exit_code == 0
    assert "ends inside a record" in result.stdout


def test_a_file_that_is_no_log_is_bad_input(tmp_path: Path, log_file: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no operation log"):
        OperationLog.load(str(other))
    assert CliRunner().invoke(app, ["kv", "replay", str(other)]).exit_code == 2
    assert CliRunner().invoke(app, ["kv", "show", str(tmp_path / "nowhere")]).exit_code == 2
    content = bytearray(log_file.read_bytes())
    content[8] = 9
    with pytest.raises(NotSupportedError, match="version 9"):
        OperationLog.parse(bytes(content))
