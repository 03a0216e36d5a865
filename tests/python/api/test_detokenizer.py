"""Streamed text equals text decoded at once; stop strings are found over every chunking."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from helicore.executor.detokenizer import (
    ByteLevelStream,
    DetokenizerFactory,
    IncrementalDetokenizer,
    StreamFactory,
    WindowStream,
)
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st


class CharStream:
    """Token i of a word list is its text: chunkings of a text become token sequences."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def chunkings(text: str) -> Iterator[list[str]]:
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for cut, char in zip(cuts, text[1:], strict=True):
            if cut:
                pieces.append(char)
            else:
                pieces[-1] += char
        yield pieces


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The naive model: the stop that ends first wins, the longest on a tie."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def held_reference(text: str, stops: Sequence[str]) -> int:
    lengths = [k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])]
    return max(lengths, default=0)


def run_stepwise(pieces: Sequence[str], stops: Sequence[str], include: bool) -> tuple[str, object]:
    """Feeds one token a step; checks at each step that exactly the right suffix is held back."""
    detokenizer = IncrementalDetokenizer(CharStream(pieces), stops, include_stop=include)
    seen, streamed = "", ""
    for token in range(len(pieces)):
        stop = detokenizer.append([token], False)
        streamed += detokenizer.take_new_text()
        assert detokenizer.text == streamed
        if stop is not None:
            assert detokenizer.num_tokens == token + 1
            break
        seen += pieces[token]
        assert streamed == seen[: len(seen) - held_reference(seen, stops)]
    stop = detokenizer.append([], True)
    streamed += detokenizer.take_new_text()
    assert detokenizer.text == streamed
    return streamed, stop


STOP_CASES = [
    ("the quick brown fox", ["own fox"]),
    ("a fox own fo", ["own fox"]),
    ("xxabcyy", ["ab", "abc"]),
    ("xxabcyy", ["abc", "b"]),
    ("xxaabaabb", ["aabb", "aabaabb"]),
    ("aaaaaab", ["aab"]),
    ("abababac", ["ababac", "bac"]),
    ("no stop here", ["stop!", "here."]),
    ("endend", ["end"]),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("text", "stops"), STOP_CASES)
def test_a_stop_string_is_found_over_every_chunking(
    text: str, stops: list[str], include: bool
) -> None:
    expected = reference(text, stops, include)
    for pieces in itertools.islice(chunkings(text[-14:]), 1 << 13):
        head = [text[: len(text) - 14]] if len(text) > 14 else []
        pieces = head + pieces
        assert run_stepwise(pieces, stops, include) == expected
        at_once = IncrementalDetokenizer(CharStream(pieces), stops, include_stop=include)
        assert at_once.append(list(range(len(pieces))), True) == expected[1]
        assert at_once.text == expected[0]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_texts_and_stops_agree_with_the_naive_model(
    text: str, stops: list[str], include: bool, seed: int
) -> None:
    draw = random.Random(seed)
    pieces = []
    rest = text
    while rest:
        size = draw.randint(1, 4)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run_stepwise(pieces, stops, include) == reference(text, stops, include)


def test_the_naive_model_notices_a_matcher_that_looks_at_single_chunks_only() -> None:
    """Negative control: per-chunk search misses a stop that spans two chunks."""
    pieces, stops = ["brown", " fox"], ["own fox"]
    assert not any(stop in piece for piece in pieces for stop in stops)
    assert reference("".join(pieces), stops, False) == ("br", "own fox")


def test_tokens_after_the_stop_are_not_taken() -> None:
    detokenizer = IncrementalDetokenizer(CharStream(["a", "STOP", "b", "c"]), ["STOP"])
    assert detokenizer.append([0, 1, 2, 3], False) == "STOP"
    assert detokenizer.num_tokens == 2
    assert detokenizer.append([2], True) == "STOP"
    assert detokenizer.num_tokens == 2
    assert detokenizer.text == "a"


