"""Brings the managers that `helicore bench kv --peers DIR` measures beside ours, from PyPI.

    python benchmarks/peers/install.py [vllm] [sglang] --peers .venv-peers

Nothing goes into the running environment: DIR/vllm and DIR/sglang hold the Python files of the
published wheels (and the native tree of the second), without their dependencies and GPU libraries;
DIR/site holds what their cache managers import, pinned in site.txt. torch, numpy, transformers and
tokenizers are those of the running environment. Run it with the interpreter that measures.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Wheel:
    """A published wheel; native: folders whose libraries are kept."""

    version: str
    native: tuple[str, ...] = ()


WHEELS = {
    "vllm": Wheel("0.33.0"),
    "sglang": Wheel("0.5.23", ("sglang/srt/mem_cache/rust_tree_core/",)),
}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def unpack(wheel: Path, folder: Path, native: tuple[str, ...]) -> None:
    """Everything but shared libraries, which are for GPUs, and scripts."""
    if folder.exists():
        shutil.rmtree(folder)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".so" not in Path(name).suffixes or name.startswith(native):
                archive.extract(name, folder)


def install(name: str, folder: Path) -> None:
    wheel = WHEELS[name]
    with tempfile.TemporaryDirectory() as downloads:
        only = ("--no-deps", "--only-binary", ":all:")
        pip("download", "-q", *only, "-d", downloads, f"{name}=={wheel.version}")
        (file,) = Path(downloads).iterdir()
        unpack(file, folder / name, wheel.native)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(WHEELS)}")
    parser.add_argument("--peers", type=Path, required=True, help="folder to fill")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(WHEELS))
    if unknown:
        parser.error(f"there is no peer {unknown[0]!r}; there are {', '.join(WHEELS)}")
    options.peers.mkdir(parents=True, exist_ok=True)
    for name in options.names or WHEELS:
        print(f"==> {name} {WHEELS[name].version}", flush=True)
        install(name, options.peers)
    print("==> what they import", flush=True)
    target = ("--target", str(options.peers / "site"), "--upgrade")
    only = ("--no-deps", "--only-binary", ":all:")
    pip("install", "-q", *only, *target, "-r", str(HERE / "site.txt"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
