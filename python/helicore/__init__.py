"""helicore: an inference engine for latent-attention (MLA) language models.

Public names are loaded when they are first used, so `import helicore` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from helicore import _requirements
from helicore._version import __version__

_requirements.check()

if TYPE_CHECKING:
    from helicore._core import InternalError, NotSupportedError
    from helicore.config import KVCacheConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig
    from helicore.llm import LLM
    from helicore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from helicore.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "InternalError",
    "KVCacheConfig",
    "Logprob",
    "NotSupportedError",
    "ParallelConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculativeConfig",
    "__version__",
]

_HOME = {
    "CompletionOutput": "outputs",
    "InternalError": "_core",
    "KVCacheConfig": "config",
    "LLM": "llm",
    "Logprob": "outputs",
    "NotSupportedError": "_core",
    "ParallelConfig": "config",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "SchedulerConfig": "config",
    "SpeculativeConfig": "config",
}


if not TYPE_CHECKING:  # else a checker would take any misspelt name for one that exists

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'helicore' has no attribute {name!r}")
        value = getattr(import_module(f"helicore.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
