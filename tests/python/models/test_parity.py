"""Logits of whole models against `transformers`, for prefill, chunked prefill, decode, mixtures."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helicore.models import CausalLM, load_model
from reference.hf_models import YARN, Spec, edit_tensor, hf_logits, load_hf, random_model
from reference.paged import PagedRequests
from torch import Tensor

TOLERANCE = 1e-4  # of the largest logit, fp32
NUM_TOKENS = 40

GROUPS = {"n_group": 4, "topk_group": 2}
SPECS = [
    Spec("v3_plain", "v3"),
    Spec("v3_yarn_groups", "v3", {"rope_parameters": dict(YARN), **GROUPS}, seed=1),
    Spec("v3_no_q_lora_tied", "v3", {"q_lora_rank": None, "tie_word_embeddings": True}, seed=2),
    Spec(
        "v3_bias_half_split_rope",
        "v3",
        {"attention_bias": True, "rope_interleave": False, "num_attention_heads": 5},
        seed=3,
    ),
    Spec(
        "v3_top_1_weights_as_they_are",
        "v3",
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_shared_experts": 2},
        seed=4,
    ),
    Spec(
        "v3_unequal_magnitudes_wide_values",
        "v3",
        {
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 12,
            "v_head_dim": 20,
            "kv_lora_rank": 36,
            "rms_norm_eps": 1e-3,
        },
        seed=5,
    ),
    Spec("v3_all_dense_one_head", "v3", {"first_k_dense_replace": 3, "num_attention_heads": 1}),
    Spec("v2_plain", "v2", seed=6),
    Spec(
        "v2_groups_yarn",
        "v2",
        {
            "topk_method": "group_limited_greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            **GROUPS,
        },
        seed=7,
    ),
    Spec("v2_no_q_lora_bias", "v2", {"q_lora_rank": None, "attention_bias": True}, seed=8),
    Spec(
        "v2_three_heads_tied_yarn_without_magnitudes",
        "v2",
        {
            "num_attention_heads": 3,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k},
        },
        seed=9,
    ),
]


@dataclass
class Pair:
    """A checkpoint, our model of it, and what `transformers` computes for one prompt."""

    folder: Path
    ours: CausalLM
    ids: list[int]
    expected: Tensor

    def error(self, logits: Tensor, first: int = 0) -> float:
        """Largest difference, as a part of the largest logit; rows from token `first` on."""
        expected = self.expected[first : first + logits.shape[0]]
        assert logits.dtype == torch.float32
        assert logits.shape == expected.shape
        return float((logits - expected).abs().max() / self.expected.abs().max())


def prompt(spec: Spec, count: int = NUM_TOKENS) -> list[int]:
    generator = torch.Generator().manual_seed(spec.seed + 100)
    return torch.randint(0, 160, (count,), generator=generator).tolist()


@pytest.fixture(scope="module", params=SPECS, ids=lambda s: s.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Pair:
    spec: Spec = request.param
    folder = tmp_path_factory.mktemp(spec.name)
    hf = random_model(spec)
    hf.save_pretrained(folder)
    ids = prompt(spec)
    return Pair(folder, load_model(folder, dtype=torch.float32), ids, hf_logits(hf, ids))


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_prefill_equals_transformers(pair: Pair, expanded: bool) -> None:
    requests = PagedRequests(pair.ours)
    assert pair.error(requests.step({0: pair.ids}, expanded=expanded)) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunked_prefill_equals_transformers(pair: Pair, page_size: int) -> None:
    requests = PagedRequests(pair.ours, page_size=page_size)
    for i, begin in enumerate(range(0, NUM_TOKENS, 7)):
        logits = requests.step({0: pair.ids[begin : begin + 7]}, expanded=i % 2 == 0)
        assert pair.error(logits, begin) < TOLERANCE


def test_decode_equals_transformers(pair: Pair) -> None:
    requests = PagedRequests(pair.ours)
    requests.step({0: pair.ids[:15]}, expanded=True, rows=[14])
    for i in range(15, NUM_TOKENS):
        assert pair.error(requests.step({0: pair.ids[i : i + 1]}), i) < TOLERANCE


def test_a_step_mixes_decode_verification_and_prefill(pair: Pair) -> None:
    requests = PagedRequests(pair.ours, num_requests=4)
    requests.step({0: pair.ids[:16], 1: pair.ids[:21], 2: pair.ids[:5]}, expanded=True)
    step = {
        0: pair.ids[16:17],
        1: pair.ids[21:24],
        2: pair.ids[5:30],
        3: pair.ids[:33],
    }
    logits = requests.step(step, num_absorbed=2)
    begins = (16, 21, 5, 0)
    parts = logits.split([len(tokens) for tokens in step.values()])
    for begin, part in zip(begins, parts, strict=True):
        assert pair.error(part, begin) < TOLERANCE


def test_a_row_has_the_same_bits_alone_and_in_a_batch(pair: Pair) -> None:
    alone = PagedRequests(pair.ours, seed=1)
    batch = PagedRequests(pair.ours, num_requests=3, seed=2)
    a = [alone.step({0: pair.ids[:20]}), alone.step({0: pair.ids[20:21]})]
    b = [
        batch.step({1: pair.ids[3:9], 0: pair.ids[:20], 2: pair.ids[:1]})[6:26],
        batch.step({0: pair.ids[20:21], 2: pair.ids[7:8]})[:1],
    ]
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_only_the_wanted_rows_get_logits(pair: Pair) -> None:
    every = PagedRequests(pair.ours).step({0: pair.ids[:9]})
    some = PagedRequests(pair.ours).step({0: pair.ids[:9]}, rows=[8, 2])
    assert torch.equal(some, every[[8, 2]])
    none = PagedRequests(pair.ours).step({0: pair.ids[:9]}, rows=[])
    assert none.shape == (0, every.shape[1])


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_long_contexts_of_published_head_widths_equal_transformers(
    family: str, tmp_path: Path
) -> None:
    spec = Spec(
        "long",
        family,
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 1024,
            "rope_parameters": YARN | {"factor": 16.0},
        },
    )
    hf = random_model(spec)
    hf.save_pretrained(tmp_path)
    ids = prompt(spec, 700)
    pair = Pair(tmp_path, load_model(tmp_path, dtype=torch.float32), ids, hf_logits(hf, ids))
    requests = PagedRequests(pair.ours, num_requests=2, capacity=704, page_size=32)
    assert pair.error(requests.step({0: ids}, expanded=True)) < TOLERANCE
    for begin, end in ((0, 333), (333, 640), (640, 690)):
        logits = requests.step({1: ids[begin:end]}, expanded=begin != 640)
        assert pair.error(logits, begin) < TOLERANCE
    for i in range(690, 700):
        assert pair.error(requests.step({1: ids[i : i + 1]}), i) < TOLERANCE


def test_steps_and_requests_without_tokens_give_no_rows(tmp_path: Path) -> None:
    spec = Spec("empty", "v3")
    random_model(spec).save_pretrained(tmp_path)
    requests = PagedRequests(load_model(tmp_path, dtype=torch.float32), num_requests=2)
    expected = requests.step({0: [5, 6]})
    for expanded in (False, True):
        assert requests.step({0: []}, expanded=expanded).shape == (0, 160)
    assert torch.equal(requests.step({0: [], 1: [5, 6]}), expected)


@pytest.mark.parametrize("token", [-1, 160])
def test_a_token_out_of_the_vocabulary_is_refused(token: int, tmp_path: Path) -> None:
    random_model(Spec("ids", "v3")).save_pretrained(tmp_path)
    requests = PagedRequests(load_model(tmp_path, dtype=torch.float32))
    with pytest.raises(ValueError, match=rf"must be in 0\.\.159, got {token}"):
        requests.step({0: [token]})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.1.self_attn.kv_a_layernorm.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.bias",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.2.self_attn.o_proj.bias",
        "model.layers.2.mlp.gate.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.shared_experts.down_proj.weight",
        "model.layers.2.mlp.experts.0.gate_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_changed_weight_is_seen(name: str, tmp_path: Path) -> None:
    spec = Spec("control", "v3", {"attention_bias": True}, seed=11)
    hf = random_model(spec)
    hf.save_pretrained(tmp_path)
    ids = prompt(spec)
    expected = hf_logits(hf, ids)
    noise = torch.Generator().manual_seed(12)
    edit_tensor(tmp_path, name, lambda t: t + 0.2 * t.std() * torch.randn(t.shape, generator=noise))
    changed = Pair(tmp_path, load_model(tmp_path, dtype=torch.float32), ids, expected)
    error = changed.error(PagedRequests(changed.ours).step({0: ids}))
    assert error > 3 * TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path: Path) -> None:
    ours, theirs = [], []
    for spec in SPECS:
        folder = tmp_path / spec.name
        random_model(spec).bfloat16().save_pretrained(folder)
        ids = prompt(spec)
        exact = hf_logits(load_hf(folder, torch.float32), ids)
        model = load_model(folder)
        for expanded in (False, True):
            requests = PagedRequests(model, dtype=torch.bfloat16)
            logits = requests.step({0: ids}, expanded=expanded)
            ours.append(float((logits - exact).norm() / exact.norm()))
        logits = hf_logits(load_hf(folder, torch.bfloat16), ids)
        theirs.append(float((logits - exact).norm() / exact.norm()))

    def geometric_mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    assert geometric_mean(ours) < 1.5 * geometric_mean(theirs), (ours, theirs)


def test_a_model_compiles_into_one_graph(tmp_path: Path) -> None:
    spec = Spec("compiled", "v3")
    random_model(spec).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    expected = PagedRequests(model).step({0: prompt(spec, 9)})
    model.forward = torch.compile(  # type: ignore[method-assign]
        model.forward, backend="eager", fullgraph=True
    )
    assert torch.equal(PagedRequests(model).step({0: prompt(spec, 9)}), expected)
