"""Commands, exit codes and JSON over a fake engine; errors are one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from api.fake_engine import FakeEngine
from helicore.cli import options
from helicore.cli.main import app
from helicore.llm import LLM
from helicore.tokenizer import Tokenizer
from typer.testing import CliRunner, Result


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    text = tokenizer.encode(" quick brown fox", add_special_tokens=False)

    def script(prompt: Sequence[int], index: int) -> list[int]:
        return [*text, 1]

    return FakeEngine(script)


@pytest.fixture
def helicore(
    monkeypatch: pytest.MonkeyPatch, make_llm: Callable[..., LLM], engine: FakeEngine
) -> Callable[..., Result]:
    """Runs a command line; models are fake and every load is noted in `loads`."""
    loads: list[dict[str, Any]] = []

    def load(model: str, **arguments: Any) -> LLM:
        loads.append({"model": model, **arguments})
        return make_llm(engine)

    monkeypatch.setattr(options, "load_llm", load)

    def invoke(*arguments: str, text: str | None = None) -> Result:
        result = CliRunner().invoke(app, list(arguments), input=text)
        result.loads = loads  # type: ignore[attr-defined]
        return result

    return invoke


def last_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_generate_prints_one_json_line(helicore: Callable[..., Result]) -> None:
    result = helicore(
        *("generate", "--model", "tiny", "--prompt", "the", "--max-tokens", "32"),
        *("--temperature", "0", "--logprobs", "1", "--json"),
    )
    value = last_json(result)
    assert len(result.stdout.splitlines()) == 1
    (output,) = value["outputs"]
    assert output["prompt"] == "the"
    assert output["outputs"][0]["text"] == " quick brown fox"
    assert output["outputs"][0]["finish_reason"] == "stop"
    assert len(output["outputs"][0]["logprobs"]) == len(output["outputs"][0]["token_ids"])
    assert value["usage"]["completion_tokens"] == len(output["outputs"][0]["token_ids"])
    assert value["model"] == "tiny"
    assert value["tokens_per_second"] > 0


def test_generate_streams_prompt_and_text_and_reports_speed(
    helicore: Callable[..., Result],
) -> None:
    result = helicore("generate", "--prompt", "the")
    assert result.exit_code == 0
    assert result.stdout == "the quick brown fox\n"
    assert "tokens/s" in result.stderr


def test_generate_takes_prompts_from_everywhere(
    helicore: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    result = helicore(
        *("generate", "--prompt", "-", "--prompt", "two", "--prompt-file", str(file)),
        *("--token-ids", "0,7, 8", "--n", "2", "--json"),
        text="from stdin",
    )
    value = last_json(result)
    assert [o["prompt"] for o in value["outputs"]] == ["from stdin", "two", "from a file", None]
    assert value["outputs"][3]["prompt_token_ids"] == [0, 7, 8]
    assert all(len(o["outputs"]) == 2 for o in value["outputs"])


def test_generate_shows_several_outputs(helicore: Callable[..., Result]) -> None:
    result = helicore("generate", "--prompt", "a", "--prompt", "b", "--n", "2")
    assert result.exit_code == 0
    assert "--- 2.1 (stop)\nb quick brown fox\n" in result.stdout


def test_engine_options_reach_the_model(helicore: Callable[..., Result]) -> None:
    result = helicore(
        *("generate", "-m", "folder", "-p", "x", "--dtype", "float32", "--threads", "2"),
        *("--block-size", "16", "--host-gb", "0.5", "--no-prefix-caching", "--json"),
        *("--kv-cache-dtype", "nvfp4"),
    )
    (load,) = result.loads  # type: ignore[attr-defined]
    assert load["model"] == "folder"
    assert load["dtype"] == "float32"
    assert load["num_threads"] == 2
    assert (load["block_size"], load["host_gb"]) == (16, 0.5)
    assert load["kv_cache_dtype"] == "nvfp4"
    assert load["no_prefix_caching"]


def test_levels_below_the_hot_one_reach_the_model(helicore: Callable[..., Result]) -> None:
    result = helicore(
        *("generate", "-p", "x", "--json", "--swap-host-gb", "0.25"),
        *("--swap-path", "folder", "--swap-disk-gb", "2"),
    )
    (load,) = result.loads  # type: ignore[attr-defined]
    assert (load["swap_host_gb"], load["swap_path"], load["swap_disk_gb"]) == (0.25, "folder", 2)


def test_a_temperature_of_zero_is_not_taken_for_a_missing_one() -> None:
    from helicore.cli.options import Sampling
    from helicore.sampling_params import SamplingParams

    given = {"temperature": 0.0, "top_k": 0, "ignore_eos": False, "stop": [], "model": "m"}
    params = Sampling.of(given).over(SamplingParams(temperature=0.7, top_k=5, stop=["x"]))
    assert (params.temperature, params.top_k, list(params.stop or [])) == (0, 0, ["x"])


BAD_LINES = [
    (("generate",), "--prompt"),
    (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
    (("generate", "--prompt", "x", "--top-p", "0"), "top_p"),
    (("generate", "--prompt", "x", "--max-tokens", "0"), "max_tokens"),
    (("generate", "--prompt", "x", "--n", "0"), "n must be"),
    (("generate", "--prompt", "x", "--stop", ""), "stop"),
    (("generate", "--prompt", ""), "must not be empty"),
    (("generate", "--token-ids", "1,b"), "--token-ids"),
    (("generate", "--prompt-file", "no-such-file"), "no-such-file"),
    (("bench", "throughput", "--vs", "somebody"), "--vs"),
    (("bench", "throughput", "--refcheck"), "--vs transformers"),
    (("bench", "throughput", "--row", "nothing"), "--row must be one of decode_b1"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=lambda v: str(v)[:50])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    helicore: Callable[..., Result], line: tuple[str, ...], message: str
) -> None:
    result = helicore(*line)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "line", [("nonsense",), ("generate", "--nonsense"), ("generate", "--n", "x")]
)
def test_usage_errors_have_exit_code_2(
    helicore: Callable[..., Result], line: tuple[str, ...]
) -> None:
    result = helicore(*line)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_a_failure_of_the_engine_is_exit_code_1(
    helicore: Callable[..., Result], engine: FakeEngine
) -> None:
    engine.fail_at_step = RuntimeError("first line\nsecond line")
    result = helicore("generate", "--prompt", "x", "--json")
    assert result.exit_code == 1
    assert result.stderr == "error: first line second line\n"


def test_an_interrupt_is_exit_code_130(helicore: Callable[..., Result], engine: FakeEngine) -> None:
    engine.fail_at_step = KeyboardInterrupt()
    result = helicore("generate", "--prompt", "x", "--json")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


@pytest.mark.parametrize("place", ["first", "last"])
def test_debug_shows_the_traceback_from_anywhere_on_the_line(
    helicore: Callable[..., Result], place: str
) -> None:
    line = ["generate", "--prompt", "x", "--temperature", "-1"]
    line = ["--debug", *line] if place == "first" else [*line, "--debug"]
    result = helicore(*line)
    assert isinstance(result.exception, ValueError)


def test_chat_answers_one_message(helicore: Callable[..., Result]) -> None:
    value = last_json(helicore("chat", "--message", "hi", "--system", "be brief", "--json"))
    assert value["message"] == {"role": "assistant", "content": " quick brown fox"}
    assert "be brief" in value["outputs"][0]["prompt"]


def test_chat_reads_turns_and_remembers_them(helicore: Callable[..., Result]) -> None:
    result = helicore("chat", "--json", text="one\ntwo\n/reset\nthree\n/exit\nfour\n")
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    prompts = [turn["outputs"][0]["prompt"] for turn in turns]
    assert len(prompts) == 3
    assert "one" in prompts[1]
    assert "one" not in prompts[2]
    plain = helicore("chat", text="one\n")
    assert plain.stdout == " quick brown fox\n"


def test_env_and_models_print_json(helicore: Callable[..., Result]) -> None:
    env = last_json(helicore("env", "--json"))
    assert {"commit", "cpu", "threads", "isa", "versions"} <= env.keys()
    assert env["versions"]["torch"]
    assert env["kv_cache_row_bytes"] == {
        "float32": 2304,
        "bfloat16": 1152,
        "fp8": 576,
        "fp8_ds_mla": 656,
        "nvfp4": 416,
    }
    names = [row["name"] for row in last_json(helicore("models", "--json"))["models"]]
    assert "tiny" in names
    shown = helicore("env")
    assert shown.exit_code == 0
    for cell in ("nvfp4", "416", "656", "576", "1152"):
        assert cell in shown.stdout
    assert "tiny" in helicore("models").stdout


def test_help_and_version(helicore: Callable[..., Result]) -> None:
    assert "generate" in helicore("--help").stdout
    assert "throughput" in helicore("bench", "--help").stdout
    assert helicore("--version").stdout.startswith("helicore ")
