"""Decode steps as lists of native calls, recorded once and replayed.

A step of a few tokens is a hundred native calls of microseconds each; allocating their results and
walking through the modules costs as much again. A caller whose batch is the same object step after
step (its tensors filled anew) makes the same calls on the same memory, so they are recorded: the
modules run once against a `Recorder`, which allocates results and notes the calls instead of making
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from helicore import _core, ops
from helicore.models.base import ForwardBatch
from helicore.ops import RouterConfig

MAX_TOKENS = 32
"""Tokens of the longest step worth a plan: kernels dominate the longer ones."""


class Operators(Protocol):
    """The operators of `helicore.ops` that a step of absorbed attention consists of; with more
    than one rank also `new` and `run`, for calls between ranks."""

    def new(self, x: Tensor, *shape: int) -> Tensor:
        """Memory for a result, with the dtype and device of x."""
        ...

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call that writes to its arguments."""
        ...

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def linear(
        self, x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None
    ) -> Tensor: ...

    def mlp(
        self,
        x: Tensor,
        packed_gate_up: Tensor,
        packed_down: Tensor,
        intermediate: int,
        out_features: int,
    ) -> Tensor: ...

    def moe_block(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor | None,
        config: RouterConfig,
        w13: Tensor,
        w2: Tensor,
        intermediate: int,
        shared_w13: Tensor | None = None,
        shared_w2: Tensor | None = None,
        shared_intermediate: int = 0,
    ) -> Tensor: ...

    def mla_append(
        self,
        kv_a: Tensor,
        cache: Tensor,
        slots: Tensor,
        kv_lora_rank: int,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = True,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> None: ...

    def mla_absorb(
        self,
        q: Tensor,
        w_absorb: Tensor,
        kv_lora_rank: int,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
        interleaved: bool = True,
    ) -> Tensor: ...

    def mla_decode(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        scale: float,
        kv_lora_rank: int,
        kv_bound: Tensor | None = None,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> Tensor: ...

    def mla_decode_stats(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        scale: float,
        kv_lora_rank: int,
        kv_bound: Tensor | None = None,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]: ...

    def mla_project_v(self, o_lat: Tensor, w_uv: Tensor, v_dim: int) -> Tensor: ...


class Eager:
    """`Operators` that are done at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)

    def new(self, x: Tensor, *shape: int) -> Tensor:
        return x.new_empty(shape)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        call(*arguments)


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of one step up to the last layer, on memory that the plan owns."""

    batch: ForwardBatch
    caches: Sequence[Tensor]
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]]
    delta: Tensor
    residual: Tensor

    def run(self) -> tuple[Tensor, Tensor]:
        """(delta, residual) of the last layer, valid until the next run."""
        for call, arguments in self.calls:
            call(*arguments)
        return self.delta, self.residual


class Recorder:
    """`Operators` that note native calls. Results of a layer share memory with those of the layer
    after the next: only its last result is read by the next one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._spare: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._used: tuple[list[Tensor], list[Tensor]] = ([], [])

    def begin_layer(self) -> None:
        """What the layer before the last one used becomes free."""
        before, last = self._used
        for tensor in before:
            self._spare.setdefault((tuple(tensor.shape), tensor.dtype), []).append(tensor)
        self._used = (last, [])

    def new(self, x: Tensor, *shape: int) -> Tensor:
        return self._new(x, *shape)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        self._note(call, *arguments)

    def _new(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        spare = self._spare.get((shape, dtype))
        tensor = spare.pop() if spare else torch.empty(shape, dtype=dtype)
        self._used[1].append(tensor)
        return tensor

    def _note(self, call: Callable[..., None], *arguments: Any) -> None:
        self.calls.append((call, arguments))

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        out = torch.empty((ids.shape[0], table.shape[1]), dtype=table.dtype)
        self._note(_core.nn.embedding, ids, table, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._new(x, *x.shape)
        self._note(_core.nn.rms_norm, x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = self._new(x, *x.shape)
        self._note(_core.nn.add_rms_norm, x, residual, weight, eps, out)
        return out

    def linear(
        self, x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None
    ) -> Tensor:
        out = self._new(x, x.shape[0], out_features)
        self._note(_core.nn.linear, x, packed, out, out_features, bias)
        return out

    def mlp(
        self,
        x: Tensor,
        packed_gate_up: Tensor,
        packed_down: Tensor,
        intermediate: int,
        out_features: int,
    ) -> Tensor:
        out = self._new(x, x.shape[0], out_features)
        self._note(_core.nn.mlp, x, packed_gate_up, packed_down, out, intermediate)
        return out

    def moe_block(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor | None,
        config: RouterConfig,
        w13: Tensor,
        w2: Tensor,
        intermediate: int,
        shared_w13: Tensor | None = None,
        shared_w2: Tensor | None = None,
        shared_intermediate: int = 0,
    ) -> Tensor:
        out = self._new(x, *x.shape)
        weights = (w13, w2, shared_w13, shared_w2, out, intermediate, shared_intermediate)
        self._note(_core.moe.moe_block, x, gate, bias, config.native, *weights)
        return out

    def mla_append(
        self,
        kv_a: Tensor,
        cache: Tensor,
        slots: Tensor,
        kv_lora_rank: int,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = True,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> None:
        rest = (norm_weight, eps, interleaved, cache_format, cache_scale)
        append = _core.attention.mla_append
        self._note(append, kv_a, cache, slots, kv_lora_rank, positions, cos_sin, *rest)

    def mla_absorb(
        self,
        q: Tensor,
        w_absorb: Tensor,
        kv_lora_rank: int,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
        interleaved: bool = True,
    ) -> Tensor:
        rope = 0 if cos_sin is None else cos_sin.shape[1]
        out = self._new(q, *q.shape[:2], kv_lora_rank + rope)
        absorb = _core.attention.mla_absorb
        self._note(absorb, q, w_absorb, out, kv_lora_rank, positions, cos_sin, interleaved)
        return out

    def mla_decode(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        scale: float,
        kv_lora_rank: int,
        kv_bound: Tensor | None = None,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> Tensor:
        out = self._new(q, *q.shape[:2], kv_lora_rank)
        decode = _core.attention.mla_decode
        rest = (kv_bound, None, cache_format, cache_scale)
        self._note(decode, q, cache, block_table, cu_q, kv_len, scale, out, *rest)
        return out

    def mla_decode_stats(
        self,
        q: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_q: Tensor,
        kv_len: Tensor,
        scale: float,
        kv_lora_rank: int,
        kv_bound: Tensor | None = None,
        cache_format: str = "auto",
        cache_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        out = self._new(q, *q.shape[:2], kv_lora_rank)
        stats = self._new(q, *q.shape[:2], 2, dtype=torch.float32)
        decode = _core.attention.mla_decode
        rest = (kv_bound, stats, cache_format, cache_scale)
        self._note(decode, q, cache, block_table, cu_q, kv_len, scale, out, *rest)
        return out, stats

    def mla_project_v(self, o_lat: Tensor, w_uv: Tensor, v_dim: int) -> Tensor:
        out = self._new(o_lat, o_lat.shape[0], o_lat.shape[1] * v_dim)
        self._note(_core.attention.mla_project_v, o_lat, w_uv, out)
        return out
