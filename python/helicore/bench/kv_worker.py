"""The process in which one side of `helicore bench kv` is measured.

    python -m helicore.bench.kv_worker MODULE [PATH ...]

MODULE is the side's adapter (ROWS, version); each PATH goes in front of sys.path before it is
imported. Requests come as JSON lines on standard input, answers go to standard output:

    {"row": NAME, "work": {...}}   prepares a row, giving up the one before -> {"ready": true}
    {"round": true}                runs it once -> {"samples": [seconds or bytes, ...]}

Before the first request it says {"version": ...}; a failure is {"error": "..."}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from helicore.bench.kv_workload import Round, Workload, settle


def main(arguments: list[str]) -> int:
    """Serves requests until standard input ends."""
    module, *paths = arguments
    sys.path[:0] = paths
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a package prints must not look like an answer
    try:
        side = importlib.import_module(module)
        _say(answers, {"version": side.version()})
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    _serve(side.ROWS, answers)
    return 0


def _serve(rows: dict[str, Callable[[Workload], Round]], answers: TextIO) -> None:
    prepared: Round | None = None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            if "row" in request:
                prepared = None
                gc.unfreeze()
                gc.collect()
                if request["row"] in rows:
                    prepared = rows[request["row"]](Workload.from_dict(request["work"]))
                    settle()
                _say(answers, {"ready": prepared is not None})
            elif prepared is None:
                _say(answers, {"error": "no row is prepared"})
            else:
                _say(answers, {"samples": prepared()})
        except Exception as error:
            prepared = None
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
