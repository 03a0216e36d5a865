"""The base of modules that hold packed weights."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class WeightModule(nn.Module):
    """A module whose buffers and submodules are plain attributes as well.

    A module's own lookup of them is a Python call of a third of a microsecond; a decode step makes
    some two hundred. `publish` ends the constructor of a derived class; after that buffers change
    only through `to()` and its kin, or in place.
    """

    def publish(self) -> None:
        self.__dict__.update(self._buffers)
        self.__dict__.update(self._modules)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, buffer in self.named_buffers(recurse=recurse):
            if fn(buffer.new_empty(0)).dtype != buffer.dtype:
                raise ValueError(
                    f"{name} is packed for {buffer.dtype} and cannot change its dtype; load the "
                    "model with the dtype that is wanted"
                )
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.publish()
        return result
