"""Whole models over quantised caches.

The oracle is the same model over a dense float32 cache whose rows are rounded to the format as they
are appended: both read the same numbers, so in float32 their logits have the same bits.
"""

from pathlib import Path
from typing import Any

import helicore
import pytest
import torch
from helicore import ops
from helicore.models import CausalLM, load_model
from helicore.models.mla import nvfp4_scale
from reference.cache_formats import FORMATS, round_trip
from reference.hf_models import Spec, edit_tensor, random_model
from reference.paged import PagedRequests
from torch import Tensor

TINY = Path(helicore.__file__).parent / "assets" / "tiny"
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=["tiny", "wide"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    if request.param == "tiny":
        return load_model(TINY, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("wide")
    random_model(Spec("wide", "v3", WIDE)).save_pretrained(folder)
    return load_model(folder, dtype=torch.float32)


def rounding_append(name: str) -> Any:
    """mla_append that writes to a dense cache what the format would keep."""
    append = ops.mla_append

    def call(kv_a: Tensor, cache: Tensor, slots: Tensor, rank: int, *rest: Any) -> None:
        *arguments, _, scale = rest
        append(kv_a, cache, slots, rank, *arguments)
        at = (slots // cache.shape[1], slots % cache.shape[1])
        cache[at] = round_trip(cache[at], name, rank, scale)

    return call


def dense_coding(monkeypatch: pytest.MonkeyPatch, model: Any, name: str) -> None:
    """Each layer hands the scale of `name` on, as the scale of dense rows."""
    for layer in model.layers:
        scales = layer.attention.cache_scales
        monkeypatch.setitem(scales, "auto", scales[name])
    monkeypatch.setattr(ops, "mla_append", rounding_append(name))
    for operator in ("mla_decode", "mla_prefill"):
        plain = getattr(ops, operator)
        monkeypatch.setattr(ops, operator, lambda *a, plain=plain: plain(*a[:-2]))


def run(model: CausalLM, expanded: bool, **options: Any) -> Tensor:
    gen = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 150, (2, 90), generator=gen).tolist()
    requests = PagedRequests(model, num_requests=2, capacity=96, page_size=16, **options)
    logits = [requests.step({0: ids[0][:70], 1: ids[1][:40]}, expanded=expanded)]
    logits += [requests.step({0: ids[0][70 + i : 71 + i], 1: [ids[1][40 + i]]}) for i in range(12)]
    return torch.cat(logits)


@pytest.mark.parametrize("expanded", [False, True], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_a_dense_cache_of_rounded_rows(
    model: CausalLM, name: str, expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(model, expanded)
    got = run(model, expanded, cache_format=name)
    planned = run(model, expanded, cache_format=name, reuse_batches=True)
    dense_coding(monkeypatch, model, name)
    want = run(model, expanded)
    assert torch.equal(got, want)
    assert torch.equal(planned, want)
    assert not torch.equal(got, plain)  # the comparison would see rows that are not rounded
    error = float((got - plain).norm() / plain.norm())
    assert error < {"fp8": 0.2, "fp8_ds_mla": 0.2, "nvfp4": 0.4}[name]


def test_the_scale_of_a_checkpoint_is_taken(tmp_path: Path) -> None:
    random_model(Spec("wide", "v3", WIDE)).save_pretrained(tmp_path)
    plain: Any = load_model(tmp_path, dtype=torch.float32)
    assert [layer.attention.cache_scales["fp8"] for layer in plain.layers] == [1.0, 1.0]
    names = ("model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.kv_scale")
    edit_tensor(tmp_path, names[0], lambda _: torch.tensor(0.25))
    edit_tensor(tmp_path, names[1], lambda _: torch.tensor([0.5]))
    edit_tensor(tmp_path, "model.layers.0.self_attn.v_scale", lambda _: torch.tensor(0.25))
    scaled: Any = load_model(tmp_path, dtype=torch.float32)
    assert [layer.attention.cache_scales["fp8"] for layer in scaled.layers] == [0.25, 0.5]
    got = run(scaled, False, cache_format="fp8")
    assert not torch.equal(got, run(plain, False, cache_format="fp8"))
    with pytest.MonkeyPatch.context() as patch:
        dense_coding(patch, scaled, "fp8")
        assert torch.equal(got, run(scaled, False))


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2)])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path: Path, value: Tensor) -> None:
    random_model(Spec("wide", "v3", WIDE)).save_pretrained(tmp_path)
    edit_tensor(tmp_path, "model.layers.0.self_attn.k_scale", lambda _: value)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_scale must"):
        load_model(tmp_path, dtype=torch.float32)


def test_no_latent_of_a_norm_is_out_of_range_of_its_nvfp4_scale() -> None:
    for rank, most in ((512, 1.0), (128, 3.0), (512, 0.01)):
        weight = torch.rand(rank) * 0.5 * most
        weight[7] = -most
        scale = nvfp4_scale(weight)
        assert most * rank**0.5 <= 6 * 448 * scale < 2 * most * rank**0.5
    assert nvfp4_scale(torch.zeros(512)) == 1.0