def test_a_stop_within_the_first_min_tokens_is_passed_over() -> None:
    pieces = ["END", "x", "EN", "D", "y"]
    detokenizer = IncrementalDetokenizer(CharStream(pieces), ["END"], min_tokens=3)
    assert detokenizer.append([0, 1, 2], False) is None
    assert detokenizer.text == "ENDx"
    assert detokenizer.append([3, 4], False) == "END"
    assert detokenizer.text == "ENDx"


def test_finish_shows_what_was_held_back() -> None:
    detokenizer = IncrementalDetokenizer(CharStream(["own fo"]), ["own fox"])
    assert detokenizer.append([0], False) is None
    assert detokenizer.text == ""
    assert detokenizer.append([], True) is None
    assert detokenizer.text == "own fo"


# Tokenizers

TEXTS = [
    "def f(self):\n    return 1\n",
    "naïve café ☕ — 你好 世界 🙂🙃",
    "é̂\u200d👩‍👩‍👧",
    "żółw 🐍 ∑ ﷽",
    "   leading and trailing   ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_streaming_equals_decoding_at_once(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = DetokenizerFactory(tokenizer)(SamplingParams())
    streamed = ""
    for token in ids:
        detokenizer.append([token], False)
        piece = detokenizer.take_new_text()
        assert "\ufffd" not in piece
        streamed += piece
    detokenizer.append([], True)
    assert streamed + detokenizer.take_new_text() == tokenizer.decode(ids) == text


def test_the_streaming_test_has_characters_that_span_tokens(tokenizer: Tokenizer) -> None:
    """Negative control: decoding token by token gives replacement characters."""
    ids = tokenizer.encode(TEXTS[3])
    assert "\ufffd" in "".join(tokenizer.decode([token]) for token in ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_ids_stream_to_the_same_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Invalid UTF-8, special tokens and ids beyond the vocabulary included."""
    top = tokenizer.vocab_size + 50
    ids = data.draw(st.lists(st.integers(0, top), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = DetokenizerFactory(tokenizer)(SamplingParams(skip_special_tokens=skip))
    rest = list(ids)
    while rest:
        size = data.draw(st.integers(1, 5))
        detokenizer.append(rest[:size], False)
        rest = rest[size:]
    detokenizer.append([], True)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_cut_by_the_end_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙂", add_special_tokens=False)[:-1]
    assert tokenizer.decode(ids).endswith("\ufffd")
    detokenizer = DetokenizerFactory(tokenizer)(SamplingParams())
    detokenizer.append(ids, False)
    assert detokenizer.text == "x"
    detokenizer.append([], True)
    assert detokenizer.text == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["the quick brown fox", "the ☕ fox 🙂 dog", "  the  dog"])
def test_a_tokenizer_with_context_streams_to_the_same_text(
    metaspace_tokenizer: Tokenizer, text: str
) -> None:
    tokenizer = metaspace_tokenizer
    prompt, ids = tokenizer.encode("over the"), tokenizer.encode(text)
    detokenizer = DetokenizerFactory(tokenizer)(SamplingParams(), prompt)
    streamed = ""
    for token in ids:
        detokenizer.append([token], False)
        piece = detokenizer.take_new_text()
        assert "\ufffd" not in piece
        streamed += piece
    detokenizer.append([], True)
    streamed += detokenizer.take_new_text()
    assert streamed == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


def test_the_stream_fits_the_tokenizer(
    tokenizer: Tokenizer, metaspace_tokenizer: Tokenizer
) -> None:
    assert isinstance(StreamFactory(tokenizer)(True), ByteLevelStream)
    assert isinstance(StreamFactory(metaspace_tokenizer)(True), WindowStream)


def test_endless_invalid_bytes_do_not_pile_up(metaspace_tokenizer: Tokenizer) -> None:
    """Cost per token stays bounded: the window never grows past its limit."""
    sizes = []

    def decode(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return "\ufffd" * len(ids)

    stream = WindowStream(decode)
    for _ in range(500):
        stream.push(0)
    assert max(sizes) <= 2 * WindowStream.MAX_PENDING + 1
