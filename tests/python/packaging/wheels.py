"""Commands, venvs and folders that the packaging tests share."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is in the assertion when it fails."""
    result = subprocess.run(  # type: ignore[call-overload]
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


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


def dependency_folders() -> list[str]:
    """Where this environment's packages lie."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders |= {entry for entry in sys.path if entry.endswith("site-packages")}
    return sorted(folders)
