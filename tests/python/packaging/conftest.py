"""The tools of the repository as importable modules, and the top of the source tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
for folder in ("tools", "tools/lint", "tools/dev"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT
