"""Values that no caller means: each is a ValueError that names its field, before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helicore import LLM, KVCacheConfig, SamplingParams, SchedulerConfig
from helicore.chat_template import ChatTemplate
from helicore.model_path import resolve_model
from helicore.models.config import ModelConfig
from helicore.tokenizer import Tokenizer
from typer.testing import CliRunner

HUGE = 10**5000
ONE = SamplingParams(max_tokens=1)


def short(value: object) -> str:
    return value if isinstance(value, str) and len(value) < 30 else type(value).__name__


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_threads=1, kv_cache=KVCacheConfig(host_gb=0.02)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", HUGE),
        ("top_k", HUGE),
        ("seed", HUGE),
        ("n", np.array([1, 2])),
        ("temperature", np.array([1, 2])),
        ("temperature", torch.ones(2)),
        ("temperature", np.True_),
        ("n", np.True_),
        ("max_tokens", torch.tensor(True)),
        ("repetition_penalty", 1e-300),
        ("top_p", 1e-300),
        ("top_p", 1e-40),
        ("logit_bias", {3: HUGE}),
        ("logit_bias", {"9" * 5000: 1}),
    ],
    ids=short,
)
def test_a_sampling_value_that_is_no_such_number_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        SamplingParams(**{name: value})


def test_the_smallest_normal_number_of_float32_is_allowed(llm: LLM) -> None:
    params = SamplingParams(top_p=2.0**-126, repetition_penalty=2.0**-126, max_tokens=2)
    output = llm.generate("def f(", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.error) == ("length", None)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (KVCacheConfig, "host_gb", HUGE),
        (KVCacheConfig, "host_gb", float("inf")),
        (KVCacheConfig, "block_size", np.array([1, 2])),
        (KVCacheConfig, "block_size", torch.ones(2)),
        (SchedulerConfig, "max_num_seqs", HUGE),
        (SchedulerConfig, "max_num_seqs", np.array([1, 2])),
    ],
    ids=short,
)
def test_a_setting_that_is_no_such_number_names_its_field(
    kind: type[Any], name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        kind(**{name: value})


def test_a_cache_beyond_the_memory_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import helicore.executor.engine as engine

    monkeypatch.setattr(engine, "load", lambda config: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"host_gb must be at most .* [0-9.]+ GiB, got 1e\+300"):
        LLM("tiny", kv_cache=KVCacheConfig(host_gb=1e300))


@pytest.mark.parametrize("value", [3, "", b"tiny", "x" * 5000, "\0"], ids=short)
@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_a_name_that_no_file_can_have_names_its_argument(name: str, value: Any) -> None:
    arguments = {"model": "tiny", name: value}
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{name}"):
        LLM(**arguments)


@pytest.mark.parametrize("salt", [2**70, -(2**70), "\ud800", True, np.True_])
def test_a_salt_that_cannot_be_one_names_its_prompt(llm: LLM, salt: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts\[1\].cache_salt"):
        llm.generate(["a", {"prompt": "b", "cache_salt": salt}], ONE, use_tqdm=False)


@pytest.mark.parametrize("salt", [-(2**63), 0, 2**63 - 1, "", "é"])
def test_any_other_salt_is_served(llm: LLM, salt: Any) -> None:
    prompt = {"prompt": "b", "cache_salt": salt}
    assert llm.generate(prompt, ONE, use_tqdm=False)[0].finished


def test_one_priority_serves_all_prompts(llm: LLM) -> None:
    many: tuple[Any, ...] = (1, np.int64(1), [1, 2], np.array([1, 2]), [np.int64(1), 2])
    for good in many:
        assert len(llm.generate(["a", "b"], ONE, False, priority=good)) == 2
    for bad in ("12", 1.5, True, object(), np.True_, np.array([1.0, 2.0])):
        with pytest.raises(ValueError, match=r"^priority"):
            llm.generate(["a", "b"], ONE, False, priority=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^priority\[0\]"):
        llm.generate(["a", "b"], ONE, False, priority=HUGE)


@pytest.mark.parametrize("ids", [[True, 2], [np.True_, 2], np.array([True, False])])
def test_truth_values_are_no_token_ids(llm: LLM, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt_token_ids must be a flat"):
        llm.generate([{"prompt_token_ids": ids}], ONE, use_tqdm=False)


def test_a_lone_surrogate_names_its_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompts\[1\] holds a lone surrogate"):
        llm.generate(["a", "\ud800"], ONE, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^messages: .* lone surrogate"):
        llm.chat([{"role": "user", "content": "\ud800"}], ONE, use_tqdm=False)


@pytest.mark.parametrize("name", ["messages", "tools", "self", "add_generation_prompt"])
def test_a_template_variable_of_a_reserved_name_is_refused(llm: LLM, name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=f"chat_template_kwargs must not have {name}"):
        llm.chat(messages, ONE, False, chat_template_kwargs={name: 1})
    with pytest.raises(ValueError, match=r"^chat_template_kwargs must be a mapping"):
        llm.chat(messages, ONE, False, chat_template_kwargs=3)  # type: ignore[arg-type]


def test_tools_that_are_no_list_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="tools must be a list"):
        llm.chat([{"role": "user", "content": "x"}], ONE, False, tools=3)  # type: ignore[arg-type]


def test_a_template_that_calls_itself_without_end_is_refused() -> None:
    endless = ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(ValueError, match="chat_template refused these messages"):
        endless.render([{"role": "user", "content": "x"}])
    with pytest.raises(ValueError, match="chat_template does not parse"):
        ChatTemplate("{{ " + "(" * 100000)


@pytest.mark.parametrize(
    "text", ["[" * 100000, '{"a": ' * 100000, '{"a": ' + "9" * 5000 + "}"], ids=short
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_beyond_what_a_parser_takes_names_its_file(
    tmp_path: Path, name: str, text: str
) -> None:
    shutil.copytree(resolve_model("tiny"), tmp_path / "m")
    (tmp_path / "m" / name).write_text(text)
    read: Callable[[Path], object] = ModelConfig.from_dir if name == "config.json" else Tokenizer
    with pytest.raises(ValueError, match=name):
        read(tmp_path / "m")


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], 3, None])
def test_ids_that_cannot_be_decoded_are_named(llm: LLM, ids: Any) -> None:
    with pytest.raises(ValueError, match=r"^token_ids must be integers"):
        llm.decode(ids)


@pytest.mark.parametrize("request_id", [[], {}, None, "", 3])
def test_a_request_id_that_is_no_name_is_refused(llm: LLM, request_id: Any) -> None:
    with pytest.raises(ValueError, match=r"^request_id must be"):
        llm.engine.add_request(request_id, [5], ONE)
    llm.engine.abort(request_id)


def test_positions_beyond_the_memory_are_refused_unless_few_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**34}))
    with pytest.raises(ValueError, match=r"max_position_embeddings must be at most .* set max"):
        LLM(folder, kv_cache=KVCacheConfig(host_gb=0.02))
    with LLM(folder, max_model_len=64, kv_cache=KVCacheConfig(host_gb=0.02)) as llm:
        assert llm.engine.model.cos_sin.shape[0] == 64
        assert llm.generate("x", ONE, use_tqdm=False)[0].finished


def test_a_configuration_with_fewer_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(ValueError, match=rf"layers\.{layers}\..* is unexpected"):
        LLM(folder, kv_cache=KVCacheConfig(host_gb=0.02))


def test_the_command_line_does_not_swallow_logprobs() -> None:
    from helicore.cli.main import app

    done = CliRunner().invoke(app, ["generate", "--prompt", "x", "--logprobs", "1"])
    assert done.exit_code != 0
    assert "--logprobs needs --json" in done.output + str(done.exception)
