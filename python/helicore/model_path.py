"""Which folder a model name means. Nothing is ever downloaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helicore.checking import describe

_ASSETS = Path(__file__).parent / "assets"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that can be loaded now. source: "bundled" or "hub cache"."""

    name: str
    path: Path
    source: str


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """The checkpoint folder of `model`.

    model: the name of a bundled model ("tiny"), a folder with a config.json, or a hub name
    ("org/name") whose snapshot is in the local Hugging Face cache. A bundled name wins over a
    folder of that name; write "./tiny" for the folder.
    Raises FileNotFoundError, for a hub name with the command that downloads it; ValueError for
    what is not a name.
    """
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"model must be a folder or a name, got {describe(model)}")
    try:
        return _resolve(model, name)
    except (OSError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"model: {describe(name)} cannot be looked up: {error!s:.80}") from error


def _resolve(model: str | os.PathLike[str], name: str) -> Path:
    if isinstance(model, str) and "/" not in name and (_ASSETS / name / "config.json").is_file():
        return _ASSETS / name
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"model: no config.json in the folder {path}")
        return path
    if path.is_file():
        raise ValueError(f"model must be a folder, got the file {path}")
    if _HUB_NAME.fullmatch(name):
        return _find_snapshot(name)
    bundled = ", ".join(m.name for m in bundled_models()) or "none"
    raise FileNotFoundError(
        f"model: there is no folder {name!r}, and it is not a bundled model ({bundled}) "
        "or a hub name (org/name)"
    )


def _find_snapshot(name: str) -> Path:
    # Imported here: only hub names need it.
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    folder = name.split("/")[1]
    raise FileNotFoundError(
        f"model: {name} is not on this machine; download it with "
        f"`hf download {name} --local-dir {folder}` and pass the folder {folder}"
    )


def bundled_models() -> Iterator[LocalModel]:
    """The models that ship with the package."""
    if _ASSETS.is_dir():
        for folder in sorted(_ASSETS.iterdir()):
            if (folder / "config.json").is_file():
                yield LocalModel(folder.name, folder, "bundled")


def cached_models() -> Iterator[LocalModel]:
    """Models in the local Hugging Face cache that have a config.json."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for folder in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        try:
            yield LocalModel(name, _find_snapshot(name), "hub cache")
        except FileNotFoundError:
            continue
