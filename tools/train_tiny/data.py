"""Token files, and batches drawn from them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenFile:
    """Documents of one file written by `prepare.py`."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.tokens: NDArray[np.uint16] = arrays["tokens"]
            self.starts: NDArray[np.int64] = arrays["starts"]
            self.groups: NDArray[np.int32] = arrays["groups"]

    def order(self, rng: np.random.Generator, related: bool) -> NDArray[np.int64]:
        """Documents in random order; `related` keeps those of one group next to each other."""
        shuffled = rng.permutation(len(self.groups))
        if not related:
            return shuffled
        key = rng.permutation(int(self.groups.max()) + 1)[self.groups[shuffled]]
        return shuffled[np.argsort(key, kind="stable")]

    def stream(self, order: NDArray[np.int64]) -> NDArray[np.uint16]:
        return np.concatenate([self.tokens[self.starts[i] : self.starts[i + 1]] for i in order])


class Batches:
    """Endless windows of `length` tokens and their successors, one variant of the text an epoch."""

    def __init__(
        self, files: list[TokenFile], batch: int, length: int, related: bool, device: str, seed: int
    ) -> None:
        self._files, self._batch, self._length = files, batch, length
        self._related, self._device, self._seed = related, device, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        within = torch.arange(self._length + 1, device=self._device)
        while True:
            rng = np.random.default_rng((self._seed, epoch))
            file = self._files[(self._seed + epoch) % len(self._files)]
            tokens = file.stream(file.order(rng, self._related))
            shift = int(rng.integers(self._length))
            windows = (len(tokens) - shift - 1) // self._length
            at = torch.from_numpy(shift + rng.permutation(windows) * self._length)
            data = torch.from_numpy(tokens.astype(np.int32)).to(self._device)
            at = at.to(self._device)
            for i in range(0, windows - self._batch + 1, self._batch):
                rows = data[at[i : i + self._batch, None] + within].long()
                yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            epoch += 1
