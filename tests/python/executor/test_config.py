"""The configuration schema: limits, names in errors, environment variables, the docs table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from executor.fake_model import fake_engine
from helicore import NotSupportedError
from helicore.config import (
    EngineConfig,
    FieldError,
    KVCacheConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    settings,
    settings_table,
)

OWNERS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (EngineConfig, KVCacheConfig, SchedulerConfig, ParallelConfig, SpeculativeConfig)
}
INTEGERS = [row for row in settings() if row.allowed.startswith(("an integer", "one of 1,"))]
FLOATS = [row for row in settings() if row.allowed.startswith("a finite number")]


def name_of(row: Any) -> str:
    return f"{row.owner}.{row.name}"


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True])
@pytest.mark.parametrize("row", INTEGERS, ids=name_of)
def test_every_integer_setting_refuses_what_is_no_positive_integer(row: Any, value: Any) -> None:
    if value == 0 and row.name == "seed":
        pytest.skip("0 is a seed")
    with pytest.raises(FieldError) as info:
        OWNERS[row.owner](**{row.name: value})
    assert info.value.param == row.name
    assert row.name in str(info.value)
    assert repr(value) in str(info.value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1", True])
@pytest.mark.parametrize("row", FLOATS, ids=name_of)
def test_every_size_refuses_what_is_no_finite_number(row: Any, value: Any) -> None:
    with pytest.raises(FieldError, match=row.name):
        OWNERS[row.owner](**{row.name: value})


def test_there_are_integer_and_size_settings_to_test() -> None:
    assert len(INTEGERS) >= 9
    assert len(FLOATS) >= 3


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KVCacheConfig(dtype="int4"), "dtype"),
        (lambda: KVCacheConfig(block_size=24), "block_size"),
        (lambda: KVCacheConfig(host_gb=0), "host_gb"),
        (lambda: KVCacheConfig(disk_path="/nowhere"), "disk_gb"),
        (lambda: KVCacheConfig(disk_gb=1), "disk_path"),
        (lambda: KVCacheConfig(disk_path=__file__, disk_gb=1), "disk_path"),
        (lambda: KVCacheConfig(disk_path=f"{__file__}/below", disk_gb=1), "disk_path"),
        (lambda: KVCacheConfig(enable_prefix_caching=1), "enable_prefix_caching"),  # type: ignore[arg-type]
        (lambda: EngineConfig(model=""), "model"),
        (lambda: EngineConfig(model=None), "model"),  # type: ignore[arg-type]
        (lambda: EngineConfig(dtype="float16"), "dtype"),
        (lambda: EngineConfig(device="tpu"), "device"),
        (lambda: EngineConfig(kv_cache={}), "kv_cache"),  # type: ignore[arg-type]
        (lambda: EngineConfig(scheduler=None), "scheduler"),  # type: ignore[arg-type]
        (lambda: EngineConfig(num_threads=5000), "num_threads"),
        (lambda: EngineConfig(max_model_len=1), "max_model_len"),
        (lambda: SchedulerConfig(max_num_batched_tokens=100), "max_num_batched_tokens"),
        (lambda: SpeculativeConfig("magic"), "method"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(make: Any, field: str) -> None:
    with pytest.raises(FieldError) as info:
        make()
    assert info.value.param == field
    assert str(info.value).startswith(field)


def ranks_with(**settings: Any) -> EngineConfig:
    return EngineConfig(parallel=ParallelConfig(context_parallel_size=2), **settings)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ranks_with(device="cuda"), "device"),
        (lambda: ranks_with(kv_cache=KVCacheConfig(disk_path="/tmp", disk_gb=1)), "disk_path"),
        (lambda: EngineConfig(speculative=SpeculativeConfig("mtp", 2)), "speculative"),
    ],
)
def test_what_is_not_served_yet_is_refused_at_construction(make: Any, field: str) -> None:
    with pytest.raises(NotSupportedError, match=field):
        make()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().max_num_seqs = 3  # type: ignore[misc]


def test_tuning_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        KVCacheConfig(64)  # type: ignore[call-arg]


# --- environment -----------------------------------------------------------------------------


def test_environment_variables_are_unique_and_named_after_their_field() -> None:
    names = [row.env for row in settings() if row.env]
    assert len(names) == len(set(names))
    for row in settings():
        if row.env:
            assert row.env.startswith("HELICORE_")
            assert row.env.lower().endswith(row.name)


def test_a_setting_left_at_its_default_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HELICORE_BLOCK_SIZE", "16")
    monkeypatch.setenv("HELICORE_HOST_GB", "0.5")
    monkeypatch.setenv("HELICORE_ENABLE_PREFIX_CACHING", "off")
    monkeypatch.setenv("HELICORE_DETERMINISTIC", "1")
    config = KVCacheConfig()
    assert (config.block_size, config.host_gb, config.enable_prefix_caching) == (16, 0.5, False)
    assert KVCacheConfig(block_size=32).block_size == 32
    assert EngineConfig().deterministic is True


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_bad_environment_value_is_refused_like_an_argument(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HELICORE_MAX_NUM_SEQS", text)
    with pytest.raises(FieldError, match="max_num_seqs"):
        SchedulerConfig()


def test_no_other_module_reads_the_environment() -> None:
    package = Path(__file__).parents[3] / "python" / "helicore"
    readers = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    # kv_sides.py hands an environment on to the processes it starts; it takes no setting from it.
    assert sorted(readers) == ["bench/kv_sides.py", "config.py"]


def test_the_docs_table_is_the_schema() -> None:
    docs = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert settings_table() in docs.read_text(), (
        "write settings_table() of helicore.config into docs/configuration.md"
    )


# --- settings that meet a model --------------------------------------------------------------


def test_a_model_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(FieldError, match=r"max_model_len must be at most 200.*got 201"):
        fake_engine(max_model_len=201)


def test_a_model_length_beyond_the_pool_is_refused() -> None:
    with pytest.raises(FieldError, match=r"max_model_len 100 .*64 tokens.*host_gb") as info:
        fake_engine(max_model_len=100, num_pages=5)
    assert info.value.param == "max_model_len"


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(FieldError) as info:
        fake_engine(num_pages=1)
    assert info.value.param == "host_gb"


def test_the_pool_limits_the_model_length_where_none_is_set() -> None:
    engine, _ = fake_engine(num_pages=5)
    assert engine.limits.max_model_len == 64
    assert fake_engine(num_pages=64)[0].limits.max_model_len == 200
    assert fake_engine(max_model_len=50)[0].limits.max_model_len == 50
