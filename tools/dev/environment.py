"""The virtual environment: made, filled as pyproject.toml says, and the package built into it."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

from steps import ROOT, Runner, Step, digest, sources

# Always installed first and alone, so that no other requirement chooses another build of it.
TORCH = "torch==2.13.0"
# Build tools that a build without isolation needs beside [build-system] requires.
BUILD_TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
NATIVE_SOURCES = ("CMakeLists.txt", "pyproject.toml", "cmake", "cpp", "bindings")


class Environment:
    """The folder `.venv` (HELICORE_VENV names another) and what is in it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.folder = Path(os.environ.get("HELICORE_VENV", ROOT / ".venv")).resolve()
        self.bin = self.folder / "bin"
        self.python = str(self.bin / "python")
        self._project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    @property
    def variables(self) -> dict[str, str]:
        """Environment of every step: the venv first on PATH, one compiler cache for all clones."""
        return {
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}",
            "VIRTUAL_ENV": str(self.folder),
            "CXX": os.environ.get("CXX", "g++"),  # one name for it, which the cache keys carry
            "CCACHE_BASEDIR": str(ROOT),
            "CCACHE_NOHASHDIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def ensure(self, *, tests: bool) -> None:
        """Brings everything up to date: the venv, torch, the other packages, the native build."""
        self._make_venv()
        self._install(f"{TORCH} (the largest download)", [TORCH])
        names = self._requirements(["test", "lint"] if tests else [])
        self._install("Python packages for the tests" if tests else "Python packages", names)
        self._build()

    def _make_venv(self) -> None:
        if shutil.which(self.python) is None:
            self._runner.run(
                Step(
                    title="Virtual environment",
                    commands=[[sys.executable, "-m", "venv", str(self.folder)]],
                    hint=f"remove {self.folder} and run again",
                )
            )

    def _requirements(self, extras: list[str]) -> list[str]:
        project = self._project["project"]
        optional = project["optional-dependencies"]
        names = [*self._project["build-system"]["requires"], *BUILD_TOOLS]
        names += [name for name in project["dependencies"] if not name.startswith("torch>")]
        for extra in extras:
            names += optional[extra]
        return [str(name) for name in names]

    def _install(self, title: str, names: list[str]) -> None:
        self._runner.run(
            Step(
                title=title,
                commands=[[self.python, "-m", "pip", "install", "-q", *names]],
                hint="check the network and the package index (`pip config list`), then run again",
                key=digest([str(self.folder), self._created(), *names]),
                env=self.variables,
            )
        )

    def _build(self) -> None:
        cuda = os.environ.get("HELICORE_CUDA", "AUTO" if Path("/dev/nvidia0").exists() else "OFF")
        files = list(sources(*NATIVE_SOURCES))
        self._runner.run(
            Step(
                title="Native build and editable install",
                commands=[
                    [
                        # -v: what ninja says is the progress that is shown
                        *(self.python, "-m", "pip", "install", "-v", "--no-build-isolation"),
                        *("--no-deps", "-e", "."),
                    ]
                ],
                hint="read the first error in the log; after a toolchain change, `make clean`",
                key=digest([str(self.folder), self._created(), cuda, *files]),
                env={**self.variables, "HELICORE_CUDA": cuda},
            )
        )

    def _created(self) -> str:
        """Changes when the venv is made anew: nothing is thought installed in an empty one."""
        marker = self.folder / "pyvenv.cfg"
        return str(marker.stat().st_mtime_ns) if marker.is_file() else ""
