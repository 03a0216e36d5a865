"""`helicore bench throughput`: decode speed and time to first token, ours and a peer in one run.

Both sides have the same weights, prompts, dtype and threads, greedy, without prefix reuse. The peer
runs each row with its fastest experts implementation, found by one trial each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helicore.bench import environment
from helicore.bench.report import Report, Result
from helicore.bench.timing import interleave, medians
from helicore.bench.workload import make_prompts, ragged_lengths
from helicore.outputs import RequestOutput
from helicore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from helicore.bench.transformers_peer import TransformersPeer
    from helicore.llm import LLM

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One workload. unit "tokens/s": decode only, after the first token; "ms": the first token."""

    name: str
    lengths: tuple[int, ...]
    num_tokens: int
    unit: str = "tokens/s"


ROWS = (
    Row("decode_b1", (32,), 96),
    Row("decode_b16_ragged", tuple(ragged_lengths(16, 16, 256)), 64),
    Row("ttft_4k", (4096,), 1, "ms"),
)
TRIAL_TOKENS = 12


@dataclass(slots=True)
class _Ours:
    llm: LLM

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )

    def figure(self, row: Row, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens/s after every sequence has its first token, or milliseconds to the first."""
        outputs = self.generate(prompts, row.num_tokens)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        arrival = min(m.arrival_time for m in metrics)
        first = max(m.first_token_time or 0.0 for m in metrics)
        last = max(m.finished_time or 0.0 for m in metrics)
        if row.unit == "ms":
            return (first - arrival) * 1e3
        return len(prompts) * (row.num_tokens - 1) / (last - first)


def _peer_figure(
    peer: TransformersPeer, row: Row, prompts: Sequence[Sequence[int]], num_tokens: int
) -> float:
    _, marks = peer.generate(prompts, num_tokens)
    if row.unit == "ms":
        return marks[0] * 1e3
    return len(prompts) * (num_tokens - 1) / (marks[-1] - marks[0])


def _better(row: Row, figures: dict[str, float]) -> str:
    choose = max if row.unit != "ms" else min
    return choose(figures, key=lambda name: figures[name])


def _fastest_experts(
    peer: TransformersPeer, row: Row, prompts: Sequence[Sequence[int]], progress: Progress
) -> str:
    """One trial per experts implementation; those that fail on this machine drop out."""
    found: dict[str, float] = {}
    num_tokens = min(row.num_tokens, TRIAL_TOKENS)
    for name in peer.experts_choices():
        progress(f"{row.name}: {peer.name}, trying experts {name}")
        try:
            peer.set_experts(name)
            found[name] = _peer_figure(peer, row, prompts, num_tokens)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            progress(f"{row.name}: experts {name} does not run: {error}")
    if not found:
        raise RuntimeError(f"{peer.name} ran with none of {peer.experts_choices()}")
    return _better(row, found)


def run(
    llm: LLM,
    *,
    peer: TransformersPeer | None,
    rounds: int,
    rows: Sequence[Row] = ROWS,
    progress: Progress = lambda text: None,
) -> Report:
    """Measures every row; medians over `rounds`. `llm` must not reuse prefixes."""
    results = [_measure(_Ours(llm), peer, row, rounds, progress) for row in rows]
    env = environment.collect() | {"dtype": dtype_name(llm), "model": llm.model, "rounds": rounds}
    return Report("throughput", results, env)


def _measure(
    ours: _Ours, peer: TransformersPeer | None, row: Row, rounds: int, progress: Progress
) -> Result:
    prompts = make_prompts(ours.llm, row.lengths)
    progress(f"{row.name}: warm-up")
    ours.generate(prompts, min(row.num_tokens, TRIAL_TOKENS))
    sides: dict[str, Callable[[], float]] = {"ours": lambda: ours.figure(row, prompts)}
    label = None
    if peer is not None:
        experts = _fastest_experts(peer, row, prompts, progress)
        peer.set_experts(experts)
        label = f"{peer.name} {experts}"
        theirs = peer
        sides["peer"] = lambda: _peer_figure(theirs, row, prompts, row.num_tokens)
    middle = medians(interleave(sides, rounds, lambda side: progress(f"{row.name}: {side}")))
    return Result(
        row.name,
        middle["ours"],
        row.unit,
        label,
        middle.get("peer"),
        higher_is_better=row.unit != "ms",
    )


def dtype_name(llm: LLM) -> str:
    """The dtype that the model computes in."""
    wanted = llm.engine.config.dtype
    if wanted != "auto":
        return wanted
    return str(llm.model_config.dtype).removeprefix("torch.")


# Reference check


@dataclass(slots=True)
class Difference:
    """Where the first token differs; gap: the peer's two best logits there, tolerance beside it."""

    row: str
    sequence: int
    position: int
    gap: float
    tolerance: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.tolerance


TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-8}
"""Share of max |logit| within which two best logits count as a tie (bfloat16: a rounding step)."""


def refcheck(
    llm: LLM, peer: TransformersPeer, *, rows: Sequence[Row] = ROWS, num_tokens: int = 64
) -> tuple[list[Result], list[str]]:
    """Greedy tokens of both sides: share of sequences that are equal or part only at a tie."""
    ours = _Ours(llm)
    tolerance = TOLERANCE[dtype_name(llm)]
    results, failures = [], []
    for row in rows:
        prompts = make_prompts(llm, row.lengths)
        count = min(num_tokens, row.num_tokens)
        mine = [output.outputs[0].token_ids for output in ours.generate(prompts, count)]
        theirs, _ = peer.generate(prompts, count)
        found = [
            _compare(peer, row.name, i, prompts[i], mine[i], theirs[i], tolerance)
            for i in range(len(prompts))
        ]
        wrong = [d for d in found if d is not None and not d.is_tie]
        ties = sum(d is not None and d.is_tie for d in found)
        results.append(Result(f"refcheck_{row.name}", 1 - len(wrong) / len(prompts), "share"))
        results.append(Result(f"refcheck_{row.name}_ties", float(ties), "sequences"))
        failures += [
            f"{d.row}[{d.sequence}] differs at token {d.position}: the reference's best two logits "
            f"are {d.gap:.4g} apart, tolerance {d.tolerance:.4g}"
            for d in wrong
        ]
    return results, failures


def _compare(
    peer: Any,
    row: str,
    sequence: int,
    prompt: Sequence[int],
    mine: Sequence[int],
    theirs: Sequence[int],
    tolerance: float,
) -> Difference | None:
    position = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    if position is None:
        return None
    logits = peer.next_logits([*prompt, *theirs[:position]])
    gap = float(logits.max() - logits[mine[position]])
    return Difference(row, sequence, position, gap, tolerance * float(logits.abs().max()))
