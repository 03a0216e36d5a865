"""Every setting of the engine: frozen dataclasses, validated once, the field named in each error.

The schema lives in the field metadata: documentation, limits, choices and environment variable.
A field that is left at its default takes the value of its environment variable, where one is
set; any other value wins over the environment. No other module reads environment variables.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helicore._core import NotSupportedError
from helicore.checking import describe

QUANTISED_DTYPES = ("fp8", "fp8_ds_mla", "nvfp4")
"""Formats of cached rows that are not elements of one dtype."""
_INT32_MAX = 2**31 - 1
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class FieldError(ValueError):
    """A ValueError that carries the name of the offending field as `param`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _setting(default: Any, doc: str, *, env: str | None = None, **limits: Any) -> Any:
    """A dataclass field with its documentation, limits and environment variable.

    limits: minimum, maximum (inclusive), above (exclusive minimum), choices (a tuple).
    """
    metadata = {"doc": doc, "env": env, "default": default, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the schema, as `settings()` yields it."""

    owner: str
    name: str
    default: object
    env: str | None
    allowed: str
    doc: str


# --- validation, driven by the metadata ------------------------------------------------------


def _value_types(cls: type, name: str) -> tuple[type, ...]:
    hint = typing.get_type_hints(cls)[name]
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(member for member in members if isinstance(member, type))


def _allowed(kinds: tuple[type, ...], limits: Mapping[str, Any]) -> str:
    parts = []
    if choices := limits.get("choices"):
        parts.append("one of " + ", ".join(str(choice) for choice in choices))
    elif bool in kinds:
        parts.append("True or False")
    elif int in kinds and float not in kinds:
        low, high = limits.get("minimum", 0), limits.get("maximum", _INT32_MAX)
        parts.append(f"an integer >= {low}" if high == _INT32_MAX else f"an integer {low}..{high}")
    elif float in kinds:
        bound = f"> {limits['above']}" if "above" in limits else f">= {limits.get('minimum', 0)}"
        parts.append(f"a finite number {bound}")
    elif str in kinds or Path in kinds:
        parts.append("a non-empty string")
    else:
        parts.append("a " + kinds[0].__name__)
    if type(None) in kinds:
        parts.append("None")
    return " or ".join(parts)


def _number_fits(value: float, limits: Mapping[str, Any]) -> bool:
    if (isinstance(value, float) and not math.isfinite(value)) or (
        "above" in limits and value <= limits["above"]
    ):
        return False
    high = limits.get("maximum", _INT32_MAX if isinstance(value, int) else math.inf)
    return bool(limits.get("minimum", 0) <= value <= high)


def _fits(value: object, kinds: tuple[type, ...], limits: Mapping[str, Any]) -> bool:
    if value is None:
        return type(None) in kinds
    if isinstance(value, bool):
        return bool in kinds
    if choices := limits.get("choices"):
        return type(value) in kinds and value in choices
    if isinstance(value, int):
        return (int in kinds or float in kinds) and _number_fits(value, limits)
    if isinstance(value, float):
        return float in kinds and _number_fits(value, limits)
    if isinstance(value, str):
        return str in kinds and bool(value)
    return isinstance(value, tuple(kind for kind in kinds if kind not in (int, float, bool)))


def _parse(text: str, kinds: tuple[type, ...]) -> object:
    """The value that the text of an environment variable stands for; the text if none fits."""
    lowered = text.strip().lower()
    if type(None) in kinds and lowered in ("none", ""):
        return None
    if bool in kinds and lowered in _TRUE | _FALSE:
        return lowered in _TRUE
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(lowered)
            except ValueError:
                continue
    return text.strip()


def _from_environment(config: Any, field: dataclasses.Field[Any]) -> None:
    """Replaces a value that was left at its default by the environment's, where one is set."""
    env = field.metadata["env"]
    value = getattr(config, field.name)
    if env is None or type(value) is not type(field.default) or value != field.default:
        return
    text = os.environ.get(env)
    if text is not None:
        value = _parse(text, _value_types(type(config), field.name))
        object.__setattr__(config, field.name, value)


def _validate(config: Any) -> None:
    for field in dataclasses.fields(config):
        _from_environment(config, field)
        value, limits = getattr(config, field.name), field.metadata["limits"]
        kinds = _value_types(type(config), field.name)
        if not _fits(value, kinds, limits):
            allowed = _allowed(kinds, limits)
            raise FieldError(field.name, f"{field.name} must be {allowed}, got {describe(value)}")


def _refuse_unserved(name: str, value: object, served: str) -> None:
    raise NotSupportedError(f"{name}={value!r} is not served by this version; use {served}")


def _is_no_folder(path: Path) -> bool:
    """True where the path or a part of it is something else; what is not there can be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return not path.is_dir()


def _check_folder(name: str, path: str | None, size_name: str, size: float) -> None:
    """A folder and the space in it are given together."""
    if path is None and size:
        raise FieldError(name, f"{name} must name a folder when {size_name} is {size}, got None")
    if path is not None and not size:
        raise FieldError(size_name, f"{size_name} must be > 0 when {name} is set, got {size}")
    if path is not None and _is_no_folder(Path(path).expanduser()):
        raise FieldError(name, f"{name} must be a folder, got {path!r}")


def _check_ranks(config: EngineConfig) -> None:
    """What several ranks can not do."""
    sizes = "tensor_parallel_size * context_parallel_size > 1"
    if config.device == "cuda":
        _refuse_unserved("device", config.device, f'device="cpu" with {sizes}')
    if config.kv_cache.disk_path is not None:
        _refuse_unserved("disk_path", config.kv_cache.disk_path, f"swap_path with {sizes}")


# --- the settings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The KV cache: page size, row format, how much memory each tier may take."""

    block_size: int = _setting(
        64,
        "Tokens per KV page, the unit of allocation and of prefix reuse.",
        env="HELICORE_BLOCK_SIZE",
        choices=(1, 16, 32, 64, 128),
    )
    dtype: str = _setting(
        "auto",
        "Format of cached latent rows; auto is the dtype of the model.",
        env="HELICORE_KV_CACHE_DTYPE",
        choices=("auto", "float32", "bfloat16", *QUANTISED_DTYPES),
    )
    gpu_gb: float | None = _setting(
        None,
        "GPU memory of the hot tier in GiB, on a GPU; None is nine tenths of what is free.",
        env="HELICORE_GPU_GB",
        above=0,
    )
    host_gb: float | None = _setting(
        None,
        "Host memory in GiB; on a CPU the hot tier, where None is a quarter of the memory.",
        env="HELICORE_HOST_GB",
        above=0,
    )
    swap_host_gb: float = _setting(
        0,
        "Host memory in GiB below the hot tier, for pages of sequences that wait and of prefixes.",
        env="HELICORE_SWAP_HOST_GB",
        minimum=0,
    )
    swap_path: str | None = _setting(
        None,
        "Folder for the files of swap_disk_gb, which end with the engine; made when not there.",
        env="HELICORE_SWAP_PATH",
    )
    swap_disk_gb: float = _setting(
        0,
        "Disk space in GiB below the tiers in memory, for the same pages; goes with swap_path.",
        env="HELICORE_SWAP_DISK_GB",
        minimum=0,
    )
    disk_path: str | None = _setting(
        None,
        "Folder that keeps cached prefixes beyond the process; made when it is not there.",
        env="HELICORE_DISK_PATH",
    )
    disk_gb: float = _setting(
        0,
        "Disk space for cached prefixes in GiB; goes with disk_path.",
        env="HELICORE_DISK_GB",
        minimum=0,
    )
    enable_prefix_caching: bool = _setting(
        True,
        "Reuse cached pages of an equal prefix between requests.",
        env="HELICORE_ENABLE_PREFIX_CACHING",
    )

    def __post_init__(self) -> None:
        _validate(self)
        _check_folder("disk_path", self.disk_path, "disk_gb", self.disk_gb)
        _check_folder("swap_path", self.swap_path, "swap_disk_gb", self.swap_disk_gb)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much one step may do."""

    max_num_seqs: int = _setting(
        256,
        "Sequences that run at the same time.",
        env="HELICORE_MAX_NUM_SEQS",
        minimum=1,
        maximum=4096,
    )
    max_num_batched_tokens: int = _setting(
        8192,
        "Token budget of a step: decodes first, the remainder for chunks of prompts.",
        env="HELICORE_MAX_NUM_BATCHED_TOKENS",
        minimum=1,
        maximum=1 << 20,
    )
    max_concurrent_prefills: int = _setting(
        8,
        "Prompts that may be in progress at once beyond what the token budget can run in a step.",
        env="HELICORE_MAX_CONCURRENT_PREFILLS",
        minimum=1,
    )

    def __post_init__(self) -> None:
        _validate(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise FieldError(
                "max_num_batched_tokens",
                f"max_num_batched_tokens must be >= max_num_seqs ({self.max_num_seqs}), so that "
                f"every running sequence can decode, got {self.max_num_batched_tokens}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Ranks (processes) that share one model: tensor_parallel_size * context_parallel_size."""

    tensor_parallel_size: int = _setting(
        1,
        "Groups of ranks that split the heads of attention.",
        env="HELICORE_TENSOR_PARALLEL_SIZE",
        minimum=1,
        maximum=256,
    )
    context_parallel_size: int = _setting(
        1,
        "Ranks of a group, which split the cached context; all ranks split the other weights.",
        env="HELICORE_CONTEXT_PARALLEL_SIZE",
        minimum=1,
        maximum=256,
    )
    enable_expert_parallel: bool = _setting(
        False,
        "Give each rank some of the routed experts whole, instead of a part of each.",
        env="HELICORE_ENABLE_EXPERT_PARALLEL",
    )
    timeout_s: float = _setting(
        300.0,
        "Seconds that a rank waits for the others within a step before it gives up.",
        env="HELICORE_RANK_TIMEOUT_S",
        above=0,
    )
    start_timeout_s: float = _setting(
        600.0,
        "Seconds that ranks wait for each other at the start.",
        env="HELICORE_RANK_START_TIMEOUT_S",
        above=0,
    )
    shared_memory_mb: int = _setting(
        64,
        "MiB of each rank that the others map, through which they exchange data.",
        env="HELICORE_SHARED_MEMORY_MB",
        minimum=1,
        maximum=65536,
    )

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.context_parallel_size


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding; validated here and refused by EngineConfig in this version."""

    method: str = _setting(
        "dflash", "How drafts are made.", choices=("dflash", "mtp", "ngram", "draft_model")
    )
    num_speculative_tokens: int = _setting(4, "Draft tokens per step.", minimum=1, maximum=64)
    model: str | None = _setting(None, "Folder of the draft model, where the method needs one.")

    def __post_init__(self) -> None:
        _validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from."""

    model: str | Path = _setting("tiny", "Checkpoint folder, or the name of a bundled model.")  # noqa: RUF009
    dtype: str = _setting(
        "auto",
        "Dtype of weights and activations; auto is the checkpoint's.",
        env="HELICORE_DTYPE",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = _setting(
        "auto",
        "Where the model runs; auto is a GPU where there is one that can be used.",
        env="HELICORE_DEVICE",
        choices=("auto", "cpu", "cuda"),
    )
    max_model_len: int | None = _setting(
        None,
        "Tokens of prompt and output together; None is what the model and the KV pool allow.",
        env="HELICORE_MAX_MODEL_LEN",
        minimum=2,
    )
    num_threads: int | None = _setting(
        None,
        "Threads of the CPU kernels and of torch; None leaves both as they are.",
        env="HELICORE_NUM_THREADS",
        minimum=1,
        maximum=1024,
    )
    deterministic: bool = _setting(
        False,
        "A request's tokens do not depend on what else is in its batch or in the cache.",
        env="HELICORE_DETERMINISTIC",
    )
    seed: int | None = _setting(
        None,
        "Seed from which requests without their own derive one; None is a random one.",
        env="HELICORE_SEED",
        minimum=0,
        maximum=2**63 - 1,
    )
    kv_cache: KVCacheConfig = dataclasses.field(
        default_factory=KVCacheConfig, metadata={"doc": "", "env": None, "limits": {}}
    )
    scheduler: SchedulerConfig = dataclasses.field(
        default_factory=SchedulerConfig, metadata={"doc": "", "env": None, "limits": {}}
    )
    parallel: ParallelConfig = dataclasses.field(
        default_factory=ParallelConfig, metadata={"doc": "", "env": None, "limits": {}}
    )
    speculative: SpeculativeConfig | None = _setting(None, "Speculative decoding (None is served).")  # noqa: RUF009

    def __post_init__(self) -> None:
        _validate(self)
        if self.speculative is not None:
            _refuse_unserved("speculative", self.speculative.method, "speculative=None")
        if self.parallel.num_ranks > 1:
            _check_ranks(self)


_OWNERS: tuple[type[Any], ...] = (
    EngineConfig,
    KVCacheConfig,
    SchedulerConfig,
    ParallelConfig,
    SpeculativeConfig,
)


def settings() -> Iterator[Setting]:
    """Every setting with its default, environment variable and allowed values."""
    for owner in _OWNERS:
        for field in dataclasses.fields(owner):
            if field.metadata["doc"]:
                limits = field.metadata["limits"]
                allowed = _allowed(_value_types(owner, field.name), limits)
                yield Setting(
                    owner.__name__,
                    field.name,
                    field.default,
                    field.metadata["env"],
                    allowed,
                    field.metadata["doc"],
                )


def settings_table() -> str:
    """The Markdown table of docs/configuration.md."""
    lines = ["| setting | default | environment | allowed | meaning |", "|---|---|---|---|---|"]
    for row in settings():
        env = f"`{row.env}`" if row.env else "-"
        lines.append(
            f"| `{row.owner}.{row.name}` | `{row.default!r}` | {env} | {row.allowed} | {row.doc} |"
        )
    return "\n".join(lines) + "\n"
