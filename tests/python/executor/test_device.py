"""Which device an engine takes, and settings that don't go with it."""

from __future__ import annotations

import pytest
import torch
from helicore import KVCacheConfig, NotSupportedError
from helicore.config import EngineConfig
from helicore.executor import device as devices

GPU = torch.device("cuda", 0)


def test_auto_is_the_cpu_where_no_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_cuda", lambda: "none is there")
    assert devices.choose_device(EngineConfig()) == devices.CPU
    with pytest.raises(ValueError, match=r'device can not be "cuda": none is there'):
        devices.choose_device(EngineConfig(device="cuda"))


def test_auto_prefers_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert devices.choose_device(EngineConfig()) == GPU
    assert devices.choose_device(EngineConfig(device="cpu")) == devices.CPU


def test_memory_for_the_other_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gpu_gb=1 .*host_gb"):
        devices.choose_device(EngineConfig(device="cpu", kv_cache=KVCacheConfig(gpu_gb=1)))
    monkeypatch.setattr(devices, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"host_gb=1 .*gpu_gb"):
        devices.choose_device(EngineConfig(device="cuda", kv_cache=KVCacheConfig(host_gb=1)))


def test_what_a_gpu_does_not_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(NotSupportedError, match="deterministic=True"):
        devices.choose_device(EngineConfig(device="cuda", deterministic=True))


def test_gpu_memory_is_nine_tenths_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert devices.gpu_bytes(None, GPU) == int((10 << 30) * 0.9)
    assert devices.gpu_bytes(2.5, GPU) == 5 << 29
    with pytest.raises(ValueError, match=r"gpu_gb must be at most the 10\.0 GiB"):
        devices.gpu_bytes(11, GPU)
