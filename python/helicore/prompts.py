"""What generate() is given, checked and in one form: token ids and parameters per request.

The form is checked here, before the first request reaches the engine; what depends on the model
(vocabulary, length) is checked by the engine. Errors start with the place of the prompt in the
caller's list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from helicore.checking import check_integer, describe, is_boolean
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | TextPrompt | TokensPrompt | Mapping[str, Any]

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One prompt, ready for the engine. where: how messages call it ("prompts[3]", "prompt")."""

    where: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | int | None = None


def as_list(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether a single one was given."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts], True
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(
            "prompts must be a string, a dict with 'prompt' or 'prompt_token_ids', or a list of "
            f"these, got {describe(prompts)}"
        )
    return list(prompts), False


def prepare(
    prompts: Prompt | Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    tokenizer: Tokenizer | None,
    priority: int | Sequence[int] | None = None,
) -> list[PreparedRequest]:
    """Checks and tokenizes all prompts. `params` has one entry per prompt."""
    items, single = as_list(prompts)
    places = ["prompt" if single else f"prompts[{i}]" for i in range(len(items))]
    parsed = [_parse(item, where) for item, where in zip(items, places, strict=True)]
    _tokenize(parsed, places, tokenizer)
    priorities = _check_priority(priority, len(items))
    return [
        PreparedRequest(where, entry.text, entry.token_ids, p, rank, entry.cache_salt)
        for where, entry, p, rank in zip(places, parsed, params, priorities, strict=True)
    ]


def expand_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    num_prompts: int,
) -> list[SamplingParams]:
    """One SamplingParams per prompt, from one for all, a list of equal length, or None."""
    if params is None:
        return [default] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, (str, bytes)):
        raise ValueError(
            f"sampling_params must be a SamplingParams or a list of them, got {describe(params)}"
        )
    for position, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(
                f"sampling_params[{position}] must be a SamplingParams, got {describe(one)}"
            )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params must have one entry per prompt ({num_prompts}), got {len(params)}"
        )
    return list(params)


@dataclass(slots=True)
class _Parsed:
    text: str | None
    token_ids: list[int]
    cache_salt: str | int | None = None


def _parse(item: object, where: str) -> _Parsed:
    if isinstance(item, str):
        return _Parsed(_check_text(item, where), [])
    if not isinstance(item, Mapping):
        raise ValueError(
            f"{where} must be a string or a dict with 'prompt' or 'prompt_token_ids', "
            f"got {describe(item)}"
        )
    unknown = sorted(str(key) for key in item.keys() - _KEYS)
    if unknown:
        raise ValueError(f"{where} must have keys from {sorted(_KEYS)}, got {unknown}")
    text, ids, salt = item.get("prompt"), item.get("prompt_token_ids"), item.get("cache_salt")
    _check_salt(salt, f"{where}.cache_salt")
    if ids is not None:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where}.prompt must be a string, got {describe(text)}")
        return _Parsed(text, _as_ids(ids, where), salt)
    if text is None:
        raise ValueError(f"{where} must have 'prompt' or 'prompt_token_ids', got {describe(item)}")
    return _Parsed(_check_text(text, f"{where}.prompt"), [], salt)


def _check_salt(salt: object, where: str) -> None:
    if salt is None:
        return
    if is_boolean(salt) or not isinstance(salt, (str, int)):
        raise ValueError(f"{where} must be a string or an integer, got {describe(salt)}")
    if isinstance(salt, int) and not -(2**63) <= salt < 2**63:
        raise ValueError(f"{where} must be a 64-bit integer, got {describe(salt)}")
    if isinstance(salt, str):
        _check_unicode(salt, where)


def _check_unicode(text: str, where: str) -> None:
    # Lone surrogates have no UTF-8.
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{where} holds a lone surrogate, which is not valid text")


def _check_text(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where} must be a string, got {describe(text)}")
    if not text:
        raise ValueError(
            f"{where} must not be empty; to start from nothing, give the begin-of-sequence id in "
            "'prompt_token_ids'"
        )
    _check_unicode(text, where)
    return text


def _as_ids(ids: object, where: str) -> list[int]:
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(
            f"{where}.prompt_token_ids must be a list of integers, got {describe(ids)}"
        )
    if not values:
        raise ValueError(f"{where}.prompt_token_ids must not be empty")
    return list(values)


def _tokenize(
    parsed: Sequence[_Parsed], places: Sequence[str], tokenizer: Tokenizer | None
) -> None:
    texts = [
        (entry, where) for entry, where in zip(parsed, places, strict=True) if not entry.token_ids
    ]
    if not texts:
        return
    if tokenizer is None:
        raise ValueError(
            f"{texts[0][1]} must have 'prompt_token_ids': skip_tokenizer_init=True left out the "
            "tokenizer"
        )
    rows = tokenizer.encode_batch([entry.text or "" for entry, _ in texts])
    for (entry, where), row in zip(texts, rows, strict=True):
        if not row:
            raise ValueError(f"{where} gives no token, got {describe(entry.text)}")
        entry.token_ids = row


def _check_priority(priority: int | Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if isinstance(priority, int) and not isinstance(priority, bool):
        priority = [priority] * count
    elif hasattr(priority, "tolist"):  # of numpy or torch
        values = priority.tolist()
        return _check_priority(values if isinstance(values, (int, list)) else [values], count)
    if not isinstance(priority, Sequence) or isinstance(priority, (str, bytes)):
        raise ValueError(
            f"priority must be an integer or a list of integers, got {describe(priority)}"
        )
    if len(priority) != count:
        raise ValueError(f"priority must have one entry per prompt ({count}), got {len(priority)}")
    return [
        check_integer(f"priority[{position}]", value, 1 - 2**31, 2**31 - 1)
        for position, value in enumerate(priority)
    ]
