"""Random continuations, stop strings and step sizes against a naive model of text and reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from api.fake_engine import FakeEngine
from helicore.llm import LLM
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_SPECIAL = 5
EOS = 1


def naive_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cuts at the stop string that is complete first, the longest on a tie."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[tuple[float, int]], bool, int]:
    """Ids, stop strings as (place, length) within their text, include flag, tokens per step."""
    ids = draw(st.lists(st.integers(NUM_SPECIAL, 399), min_size=1, max_size=30))
    places = st.tuples(st.floats(0, 1), st.integers(1, 6))
    return ids, draw(st.lists(places, max_size=3)), draw(st.booleans()), draw(st.integers(1, 6))


@pytest.mark.parametrize("streamed", [False, True])
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(problem=problems())
def test_text_and_reason_agree_with_the_naive_model(
    make_llm: Callable[..., LLM],
    tokenizer: Tokenizer,
    streamed: bool,
    problem: tuple[list[int], list[tuple[float, int]], bool, int],
) -> None:
    ids, places, include, step = problem
    whole = tokenizer.decode(ids)
    stops = [s for p, n in places if (s := whole[int(p * len(whole)) :][:n])]
    # A cut character becomes U+FFFD only when the text ends: it is not there to be found before.
    stops = [stop for stop in stops if "\ufffd" not in stop]
    llm = make_llm(FakeEngine(lambda prompt, index: [*ids, EOS], tokens_per_step=step))
    params = SamplingParams(max_tokens=None, stop=stops or None, include_stop_str_in_output=include)
    expected, stop = naive_text(whole, stops, include)
    if streamed:
        stream = llm.stream("x", params)
        assert "".join(stream) == expected
        completion = stream.output.outputs[0]
    else:
        completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == expected
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    if stop is None:
        assert completion.token_ids == [*ids, EOS]
    else:
        kept = completion.token_ids
        assert kept == ids[: len(kept)]
        # The last token completed the stop string: without it the string is not there.
        assert stop in tokenizer.decode(kept)
        assert stop not in tokenizer.decode(kept[:-1])
