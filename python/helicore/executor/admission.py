"""Checks of what a caller hands to add_request; each error names the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from helicore.checking import describe
from helicore.config import FieldError
from helicore.executor.detokenizer import Detokenizer
from helicore.executor.sequence import Request
from helicore.kv import ReuseScope
from helicore.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must fit: facts of the model and of the KV pool."""

    vocab_size: int
    max_model_len: int
    max_model_len_source: str
    """Where the limit comes from, for messages: the setting, the model or the KV pool."""
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]


def check_prompt(prompt: Sequence[int] | NDArray[np.int32], limits: ModelLimits) -> np.ndarray:
    """The prompt as a contiguous int32 array of its own; FieldError where it cannot be served."""
    name = "prompt_token_ids"
    if isinstance(prompt, (str, bytes)):
        raise FieldError(name, f"{name} must be a sequence of token ids, got text")
    try:
        array = np.array(prompt)
        if not isinstance(prompt, np.ndarray) and {bool, np.bool_} & set(map(type, prompt)):
            array = np.array(None)  # numpy takes [True, 2] for integers
    except (TypeError, ValueError, OverflowError):
        array = np.array(None)
    if array.ndim == 1 and array.size == 0:
        raise FieldError(name, f"{name} must hold at least one token id, got an empty prompt")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise FieldError(
            name, f"{name} must be a flat sequence of integers, got {describe(prompt)}"
        )
    if len(array) >= limits.max_model_len:
        raise FieldError(
            name,
            f"{name} has {len(array)} tokens, but at most {limits.max_model_len - 1} fit: "
            f"max_model_len is {limits.max_model_len} ({limits.max_model_len_source}) "
            "and one token is needed for the output",
        )
    bad = np.flatnonzero((array < 0) | (array >= limits.vocab_size))
    if bad.size:
        position = int(bad[0])
        raise FieldError(
            name,
            f"{name}[{position}] must be in [0, {limits.vocab_size - 1}], got {array[position]}",
        )
    return np.ascontiguousarray(array, np.int32)


def make_request(
    request_id: str,
    prompt: Sequence[int] | NDArray[np.int32],
    params: SamplingParams,
    limits: ModelLimits,
    *,
    priority: int,
    arrival: int,
    scope: ReuseScope | None,
    detokenizer_factory: Callable[[], Detokenizer] | None,
) -> Request:
    """A checked Request without sequences."""
    if not isinstance(request_id, str) or not request_id:
        raise FieldError(
            "request_id", f"request_id must be a non-empty string, got {describe(request_id)}"
        )
    if not isinstance(params, SamplingParams):
        raise FieldError("params", f"params must be SamplingParams, got {type(params).__name__}")
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) >= 2**31:
        raise FieldError("priority", f"priority must be a 32-bit integer, got {describe(priority)}")
    if scope is not None and not isinstance(scope, ReuseScope):
        raise FieldError("reuse_scope", f"reuse_scope must be a ReuseScope or None, got {scope!r}")
    tokens = check_prompt(prompt, limits)
    params.check_vocabulary(limits.vocab_size)
    if params.stop and detokenizer_factory is None:
        raise FieldError("stop", "stop needs a tokenizer: stop strings are found in the text")
    room = limits.max_model_len
    if params.max_tokens is not None:
        room = min(room, len(tokens) + params.max_tokens)
    eos = () if params.ignore_eos else limits.eos_token_ids
    return Request(
        request_id=request_id,
        prompt=tokens,
        params=params,
        priority=priority,
        arrival=arrival,
        scope=scope,
        detokenizer_factory=detokenizer_factory if params.stop else None,
        limit=room,
        stop_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
        eos_ids=frozenset(eos) - frozenset(params.stop_token_ids),
    )
