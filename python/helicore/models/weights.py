"""Tensors of a checkpoint folder: safetensors by mmap, checked by name and shape, dequantised.

`Checkpoint` owns the mapped files. A tensor is a view of the file until it is converted or packed,
so loading needs no second copy of the model. Every fault is a `ValueError` that names the tensor
and the file.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from helicore import ops

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BLOCK = 128


class Checkpoint:
    """The tensors of one folder, and which of them have been taken. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Maps the files; FileNotFoundError when there are no safetensors files."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where = self._locate()
        self._taken: set[str] = set()

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False
    ) -> Tensor:
        """The tensor in `dtype`, dequantised if it is stored as FP8.

        Without `copy` it may be a view of the file, to be read only.
        """
        tensor = self._get(name, shape)
        if tensor.dtype == _FP8:
            rows, cols = (self._blocks(name, shape, d) for d in (0, 1))
            scale = self._get(f"{name}_scale_inv", (rows, cols))
            return ops.dequantize_fp8_block(tensor, scale.float(), dtype)
        if tensor.dtype not in _FLOATS:
            raise self._error(name, f"must hold floating point numbers, got {tensor.dtype}")
        return tensor.to(dtype, copy=copy)

    def scalar(self, *names: str) -> float | None:
        """The one number, > 0, of the first of these tensors that is there; None without any."""
        for name in names:
            if name not in self._where:
                continue
            shape = tuple(self._open(self._where[name]).get_slice(name).get_shape())
            value = self._get(name, shape if shape == () else (1,)).item()
            if not 0.0 < value < math.inf:
                raise self._error(name, f"must be a positive number, got {value}")
            return float(value)
        return None

    def leave(self, name: str) -> None:
        """The tensor belongs to the model but is not wanted here."""
        self._taken.update((name, f"{name}_scale_inv"))

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """ValueError when tensors were left that `ignored` does not know."""
        left = sorted(n for n in self._where if n not in self._taken and not ignored(n))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise self._error(left[0], f"is unexpected for this config.json{more}")

    def _blocks(self, name: str, shape: tuple[int, ...], dim: int) -> int:
        if len(shape) != 2:
            raise self._error(name, "must be a matrix to be stored as FP8 blocks")
        return -(-shape[dim] // _BLOCK)

    def _get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._where:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        file = self._open(self._where[name])
        try:
            found = tuple(file.get_slice(name).get_shape())
            if found != shape:
                raise self._error(name, f"must have shape {list(shape)}, got {list(found)}")
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, RuntimeError) as e:
            raise self._error(name, f"cannot be read: {e}") from None
        self._taken.add(name)
        return tensor

    def _error(self, name: str, what: str) -> ValueError:
        file = self.folder / self._where.get(name, SINGLE_FILE)
        return ValueError(f"{file}: tensor {name} {what}")

    def _open(self, file: str) -> Any:
        """The mapped file, opened at its first use."""
        if file not in self._files:
            path = self.folder / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise FileNotFoundError(f"{path} is named in {INDEX_FILE} but missing") from None
            except (SafetensorError, OSError) as e:
                raise ValueError(f"{path} is truncated or not a safetensors file: {e}") from None
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        """Name of each tensor -> file that holds it."""
        if (self.folder / SINGLE_FILE).exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        index = self.folder / INDEX_FILE
        if not index.exists():
            raise FileNotFoundError(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (weights of other "
                "formats are not read)"
            )
        where = _read_index(index)
        present = {file: set(self._open(file).keys()) for file in sorted(set(where.values()))}
        for name, file in where.items():
            if name not in present[file]:
                raise ValueError(f"{self.folder / file}: tensor {name} of {INDEX_FILE} is missing")
        return where


class WeightReader:
    """A checkpoint seen from one module: names below a prefix, one computing dtype, one device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        prefix: str = "",
        device: torch.device | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self._prefix = prefix

    def at(self, name: str) -> "WeightReader":
        return WeightReader(self._checkpoint, self.dtype, f"{self._prefix}{name}.", self.device)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A view of the file or a converted copy, to be read only."""
        return self._checkpoint.take(self._prefix + name, shape, dtype or self.dtype).to(
            self.device
        )

    def own(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy in memory, aligned and independent of the file."""
        dtype = dtype or self.dtype
        in_host_memory = self.device.type == "cpu"
        tensor = self._checkpoint.take(self._prefix + name, shape, dtype, copy=in_host_memory)
        return tensor.to(self.device)

    def leave(self, *names: str) -> None:
        """These tensors belong to the model but are not wanted here."""
        for name in names:
            self._checkpoint.leave(self._prefix + name)

    def scalar(self, *names: str) -> float | None:
        """The number in the first of these tensors that is there; None without any."""
        return self._checkpoint.scalar(*(self._prefix + name for name in names))

    def own_if(self, present: bool, name: str, *shape: int) -> Tensor | None:
        return self.own(name, *shape) if present else None


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must map names of tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: weight_map[{name!r}] must be a file name, got {file!r}")
    return weight_map
