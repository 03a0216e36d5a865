"""SamplingParams: how the tokens of one request are chosen, and when they end.

Names, defaults and meaning follow what users of offline inference APIs know. An object is checked
once, when it is made; each error names the field, the value and what is allowed. Checks that need
the model (vocabulary, context length) happen when a request is added: see `check_vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helicore.checking import check_integer, describe, is_boolean

MAX_N = 4096
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_LOGIT_BIAS = 100.0
MIN_NORMAL = 2.0**-126
"""The smallest normal number of float32, in which kernels compute."""


def _number(field: str, value: object, allowed: str) -> float:
    try:
        if is_boolean(value) or isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # of arrays and tensors with several numbers
        raise ValueError(f"{field} must be a number ({allowed}), got {describe(value)}") from None
    if not math.isfinite(number):
        raise ValueError(f"{field} must be finite ({allowed}), got {describe(value)}")
    return number


def _ranged(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    allowed = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    number = _number(field, value, allowed)
    if number > high or number < low or (open_low and number == low):
        raise ValueError(f"{field} must be in {allowed}, got {describe(value)}")
    if open_low and number < low + MIN_NORMAL:
        raise ValueError(
            f"{field} must be at least {low + MIN_NORMAL:g} (less is zero in float32), "
            f"got {describe(value)}"
        )
    return number


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, got {describe(value)}")
    return value


def _strings(field: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise ValueError(f"{field} must be a string or a list of strings, got {describe(value)}")
    for position, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(f"{field}[{position}] must be a string, got {describe(item)}")
        if not item:
            raise ValueError(f"{field}[{position}] must not be an empty string")
    return tuple(value)


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (Sequence, set, frozenset)) or isinstance(value, (str, bytes)):
        raise ValueError(f"{field} must be a list of token ids, got {describe(value)}")
    return tuple(check_integer(f"{field}[{i}]", item, 0, MAX_COUNT) for i, item in enumerate(value))


def _bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a mapping of token id to bias, got {describe(value)}")
    result: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has string keys only: "15" is token 15.
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        token = check_integer("logit_bias key", token, 0, MAX_COUNT)
        result[token] = _ranged(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return result or None


def _num_logprobs(field: str, value: object) -> int | None:
    return None if value is None else check_integer(field, value, -1, MAX_COUNT, " (-1 = all)")


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How to sample one request. Immutable; every field is validated here.

    Fields:
      n: sequences to generate from one prompt; they share the prompt's cache pages. [1, 4096].
      presence_penalty, frequency_penalty: [-2, 2], over generated tokens; 0 is off.
      repetition_penalty: (0, 10], over prompt and generated tokens; 1 is off.
      temperature: [0, 1000]; 0 is greedy (the highest logit, lowest id on a tie).
      top_p: (0, 1]; 1 is off.
      top_k: >= 1, or 0 or -1 for off (stored as 0).
      min_p: [0, 1]; 0 is off.
      seed: [0, 2**63 - 1] or None (not reproducible); sequence i of n draws its own stream.
      stop: a string or strings that end the text, and are left out of it unless
        include_stop_str_in_output.
      stop_token_ids: ids that end the sequence, beside the model's end-of-sequence ids.
      ignore_eos: go on after the model's end-of-sequence ids (stop_token_ids still end it).
      max_tokens: >= 1, or None: up to the model's length.
      min_tokens: until that many tokens, ids that end a sequence are masked and stop strings
        ignored.
      logprobs, prompt_logprobs: how many best tokens to report per position besides the chosen
        one (0: only the chosen one; -1: the whole vocabulary; None: nothing).
      detokenize: False leaves `text` empty.
      skip_special_tokens: leave special tokens out of the text.
      logit_bias: token id -> value in [-100, 100] added to its logit.
    """

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    logit_bias: dict[int, float] | None = field(hash=False)

    def __init__(
        self,
        n: int = 1,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", check_integer("n", n, 1, MAX_N))
        put("presence_penalty", _ranged("presence_penalty", presence_penalty, -2, 2))
        put("frequency_penalty", _ranged("frequency_penalty", frequency_penalty, -2, 2))
        put(
            "repetition_penalty",
            _ranged("repetition_penalty", repetition_penalty, 0, 10, open_low=True),
        )
        put("temperature", _ranged("temperature", temperature, 0, 1000))
        put("top_p", _ranged("top_p", top_p, 0, 1, open_low=True))
        put("top_k", max(0, check_integer("top_k", top_k, -1, MAX_COUNT, " (0 or -1 = off)")))
        put("min_p", _ranged("min_p", min_p, 0, 1))
        put("seed", None if seed is None else check_integer("seed", seed, 0, MAX_SEED))
        put("stop", _strings("stop", stop))
        put("stop_token_ids", _token_ids("stop_token_ids", stop_token_ids))
        put("ignore_eos", _flag("ignore_eos", ignore_eos))
        put(
            "max_tokens",
            None if max_tokens is None else check_integer("max_tokens", max_tokens, 1, MAX_COUNT),
        )
        put("min_tokens", check_integer("min_tokens", min_tokens, 0, MAX_COUNT))
        put("logprobs", _num_logprobs("logprobs", logprobs))
        put("prompt_logprobs", _num_logprobs("prompt_logprobs", prompt_logprobs))
        put("detokenize", _flag("detokenize", detokenize))
        put("skip_special_tokens", _flag("skip_special_tokens", skip_special_tokens))
        put(
            "include_stop_str_in_output",
            _flag("include_stop_str_in_output", include_stop_str_in_output),
        )
        put("logit_bias", _bias(logit_bias))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: stop strings are found in the text")

    @property
    def greedy(self) -> bool:
        """True when the highest logit is taken and no random number is drawn."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError when an id or a count does not fit a vocabulary of `vocab_size`."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias or ())),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} must hold token ids in [0, {vocab_size - 1}], got {token}"
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise ValueError(
                    f"{name} must be at most the vocabulary size {vocab_size}, got {count}"
                )

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The defaults a model asks for in its generation_config.json.

        Unknown keys are ignored; `do_sample: false` means greedy; `max_new_tokens` is `max_tokens`.
        Errors name the field, as in the constructor.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen = {name: values[name] for name in names if values.get(name) is not None}
        if values.get("max_new_tokens") is not None:
            chosen["max_tokens"] = values["max_new_tokens"]
        if values.get("do_sample") is False:
            chosen["temperature"] = 0.0
        try:
            return cls(**chosen)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from error
