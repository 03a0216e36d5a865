"""Which folder a name means; hub names are looked up, never downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from helicore.model_path import bundled_models, cached_models, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A cache with one snapshot of org/known."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--known" / "snapshots" / "abc123"
    shutil.copytree(folder, snapshot)
    refs = cache / "models--org--known" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc123")
    (cache / "models--org--empty" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_the_bundled_model_is_found_by_name() -> None:
    path = resolve_model("tiny")
    assert (path / "config.json").is_file()
    assert "tiny" in [model.name for model in bundled_models()]


def test_a_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model") == Path("model")
    assert resolve_model("./model") == Path("model")


def test_a_snapshot_in_the_cache_is_found(hub_cache: Path) -> None:
    assert resolve_model("org/known") == hub_cache
    assert [model.name for model in cached_models()] == ["org/known"]


@pytest.mark.parametrize("name", ["org/unknown", "org/empty", "deepseek-ai/DeepSeek-V3.1"])
def test_a_hub_name_that_is_not_here_is_refused_with_the_download_command(
    hub_cache: Path, name: str
) -> None:
    folder = name.split("/")[1]
    with pytest.raises(FileNotFoundError, match=f"hf download {name} --local-dir {folder}"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("", ValueError, "model must be"),
        (None, ValueError, "model must be"),
        (7, ValueError, "model must be"),
        ("no_such_name", FileNotFoundError, r"bundled model \(.*tiny"),
        ("/no/such/folder", FileNotFoundError, "model: there is no folder"),
        ("a/b/c", FileNotFoundError, "model: there is no folder"),
        ("../tiny", FileNotFoundError, "model"),
    ],
)
def test_what_is_no_model_is_refused(
    hub_cache: Path, name: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_model(name)


def test_a_file_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model must be a folder, got the file"):
        resolve_model(folder / "config.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_model(empty)
