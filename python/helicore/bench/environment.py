"""The machine and the versions behind a figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "transformers")


def collect() -> dict[str, Any]:
    """commit, cpu, threads, isa, cuda, versions: plain values, ready for JSON."""
    import torch

    from helicore import __version__, _core

    return {
        "commit": _commit(),
        "helicore": __version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": _core.core.num_threads(),
        "torch_threads": torch.get_num_threads(),
        "isa": _core.core.active_isa(),
        "memory_gb": _memory_gb(),
        "load_average": round(os.getloadavg()[0], 1),
        "cuda_compiled": _core.core.cuda_compiled(),
        "gpus": _gpu_names(torch),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        shown = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    if sys.platform != "linux":
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)


def _gpu_names(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
