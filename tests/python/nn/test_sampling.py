"""Sampling, log-probabilities and penalties through the Python operators."""

import pytest
import torch
from helicore import _core, ops
from reference import nn as reference
from torch import Tensor


def settings(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 3,
) -> list[Tensor]:
    return [
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), seed, dtype=torch.int64),
        torch.arange(rows, dtype=torch.int64),
    ]


def csr(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0] + [len(r) for r in rows])
    flat = [token for row in rows for token in row]
    return lengths.cumsum(0).to(torch.int32), torch.tensor(flat, dtype=torch.int32)


def chi_square(draws: Tensor, p: Tensor) -> tuple[float, int]:
    counts = torch.bincount(draws.long(), minlength=len(p)).double()
    assert bool((counts[p == 0] == 0).all()), "a filtered token was drawn"
    wanted = p[p > 0] * len(draws)
    return float(((counts[p > 0] - wanted) ** 2 / wanted).sum()), len(wanted) - 1


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 9},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 25, "top_p": 0.85, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_frequencies_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    torch.manual_seed(1)
    row = torch.randn(50)
    draws, _ = ops.sample(row.expand(20000, 50).contiguous(), *settings(20000, **filters))  # type: ignore[arg-type]
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    statistic, freedom = chi_square(draws, reference.filtered_distribution(row, **full))  # type: ignore[arg-type]
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 1


def test_chi_square_refuses_a_nearby_distribution() -> None:
    torch.manual_seed(1)
    row = torch.randn(50)
    draws, _ = ops.sample(row.expand(20000, 50).contiguous(), *settings(20000, temperature=1.1))
    statistic, freedom = chi_square(draws, row.double().softmax(-1))
    assert statistic > freedom + 5 * (2 * freedom) ** 0.5 + 1


def test_different_seeds_and_positions_are_uncorrelated() -> None:
    logits = torch.zeros(4000, 2)
    first, _ = ops.sample(logits, *settings(4000, seed=1))
    second, _ = ops.sample(logits, *settings(4000, seed=2))
    agree = float((first == second).float().mean())
    assert abs(agree - 0.5) < 0.04
    assert abs(float((first[1:] == first[:-1]).float().mean()) - 0.5) < 0.04


def test_a_seeded_row_draws_the_same_in_any_batch(isa: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 700)
    knobs = settings(40, top_p=0.9)
    knobs[4] = torch.randint(-(2**62), 2**62, (40,))
    ids, logprobs = ops.sample(logits, *knobs, logprobs=True)
    again, _ = ops.sample(logits, *knobs)
    assert torch.equal(ids, again)
    for row in (0, 7, 39):
        one = slice(row, row + 1)
        alone, value = ops.sample(logits[one], *[k[one] for k in knobs], logprobs=True)
        assert int(alone) == int(ids[row])
        assert float(value) == float(logprobs[row])


def test_greedy_equals_argmax_and_ties_go_to_the_lowest_id(isa: str) -> None:
    torch.manual_seed(3)
    logits = torch.randint(-4, 5, (64, 333)).float()
    ids, _ = ops.sample(logits, *settings(64, temperature=0.0))
    want = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert ids.tolist() == want


def test_a_broken_row_is_reported_and_others_are_not_touched() -> None:
    logits = torch.randn(3, 40)
    clean, _ = ops.sample(logits, *settings(3))
    logits[1, 17] = float("nan")
    ids, logprobs = ops.sample(logits, *settings(3), logprobs=True)
    assert ids.tolist() == [int(clean[0]), -1, int(clean[2])]
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ops.sample(torch.full((1, 5), float("-inf")), *settings(1))[0].tolist() == [-1]


@pytest.mark.parametrize("n", [0, 1, 20, 100])
def test_top_logprobs_equal_log_softmax(isa: str, n: int) -> None:
    torch.manual_seed(4)
    logits = torch.randn(9, 100) * 5
    ids = torch.randint(0, 100, (9,), dtype=torch.int32)
    want = logits.double().log_softmax(-1)
    values, ranks, best_ids, best = ops.top_logprobs(logits, ids, n)
    torch.testing.assert_close(
        values.double(), want.gather(1, ids.long()[:, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(ops.log_softmax_gather(logits, ids), values)
    chosen = logits.gather(1, ids.long()[:, None])
    assert ranks.tolist() == (1 + (logits > chosen).sum(-1)).tolist()
    top = want.topk(n, -1)
    assert torch.equal(best_ids.long(), top.indices)
    torch.testing.assert_close(best.double(), top.values, rtol=0, atol=1e-5)


def test_penalties_equal_the_naive_form() -> None:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)

    def tokens() -> list[int]:
        size = int(torch.randint(0, 30, (1,), generator=generator))
        return torch.randint(0, 20, (size,), generator=generator).tolist()

    logits = torch.randn(12, 20)
    prompts, outputs = [tokens() for _ in range(12)], [tokens() for _ in range(12)]
    repetition, presence, frequency = torch.rand(12) + 0.5, torch.rand(12), torch.rand(12) - 0.5
    repetition[3], presence[3], frequency[3] = 1.0, 0.0, 0.0
    want = torch.stack(
        [
            reference.penalise(
                logits[r],
                prompts[r],
                outputs[r],
                *map(float, (repetition[r], presence[r], frequency[r])),
            )
            for r in range(12)
        ]
    )
    before = logits.clone()
    ops.apply_penalties(logits, *csr(prompts), *csr(outputs), repetition, presence, frequency)
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[3], before[3])
    assert not torch.equal(logits, before)


def test_bias_and_mask_change_only_the_listed_tokens() -> None:
    logits = torch.zeros(3, 6)
    ops.apply_logit_bias(logits, *csr([[1, 5], [], [0]]), torch.tensor([1.0, -1.0, 2.0]))
    ops.mask_tokens(logits, *csr([[], [2], [5]]))
    inf = float("inf")
    assert logits.tolist() == [[0, 1, 0, 0, 0, -1], [0, 0, -inf, 0, 0, 0], [2, 0, 0, 0, 0, -inf]]


def test_wrong_settings_and_ids_are_value_errors() -> None:
    logits = torch.randn(2, 6)
    knobs = settings(2)
    for index, bad, text in [(0, -0.5, "temperature"), (2, 1.5, "top_p"), (3, -1.0, "min_p")]:
        wrong = [k.clone() for k in knobs]
        wrong[index][1] = bad
        with pytest.raises(ValueError, match=rf"{text}\[1\]"):
            ops.sample(logits, *wrong)
    with pytest.raises(ValueError, match=r"must be in 0\.\.5, got 6"):
        ops.mask_tokens(logits, *csr([[6], []]))
    with pytest.raises(ValueError, match="row_ptr"):
        ops.mask_tokens(logits, *csr([[1]]))
    with pytest.raises(ValueError, match="logits"):
        ops.sample(logits.bfloat16(), *knobs)


def test_set_num_threads_rules_both_pools() -> None:
    before = _core.core.num_threads(), torch.get_num_threads()
    try:
        ops.set_num_threads(1)
        assert (_core.core.num_threads(), torch.get_num_threads()) == (1, 1)
        with pytest.raises(ValueError, match="num_threads"):
            ops.set_num_threads(0)
    finally:
        _core.core.set_num_threads(before[0])
        torch.set_num_threads(before[1])
