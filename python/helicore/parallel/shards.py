"""Which part of a model one rank holds, and how it meets the others.

Ranks are numbered tensor-parallel groups first: rank = tensor_rank * context_size + context_rank.
In attention over the cache a tensor-parallel group of `context_size` ranks shares its heads and
splits the sequence; everywhere else all ranks split the weights alike. docs/design/helix.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from helicore._core.core import Ledger


class Collectives(Protocol):
    """What a model asks of `helicore.comm`; results are the same bits on every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, x: Tensor, out: Tensor) -> None: ...

    def all_gather(self, x: Tensor, out: Tensor) -> None: ...

    def merge_partials(self, o: Tensor, stats: Tensor, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Shards:
    """The part of one rank. `everyone` is needed with more than one rank, `context` with more than
    one that splits the sequence."""

    tensor_size: int = 1
    context_size: int = 1
    rank: int = 0
    block_size: int = 1
    """Rows of a page on one rank."""
    everyone: Collectives | None = None
    context: Collectives | None = None
    splits_experts: bool = False
    """A rank has some of the routed experts whole, not a part of each."""
    project_first_above: int | None = None
    """From this many tokens of a step on, values are projected before partial results travel:
    fewer bytes for more products. None: never."""

    @property
    def size(self) -> int:
        return self.tensor_size * self.context_size

    @property
    def tensor_rank(self) -> int:
        return self.rank // self.context_size

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_size

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.block_size, self.context_size)

    def group_heads(self, num_heads: int) -> range:
        """Heads of this rank's tensor-parallel group: those it computes over the cache."""
        self.check_heads(num_heads)
        count = num_heads // self.tensor_size
        return range(self.tensor_rank * count, (self.tensor_rank + 1) * count)

    def own_heads(self, num_heads: int) -> range:
        """Heads of this rank alone: those of prompts, and of the output projection."""
        self.check_heads(num_heads)
        count = num_heads // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def check_heads(self, num_heads: int) -> None:
        if num_heads % self.size:
            raise ValueError(
                f"tensor_parallel_size * context_parallel_size must divide the {num_heads} "
                f"attention heads of the model, got {self.tensor_size} * {self.context_size}"
            )

    def part_of(self, features: int, name: str) -> range:
        """The consecutive features of this rank: whole vectors where there are enough of them."""
        if features < self.size:
            raise ValueError(f"{name} {features} can not be split over {self.size} ranks")
        unit = next(u for u in (16, 8, 4, 1) if features % u == 0 and features // u >= self.size)
        units = features // unit
        first, last = (units * r // self.size for r in (self.rank, self.rank + 1))
        return range(first * unit, last * unit)

    def own_experts(self, num_experts: int) -> range:
        """The routed experts of this rank, where they are not split."""
        if num_experts < self.size:
            raise ValueError(
                f"enable_expert_parallel needs an expert for each of the {self.size} ranks, the "
                f"model has {num_experts}"
            )
        first, last = (num_experts * r // self.size for r in (self.rank, self.rank + 1))
        return range(first, last)

    def equal_part(self, rows: int) -> range:
        """Of rows that are gathered again: every rank has as many, but for the last ones."""
        count = -(-rows // self.size)
        return range(min(self.rank * count, rows), min((self.rank + 1) * count, rows))
