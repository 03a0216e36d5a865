"""The commands behind the Makefile: `python3.11 tools/dev demo` does what `make demo` does."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

import checks
import system
from environment import Environment
from steps import ROOT, Runner, StepFailed

DEMO_PROMPT = "def read_lines(path):\n"


def setup(runner: Runner, *, tests: bool) -> Environment:
    """Everything installed and built, ready to run."""
    system.ensure(runner, tests=tests)
    environment = Environment(runner)
    environment.ensure(tests=tests)
    return environment


def demo(runner: Runner) -> None:
    """Text from the bundled model, with tokens per second."""
    environment = setup(runner, tests=False)
    print("==> Text from the bundled model", flush=True)
    command = [
        *(str(environment.bin / "helicore"), "generate", "--model", "tiny"),
        *("--prompt", DEMO_PROMPT, "--max-tokens", "128", "--seed", "1"),
    ]
    status = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment.variables}
    ).returncode
    if status != 0:
        print(f"\n!!! failed: the demo (exit status {status})")
        print("    what to do: read the message above; `make test` says which part is broken")
        raise StepFailed("demo")
    print("==> Next: `make test`, or .venv/bin/helicore generate --help", flush=True)


def test(runner: Runner) -> None:
    """All tests."""
    environment = setup(runner, tests=True)
    runner.run_all(checks.all_tests(environment))


def lint(runner: Runner) -> None:
    """Format, types, lint scripts and stubs."""
    environment = setup(runner, tests=True)
    runner.run_all(checks.lint(environment))


def sanitize(runner: Runner) -> None:
    """The C++ tests under the sanitizers."""
    environment = setup(runner, tests=True)
    runner.run_all(checks.sanitizers(environment))


def stubs(runner: Runner) -> None:
    """Writes the stubs of the native module anew."""
    environment = setup(runner, tests=True)
    subprocess.run([environment.python, "tools/stubs.py"], cwd=ROOT, check=True)


def wheel(runner: Runner) -> None:
    """A wheel in dist/."""
    environment = setup(runner, tests=False)
    command = [environment.python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    environ = {**os.environ, **environment.variables}
    subprocess.run([*command, "-w", "dist", "."], cwd=ROOT, check=True, env=environ)


def clean(runner: Runner) -> None:
    """Removes build/ and dist/; .venv stays."""
    del runner
    for name in ("build", "dist"):
        shutil.rmtree(ROOT / name, ignore_errors=True)


COMMANDS = {
    "demo": demo,
    "test": test,
    "setup": lambda runner: setup(runner, tests=True) and None,
    "lint": lint,
    "sanitize": sanitize,
    "stubs": stubs,
    "wheel": wheel,
    "clean": clean,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/dev", description=__doc__)
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--force", action="store_true", help="run steps that are up to date too")
    args = parser.parse_args(argv)
    force = args.force or os.environ.get("FORCE", "") not in ("", "0")
    force = force or os.environ.get("CI", "") not in ("", "0", "false")
    runner = Runner(force=force)
    try:
        COMMANDS[args.command](runner)
    except StepFailed:
        return 1
    except KeyboardInterrupt:
        print("\n!!! interrupted; run the same command again, finished steps are remembered")
        return 130
    print(f"==> {args.command}: all done in {runner.total():.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
