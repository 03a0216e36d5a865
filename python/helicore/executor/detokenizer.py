"""Token ids of one sequence to text, step by step, with stop strings.

Everything here is a function of the token sequence alone, never of how it was cut into steps:
text and stop are the same streamed and at once. Cost per step is linear in the new tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import tokenizers

from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    @property
    def text(self) -> str:
        """Visible text so far: nothing that could still turn out to be (part of) a stop string."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens taken in; after a stop string matched, up to the one that completed it."""
        ...

    def append(self, token_ids: Sequence[int], finished: bool) -> str | None:
        """Takes new tokens in order, up to the first that completes a stop string.

        finished: no token follows; what was held back becomes visible.
        Returns the stop string that matched (now or before), else None.
        """
        ...


class TextStream(Protocol):
    """Text pieces of one sequence; an incomplete character is kept until it is whole."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


# Streams


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 is itself, other bytes are U+0100 onwards."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(0x100 + i): b for i, b in enumerate(rest)}


class ByteLevelStream:
    """For byte-level BPE: a token is a fixed string of bytes, characters may span tokens.

    Invalid bytes become U+FFFD exactly as in decoding the whole sequence.

    Args:
      piece_of: a token's text where its bytes are whole characters, else its bytes.
    """

    def __init__(self, piece_of: Callable[[int], str | bytes]) -> None:
        self._piece_of = piece_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if isinstance(piece, str):
            if not self._pending:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._pending = False
        return self._decoder.decode(b"", True)


class WindowStream:
    """For any other tokenizer: a short window decoded with and without new tokens, the difference.

    The window starts at the last place where the text was whole; `context` (the prompt's end)
    decides about a leading space.
    """

    CONTEXT_TOKENS = 6
    MAX_PENDING = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-self.CONTEXT_TOKENS :])
        self._num_seen = len(self._window)
        self._seen_text = decode(self._window)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._num_seen
        if text.endswith("\ufffd") and pending < self.MAX_PENDING:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._seen_text) :]
        self._window = self._window[self._num_seen :]
        self._num_seen = len(self._window)
        self._seen_text = self._decode(self._window)
        return piece


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        return len(parts) == 1 and parts[0]["type"] == "ByteLevel"
    return bool(decoder["type"] == "ByteLevel")


class _PieceTable(dict[int, str | bytes]):
    """Token id -> text, or bytes where they are no whole characters; filled as tokens appear."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = tokenizer.backend
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = b"" if token_id in self._hidden else self._bytes_of(token_id)
        try:
            self[token_id] = piece.decode()
        except UnicodeDecodeError:
            self[token_id] = piece
        return self[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        table = _byte_of_char()
        whole = all(c in table for c in token)
        return bytes(table[c] for c in token) if whole else token.encode()


class StreamFactory:
    """Makes the TextStream that fits a tokenizer; pieces of tokens are cached across sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = _is_byte_level(tokenizer.backend)
        self._pieces = {
            True: _PieceTable(tokenizer, tokenizer.special_ids),
            False: _PieceTable(tokenizer, frozenset()),
        }

    def __call__(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> TextStream:
        if self._byte_level:
            return ByteLevelStream(self._pieces[skip_special_tokens].__getitem__)
        return WindowStream(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
            context,
        )


# Stop strings


def _failure_links(pattern: str) -> list[int]:
    """links[i]: length of the longest proper prefix of pattern[:i] that is also its suffix."""
    links = [0] * (len(pattern) + 1)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = links[length]
        length += pattern[i] == pattern[length]
        links[i + 1] = length
    return links


class StopMatcher:
    """Finds the stop string that is complete first; on a tie the longest. Linear in the text fed.

    State per stop string: how many of its first characters the text ends with. That is both the
    matcher and the exact number of characters to hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._links = [_failure_links(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)
        self._first_chars = {stop[0] for stop in self._stops}

    @property
    def num_held(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._state, default=0)

    def feed(self, piece: str, armed: bool = True) -> tuple[str, int] | None:
        """Takes the next characters; (stop string, end offset in `piece`) at the first match.

        armed=False: a complete stop string is passed over.
        """
        if not any(self._state) and not any(c in piece for c in self._first_chars):
            return None
        for offset, char in enumerate(piece):
            matched = self._step(char)
            if matched is not None and armed:
                return matched, offset + 1
        return None

    def _step(self, char: str) -> str | None:
        matched = None
        for i, stop in enumerate(self._stops):
            length = self._state[i]
            while length and stop[length] != char:
                length = self._links[i][length]
            length += stop[length] == char
            if length == len(stop):
                matched = matched or stop
                length = self._links[i][length]
            self._state[i] = length
        return matched


class IncrementalDetokenizer:
    """The Detokenizer of one sequence.

    Not thread-safe; one owner. A stop string that ends within the first `min_tokens` tokens is
    ignored.
    """

    def __init__(
        self,
        stream: TextStream,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._visible: list[str] = []
        self._num_taken_pieces = 0
        self._held = ""
        self._num_tokens = 0
        self._matched: str | None = None
        self._finished = False

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def text(self) -> str:
        return "".join(self._visible)

    def take_new_text(self) -> str:
        """Visible text since the last call of this function: what a stream sends."""
        new = "".join(self._visible[self._num_taken_pieces :])
        self._num_taken_pieces = len(self._visible)
        return new

    def append(self, token_ids: Sequence[int], finished: bool) -> str | None:
        for token_id in token_ids:
            if self._matched is not None or self._finished:
                break
            self._num_tokens += 1
            self._take(self._stream.push(token_id))
        if finished and not self._finished:
            self._finished = True
            if self._matched is None:
                self._take(self._stream.flush())
            self._show(self._held)
            self._held = ""
        return self._matched

    def _take(self, piece: str) -> None:
        if not piece:
            return
        if self._matcher is None:
            self._visible.append(piece)
            return
        match = self._matcher.feed(piece, armed=self._num_tokens > self._min_tokens)
        text = self._held + piece
        if match is None:
            cut = len(text) - self._matcher.num_held
            self._show(text[:cut])
            self._held = text[cut:]
            return
        self._matched, end = match
        end += len(self._held)
        self._show(text[: end if self._include_stop else end - len(self._matched)])
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._visible.append(text)


class DetokenizerFactory:
    """Makes a Detokenizer per sequence from its SamplingParams. One per engine; cheap to call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._streams = StreamFactory(tokenizer)

    def __call__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._streams(params.skip_special_tokens, prompt_token_ids),
            params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
