"""What only a new process shows: cheap imports, exit codes, the installed CMake package."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, input=text, timeout=300
    )


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, helicore, helicore.sampling_params, helicore.outputs\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'typer', 'tqdm', 'helicore._core'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run("-c", code).stdout.strip() == "[]"


def test_the_command_line_loads_torch_only_when_it_needs_a_model() -> None:
    code = (
        "import sys\nfrom helicore.cli.main import app\n"
        "print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert run("-c", code).stdout.strip() == "[]"


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    import helicore

    for name in helicore.__all__:
        assert getattr(helicore, name) is not None
        assert name in dir(helicore)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = helicore.nonsense  # type: ignore[attr-defined]


def test_the_cmake_package_and_the_headers_are_found() -> None:
    cmake = Path(run("-m", "helicore", "--cmake-dir").stdout.strip())
    assert (cmake / "helicore-config.cmake").is_file()
    include = Path(run("-m", "helicore", "--include-dir").stdout.strip())
    assert (include / "helicore" / "helicore.h").is_file() or (include / "helicore").is_dir()


def test_the_module_is_the_command_line() -> None:
    done = run(
        *("-m", "helicore", "generate", "--model", "tiny", "--prompt", "def f("),
        *("--max-tokens", "8", "--temperature", "0", "--host-gb", "0.1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    assert value["usage"]["completion_tokens"] <= 8
    assert value["outputs"][0]["outputs"][0]["text"]


def test_ctrl_c_ends_generation_with_exit_code_130() -> None:
    line = ["generate", "--prompt", "def", "--max-tokens", "16000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "helicore", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A runner in the background may ignore the signal, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--model", "org/none", "--prompt", "x"), "hf download org/none"),
        (("generate", "--prompt", "x", "--temperature", "nan"), "temperature"),
        (("generate", "--prompt", "x", "--device", "cuda"), "device"),
        (("generate", "--prompt-file", "."), "directory"),
    ],
)
def test_an_error_is_one_line_without_traceback(arguments: tuple[str, ...], message: str) -> None:
    done = run("-m", "helicore", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    shown = run("-m", "helicore", *arguments, "--debug")
    assert "Traceback" in shown.stderr


def test_text_that_the_terminal_cannot_show_is_no_traceback() -> None:
    code = "from helicore.cli.console import print_json\nprint_json({'x': '\\u2615\\ud800'})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
