"""`helicore models`: which models can be loaded now, and which architectures are known."""

from __future__ import annotations

from typing import Any

from helicore.cli import options
from helicore.cli.console import note, print_json, print_table


def models(json: options.Json = False) -> None:
    """Lists bundled models and those of the local Hugging Face cache."""
    from helicore.model_path import bundled_models, cached_models

    rows = [_describe(model) for model in (*bundled_models(), *cached_models())]
    if json:
        print_json({"models": rows})
        return
    columns = ("name", "source", "architecture", "max_model_len", "size_mb", "problem")
    table = [[row.get(column) for column in columns] for row in rows]
    print_table("models on this machine", columns, table)
    note("any checkpoint folder works too: --model FOLDER")


def _describe(model: Any) -> dict[str, Any]:
    from helicore.models.config import ModelConfig

    size = sum(file.stat().st_size for file in model.path.glob("*.safetensors"))
    row: dict[str, Any] = {
        "name": model.name,
        "source": model.source,
        "path": str(model.path),
        "size_mb": round(size / 1e6, 1),
    }
    try:
        config = ModelConfig.from_dir(model.path)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        return {**row, "problem": " ".join(str(error).split())}
    return {
        **row,
        "architecture": config.model_type,
        "max_model_len": config.max_position_embeddings,
        "problem": None,
    }
