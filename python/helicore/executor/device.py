"""Where an engine runs, and what of its settings goes there."""

from __future__ import annotations

import torch

from helicore._core import NotSupportedError
from helicore.config import EngineConfig, FieldError
from helicore.models.loader import why_no_cuda

_GIB = 1 << 30
_SHARE_OF_FREE = 0.9
"""Of the GPU memory that is free once the weights are there; the rest is for activations."""

CPU = torch.device("cpu")


def choose_device(config: EngineConfig, *, is_loaded: bool = True) -> torch.device:
    """The device that `config` names. "auto" prefers a GPU for a model that is yet to be loaded;
    one that is given is taken to be on the CPU.

    Raises FieldError where it can't be used, NotSupportedError for settings that it doesn't serve.
    """
    wanted = config.device
    if wanted == "auto" and not is_loaded:
        wanted = "cpu"
    reason = None if wanted == "cpu" else why_no_cuda()
    if wanted == "cuda" and reason is not None:
        raise FieldError("device", f'device can not be "cuda": {reason}')
    on_gpu = wanted != "cpu" and reason is None
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else CPU
    _check_served(config, device)
    return device


def _check_served(config: EngineConfig, device: torch.device) -> None:
    settings = config.kv_cache
    if device.type == "cpu":
        if settings.gpu_gb is not None:
            raise FieldError(
                "gpu_gb", f"gpu_gb={settings.gpu_gb:g} is of no use on a CPU; use host_gb"
            )
        return
    if settings.host_gb is not None:
        raise FieldError(
            "host_gb",
            f"host_gb={settings.host_gb:g} is the hot tier of a CPU; on a GPU use gpu_gb for that "
            "and swap_host_gb for the level below",
        )
    for name, value in (("deterministic", config.deterministic), ("disk_path", settings.disk_path)):
        if value:
            raise NotSupportedError(f'{name}={value!r} is not served on a GPU; use device="cpu"')


def gpu_bytes(gpu_gb: float | None, device: torch.device) -> int:
    """Bytes of the hot tier on a GPU: as set, else nine tenths of what is free.

    FieldError when the GPU has less free memory than that.
    """
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if gpu_gb is None:
        return int(free * _SHARE_OF_FREE)
    if gpu_gb * _GIB > free:
        raise FieldError(
            "gpu_gb",
            f"gpu_gb must be at most the {free / _GIB:.1f} GiB that are free on {device}, "
            f"got {gpu_gb:g}",
        )
    return int(gpu_gb * _GIB)
