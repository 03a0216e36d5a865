"""Constants, enums and errors of the published interface."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from helicore import _core, kv

NDEBUG = os.environ.get("TLLM_DEBUG_MODE") != "1"  # a snapshot, as of the import
DEFAULT_BEAM_INDEX = kv.DEFAULT_BEAM_INDEX
BAD_PAGE_INDEX = kv.BAD_PAGE_INDEX
GPU_LEVEL = kv.GPU_LEVEL
CACHE_LEVEL1 = 1
PRIORITY_MIN = kv.PRIORITY_MIN
PRIORITY_MAX = kv.PRIORITY_MAX
PRIORITY_DEFAULT = kv.PRIORITY_DEFAULT

CacheTier = kv.CacheTier
CacheDomain = kv.CacheDomain
CacheStatus = kv.CacheStatus
CommitState = kv.CommitState
LayerType = kv.LayerType
PageIndexMode = kv.PageIndexMode
PageStatus = kv.PageStatus
AttentionReusePolicy = kv.AttentionReusePolicy

# Plain ints, as in the published module.
LayerId = int
LayerGroupId = int
LifeCycleId = int
PoolGroupIndex = int
CacheLevel = int
Priority = int
BlockOrdinal = int
DataRole = str


class OutOfMemoryError(Exception):
    """Memory of some kind ran out."""


class HostOOMError(OutOfMemoryError):
    """Of the host."""


class DiskOOMError(OutOfMemoryError):
    """Of a disk."""


class CuOOMError(OutOfMemoryError):
    """Of a GPU."""


class OutOfPagesError(OutOfMemoryError):
    """There are not enough pages; `reason` says of which pool group and level."""

    def __init__(self, message: str = "", reason: kv.NoRoom | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class LogicError(Exception):
    """A call in a state that does not allow it."""


class ResourceBusyError(Exception):
    """Caches are still open."""


class CuError(Exception):
    """A call of the CUDA driver or run time failed."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class CorruptedError(Exception):
    """Pages were lost, or an invariant of the core broke."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Native errors leave as the published ones; ValueError and NotSupportedError as they are."""
    try:
        yield
    except kv.OutOfPagesError as error:
        raise OutOfPagesError(str(error), error.reason) from error
    except kv.LogicError as error:
        raise LogicError(str(error)) from error
    except kv.ResourceBusyError as error:
        raise ResourceBusyError(str(error)) from error
    except (kv.DataLostError, _core.InternalError) as error:
        raise CorruptedError(str(error)) from error
    except _core.CudaError as error:
        raise CuError(str(error)) from error
    except MemoryError as error:
        kind = CuOOMError if "cuda" in str(error).lower() else HostOOMError
        raise kind(str(error)) from error
