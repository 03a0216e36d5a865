"""The tools of the repository as importable modules; the wheel and where it is unpacked."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
for folder in ("tools", "tools/lint", "tools/dev", "tests/python/packaging"):
    sys.path.insert(0, str(ROOT / folder))


from wheels import dependency_folders, make_venv, run  # noqa: E402


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without CUDA and without build isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    environment = {**os.environ, "HELICORE_CUDA": "OFF"}
    run([*command, "-w", folder, "."], cwd=ROOT, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked in a folder that no build has seen."""
    folder = tmp_path_factory.mktemp("moved") / "some where else"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a venv that holds the wheel over the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    return make_venv(folder, wheel, *dependency_folders())
