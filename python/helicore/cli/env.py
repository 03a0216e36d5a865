"""`helicore env`: what this installation is and what it runs on."""

from __future__ import annotations

from helicore.cli import options
from helicore.cli.console import print_json, print_table


def env(json: options.Json = False) -> None:
    """Shows versions, CPU, instruction set, GPUs: put it into a bug report."""
    from helicore.bench.environment import collect

    values = collect()
    if json:
        print_json(values)
        return
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            rows.append((name, ", ".join(str(item) for item in value) or None))
        else:
            rows.append((name, value))
    print_table("helicore environment", ("what", "value"), [(k, _text(v)) for k, v in rows])


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None else str(value)
