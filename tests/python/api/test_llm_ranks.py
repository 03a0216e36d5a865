"""LLM over several processes: as many as it starts, or those of torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helicore import LLM, KVCacheConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["def f(", "import os\nimport sys\n\n\nclass A:\n    def __init__(self"]
CACHE = KVCacheConfig(host_gb=0.05, block_size=16)
COMMAND = ["--prompt", PROMPTS[0], "--max-tokens", "8", "--temperature", "0", "--json"]


def make_llm(tensor_size: int = 1, context_size: int = 1) -> LLM:
    return LLM(
        "tiny",
        dtype="float32",
        kv_cache=CACHE,
        tensor_parallel_size=tensor_size,
        context_parallel_size=context_size,
    )


def texts(llm: LLM, prompts: list[str] = PROMPTS) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def children(parent: int | None = None) -> set[int]:
    """Processes that `parent` (this one) has started and not seen end."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (parent or os.getpid()) and is_running(int(stat.parent.name)):
            found.add(int(stat.parent.name))
    return found


def num_shared_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:helicore")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a rank outlives the first one"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone() -> list[str]:
    with make_llm() as llm:
        return texts(llm)


def test_ranks_start_serve_and_end(alone: list[str]) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before, num_maps = children(), num_shared_maps()
    with make_llm(1, 2) as llm:
        pids = children() - before
        assert len(pids) == 1
        assert num_shared_maps() > num_maps
        assert texts(llm) == alone
        assert "".join(llm.stream(PROMPTS[0], GREEDY)) == alone[0]
        stopped = llm.generate(
            PROMPTS[0], SamplingParams(temperature=0, max_tokens=30, stop="\n"), use_tqdm=False
        )
        assert stopped[0].outputs[0].finish_reason == "stop"
        assert texts(llm) == alone
        assert llm.metrics()["prefix_cache_hits"] > 0
    assert not any(map(is_running, pids))
    assert num_shared_maps() == num_maps
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    with pytest.raises(RuntimeError, match="closed"):
        texts(llm)


def test_a_rank_that_dies_ends_the_call_with_its_name() -> None:
    before = children()
    llm = make_llm(2, 1)
    (pid,) = children() - before
    texts(llm)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\) has died"):
        texts(llm)
    with pytest.raises(RuntimeError, match="stopped after an internal error"):
        texts(llm)
    llm.close()
    assert not children() - before


_LEADER = """
import sys
from helicore import LLM, KVCacheConfig
llm = LLM("tiny", tensor_parallel_size=2, kv_cache=KVCacheConfig(host_gb=0.05))
print("ready", flush=True)
sys.stdin.read()
"""


def test_no_rank_outlives_a_first_one_that_is_killed() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", _LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    pids = children(leader.pid)
    assert pids
    leader.kill()
    leader.communicate()
    wait_until_gone(pids)


def test_a_rank_that_can_not_start_is_named_and_nothing_is_left() -> None:
    before = children()
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        make_llm(5, 1)
    assert not children() - before


def torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    with tempfile.TemporaryDirectory() as logs:
        return subprocess.run(
            [*start, *meet, "--log-dir", logs, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | environment,
        )


def test_torchrun_runs_the_command_line_once() -> None:
    options = ["--cp", "2", "--ep", "--host-gb", "0.05", "--dtype", "float32"]
    ran = torchrun("-m", "helicore", "generate", *options, *COMMAND)
    assert ran.returncode == 0, ran.stderr
    outputs = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(outputs) == 1, ran.stdout
    with make_llm() as llm:
        want = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert json.dumps(want[0].outputs[0].text) in outputs[0]


def test_processes_of_torchrun_that_are_too_many_are_refused() -> None:
    ran = torchrun("-m", "helicore", "generate", "--tp", "4", *COMMAND)
    assert ran.returncode != 0
    assert "must be the 2 processes of torchrun" in ran.stderr


_DIFFERENT = """
import os
from helicore import LLM, KVCacheConfig
size = 16 if os.environ["RANK"] == "0" else 32
LLM("tiny", tensor_parallel_size=2, kv_cache=KVCacheConfig(host_gb=0.05, block_size=size))
"""


def test_a_rank_with_other_settings_is_named(tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(_DIFFERENT)
    ran = torchrun(str(script))
    assert ran.returncode != 0
    assert "rank 1 has block_size=32, but rank 0 has 16" in ran.stderr
