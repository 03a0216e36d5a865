"""What the operating system must bring, found by probing, and how to install what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from steps import Runner, Step, StepFailed

MINIMUM_PYTHON = (3, 11)
MINIMUM_GCC = 12


@dataclass(frozen=True, slots=True)
class Need:
    """One thing the build needs and the Debian packages that bring it."""

    what: str
    present: bool
    packages: tuple[str, ...]


def _compiles(header: str) -> bool:
    """Whether the C++ compiler finds a header."""
    compiler = shutil.which("g++")
    if compiler is None:
        return False
    probe = subprocess.run(
        [compiler, "-E", "-x", "c++", "-std=c++20", "-"],
        input=f"#include <{header}>\n".encode(),
        capture_output=True,
        check=False,
    )
    return probe.returncode == 0


def _gcc_version() -> int:
    compiler = shutil.which("g++")
    if compiler is None:
        return 0
    text = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=False)
    return int(text.stdout.split(".")[0] or 0)


def needs(*, tests: bool) -> list[Need]:
    """Everything needed, present or not: to build, and with `tests` to run every test."""
    version = f"python3.{sys.version_info.minor}"
    python_header = Path(sysconfig.get_path("include")) / "Python.h"
    found = [
        Need("a C++20 compiler (g++ 12)", _gcc_version() >= MINIMUM_GCC, ("g++",)),
        Need("Python headers", python_header.is_file(), (f"{version}-dev",)),
        Need(
            "Python venv", importlib.util.find_spec("ensurepip") is not None, (f"{version}-venv",)
        ),
    ]
    if tests:
        found += [
            Need("git", shutil.which("git") is not None, ("git",)),
            Need("GoogleTest", _compiles("gmock/gmock.h"), ("libgtest-dev", "libgmock-dev")),
            Need("Google Benchmark", _compiles("benchmark/benchmark.h"), ("libbenchmark-dev",)),
            Need("readelf and nm", shutil.which("readelf") is not None, ("binutils",)),
            Need("ccache", shutil.which("ccache") is not None, ("ccache",)),
        ]
    return found


def install_line(missing: list[Need]) -> str:
    """The command that installs what is missing, for a person to paste."""
    packages = " ".join(sorted({p for need in missing for p in need.packages}))
    return f"apt-get update && apt-get install -y --no-install-recommends {packages}"


def ensure(runner: Runner, *, tests: bool) -> None:
    """Installs missing system packages as root with apt-get, else prints the line to run."""
    if sys.version_info < MINIMUM_PYTHON:
        print(f"!!! Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
        print("    what to do: run again with it, e.g. make demo PYTHON=/usr/bin/python3.11")
        raise StepFailed("Python version")
    missing = [need for need in needs(tests=tests) if not need.present]
    if not missing:
        print("==> System packages: all there", flush=True)
        return
    line = install_line(missing)
    names = ", ".join(need.what for need in missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"!!! This machine lacks: {names}")
        print("    what to do: run this line, then the same command again")
        print(f"      sudo sh -c '{line}'")
        raise StepFailed("System packages")
    runner.run(
        Step(
            title="System packages",
            commands=[["sh", "-c", line]],
            hint=f"check the network, then run by hand: {line}",
            env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    )
    still = [need.what for need in needs(tests=tests) if not need.present]
    if still:
        print(f"!!! Still missing after the installation: {', '.join(still)}")
        print("    what to do: install them by hand; g++ must be version 12 or newer")
        raise StepFailed("System packages")
