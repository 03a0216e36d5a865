"""Runs benchmarks and keeps their results: a front end over `helicore bench` and routines here.

    python benchmarks/run.py                      # everything that this machine can run
    python benchmarks/run.py throughput kv        # some of it
    python benchmarks/run.py --out DIR --quick

Each benchmark is a process of its own, so that none sees another's caches or threads. Results go to
benchmarks/results as JSON with commit and hardware.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers"  # what benchmarks/peers/install.py filled

COMMANDS: dict[str, list[str]] = {
    "throughput": ["throughput", "--model", "tiny", "--vs", "transformers", "--refcheck"],
    "latency": ["latency", "--batch-size", "1"],
    "latency_b64": ["latency", "--batch-size", "64", "--input-len", "64", "--output-len", "64"],
    "kv": ["kv"],
    "mla": ["mla"],
}
TAKES_ROUNDS = frozenset({"throughput", "latency", "latency_b64", "kv", "mla"})
ROUTINES: dict[str, str] = {
    "executor": "routines/executor.py",
    "disk_prefix": "routines/disk_prefix.py",
    "sharing": "routines/sharing.py",
}


def command_of(name: str, out: Path, quick: bool) -> list[str]:
    if name in ROUTINES:
        return [sys.executable, str(HERE / ROUTINES[name]), "--json"]
    rounds = ["--rounds", "1"] if quick and name in TAKES_ROUNDS else []
    if name == "kv" and PEERS.is_dir():
        rounds += ["--peers", str(PEERS)]
    bench = ["-m", "helicore", "bench", *COMMANDS[name], *rounds]
    return [sys.executable, *bench, "--json", "--out", str(out)]


def show(line: str) -> None:
    for row in json.loads(line)["results"]:
        if row["value"] is None:
            print(f"  {row['name']:<32} {row['status']}")
            continue
        ratio = "" if row["ratio"] is None else f"  {row['ratio']:.2f}x of {row['peer']}"
        print(f"  {row['name']:<32} {row['value']:>12.4g} {row['unit']}{ratio}")


def run(name: str, out: Path, quick: bool) -> bool:
    print(f"==> {name}", flush=True)
    done = subprocess.run(command_of(name, out, quick), stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if lines:
        show(lines[-1])
        if name in ROUTINES:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(lines[-1] + "\n", encoding="utf-8")
    if done.returncode != 0:
        print(f"!!! {name} failed with exit status {done.returncode}")
    return done.returncode == 0


def main() -> int:
    names = [*COMMANDS, *ROUTINES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one round each")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    done = [run(name, options.out, options.quick) for name in options.names or names]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
