"""The example programs run and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("offline.py", "log-probabilities after"),
        ("chat.py", "---"),
        ("kv_only.py", "sequence 1: 32 of 41 tokens found in the cache"),
    ],
)
def test_an_example_runs(name: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
