"""The bundled model against `transformers`."""

from pathlib import Path
from typing import Any

import helicore
import pytest
import torch
from helicore.models import CausalLM, load_model
from reference.hf_models import hf_logits, load_hf
from reference.paged import PagedRequests
from tokenizers import Tokenizer

FOLDER = Path(helicore.__file__).parent / "assets" / "tiny"
TEXT = '''def sift_down(heap, start, pos):
    """Move the item at pos down to its place; the heap below start is left alone."""
    item = heap[pos]
    while pos > start:
        parent = (pos - 1) >> 1
        if heap[parent] <= item:
            break
        heap[pos] = heap[parent]
        pos = parent
    heap[pos] = item
'''


@pytest.fixture(scope="module")
def ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    encoded: list[int] = tokenizer.encode(TEXT * 3).ids
    return encoded[:300]


@pytest.fixture(scope="module")
def exact() -> Any:
    return load_hf(FOLDER, torch.float32)


@pytest.fixture(scope="module")
def ours() -> CausalLM:
    return load_model(FOLDER, dtype=torch.float32)


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
def test_logits_equal_those_of_transformers(
    ours: CausalLM, exact: Any, ids: list[int], expanded: bool
) -> None:
    expected = hf_logits(exact, ids)
    requests = PagedRequests(ours, capacity=320, page_size=64)
    logits = requests.step({0: ids[:200]}, expanded=expanded)
    rest = [requests.step({0: ids[i : i + 10]}) for i in range(200, 300, 10)]
    error = (torch.cat([logits, *rest]) - expected).abs().max()
    assert float(error / expected.abs().max()) < 1e-4


def test_greedy_tokens_equal_those_of_transformers(
    ours: CausalLM, exact: Any, ids: list[int]
) -> None:
    requests = PagedRequests(ours, capacity=128)
    sequence = ids[:20]
    ends = torch.tensor(ours.config.eos_token_ids)
    last = requests.step({0: sequence}, rows=[19])
    for _ in range(64):
        sequence.append(int(last.index_fill(1, ends, float("-inf")).argmax()))
        last = requests.step({0: sequence[-1:]})
    expected = exact.generate(
        torch.tensor([ids[:20]]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    assert sequence == expected[0].tolist()


def test_bfloat16_is_as_close_to_float32_as_transformers_is(exact: Any, ids: list[int]) -> None:
    expected = hf_logits(exact, ids)
    theirs = hf_logits(load_hf(FOLDER, torch.bfloat16), ids)
    requests = PagedRequests(load_model(FOLDER), capacity=320, dtype=torch.bfloat16)
    logits = requests.step({0: ids}, expanded=True)
    assert (logits - expected).norm() < 1.5 * (theirs - expected).norm()


def test_the_model_fits_the_parallel_layouts_it_was_made_for(ours: CausalLM) -> None:
    c = ours.config
    assert all(c.num_attention_heads % n == 0 for n in (2, 3, 4, 6))
    assert c.max_position_embeddings == 16384
    assert c.generation_defaults["do_sample"] is True
    assert c.q_lora_rank is not None
    assert c.moe is not None
    assert c.moe.scoring_func == "sigmoid"
    assert c.moe.shared_size > 0
