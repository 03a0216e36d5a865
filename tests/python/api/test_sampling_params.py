"""Every field is checked when the object is made, and the error names it."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from helicore.sampling_params import SamplingParams

BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", -1),
    ("n", 10**9),
    ("n", True),
    ("n", 1.0),
    ("n", None),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "0"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", False),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("seed", "7"),
    ("seed", True),
    ("stop", 7),
    ("stop", b"end"),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", ["ok", 3]),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "12"),
    ("ignore_eos", 1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", None),
    ("logprobs", -2),
    ("logprobs", True),
    ("logprobs", 1.5),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", "all"),
    ("detokenize", None),
    ("skip_special_tokens", 0),
    ("include_stop_str_in_output", "yes"),
    ("logit_bias", [1, 2]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: "5"}),
    ("logit_bias", {True: 1.0}),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda v: repr(v)[:24])
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        SamplingParams(**{field: value})


def test_the_message_shows_the_value_and_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^top_p must be in \(0, 1\], got 1\.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"^max_tokens must be in \[1, 2147483647\], got -45$"):
        SamplingParams(max_tokens=-45)


def test_defaults_are_those_that_users_know() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), None)
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output
    assert params.logprobs is None
    assert params.prompt_logprobs is None


def test_edge_values_are_accepted() -> None:
    low = SamplingParams(n=1, temperature=0, top_p=1, top_k=1, min_p=1, seed=0, max_tokens=1)
    assert (low.temperature, low.seed, low.max_tokens) == (0, 0, 1)
    high = SamplingParams(seed=2**63 - 1, max_tokens=None, min_tokens=2**31 - 1, logprobs=-1)
    assert (high.seed, high.max_tokens, high.min_tokens) == (2**63 - 1, None, 2**31 - 1)
    wide = SamplingParams(logprobs=0, prompt_logprobs=0, presence_penalty=-2, frequency_penalty=2)
    assert (wide.logprobs, wide.presence_penalty, wide.frequency_penalty) == (0, -2, 2)


def test_values_are_stored_in_one_form() -> None:
    params = SamplingParams(
        stop="end",
        stop_token_ids=[3, 4],
        top_k=-1,
        logit_bias={"5": 1},
        temperature=np.float32(0.5),
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.top_k == 0
    assert params.logit_bias == {5: 1.0}
    assert isinstance(params.temperature, float)
    assert SamplingParams(n=np.int64(3)).n == 3


def test_an_object_is_immutable_hashable_and_survives_copies() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3).n == 3
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(ValueError, match=r"^n must be"):
        dataclasses.replace(params, n=0)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="stop needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=[10])),
        ("logit_bias", SamplingParams(logit_bias={10: 1.0})),
        ("logprobs", SamplingParams(logprobs=11)),
        ("prompt_logprobs", SamplingParams(prompt_logprobs=11)),
    ],
)
def test_ids_and_counts_must_fit_the_vocabulary(field: str, params: SamplingParams) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b.*1[01]"):
        params.check_vocabulary(10)
    params.check_vocabulary(11)


def test_generation_config_gives_the_defaults() -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "max_new_tokens": 99, "x": 1}
    params = SamplingParams.from_generation_config(values)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.95, 99)
    assert SamplingParams.from_generation_config({"do_sample": False}).greedy
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must be in"):
        SamplingParams.from_generation_config({"top_p": 7})
