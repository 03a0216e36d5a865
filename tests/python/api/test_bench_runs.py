"""Every benchmark runs end to end on small shapes, and its check against the reference can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helicore import LLM, KVCacheConfig
from helicore.bench import allreduce, latency, throughput
from helicore.bench.throughput import Row
from helicore.bench.transformers_peer import TransformersPeer
from helicore.cli import bench as cli_bench
from helicore.cli.main import app
from helicore.model_path import resolve_model
from typer.testing import CliRunner

ROWS = (Row("decode_b1", (9,), 5), Row("ragged", (4, 12, 7), 6), Row("ttft", (70,), 1, "ms"))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The peer's matrices are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    cache = KVCacheConfig(host_gb=0.1, enable_prefix_caching=False)
    with LLM("tiny", dtype="float32", max_model_len=512, kv_cache=cache) as llm:
        yield llm


@pytest.fixture(scope="module")
def peer() -> TransformersPeer:
    pytest.importorskip("transformers")
    return TransformersPeer(resolve_model("tiny"), "float32")


def test_throughput_has_a_peer_and_a_ratio_in_every_row(llm: LLM, peer: TransformersPeer) -> None:
    report = throughput.run(llm, peer=peer, rounds=1, rows=ROWS)
    assert [result.name for result in report.results] == ["decode_b1", "ragged", "ttft"]
    for result in report.results:
        assert result.value > 0
        assert result.peer is not None
        assert result.peer.split()[-1] in peer.experts_choices()
        assert result.ratio is not None
    assert report.env["dtype"] == "float32"


def test_throughput_without_a_peer_has_no_ratio(llm: LLM) -> None:
    (result,) = throughput.run(llm, peer=None, rounds=1, rows=ROWS[:1]).results
    assert (result.peer, result.ratio) == (None, None)


def test_greedy_tokens_agree_with_the_reference(llm: LLM, peer: TransformersPeer) -> None:
    results, failures = throughput.refcheck(llm, peer, rows=ROWS, num_tokens=6)
    assert not failures
    assert all(r.value == 1.0 for r in results if not r.name.endswith("_ties"))


def test_the_check_notices_a_reference_with_other_weights(llm: LLM, peer: TransformersPeer) -> None:
    """Negative control."""
    weight = peer.model.model.norm.weight.data
    kept = weight.clone()
    weight.copy_(kept.flip(0) * -1)
    try:
        _, failures = throughput.refcheck(llm, peer, rows=ROWS, num_tokens=6)
    finally:
        weight.copy_(kept)
    assert failures
    assert "differs at token" in failures[0]


def test_latency_reports_steps_of_the_executor(llm: LLM) -> None:
    config = latency.LatencyConfig(input_len=8, output_len=6, batch_size=3, rounds=1)
    names = [result.name for result in latency.run(llm, config).results]
    assert {"ttft_b3", "e2e_b3", "inter_token_b3_p50", "executor_step_b3_p50"} <= set(names)
    assert not llm.engine.has_unfinished()


def test_calls_between_ranks_are_measured_beside_gloo() -> None:
    report = allreduce.run((2,), 3)
    names = [result.name for result in report.results]
    assert "allreduce_f32_w2_16x7168_us" in names
    assert "helix_merge_f32_w2_1x16x512_us" in names
    for result in report.results:
        assert result.peer == "gloo"
        assert result.value > 0
        assert (result.peer_value or 0) > 0


def test_the_command_prints_json_last_and_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: Any = {"row_a": ROWS[0]}
    monkeypatch.setattr(throughput, "ROWS", tuple(small.values()))
    line = ["bench", "throughput", "--rounds", "1", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert list(value) == ["results", "env"]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["results"] == value["results"]


def test_a_failed_check_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    from helicore.bench.report import Report, Result

    report = Report("demo", [Result("x", 1.0, "ms")], {"commit": None}, failures=["x is wrong"])
    with pytest.raises(Exception) as caught:
        cli_bench._finish(report, True, None)
    assert getattr(caught.value, "exit_code", None) == 1
    assert "check failed: x is wrong" in capsys.readouterr().err
