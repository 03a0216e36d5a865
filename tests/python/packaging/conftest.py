"""The tools of the repository as importable modules; the wheel and where it is unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
for folder in ("tools", "tools/lint", "tools/dev"):
    sys.path.insert(0, str(ROOT / folder))


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is in the assertion when it fails."""
    result = subprocess.run(  # type: ignore[call-overload]
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


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


def make_venv(folder: Path, wheel: Path, *paths: str | Path) -> Path:
    """A venv with the wheel and, through a .pth file, the given folders; returns its Python."""
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run([*pip, wheel])
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run([python, "-c", script]).stdout.strip())
    (packages / "base.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a venv that holds the wheel over the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    return make_venv(folder, wheel, *dependency_folders())


def dependency_folders() -> list[str]:
    """Where this environment's packages lie."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {entry for entry in sys.path if entry.endswith("site-packages")}
    return sorted(folders)
