"""Registration of native kernels as torch custom operators, with a direct path for eager calls.

A dispatched custom operator costs several microseconds a call, a direct call into the native module
about one. `register_op` therefore returns a plain function that runs the implementation itself. It
goes through `torch.ops.helicore.<name>` where torch has to see the operator: while `torch.compile`
or `torch.export` traces, and under a dispatch mode (`make_fx`, fake tensors). No operator has a
backward pass: a call that asks for a gradient is refused. Which device runs a call is told by its
first argument.
"""

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("helicore", "FRAGMENT")
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def needs_dispatch() -> bool:
    """Whether torch has to see calls as operators now."""
    return _is_compiling() or _num_dispatch_modes() > 0


def refuse_gradient(name: str, args: Iterable[object]) -> None:
    """RuntimeError when autograd would record a call of operator `name` with these arguments."""
    if _is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        raise RuntimeError(
            f"helicore.ops.{name} has no backward pass, but an argument requires a gradient; "
            "call it under torch.no_grad() or pass detached tensors"
        )


def is_on_gpu(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the first argument of a call is a tensor of a GPU."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    return isinstance(first, torch.Tensor) and first.is_cuda


def register_op(
    name: str,
    *,
    fake: Callable[P, R],
    mutates: tuple[str, ...] = (),
    cuda: Callable[P, R] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes the decorated CPU implementation the operator `helicore::<name>`.

    The schema comes from the annotations of the implementation: tensors, optional tensors, `int`,
    `float`, `bool`, `str`, `torch.dtype`, and a tensor, a tuple of tensors or None as the result.

    Args:
        name: name below `torch.ops.helicore`.
        fake: gives results of the right shape and dtype without computing.
        mutates: names of the arguments that are written in place. A result never aliases one.
        cuda: the implementation over tensors of a GPU; None where there is none.
    """

    def decorate(impl: Callable[P, R]) -> Callable[P, R]:
        LIBRARY.define(name + torch.library.infer_schema(impl, mutates_args=mutates))
        LIBRARY.impl(name, impl, "CPU")
        if cuda is not None:
            LIBRARY.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"helicore::{name}", fake, lib=LIBRARY)
        operator = cast("Callable[P, R]", getattr(torch.ops.helicore, name).default)

        @functools.wraps(impl)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if needs_dispatch():
                return operator(*args, **kwargs)
            if _is_grad_enabled():
                refuse_gradient(name, (*args, *kwargs.values()))
            if cuda is not None and is_on_gpu(args, kwargs):
                return cuda(*args, **kwargs)
            return impl(*args, **kwargs)

        return call

    return decorate
