"""What a shared object needs at load time, and which of it is allowed in a wheel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ALLOWED_LIBRARIES = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
    }
)
# Newest versions of the manylinux_2_35 set.
MAXIMUM_GLIBC = (2, 35)
MAXIMUM_GLIBCXX = (3, 4, 30)
# C++ names of torch, and C names of the CUDA driver and run time and of Highway.
_FOREIGN = re.compile(r"^(_ZN?K?(2at|3c10|5torch|3hwy)\w*|cu[A-Z]\w+|cuda[A-Z]\w+|hwy\w*)")
# Names beside the stable ABI's `Py...` that CPython exports to abi3 modules.
_STABLE_PRIVATE = frozenset(
    {
        "_Py_Dealloc",
        "_Py_NoneStruct",
        "_Py_TrueStruct",
        "_Py_FalseStruct",
        "_Py_NotImplementedStruct",
    }
    | {"_Py_EllipsisObject", "_PyArg_ParseTuple_SizeT", "_Py_BuildValue_SizeT", "_Py_RefTotal"}
)


def needed_libraries(library: Path) -> set[str]:
    """The NEEDED entries."""
    text = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))


def run_paths(library: Path) -> list[str]:
    """RPATH and RUNPATH entries."""
    text = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+?)\]", text)


def undefined_symbols(library: Path) -> list[str]:
    """Names that the loader must find elsewhere, with their versions."""
    command = ["nm", "-D", "--undefined-only", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in text.splitlines() if line.strip()]


def _too_new(symbol: str) -> bool:
    match = re.search(r"@(GLIBC|GLIBCXX)_([\d.]+)$", symbol)
    if match is None:
        return False
    version = tuple(int(part) for part in match[2].split("."))
    return version > (MAXIMUM_GLIBC if match[1] == "GLIBC" else MAXIMUM_GLIBCXX)


def faults(library: Path) -> list[str]:
    """Everything about a shared object that must not be in a wheel."""
    found = [f"needs {name}" for name in sorted(needed_libraries(library) - ALLOWED_LIBRARIES)]
    found += [f"has the run path {path}" for path in run_paths(library)]
    for symbol in undefined_symbols(library):
        name = symbol.split("@")[0]
        if _FOREIGN.match(name):
            found.append(f"takes {name} from another library")
        elif name.startswith("_Py") and name not in _STABLE_PRIVATE:
            found.append(f"takes {name}, which is outside the stable ABI")
        elif _too_new(symbol):
            found.append(f"takes {symbol}, newer than manylinux_2_35")
    return found
