"""What is in the wheel, what its binaries need, and what an installed wheel says for itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import binaries
import pytest
from wheels import dependency_folders, make_venv, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert re.fullmatch(r"helicore-[\d.]+-cp311-abi3-linux_x86_64\.whl", wheel.name)


@pytest.mark.parametrize(
    "name",
    [
        "helicore/__init__.py",
        "helicore/py.typed",
        "helicore/_core.abi3.so",
        "helicore/_core/__init__.pyi",
        "helicore/_core/core.pyi",
        "helicore/_core/kv.pyi",
        "helicore/_core/attention.pyi",
        "helicore/lib/libhelicore.a",
        "helicore/lib/libhelicore.so.0",
        "helicore/lib/cmake/helicore/helicore-config.cmake",
        "helicore/lib/cmake/helicore/helicore-config-version.cmake",
        "helicore/include/helicore/helicore.h",
        "helicore/include/helicore/core/tensor_view.h",
        "helicore/assets/tiny/config.json",
        "helicore/assets/tiny/model.safetensors",
        "helicore/assets/tiny/tokenizer.json",
    ],
)
def test_the_wheel_holds(names: list[str], name: str) -> None:
    assert name in names


def test_the_wheel_holds_nothing_else(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"helicore"}
    unwanted = (".cpp", ".cu", ".cuh", ".o", ".pyc", ".log")
    assert [name for name in names if name.endswith(unwanted)] == []
    assert [name for name in names if "/tests/" in name or "CMakeLists" in name] == []


def test_the_stubs_in_the_wheel_are_the_committed_ones(unpacked: Path, root: Path) -> None:
    committed = root / "python" / "helicore" / "_core"
    stubs = sorted(committed.rglob("*.pyi"))
    assert stubs
    for stub in stubs:
        packed = unpacked / "helicore" / "_core" / stub.relative_to(committed)
        assert packed.read_text() == stub.read_text()


def test_the_metadata_pins_no_torch_and_names_the_licence(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    requirements = re.findall(r"^Requires-Dist: (torch.*)$", text, re.MULTILINE)
    assert requirements == ["torch>=2.11"]
    assert "License-Expression: Apache-2.0" in text
    assert (metadata.parent / "licenses" / "LICENSE").is_file()


@pytest.mark.parametrize("name", ["_core.abi3.so", "lib/libhelicore.so.0"])
def test_binaries_need_only_the_c_and_cpp_run_time(unpacked: Path, name: str) -> None:
    assert binaries.faults(unpacked / "helicore" / name) == []


def test_the_allow_list_refuses_a_library_that_links_torch() -> None:
    import torch

    (library,) = Path(torch.__file__).parent.glob("lib/libtorch_python.so")
    found = "\n".join(binaries.faults(library))
    assert "needs libtorch" in found
    assert "from another library" in found


def test_import_without_gpu_and_driver(installed: Path, tmp_path: Path) -> None:
    script = (
        "import helicore, helicore._core as c;"
        "print(helicore.__version__, c.core.cuda_device_count(), helicore.__file__)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = run([installed, "-c", script], cwd=tmp_path, env=environment).stdout.split()
    assert out[1] == "0"
    assert Path(out[2]).is_relative_to(installed.parents[1])


def test_version_is_one_everywhere(installed: Path, wheel: Path, tmp_path: Path) -> None:
    script = (
        "import helicore as h, importlib.metadata as m; print(h.__version__, m.version('helicore'))"
    )
    ours, theirs = run([installed, "-c", script], cwd=tmp_path).stdout.split()
    assert ours == theirs == wheel.name.split("-")[1]


def test_the_command_line_is_installed(installed: Path, tmp_path: Path) -> None:
    text = run([installed.parent / "helicore", "--help"], cwd=tmp_path).stdout
    assert "generate" in text


def test_cmake_dir_leads_to_the_package(installed: Path, tmp_path: Path) -> None:
    printed = run([installed, "-m", "helicore", "--cmake-dir"], cwd=tmp_path).stdout.strip()
    assert list(Path(printed).rglob("helicore-config.cmake"))
    assert Path(printed).is_relative_to(installed.parents[1])


def failing_import(python: Path, folder: Path) -> str:
    result = subprocess.run(
        [python, "-c", "import helicore"], capture_output=True, text=True, check=False, cwd=folder
    )
    assert result.returncode != 0
    return result.stderr


def test_a_missing_torch_is_explained(wheel: Path, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", wheel)
    message = failing_import(python, tmp_path).splitlines()[-1]
    assert message.startswith("ImportError: helicore needs torch >= 2.11")
    assert "pip install" in message


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cpu"])
def test_a_torch_that_is_too_old_is_explained(wheel: Path, tmp_path: Path, version: str) -> None:
    old = tmp_path / "old"
    (old / "torch").mkdir(parents=True)
    (old / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = old / f"torch-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    python = make_venv(tmp_path / "venv", wheel, old, *dependency_folders())
    message = failing_import(python, tmp_path).splitlines()[-1]
    assert f"found torch {version}" in message
    assert "ImportError: helicore needs torch >= 2.11" in message


def source_archive(root: Path, folder: Path) -> Path:
    """The sdist; not run from the tree, whose build/ would hide the tool of that name."""
    command = [sys.executable, "-m", "build", "-n", "--sdist", "-o", folder, root]
    run(command, cwd=folder)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_source_archive_holds_all_that_a_build_reads(root: Path, tmp_path: Path) -> None:
    archive = source_archive(root, tmp_path)
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    for name in ("CMakeLists.txt", "pyproject.toml", "bindings/module.cpp", "LICENSE", "README.md"):
        assert name in names
    for top in ("cpp", "cmake", "bindings", "python"):
        for path in (root / top).rglob("*"):
            relative = path.relative_to(root).as_posix()
            ignored = "__pycache__" in relative or path.suffix in (".so", ".pyc")
            if path.is_file() and not ignored:
                assert relative in names, relative
    assert archive.stat().st_size < 64 * 2**20


def test_an_isolated_build_of_the_source_archive_makes_the_same_wheel(
    root: Path, wheel: Path, tmp_path: Path
) -> None:
    """Fetches its own build tools; nvcc is hidden, so that CUDA=AUTO builds for the CPU."""
    archive = source_archive(root, tmp_path)
    folders = os.environ["PATH"].split(os.pathsep)
    path = [f for f in folders if not (Path(f) / "nvcc").exists()]
    hidden = {"PATH": os.pathsep.join(path), "HELICORE_CUDA": "AUTO"}
    cache = {"CCACHE_BASEDIR": tempfile.gettempdir(), "CCACHE_NOHASHDIR": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, archive]
    run(command, env={**os.environ, **hidden, **cache})
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as ours, zipfile.ZipFile(wheel) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


@pytest.mark.skipif(shutil.which("auditwheel") is None, reason="auditwheel is not installed")
def test_auditwheel_finds_nothing_to_repair(wheel: Path) -> None:
    text = run(["auditwheel", "show", wheel]).stdout
    assert re.search(r"manylinux_2_(2\d|3[0-5])_x86_64", text), text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_a_cuda_build_needs_no_cuda_library_and_imports_without_a_gpu(
    root: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    setting = f"--config-settings=build-dir={root / 'build' / 'wheel-cuda'}"
    environment = {**os.environ, "HELICORE_CUDA": "ON"}
    run([*command, setting, "-w", tmp_path, "."], cwd=root, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    python = make_venv(tmp_path / "venv", wheel, *dependency_folders())
    script = "import helicore._core as c; print(c.__file__, c.core.cuda_compiled())"
    file, compiled = run([python, "-c", script], cwd=tmp_path).stdout.split()
    assert compiled == "True"
    folder = Path(file).parent
    assert binaries.faults(Path(file)) == []
    assert binaries.faults(folder / "lib" / "libhelicore.so.0") == []
