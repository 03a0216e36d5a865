"""`helicore env`: what this installation is and what it runs on."""

from __future__ import annotations

from helicore.cli import options
from helicore.cli.console import print_json, print_table

_WIDTHS = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of DeepSeek-V2, V3, R1 and Kimi-K2."""
_NUM_LAYERS = 61
"""Of DeepSeek-V3, R1 and Kimi-K2."""


def env(json: options.Json = False) -> None:
    """Shows versions, CPU, instruction set, GPUs: put it into a bug report."""
    from helicore.bench.environment import collect

    values = collect()
    row_bytes = cache_row_bytes()
    if json:
        values["kv_cache_row_bytes"] = row_bytes
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
    print_table(
        f"KV cache of rows {_WIDTHS[0]} + {_WIDTHS[1]} wide (DeepSeek-V3)",
        (
            "dtype",
            "bytes a token and layer",
            f"bytes a token, {_NUM_LAYERS} layers",
            "tokens a GiB",
        ),
        [
            (name, size, size * _NUM_LAYERS, (1 << 30) // (size * _NUM_LAYERS))
            for name, size in row_bytes.items()
        ],
    )


def cache_row_bytes() -> dict[str, int]:
    """Bytes of a token's row of one layer, for every dtype of the KV cache."""
    from helicore import ops
    from helicore.config import QUANTISED_DTYPES

    dtypes = ("float32", "bfloat16", *QUANTISED_DTYPES)
    return {dtype: ops.cache_row_bytes(dtype, *_WIDTHS) for dtype in dtypes}


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None else str(value)
