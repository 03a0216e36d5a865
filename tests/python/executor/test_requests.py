"""Ends, edits, errors: what a single request may ask for, and what it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from executor.driving import drain, generate, tokens_of
from executor.fake_model import EOS, MAX_LEN, VOCAB, FakeModel, fake_engine, greedy_output
from helicore.config import FieldError
from helicore.executor.engine import Engine
from helicore.executor.postprocess import TokenEvent, first_event
from helicore.sampling_params import SamplingParams

PROMPT = [3, 4, 5, 6, 7]


def greedy(max_tokens: int = 10, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def scripted(monkeypatch: pytest.MonkeyPatch, output: list[int]) -> None:
    """The model then continues PROMPT with `output`, whatever it is fed."""

    def call(self: FakeModel, batch: Any, caches: Any) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_rows), VOCAB)
        for i, row in enumerate(batch.logits_rows.tolist()):
            at = int(batch.positions[row]) - len(PROMPT) + 1
            logits[i, output[at % len(output)]] = 4
        return logits

    monkeypatch.setattr(FakeModel, "__call__", call)


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "room", "expected"),
    [
        ([10, 11, 9, 20, 21, 22], 5, TokenEvent(3, "stop", 9)),
        ([10, 11, 20, 21, 22, 9], 5, TokenEvent(5, "length")),
        ([10, 11, 12, 13, 9, 22], 5, TokenEvent(5, "stop", 9)),
        ([10, 11], 2, TokenEvent(2, "length")),
        ([10, 11], 3, None),
        ([9], 1, TokenEvent(1, "stop", 9)),
        ([], 1, None),
        ([9], 0, TokenEvent(0, "length")),
    ],
)
def test_the_first_event_in_token_order_wins(
    tokens: list[int], room: int, expected: TokenEvent | None
) -> None:
    assert first_event(tokens, (9,), 0, 0, room) == expected


def test_a_stop_before_min_tokens_is_no_event() -> None:
    assert first_event([9, 10, 9], (9,), 0, 2, 10) == TokenEvent(3, "stop", 9)
    assert first_event([9], (9,), 1, 2, 10) is None
    assert first_event([9], (9,), 2, 2, 10) == TokenEvent(1, "stop", 9)


def test_end_of_sequence_stops_without_a_stop_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [8, 9, EOS, 10])
    last = generate(fake_engine()[0], [PROMPT], greedy())[0][-1]
    assert (last.finish_reason, last.stop_reason, last.new_token_ids) == ("stop", None, [EOS])


def test_a_stop_id_is_the_stop_reason_and_is_in_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [8, 9, 12, 10])
    updates = generate(fake_engine()[0], [PROMPT], greedy(stop_token_ids=[12, 30]))[0]
    assert tokens_of(updates) == [8, 9, 12]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", 12)


def test_end_of_sequence_given_as_a_stop_id_is_a_stop_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, [8, EOS])
    params = greedy(stop_token_ids=[EOS], ignore_eos=True)
    last = generate(fake_engine()[0], [PROMPT], params)[0][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", EOS)


def test_ignored_end_of_sequence_runs_to_max_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [EOS])
    updates = generate(fake_engine()[0], [PROMPT], greedy(7, ignore_eos=True))[0]
    assert tokens_of(updates) == [EOS] * 7
    assert updates[-1].finish_reason == "length"


def test_a_stop_id_as_the_last_token_allowed_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [8, 9, EOS])
    assert generate(fake_engine()[0], [PROMPT], greedy(3))[0][-1].finish_reason == "stop"


def test_min_tokens_masks_every_stop_id(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [EOS])
    updates = generate(fake_engine()[0], [PROMPT], greedy(9, min_tokens=4))[0]
    assert len(tokens_of(updates)) == 5
    assert EOS not in tokens_of(updates)[:4]
    assert updates[-1].finish_reason == "stop"


class Words:
    """A detokenizer whose text is the ids; it stops at a given text."""

    def __init__(self, stop: str = "", fails: bool = False) -> None:
        self.text, self.num_tokens, self.finished = "", 0, False
        self._stop, self._fails = stop, fails

    def append(self, token_ids: Any, finished: bool) -> str | None:
        if self._fails:
            raise UnicodeError("no text for this token")
        self.num_tokens += len(token_ids)
        self.text += "".join(f"{token} " for token in token_ids)
        self.finished |= finished
        return self._stop if self._stop and self._stop in self.text else None


def give(words: Words) -> Words:
    return words


def test_a_stop_string_ends_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [8, 9, 10, 11])
    engine, _ = fake_engine()
    words = Words("9 10")
    engine.add_request("a", PROMPT, greedy(stop=["9 10"]), detokenizer_factory=lambda: words)
    updates = drain(engine)["a", 0]
    assert tokens_of(updates) == [8, 9, 10]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "9 10")
    assert updates[-1].detokenizer is words
    assert words.finished
    assert engine.counters.times.detokenize > 0


def test_the_text_of_a_stop_id_is_left_out_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, [8, 9, EOS])
    for include, text in ((False, "8 9 "), (True, "8 9 1 ")):
        engine, _ = fake_engine()
        words = Words("never")
        params = greedy(stop=["never"], include_stop_str_in_output=include)
        engine.add_request("a", PROMPT, params, detokenizer_factory=partial(give, words))
        drain(engine)
        assert words.text == text


# --- edits of logits -------------------------------------------------------------------------


def test_logit_bias_forces_and_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [8])
    engine, _ = fake_engine()
    engine.add_request("force", PROMPT, greedy(4, logit_bias={20: 100.0}))
    engine.add_request("forbid", PROMPT, greedy(4, logit_bias={8: -100.0}))
    engine.add_request("plain", PROMPT, greedy(4))
    results = drain(engine)
    assert tokens_of(results["force", 0]) == [20] * 4
    assert 8 not in tokens_of(results["forbid", 0])
    assert tokens_of(results["plain", 0]) == [8] * 4


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 10.0}],
)
def test_penalties_break_repetition_for_their_request_only(
    monkeypatch: pytest.MonkeyPatch, penalty: dict[str, float]
) -> None:
    def call(self: FakeModel, batch: Any, caches: Any) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_rows), VOCAB)
        logits[:, 8], logits[:, 9] = 1.0, 0.5
        return logits

    monkeypatch.setattr(FakeModel, "__call__", call)
    engine, _ = fake_engine()
    engine.add_request("penalised", PROMPT, greedy(3, **penalty))
    engine.add_request("plain", PROMPT, greedy(3))
    results = drain(engine)
    assert tokens_of(results["penalised", 0])[:2] == [8, 9]
    assert tokens_of(results["plain", 0]) == [8, 8, 8]


def test_logprobs_are_of_the_logits_before_edits() -> None:
    engine, _ = fake_engine()
    plain = generate(engine, [PROMPT], greedy(1, logprobs=2, ignore_eos=True))[0][0]
    biased = generate(engine, [PROMPT], greedy(1, logprobs=2, logit_bias={20: 100.0}))[0][0]
    assert plain.new_logprobs is not None
    assert biased.new_logprobs is not None
    assert biased.new_logprobs[0].token_id == 20
    assert biased.new_logprobs[0].top_ids == plain.new_logprobs[0].top_ids
    assert biased.new_logprobs[0].rank > 1


def test_prompt_logprobs_survive_preemption() -> None:
    engine, _ = fake_engine(num_pages=9, block_size=16)
    params = greedy(45, ignore_eos=True, prompt_logprobs=1)
    for i in range(3):
        engine.add_request(str(i), [3 + i] * 35, params)
    results = drain(engine)
    assert engine.counters.preemptions > 0
    for i in range(3):
        entries = [u.prompt_logprobs for u in results[str(i), 0] if u.prompt_logprobs]
        assert len(entries) == 1
        assert len(entries[0]) == 35
        assert tokens_of(results[str(i), 0]) == greedy_output([3 + i] * 35, 45, eos=False)


# --- errors inside a step --------------------------------------------------------------------


def test_a_request_that_breaks_a_step_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine, model = fake_engine()
    model.broken_token = 33
    engine.add_request("good", PROMPT, greedy())
    engine.add_request("bad", [3, 33, 4], greedy(n=2))
    results = drain(engine)
    assert tokens_of(results["good", 0]) == greedy_output(PROMPT, 10)
    for index in range(2):
        last = results["bad", index][-1]
        assert last.finish_reason == "abort"
        assert "token 33 broke the step" in (last.error or "")
    assert engine.counters.kv_pages_in_use == 0
    assert engine.counters.failed_steps >= 2
    assert len([record for record in caplog.records if "a step failed" in record.message]) == 1
    assert tokens_of(generate(engine, [PROMPT], greedy())[0]) == greedy_output(PROMPT, 10)


def test_logits_that_are_not_numbers_abort_their_sequence_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = FakeModel.__call__

    def poisoned(self: FakeModel, batch: Any, caches: Any) -> torch.Tensor:
        logits = call(self, batch, caches)
        for i, row in enumerate(batch.logits_rows.tolist()):
            if int(batch.token_ids[row]) == 33:
                logits[i, 7] = float("nan")
        return logits

    monkeypatch.setattr(FakeModel, "__call__", poisoned)
    engine, _ = fake_engine()
    engine.add_request("good", PROMPT, greedy(logprobs=1))
    engine.add_request("bad", [4, 33], greedy())
    results = drain(engine)
    assert tokens_of(results["good", 0]) == greedy_output(PROMPT, 10)
    assert "NaN" in (results["bad", 0][-1].error or "")
    assert results["bad", 0][-1].finish_reason == "abort"


def test_a_detokenizer_that_raises_aborts_its_request_only() -> None:
    engine, _ = fake_engine()
    engine.add_request("good", PROMPT, greedy())
    params = greedy(stop=["x"])
    engine.add_request("bad", PROMPT, params, detokenizer_factory=lambda: Words(fails=True))
    results = drain(engine)
    assert tokens_of(results["good", 0]) == greedy_output(PROMPT, 10)
    assert "no text for this token" in (results["bad", 0][-1].error or "")
    assert engine.counters.kv_pages_in_use == 0


def interrupted(*args: Any) -> torch.Tensor:
    raise KeyboardInterrupt


def test_an_interrupt_inside_a_step_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = fake_engine()
    engine.add_request("a", PROMPT, greedy())
    got = [token for u in engine.step() for token in u.new_token_ids]
    with monkeypatch.context() as patch:
        patch.setattr(FakeModel, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    got += tokens_of(drain(engine)["a", 0])
    assert got == greedy_output(PROMPT, 10)


# --- refusals --------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[str, str, Callable[[Engine], None]]] = [
    ("prompt_token_ids", "empty", lambda e: e.add_request("x", [], greedy())),
    ("prompt_token_ids", "50", lambda e: e.add_request("x", [3, VOCAB], greedy())),
    ("prompt_token_ids", "-1", lambda e: e.add_request("x", [3, -1], greedy())),
    ("prompt_token_ids", "text", lambda e: e.add_request("x", "abc", greedy())),  # type: ignore[arg-type]
    ("prompt_token_ids", "integers", lambda e: e.add_request("x", [3.5], greedy())),  # type: ignore[list-item]
    ("prompt_token_ids", "integers", lambda e: e.add_request("x", [[3]], greedy())),  # type: ignore[list-item]
    ("prompt_token_ids", "integers", lambda e: e.add_request("x", [2**70], greedy())),
    ("prompt_token_ids", "integers", lambda e: e.add_request("x", [True, False], greedy())),
    ("prompt_token_ids", "integers", lambda e: e.add_request("x", [[3], [4, 5]], greedy())),  # type: ignore[list-item]
    ("request_id", "non-empty", lambda e: e.add_request("", PROMPT, greedy())),
    ("request_id", "in use", lambda e: e.add_request("taken", PROMPT, greedy())),
    ("params", "SamplingParams", lambda e: e.add_request("x", PROMPT, None)),  # type: ignore[arg-type]
    ("priority", "integer", lambda e: e.add_request("x", PROMPT, greedy(), priority=1.5)),  # type: ignore[arg-type]
    ("reuse_scope", "ReuseScope", lambda e: e.add_request("x", PROMPT, greedy(), reuse_scope="s")),  # type: ignore[arg-type]
    ("stop", "tokenizer", lambda e: e.add_request("x", PROMPT, greedy(stop=["a"]))),
]


@pytest.mark.parametrize(("field", "words", "add"), BAD_REQUESTS)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    field: str, words: str, add: Callable[[Engine], None]
) -> None:
    engine, _ = fake_engine()
    engine.add_request("taken", PROMPT, greedy())
    with pytest.raises(FieldError, match=words) as info:
        add(engine)
    assert info.value.param == field
    assert str(info.value).startswith(field)
    assert tokens_of(drain(engine)["taken", 0]) == greedy_output(PROMPT, 10)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs"])
def test_parameters_beyond_the_vocabulary_are_refused(field: str) -> None:
    values: dict[str, Any] = {"stop_token_ids": [VOCAB], "logit_bias": {VOCAB: 1.0}}
    engine, _ = fake_engine()
    with pytest.raises(ValueError, match=field):
        engine.add_request("x", PROMPT, greedy(**{field: values.get(field, VOCAB + 1)}))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("max_tokens", [None, 1, 1000])
def test_prompts_round_the_limit(max_tokens: int | None) -> None:
    engine, _ = fake_engine()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    assert len(tokens_of(generate(engine, [[3] * (MAX_LEN - 1)], params)[0])) == 1
    for length in (MAX_LEN, MAX_LEN + 1):
        with pytest.raises(FieldError) as info:
            engine.add_request("x", [3] * length, params)
        message = str(info.value)
        assert str(length) in message
        assert str(MAX_LEN) in message
        assert "max_tokens" not in message, "the message speaks of what was sent"


def test_a_prompt_longer_than_the_pool_names_both_numbers() -> None:
    engine, _ = fake_engine(num_pages=5)
    with pytest.raises(FieldError, match=r"100 tokens.*max_model_len is 64.*KV pool") as info:
        engine.add_request("x", [3] * 100, greedy())
    assert info.value.param == "prompt_token_ids"


def test_numpy_prompts_are_taken_and_copied() -> None:
    engine, _ = fake_engine()
    prompt = np.array(PROMPT, np.int64)
    engine.add_request("a", prompt, greedy())  # type: ignore[arg-type]
    prompt[:] = 0
    assert tokens_of(drain(engine)["a", 0]) == greedy_output(PROMPT, 10)
