"""Registration of native kernels as torch custom operators, with a direct path for eager calls.

A dispatched custom operator costs several microseconds a call, a direct call into the native module
about one. `register_op` therefore returns a plain function that runs the implementation itself, and
goes through `torch.ops.helicore.<name>` only while `torch.compile` or `torch.export` traces.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("helicore", "FRAGMENT")
is_compiling = torch.compiler.is_compiling


def register_op(
    name: str, *, fake: Callable[P, R], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes the decorated CPU implementation the operator `helicore::<name>`.

    The schema comes from the annotations of the implementation: tensors, optional tensors, `int`,
    `float`, `bool`, `str`, `torch.dtype`, and a tensor, a tuple of tensors or None as the result.

    Args:
        name: name below `torch.ops.helicore`.
        fake: gives results of the right shape and dtype without computing.
        mutates: names of the arguments that are written in place. A result never aliases one.
    """

    def decorate(impl: Callable[P, R]) -> Callable[P, R]:
        LIBRARY.define(name + torch.library.infer_schema(impl, mutates_args=mutates))
        LIBRARY.impl(name, impl, "CPU")
        torch.library.register_fake(f"helicore::{name}", fake, lib=LIBRARY)
        operator = cast("Callable[P, R]", getattr(torch.ops.helicore, name).default)

        @functools.wraps(impl)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return operator(*args, **kwargs)
            return impl(*args, **kwargs)

        return call

    return decorate
