"""Everything that `make test`, `make lint` and `make sanitize` run, as lists of steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

from environment import Environment
from steps import ROOT, Step, digest, sources

LINT_SCRIPTS = ("layers", "sizes", "mirror", "words", "docs")
CPP_FOLDERS = ("cpp", "bindings", "tests/cpp", "examples/cpp", "benchmarks/cpp")
CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
CPP_INPUTS = ("CMakeLists.txt", "CMakePresets.json", "cmake", "cpp", "tests/cpp", "benchmarks/cpp")
_TEST_HINT = "run one test again: .venv/bin/python -m pytest tests/python/<file> -k <name>"


def lint(environment: Environment) -> list[Step]:
    """Format, types, lint scripts and stubs."""
    python = environment.python
    everything = digest([str(environment.folder), *sources(".")])
    cpp = [str(f.relative_to(ROOT)) for f in sources(*CPP_FOLDERS) if f.name.endswith(CPP_SUFFIXES)]
    dev = [str(f) for f in sources("tools/dev") if f.suffix == ".py"]
    scripts = [str(f) for f in sources("tools/lint") if f.suffix == ".py"]

    def step(title: str, commands: list[list[str]], hint: str) -> Step:
        return Step(title, commands, hint, key=everything, env=environment.variables)

    return [
        step(
            "Lint: layers, sizes, layout, words, documents",
            [[python, f"tools/lint/check_{name}.py"] for name in LINT_SCRIPTS],
            "each line above names a file and what is wrong with it",
        ),
        step(
            "Lint: Python style",
            [["ruff", "check", "."], ["ruff", "format", "--check", "."]],
            "run .venv/bin/ruff check --fix . && .venv/bin/ruff format .",
        ),
        step(
            "Lint: C++ format",
            [["clang-format", "--dry-run", "-Werror", *cpp]],
            "run .venv/bin/clang-format -i on the files named above",
        ),
        step(
            "Types: mypy strict",
            [
                ["mypy"],
                ["mypy", "--strict", "--config-file=", *dev],
                ["mypy", "--strict", "--config-file=", "tools/stubs.py", "tools/gpu_check.py"],
                ["mypy", "--strict", "--config-file=", *scripts],
            ],
            "fix the types, or the stubs with `make stubs`",
        ),
        step(
            "Stubs of the native module",
            [[python, "tools/stubs.py", "--check"]],
            "the bindings have changed: run `make stubs` and commit python/helicore/_core",
        ),
    ]


def cpp_tests(environment: Environment, preset: str, title: str) -> Step:
    """Configure, build and run the C++ tests of one CMake preset."""
    jobs = str(os.cpu_count() or 2)
    return Step(
        title=title,
        commands=[
            ["cmake", "--preset", preset],
            ["cmake", "--build", "--preset", preset, "-j", jobs],
            ["ctest", "--preset", preset, "-j", jobs],
        ],
        hint=f"run one test again: ctest --preset {preset} -R <name> --output-on-failure",
        key=digest([str(environment.folder), preset, *sources(*CPP_INPUTS)]),
        env=environment.variables,
        is_test=True,
    )


def python_tests(environment: Environment) -> Step:
    """Every Python test except the packaging ones; two processes, a file stays in one of them."""
    return Step(
        title="Python tests",
        commands=[
            [
                *(environment.python, "-m", "pytest", "-n", "2", "--dist", "loadfile"),
                *("--ignore=tests/python/packaging", "tests/python"),
            ]
        ],
        hint=_TEST_HINT,
        key=digest([str(environment.folder), *sources(".")]),
        echo=True,
        env={**environment.variables, "HF_HUB_OFFLINE": "1"},
        is_test=True,
    )


def packaging_tests(environment: Environment) -> Step:
    """The wheel, what is in it, consumers in C++ and Python, stubs, lint scripts."""
    return Step(
        title="Packaging tests",
        commands=[[environment.python, "-m", "pytest", "tests/python/packaging"]],
        hint=_TEST_HINT,
        key=digest([str(environment.folder), *sources(".")]),
        echo=True,
        env=environment.variables,
        is_test=True,
    )


def cuda_compile(environment: Environment) -> list[Step]:
    """Compiles the CUDA sources for sm_90a where nvcc is there; they run on a GPU machine only."""
    if shutil.which("nvcc") is None:
        print("==> CUDA compile: no nvcc on this machine, left out", flush=True)
        return []
    preset = "cuda-release"
    build = ["cmake", "--build", "--preset", preset, "-j", str(os.cpu_count() or 2)]
    return [
        Step(
            title="CUDA compile for sm_90a",
            commands=[
                ["cmake", "--preset", preset],
                [*build, "--target", "helicore_static", "helicore_shared"],
            ],
            hint="read the first error in the log; HELICORE_CUDA=OFF builds without CUDA",
            key=digest([str(environment.folder), preset, *sources(*CPP_INPUTS)]),
            env=environment.variables,
        )
    ]


def sanitizers(environment: Environment) -> list[Step]:
    """The C++ tests under ASan and UBSan with invariant checks, and under TSan."""
    return [
        cpp_tests(environment, "cpu-debug", "C++ tests with ASan, UBSan and invariant checks"),
        cpp_tests(environment, "cpu-tsan", "C++ tests with TSan"),
    ]


def all_tests(environment: Environment) -> Iterable[Step]:
    """What `make test` runs, cheapest first."""
    yield from lint(environment)
    yield cpp_tests(environment, "cpu-release", "C++ tests")
    yield python_tests(environment)
    yield from cuda_compile(environment)
    yield packaging_tests(environment)
    yield from sanitizers(environment)
