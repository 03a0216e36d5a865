"""Says in one sentence what to install when torch is missing or too old, before anything fails."""

from __future__ import annotations

import re
import sys
from importlib import metadata

MINIMUM_TORCH = (2, 11)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check() -> None:
    """Raises ImportError unless torch >= 2.11 is installed; reads its metadata, does not import it.

    `python -m helicore --cmake-dir` serves C++ builds, which need no torch, and passes.
    """
    if "--cmake-dir" in sys.orig_argv:
        return
    found = _installed("torch")
    need = "helicore needs torch >= {}.{}".format(*MINIMUM_TORCH)
    if found is None:
        raise ImportError(f"{need}, and there is none here: pip install 'torch>=2.11'")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < MINIMUM_TORCH:
        raise ImportError(f"{need}, found torch {found}: pip install --upgrade 'torch>=2.11'")
