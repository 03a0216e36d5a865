"""`helicore bench kv`: every row, its JSON, sides that fail, and figures that are not there."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helicore.bench import kv, kv_cpp, kv_disk, kv_ours, kv_sides
from helicore.bench.kv_rows import CPP, PYTHON, SPECS, Figure, RowSpec, make_row
from helicore.bench.kv_workload import Workload
from helicore.bench.report import Report
from helicore.cli.main import app
from typer.testing import CliRunner

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SMALL = Workload(
    block_size=16,
    batch=4,
    context=64,
    steps=3,
    prompt=528,
    num_prompts=2,
    branchy_prompts=1,
    cached_blocks=200,
    evicted_blocks=50,
    singles=10,
    sequences=3,
    sequence=64,
    small_tree=256,
    large_tree=1024,
    tree_samples=4,
)
ROW_KEYS = {
    *("name", "value", "unit", "peer", "peer_value", "ratio", "status", "range", "measured_in"),
    *("peers", "required", "goal", "pass", "goal_met", "details"),
}


@pytest.fixture
def loud() -> Iterator[kv_sides.Side]:
    with kv_sides.Side("loud", "loud_side", [HERE]) as side:
        yield side


@pytest.fixture(scope="module")
def report() -> Report:
    """A run of every row in small, without peers."""
    return kv.run(kv.KVBenchConfig(rounds=2, work=SMALL))


def test_every_row_of_ours_is_measured_and_has_the_schema(report: Report) -> None:
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [row["name"] for row in value["results"]] == [spec.name for spec in SPECS]
    for row, spec in zip(value["results"], SPECS, strict=True):
        assert set(row) == ROW_KEYS
        assert (row["unit"], row["required"], row["goal"]) == (spec.unit, spec.required, spec.goal)
        if spec.source == PYTHON:
            assert row["status"] == "measured"
            low, high = row["range"]
            assert low <= row["value"] <= high
            assert row["pass"] in (True, False) or spec.required is None
    assert value["env"]["notes"] == []
    assert {"load_average", "load_average_end", "rounds", "clock", "core", "work"} <= set(
        value["env"]
    )


def test_a_peer_that_is_not_installed_has_a_command_and_no_figure(report: Report) -> None:
    for row in report.to_dict()["results"]:
        assert (row["peer"], row["peer_value"], row["ratio"]) == (None, None, None)
        if row["measured_in"] == PYTHON:
            assert set(row["peers"]) == {"vllm", "sglang"}
        for name, peer in row["peers"].items():
            assert peer["status"] == "not installed"
            assert peer["install"].startswith(f"python benchmarks/peers/install.py {name} ")
            assert "value" not in peer


def test_rows_that_need_an_option_name_it(report: Report) -> None:
    rows = {row["name"]: row for row in report.to_dict()["results"]}
    for name, option in (
        ("decode_step_256_cpp_us", "--cpp-bench"),
        ("bytes_per_page", "--cpp-bench"),
        ("host_to_disk_ratio", "--disk"),
        ("disk_to_host_ratio", "--disk"),
    ):
        assert option in rows[name]["status"]
        assert (rows[name]["value"], rows[name]["pass"]) == (None, None)


def test_a_peers_folder_without_its_package_says_so_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "vllm").mkdir(parents=True)
    (tmp_path / "vllm" / "vllm" / "__init__.py").write_text("raise ImportError('torn wheel')\n")
    config = kv.KVBenchConfig(rounds=1, work=SMALL, peers=tmp_path, rows=("evict_one_us",))
    report = kv.run(config)
    (row,) = report.to_dict()["results"]
    assert "torn wheel" in row["peers"]["vllm"]["status"]
    assert row["peers"]["sglang"]["status"] == "not installed"
    assert row["value"] > 0


def test_an_unknown_row_names_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"--row must be one of decode_step_256_python_us, .*got 'x'"
    ):
        kv.run(kv.KVBenchConfig(rows=("x",)))


@pytest.mark.parametrize(
    ("higher", "value", "passed", "goal"),
    [
        (False, 2.0, True, True),
        (False, 3.0, True, False),
        (False, 4.5, False, False),
        (True, 2.0, False, False),
        (True, 4.0, True, False),
        (True, 9.0, True, True),
    ],
)
def test_bounds_hold_in_the_right_direction(
    higher: bool, value: float, passed: bool, goal: bool
) -> None:
    spec = RowSpec("r", "x", 1, 4, 9 if higher else 2, higher_is_better=higher)
    row = make_row(spec, Figure(value, value, value), {})
    assert (row.passed, row.goal_met) == (passed, goal)


def test_a_row_without_a_figure_or_a_bound_passes_nothing() -> None:
    assert make_row(RowSpec("r", "x", 1, 4), None, {}).passed is None
    assert make_row(RowSpec("r", "x", 1), Figure(1, 1, 1), {}).passed is None


def test_only_measured_peers_are_compared_and_the_best_one_is_named() -> None:
    peers: dict[str, Any] = {
        "slow": Figure(8, 7, 9),
        "fast": Figure(4, 4, 4),
        "absent": {"status": "not installed", "install": "..."},
    }
    row = make_row(RowSpec("r", "us", 1e6, 4), Figure(2, 1, 3), peers).to_dict()
    assert (row["peer"], row["peer_value"], row["ratio"]) == ("fast", 4, 2)
    assert row["peers"]["slow"]["ratio"] == 4
    assert row["peers"]["absent"] == {"status": "not installed", "install": "..."}
    absent = make_row(RowSpec("r", "us", 1e6, 4), None, peers).to_dict()
    assert (absent["peer"], absent["ratio"], absent["peers"]["slow"]["ratio"]) == (None, None, None)


def test_missed_bounds_are_named() -> None:
    spec = RowSpec("slow_row", "us", 1e6, 4)
    missing = make_row(RowSpec("unmeasured", "us", 1, 1), None, {})
    late = Report("kv", [make_row(spec, Figure(5, 5, 5), {}), missing], {})
    assert kv.missed(late) == ["slow_row: 5 us, required 4"]


def test_what_a_package_prints_is_not_taken_for_an_answer(loud: kv_sides.Side) -> None:
    assert loud.version == "1.2"
    assert loud.prepare("steady", SMALL)
    assert loud.round() == [0.5, 0.25, 4.0]
    assert not loud.prepare("a row that it lacks", SMALL)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("broken", "no room for 4 sequences"),
        ("breaks_later", "lost its way"),
        ("dies", "the process ended"),
    ],
)
def test_a_side_that_fails_in_a_row_is_left_out_of_it(
    loud: kv_sides.Side, row: str, said: str
) -> None:
    notes: list[str] = []
    assert kv_sides.measure([loud], row, SMALL, 2, notes.append) == {}
    assert len(notes) == 1
    assert said in notes[0]


def test_rounds_keep_the_median_of_their_samples(loud: kv_sides.Side) -> None:
    assert kv_sides.measure([loud], "steady", SMALL, 3) == {"loud": [0.5, 0.5, 0.5]}


def test_our_rows_and_the_specifications_name_the_same() -> None:
    assert set(kv_ours.ROWS) == {spec.name for spec in SPECS if spec.source == PYTHON}


def test_cpp_figures_are_processor_time_by_name_and_counters() -> None:
    runs = [
        {"run_type": "iteration", "run_name": "decode_step/256", "cpu_time": t, "time_unit": "us"}
        for t in (7.0, 9.0, 8.0)
    ]
    runs.append({"run_type": "aggregate", "run_name": "decode_step/256", "cpu_time": 1.0})
    runs.append({**runs[0], "run_name": "decode_step/64", "cpu_time": 1.0})
    runs.append({**runs[0], "run_name": "bytes_per_block/iterations:1", "page_record": 40.0})
    specs = [spec for spec in SPECS if spec.source == CPP]
    figures = kv_cpp.parse(json.dumps({"benchmarks": runs}), specs)
    step = figures["decode_step_256_cpp_us"]
    assert (step.value, step.low, step.high) == pytest.approx((8, 7, 9))
    assert figures["bytes_per_page"] == Figure(40, 40, 40)


def test_a_binary_that_can_not_run_fails_its_rows_only(tmp_path: Path) -> None:
    config = kv.KVBenchConfig(cpp_bench=tmp_path / "absent", rows=("bytes_per_page",))
    (row,) = kv.run(config).to_dict()["results"]
    assert row["status"].startswith("failed: ")
    assert row["value"] is None


def test_disk_rows_compare_with_the_device_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_disk, "BLOCK_BYTES", 1 << 16)
    config = kv.KVBenchConfig(
        rounds=1,
        disk=tmp_path,
        disk_bytes=8 << 20,
        rows=("host_to_disk_ratio", "disk_to_host_ratio"),
    )
    rows = kv.run(config).to_dict()["results"]
    if rows[0]["status"].startswith("failed: [Errno 22]"):
        pytest.skip("the file system of temporary files refuses direct transfers")
    for row in rows:
        details = {name: part["value"] for name, part in row["details"].items()}
        assert row["value"] == pytest.approx(details["store_gbps"] / details["device_gbps"])
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_one_json_object_and_refuses_unknown_rows() -> None:
    arguments = ["bench", "kv", "--row", "commit_64_blocks_us", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert set(row) == ROW_KEYS
    assert CliRunner().invoke(app, ["bench", "kv", "--row", "x"]).exit_code != 0


def test_check_fails_the_command_when_a_bound_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    late = make_row(RowSpec("slow_row", "us", 1e6, 4), Figure(5, 5, 5), {})
    env = {"cpu": "c", "threads": 1, "isa": "i", "commit": None}
    monkeypatch.setattr(kv, "run", lambda config, progress: Report("kv", [late], env))
    assert CliRunner().invoke(app, ["bench", "kv", "--json", "--check"]).exit_code == 1
    assert CliRunner().invoke(app, ["bench", "kv", "--json"]).exit_code == 0


def test_unpacking_leaves_gpu_libraries_out_and_keeps_the_native_tree(tmp_path: Path) -> None:
    install = _load(ROOT / "benchmarks" / "peers" / "install.py")
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("p/a.py", "p/gpu.abi3.so", "p/tree/core.cpython-311.so"):
            archive.writestr(name, "x")
    install.unpack(wheel, tmp_path / "p", ("p/tree/",))
    kept = sorted(f.name for f in (tmp_path / "p").rglob("*") if f.is_file())
    assert kept == ["a.py", "core.cpython-311.so"]


def test_inert_packages_import_at_any_depth_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from helicore.bench.kv_peers import inert

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    inert.install("helicore_absent")
    module = importlib.import_module("helicore_absent.deep.down")
    assert isinstance(module.Thing.KIND, type)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("helicore_absent_too")
    for name in [name for name in sys.modules if name.startswith("helicore_absent")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_installed_peers_answer_every_row() -> None:
    folder = ROOT / ".venv-peers"
    if not folder.is_dir():
        pytest.skip("no peers: python benchmarks/peers/install.py --peers .venv-peers")
    report = kv.run(kv.KVBenchConfig(rounds=1, work=SMALL, peers=folder))
    assert report.env["notes"] == []
    for row in report.to_dict()["results"]:
        if row["measured_in"] == PYTHON:
            for peer in row["peers"].values():
                assert peer["status"] == "measured"
                assert math.isfinite(peer["value"])


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
