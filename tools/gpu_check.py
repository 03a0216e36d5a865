"""Builds and runs the GPU tests and benchmarks on a CUDA machine without network.

The machine must have python3 >= 3.11 with torch, numpy and pytest, CMake >= 3.28, ninja and nvcc.
What else is needed comes from the folder `.gpu`, which --prepare fills on a machine with a network:
wheels of nanobind and its backend, a wheel of helicore with CUDA kernels, GoogleTest sources.
Without them the native module is built with what the machine has, and C++ tests are left out.

Results go to DIR/gpu_check.json: one entry per step with its status, seconds and closing line, and
the machine; logs of each step lie beside it. The exit status is 1 if any step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / ".gpu"
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"  # an importable copy of the package with its native module
NANOBIND = ("nanobind==3.1.0", "nanobind-backend==1.0.0")
ENGINE = ("safetensors==0.8.0", "tokenizers==0.23.3")  # what the engine imports besides torch
GOOGLETEST = Path("/usr/src/googletest")
CUDA_BENCHMARKS = ("mla", "allreduce")


@dataclass
class Outcome:
    """How one step went: passed, failed or skipped, and why."""

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""
    results: list[object] = field(default_factory=list)


class Check:
    """Runs the steps and gathers their outcomes; a failed step does not stop the others."""

    def __init__(self, out: Path, architecture: str) -> None:
        self._out = out
        self._architecture = architecture
        self.outcomes: list[Outcome] = []
        out.mkdir(parents=True, exist_ok=True)

    def step(self, name: str, *commands: list[str], **variables: str) -> bool:
        """Runs commands into one log; true when all succeeded."""
        began = time.monotonic()
        print(f"==> {name}", flush=True)
        log = self._out / f"{name.replace(' ', '_')}.log"
        status = 0
        with log.open("wb") as file:
            for command in commands:
                file.write(f"$ {' '.join(command)}\n".encode())
                file.flush()
                environment = {**os.environ, **variables}
                status = subprocess.run(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment
                ).returncode
                if status != 0:
                    break
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome = Outcome(name, "passed" if status == 0 else "failed", time.monotonic() - began)
        outcome.detail = lines[-1] if lines else ""
        outcome.results = _json_lines(lines)
        self.outcomes.append(outcome)
        if status != 0:
            print("\n".join(f"    {line}" for line in lines[-25:]))
        print(f"    {outcome.status} in {outcome.seconds:.1f} s: {outcome.detail}", flush=True)
        return status == 0

    def skip(self, name: str, reason: str) -> None:
        """Records a step that cannot run here."""
        print(f"==> {name}: left out, {reason}", flush=True)
        self.outcomes.append(Outcome(name, "skipped", detail=reason))

    def configure(self, build: Path, *options: str) -> list[str]:
        """The CMake command line for a CUDA build of the given folder."""
        architecture = f"-DCMAKE_CUDA_ARCHITECTURES={self._architecture}"
        return ["cmake", "--preset", "cuda-release", "-B", str(build), architecture, *options]

    def write(self) -> None:
        """DIR/gpu_check.json."""
        report = {"machine": machine(), "steps": [asdict(outcome) for outcome in self.outcomes]}
        (self._out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report["machine"]))


def _json_lines(lines: list[str]) -> list[object]:
    """The lines that are JSON objects: results that benchmarks print."""
    found = []
    for line in lines:
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict[str, str]:
    """GPU, driver, compiler, torch and commit."""
    gpu = _output(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    )
    nvcc = _output("nvcc", "--version").splitlines()
    return {
        "gpu": gpu or "none",
        "nvcc": nvcc[-1] if nvcc else "none",
        "torch": _output(sys.executable, "-c", "import torch; print(torch.__version__)"),
        "python": sys.version.split()[0],
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
    }


def prepare() -> None:
    """Fills `.gpu` on a machine with a network."""
    shutil.rmtree(PACKED, ignore_errors=True)
    wheels = PACKED / "wheels"
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    options = ["--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    for version in ("3.11", "3.12", "3.13"):
        command = [
            *pip,
            "download",
            "-q",
            "--python-version",
            version,
            *options,
            *NANOBIND,
            *ENGINE,
        ]
        subprocess.run(command, check=True)
    if shutil.which("nvcc"):
        command = [*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(wheels), "."]
        environment = {**os.environ, "HELICORE_CUDA": "ON"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
    if GOOGLETEST.is_dir():
        shutil.copytree(GOOGLETEST, PACKED / "googletest")
    print(f"packed {PACKED}: {sum(f.stat().st_size for f in PACKED.rglob('*')) >> 20} MiB")


def unpack(pattern: str) -> bool:
    """Unpacks the wheels of a name that fit this Python into the import folder."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(PACKED.glob(f"wheels/{pattern}-*.whl")):
        if any(part in wheel.name for part in (f"-{tag}-", "-py3-", "-abi3-")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(SITE)
            return True
    return False


def python_package(check: Check) -> bool:
    """An importable helicore in SITE: from the packed wheel, else built here."""
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    for name in ("nanobind_backend", "nanobind", "safetensors", "tokenizers"):
        unpack(name)
    if unpack("helicore"):  # its Python files may be older than the tree's
        shutil.copytree(ROOT / "python" / "helicore", SITE / "helicore", dirs_exist_ok=True)
        imports = [
            sys.executable,
            "-c",
            "import helicore._core as c; print(c.core.cuda_device_count())",
        ]
        return check.step("import packed module", imports, PYTHONPATH=str(SITE))
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        check.skip("build native module", "no packed wheel (--prepare) and no Python.h")
        return False
    folder = BUILD / "module"
    options = [
        "-DHELICORE_PYTHON=ON",
        "-DHELICORE_TESTS=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    built = check.step(
        "build native module",
        check.configure(folder, *options),
        ["cmake", "--build", str(folder), "--target", "_core"],
        PYTHONPATH=str(SITE),
    )
    if built:
        shutil.copytree(ROOT / "python" / "helicore", SITE / "helicore", dirs_exist_ok=True)
        for module in (folder / "bindings").glob("_core*.so"):
            shutil.copy(module, SITE / "helicore")
    return built


def cpp_tests(check: Check) -> None:
    """The C++ tests in a CUDA build, where GoogleTest can be had."""
    folder = BUILD / "cpp"
    options = []
    if (PACKED / "googletest").is_dir():
        options = [f"-DHELICORE_GTEST_SOURCE={PACKED / 'googletest'}"]
    elif not Path("/usr/include/gtest/gtest.h").is_file():
        check.skip("C++ tests", "no GoogleTest here and none packed (--prepare)")
        return
    jobs = str(os.cpu_count() or 2)
    ctest = ["ctest", "--test-dir", str(folder), "--timeout", "90", "--output-on-failure"]
    check.step(
        "C++ tests",
        check.configure(folder, *options),
        ["cmake", "--build", str(folder), "-j", jobs],
        [*ctest, "-R", "CudaDevice"],  # one at a time: one of them takes all memory of the GPU
        [*ctest, "-E", "CudaDevice", "-j", jobs],
    )


def benchmarks(check: Check) -> None:
    """The benchmarks that have a CUDA side; each prints its results as a line of JSON."""
    for name in CUDA_BENCHMARKS:
        command = [sys.executable, "-m", "helicore", "bench", name, "--device", "cuda", "--json"]
        check.step(f"bench {name}", command, PYTHONPATH=str(SITE))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--prepare", action="store_true", help="fill .gpu, with a network")
    parser.add_argument("--architecture", default="90a-real", help="CMAKE_CUDA_ARCHITECTURES")
    parser.add_argument("--without", nargs="*", default=[], choices=["cpp", "python", "bench"])
    args = parser.parse_args(argv)
    if args.prepare:
        prepare()
        return 0
    if args.out is None:
        parser.error("--out DIR is needed")
    if shutil.which("nvcc") is None:
        print("!!! nvcc is not on PATH: this is no CUDA machine; `make test` runs the CPU twins")
        return 1
    check = Check(args.out.resolve(), args.architecture)
    ready = python_package(check)
    if "python" not in args.without and ready:
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-rs",
            "-p",
            "no:cacheprovider",
            "-m",
            "cuda",
            "tests/python/cuda",
            "tests/python/kv",
        ]
        check.step("GPU tests", pytest, PYTHONPATH=str(SITE))
    if "bench" not in args.without and ready:
        benchmarks(check)
    if "cpp" not in args.without:
        cpp_tests(check)
    check.write()
    return 1 if any(outcome.status == "failed" for outcome in check.outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
