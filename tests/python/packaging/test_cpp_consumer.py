"""A C++ project without Python finds the unpacked wheel, builds against it and runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from wheels import run

pytestmark = pytest.mark.slow

SYSTEM_CMAKE = Path("/usr/bin/cmake")


def configure(
    cmake: str | Path, source: Path, build: Path, prefix: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    command = [cmake, "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    arguments = [*command, f"-DCMAKE_PREFIX_PATH={prefix}", *options]
    return subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, check=False, cwd=build.parent
    )


def build_and_run(cmake: str | Path, source: Path, build: Path, prefix: Path, *options: str) -> str:
    result = configure(cmake, source, build, prefix, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    run([cmake, "--build", build])
    return run([build / "decode_step"], cwd=build).stdout


@pytest.mark.parametrize("kind", ["static", "shared"])
def test_the_example_builds_and_runs(root: Path, unpacked: Path, tmp_path: Path, kind: str) -> None:
    source = shutil.copytree(root / "examples" / "cpp", tmp_path / "example")
    shared = "ON" if kind == "shared" else "OFF"
    prefix = unpacked / "helicore"
    option = f"-DHELICORE_USE_SHARED={shared}"
    text = build_and_run("cmake", source, tmp_path / "build", prefix, option)
    assert "the result agrees with the plain loop" in text
    assert re.search(r"tokens found in the cache: [1-9]", text)
    needed = run(["readelf", "-d", tmp_path / "build" / "decode_step"]).stdout
    assert ("libhelicore.so.0" in needed) == (kind == "shared")
    assert "libpython" not in needed


@pytest.mark.skipif(not SYSTEM_CMAKE.exists(), reason="no other CMake on this machine")
def test_the_example_builds_with_the_cmake_of_the_system(
    root: Path, unpacked: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(root / "examples" / "cpp", tmp_path / "example")
    prefix = unpacked / "helicore"
    text = build_and_run(SYSTEM_CMAKE, source, tmp_path / "build", prefix)
    assert "the result agrees with the plain loop" in text


def test_python_m_helicore_names_a_prefix_that_cmake_finds(
    root: Path, installed: Path, tmp_path: Path
) -> None:
    prefix = Path(run([installed, "-m", "helicore", "--cmake-dir"], cwd=tmp_path).stdout.strip())
    result = configure("cmake", root / "examples" / "cpp", tmp_path / "build", prefix)
    assert result.returncode == 0, result.stdout + result.stderr


CONSUMER = """\
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(helicore {request} CONFIG REQUIRED)
"""


@pytest.mark.parametrize(
    "request_line", ["", "0.1", "0.1 EXACT", "0.1.0", "COMPONENTS static shared"]
)
def test_find_package_accepts(unpacked: Path, tmp_path: Path, request_line: str) -> None:
    version = request_line.replace("0.1 EXACT", "0.1.0 EXACT")
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER.format(request=version))
    result = configure("cmake", tmp_path, tmp_path / "build", unpacked / "helicore")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("request_line", ["0.2", "1.0", "0.1.99", "COMPONENTS cpu_only"])
def test_find_package_refuses(unpacked: Path, tmp_path: Path, request_line: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER.format(request=request_line))
    result = configure("cmake", tmp_path, tmp_path / "build", unpacked / "helicore")
    assert result.returncode != 0


def test_the_package_files_name_no_folder_of_the_build(unpacked: Path, root: Path) -> None:
    files = sorted((unpacked / "helicore" / "lib" / "cmake").rglob("*.cmake"))
    assert len(files) >= 3
    for file in files:
        text = file.read_text()
        assert str(root) not in text, file.name
        assert not re.search(r'"/(?!\.\.)[a-z]+/', text.replace('"/usr/lib', "")), file.name


def test_each_public_header_compiles_by_itself(unpacked: Path, tmp_path: Path) -> None:
    include = unpacked / "helicore" / "include"
    headers = sorted(p.relative_to(include).as_posix() for p in include.rglob("*.h"))
    assert "helicore/helicore.h" in headers
    sources = []
    for number, header in enumerate(headers):
        source = tmp_path / f"header_{number}.cpp"
        source.write_text(f'#include "{header}"\n#include "{header}"\n')
        sources.append(source)
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    run(["g++", *flags, *sources])
