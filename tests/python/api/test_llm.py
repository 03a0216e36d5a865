"""LLM over a fake engine: order, text, stops, logprobs, refusals that leave nothing behind."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from api.fake_engine import FakeEngine
from helicore.llm import LLM
from helicore.sampling_params import SamplingParams
from helicore.tokenizer import Tokenizer

MakeLLM = Callable[..., LLM]


@pytest.fixture
def writer(tokenizer: Tokenizer) -> Callable[[str], Callable[[Sequence[int], int], list[int]]]:
    """A script that continues every prompt with `text` and then the end of sequence."""

    def write(text: str) -> Callable[[Sequence[int], int], list[int]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return lambda prompt, index: [*ids, 1]

    return write


def echo(prompt: Sequence[int], index: int) -> list[int]:
    """Length depends on the prompt, so that requests end out of order."""
    return [*prompt, *([20 + index] * len(prompt)), 1]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_outputs_come_in_the_order_of_the_prompts(
    make_llm: MakeLLM, tokenizer: Tokenizer, tokens_per_step: int
) -> None:
    prompts = ["the quick brown fox jumps", "def", "class A:\n"]
    llm = make_llm(FakeEngine(echo, tokens_per_step=tokens_per_step))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=None), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == echo(ids, 0)
        assert output.outputs[0].text == tokenizer.decode(echo(ids, 0))
        assert output.finished
        assert output.num_cached_tokens == 3
        assert output.metrics is not None
        assert output.metrics.latency is not None
        assert output.metrics.time_to_first_token is not None
    assert len({output.request_id for output in outputs}) == 3


def test_every_form_of_prompt_is_taken(make_llm: MakeLLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox")
    llm = make_llm(FakeEngine(echo))
    for prompts in (
        "fox",
        ["fox"],
        {"prompt": "fox"},
        ({"prompt": "fox"},),
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": tuple(ids)}],
        {"prompt_token_ids": ids, "prompt": "fox"},
    ):
        (output,) = llm.generate(prompts, use_tqdm=False)
        assert output.prompt_token_ids == ids
    assert llm.generate([], use_tqdm=False) == []


def test_each_prompt_can_have_its_own_parameters(make_llm: MakeLLM) -> None:
    engine = FakeEngine(lambda prompt, index: [])
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, n=3)]
    outputs = make_llm(engine).generate(["a", "b"], params, use_tqdm=False, priority=[1, -1])
    assert [[len(c.token_ids) for c in o.outputs] for o in outputs] == [[2], [5, 5, 5]]
    assert [c.index for c in outputs[1].outputs] == [0, 1, 2]
    assert [c.finish_reason for o in outputs for c in o.outputs] == ["length"] * 4
    assert [entry["priority"] for entry in engine.added] == [1, -1]


def test_none_means_the_defaults_of_the_model(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeEngine(echo))
    assert llm.get_default_sampling_params().temperature == 0.5
    assert llm.get_default_sampling_params().max_tokens == 16


# Text and stops


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7])
def test_the_text_ends_before_a_stop_string(
    make_llm: MakeLLM, writer: Any, tokens_per_step: int
) -> None:
    engine = FakeEngine(writer("the quick brown fox jumps"), tokens_per_step=tokens_per_step)
    params = SamplingParams(max_tokens=None, stop=["wn fo", "jumps"])
    completion = make_llm(engine).generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == "the quick bro"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "wn fo")
    included = SamplingParams(max_tokens=None, stop="wn fo", include_stop_str_in_output=True)
    completion = make_llm(engine).generate("x", included, use_tqdm=False)[0].outputs[0]
    assert completion.text == "the quick brown fo"


def test_a_stop_token_is_no_text_but_is_reported(make_llm: MakeLLM, tokenizer: Tokenizer) -> None:
    fox = tokenizer.encode("fox", add_special_tokens=False)
    engine = FakeEngine(lambda prompt, index: [*fox, 40, 41])
    params = SamplingParams(stop_token_ids=[40])
    completion = make_llm(engine).generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == [*fox, 40]
    assert completion.text == "fox"
    assert completion.stop_reason == 40
    params = SamplingParams(stop_token_ids=[40], include_stop_str_in_output=True)
    completion = make_llm(engine).generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == "fox" + tokenizer.decode([40])


def test_end_of_sequence_has_no_stop_reason(make_llm: MakeLLM, writer: Any) -> None:
    llm = make_llm(FakeEngine(writer("fox")))
    completion = llm.generate("x", use_tqdm=False)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        "fox",
        "stop",
        None,
    )


def test_special_tokens_show_only_when_asked_for(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeEngine(lambda prompt, index: [3, 4, 1]))
    shown = SamplingParams(skip_special_tokens=False, ignore_eos=True, max_tokens=3)
    assert llm.generate("x", use_tqdm=False)[0].outputs[0].text == ""
    assert llm.generate("x", shown, use_tqdm=False)[0].outputs[0].text == "<user><assistant><eos>"


def test_detokenize_false_leaves_the_text_empty(make_llm: MakeLLM, writer: Any) -> None:
    llm = make_llm(FakeEngine(writer("fox")))
    completion = llm.generate("x", SamplingParams(detokenize=False), use_tqdm=False)[0].outputs[0]
    assert completion.text == ""
    assert completion.token_ids


def test_a_stream_gives_the_same_text_in_pieces(make_llm: MakeLLM, writer: Any) -> None:
    text = "żółw — the quick 🐍 brown fox"
    params = SamplingParams(max_tokens=None, stop=["fox!"])
    whole = make_llm(FakeEngine(writer(text))).generate("x", params, use_tqdm=False)
    pieces = list(make_llm(FakeEngine(writer(text))).stream("x", params))
    assert "".join(pieces) == whole[0].outputs[0].text == text
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_leaving_a_stream_cancels_its_request(make_llm: MakeLLM) -> None:
    engine = FakeEngine(lambda prompt, index: [])
    llm = make_llm(engine)
    for _ in llm.stream("x", SamplingParams(max_tokens=None)):
        break
    assert engine.aborted == ["0"]
    with llm.stream("x", SamplingParams(max_tokens=None)) as stream:
        next(stream)
        assert not stream.output.finished
    assert engine.aborted == ["0", "1"]
    assert not engine.has_unfinished()
    with pytest.raises(ValueError, match="n must be 1"):
        list(llm.stream("x", SamplingParams(n=2)))


def test_a_stream_and_a_batch_can_run_at_the_same_time(make_llm: MakeLLM, writer: Any) -> None:
    llm = make_llm(FakeEngine(writer("the quick brown fox")))
    stream = llm.stream("x", SamplingParams(max_tokens=None))
    first = next(stream)
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=None), use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["the quick brown fox"] * 2
    assert first + "".join(stream) == "the quick brown fox"


# Log-probabilities


def test_logprobs_are_keyed_by_token_the_chosen_one_first(
    make_llm: MakeLLM, tokenizer: Tokenizer
) -> None:
    engine = FakeEngine(lambda prompt, index: [30, 31])
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    output = make_llm(engine).generate("the fox", params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[30, 100], [31, 100]]
    chosen = completion.logprobs[0][30]
    assert (chosen.logprob, chosen.rank) == (-0.5, 1)
    assert chosen.decoded_token == tokenizer.decode([30])
    assert completion.logprobs[0][100].rank == 2
    assert completion.cumulative_logprob == -1.0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_no_logprobs_unless_asked_for(make_llm: MakeLLM) -> None:
    output = make_llm(FakeEngine(echo)).generate("x", use_tqdm=False)[0]
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


# Refusals

BAD_PROMPTS: list[tuple[Any, str]] = [
    (5, r"^prompts must be"),
    (b"x", r"^prompts must be"),
    (None, r"^prompts must be"),
    ("", r"^prompt must not be empty"),
    (["ok", ""], r"^prompts\[1\] must not be empty"),
    (["ok", 5], r"^prompts\[1\] must be a string or a dict"),
    ([[1, 2]], r"^prompts\[0\] must be a string or a dict"),
    ({}, r"^prompt must have 'prompt' or 'prompt_token_ids'"),
    ({"text": "x"}, r"^prompt must have keys from"),
    ({"prompt": 5}, r"^prompt\.prompt must be a string"),
    ({"prompt": ""}, r"^prompt\.prompt must not be empty"),
    ({"prompt_token_ids": []}, r"^prompt\.prompt_token_ids must not be empty"),
    ({"prompt_token_ids": "12"}, r"^prompt\.prompt_token_ids must be a list"),
    ({"prompt_token_ids": [1], "cache_salt": 1.5}, r"^prompt\.cache_salt"),
    (["x", {"prompt_token_ids": [7] * 1000}], r"^prompts\[1\]: prompt_token_ids has 1000 tokens"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=lambda v: repr(v)[:30])
def test_a_bad_prompt_is_refused_by_its_place_and_nothing_stays(
    make_llm: MakeLLM, prompts: Any, message: str
) -> None:
    engine = FakeEngine(echo)
    llm = make_llm(engine)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, use_tqdm=False)
    assert not engine.has_unfinished()
    assert engine.num_steps == 0
    assert llm.generate("fox", use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 1}, r"^sampling_params must be"),
        ([SamplingParams()], r"^sampling_params must have one entry per prompt \(2\), got 1"),
        ([SamplingParams(), None], r"^sampling_params\[1\] must be"),
    ],
)
def test_bad_parameters_are_refused(make_llm: MakeLLM, params: Any, message: str) -> None:
    engine = FakeEngine(echo)
    with pytest.raises(ValueError, match=message):
        make_llm(engine).generate(["a", "b"], params, use_tqdm=False)
    assert not engine.added


def test_priorities_must_fit_the_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeEngine(echo))
    with pytest.raises(ValueError, match=r"^priority must have one entry"):
        llm.generate(["a", "b"], priority=[1], use_tqdm=False)
    bad: Any = [1.5]
    with pytest.raises(ValueError, match=r"^priority\[0\]"):
        llm.generate("a", priority=bad, use_tqdm=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")])
def test_an_interrupt_aborts_the_batch_and_the_engine_goes_on(
    make_llm: MakeLLM, error: BaseException
) -> None:
    engine = FakeEngine(echo, fail_at_step=error)
    llm = make_llm(engine)
    with pytest.raises(type(error)):
        llm.generate(["a", "b"], use_tqdm=False)
    assert sorted(engine.aborted) == ["0", "1"]
    assert not engine.has_unfinished()
    assert llm.generate("fox", use_tqdm=False)[0].finished


def test_a_lost_request_is_an_error_and_not_an_endless_loop(make_llm: MakeLLM) -> None:
    engine = FakeEngine(echo)
    llm = make_llm(engine)
    engine.has_unfinished = lambda: False
    with pytest.raises(RuntimeError, match="lost a request"):
        llm.generate("x", use_tqdm=False)


def test_without_a_tokenizer_ids_work_and_text_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(FakeEngine(echo), with_tokenizer=False)
    completion = llm.generate({"prompt_token_ids": [7, 8]}, use_tqdm=False)[0].outputs[0]
    assert completion.token_ids == [7, 8, 20, 20, 1]
    assert completion.text == ""
    with pytest.raises(ValueError, match=r"^prompt must have 'prompt_token_ids'"):
        llm.generate("fox", use_tqdm=False)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "x"}])


# Chat


def test_chat_renders_the_template_without_a_second_begin_token(
    make_llm: MakeLLM, tokenizer: Tokenizer
) -> None:
    llm = make_llm(FakeEngine(echo))
    message = {"role": "user", "content": "fox"}
    (output,) = llm.chat([message], use_tqdm=False)
    assert output.prompt is not None
    assert output.prompt.startswith("<bos>")
    assert output.prompt.rstrip("\n").endswith("<assistant>")
    assert output.prompt_token_ids.count(0) == 1
    two = llm.chat([[message], [message, message]], use_tqdm=False)
    assert [o.prompt_token_ids.count(3) for o in two] == [1, 2]
    (custom,) = llm.chat([message], use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert custom.prompt == "fox"
    with pytest.raises(ValueError, match=r"^messages\[1\]: messages\[0\]\.role"):
        llm.chat([[message], [{"content": "x"}]], use_tqdm=False)
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([], use_tqdm=False)


# Life


def test_close_is_idempotent_and_later_use_is_a_clear_error(make_llm: MakeLLM) -> None:
    engine = FakeEngine(echo)
    with make_llm(engine) as llm:
        assert llm.generate("x", use_tqdm=False)
    llm.close()
    assert engine.closed == 1
    for use in (
        lambda: llm.generate("x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream("x"),
        lambda: llm.counters,
    ):
        with pytest.raises(RuntimeError, match=r"LLM \(fake\) is closed"):
            use()


def test_the_progress_bar_shows_tokens_per_second(make_llm: MakeLLM) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown):
        make_llm(FakeEngine(echo)).generate(["a", "b"], SamplingParams(max_tokens=4))
    assert "2/2" in shown.getvalue()
    assert "tok/s" in shown.getvalue()


def test_construction_errors_name_the_argument(tmp_path: Path) -> None:
    for arguments, error, message in (
        ({"model": "no/such-model"}, FileNotFoundError, "hf download no/such-model"),
        ({"model": "no_such_folder"}, FileNotFoundError, "model: there is no folder"),
        ({"model": str(tmp_path)}, FileNotFoundError, "no config.json"),
        ({"model": ""}, ValueError, "model must be"),
        ({"model": 5}, ValueError, "model must be"),
    ):
        with pytest.raises(error, match=message):
            LLM(**arguments)


def test_nan_cannot_slip_through_sampling_params(make_llm: MakeLLM) -> None:
    with pytest.raises(ValueError, match="temperature"):
        make_llm(FakeEngine(echo)).generate("x", SamplingParams(temperature=math.nan))
