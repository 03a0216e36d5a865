"""Muon for the matrices, AdamW for the rest. Both can be captured in a CUDA graph."""

import math

import torch
from torch import Tensor


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Brings the singular values of a batch of matrices near one."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return (x.mT if tall else x).float()


class Muon:
    """Orthogonalised momentum; leading axes are a batch of matrices, as the experts of a layer."""

    def __init__(self, params: list[Tensor], weight_decay: float, momentum: float = 0.95) -> None:
        self._weight_decay, self._momentum = weight_decay, momentum
        self._groups: dict[tuple[int, int], list[Tensor]] = {}
        for p in params:
            self._groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self._buffers = {
            shape: torch.zeros(
                sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape, device=ps[0].device
            )
            for shape, ps in self._groups.items()
        }

    def reset(self) -> None:
        for buffer in self._buffers.values():
            buffer.zero_()

    @torch.no_grad()
    def step(self, lr: Tensor) -> None:
        for shape, params in self._groups.items():
            grad = torch.cat([p.grad.reshape(-1, *shape) for p in params if p.grad is not None])
            buffer = self._buffers[shape]
            buffer.lerp_(grad, 1 - self._momentum)
            update = newton_schulz(grad.lerp(buffer, self._momentum))
            update = update * (lr * (-0.2 * math.sqrt(max(shape))))  # the update RMS of AdamW
            torch._foreach_mul_(params, 1 - lr * self._weight_decay)
            sizes = [p.numel() // (shape[0] * shape[1]) for p in params]
            parts = zip(torch.split(update, sizes), params, strict=True)
            torch._foreach_add_(params, [u.view(p.shape) for u, p in parts])


class Optimizer:
    """Muon and AdamW over named parameters, at one learning rate each."""

    def __init__(
        self,
        named: dict[str, Tensor],
        muon_lr: float,
        adam_lr: float,
        weight_decay: float,
        capturable: bool,
    ) -> None:
        self.params = list(named.values())
        by_muon = [v for k, v in named.items() if v.ndim >= 2 and not _by_adam(k)]
        by_adam = [v for k, v in named.items() if v.ndim < 2 or _by_adam(k)]
        device = self.params[0].device
        self._rates = (muon_lr, adam_lr)
        self._muon_lr = torch.zeros((), device=device)
        self._adam_lr = torch.zeros((), device=device)
        self._muon = Muon(by_muon, weight_decay)
        self._adam = torch.optim.AdamW(
            by_adam,
            lr=self._adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            capturable=capturable,
            fused=capturable,
        )

    def set_factor(self, factor: float) -> None:
        self._muon_lr.fill_(self._rates[0] * factor)
        self._adam_lr.fill_(self._rates[1] * factor)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self._adam.step()
        self._muon.step(self._muon_lr)

    def clear_gradients(self) -> None:
        for p in self.params:
            p.grad = None

    def reset(self) -> None:
        """Forgets all moments in place, so that captured graphs stay valid."""
        self._muon.reset()
        for state in self._adam.state.values():
            for value in state.values():
                value.zero_()


def _by_adam(name: str) -> bool:
    return name == "embedding" or name.endswith(".router")
