"""Trains the bundled model and writes it as a Hugging Face folder.

python tools/train_tiny/train.py --data DIR --out DIR

`--data` is a folder made by `prepare.py`. On a GPU a whole step, optimiser included, is one CUDA
graph. Without a GPU the same steps run eagerly, which is of use for a look at the code only.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from data import Batches, TokenFile
from evaluate import nats_per_token, report
from export import round_to_checkpoint, save
from model import Config, Model
from optim import Optimizer
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int


@dataclass(frozen=True)
class Plan:
    """A run. The last `long_share` of the steps goes through `long_cycle` of `shapes`."""

    steps: int = 16000
    seconds: float = 450.0  # the schedule is shortened before the start if it would take longer
    shapes: tuple[Shape, ...] = (Shape(16, 2048), Shape(4, 8192), Shape(2, 16384))
    long_share: float = 0.25
    long_cycle: tuple[int, ...] = (1, 0, 2, 0, 1, 0)
    muon_lr: float = 0.01
    adam_lr: float = 0.01
    weight_decay: float = 0.1
    dropout: float = 0.2
    warmup: int = 100
    z_loss: float = 1e-4
    balance: float = 1e-3
    seed: int = 0

    def shape_at(self, step: int) -> int:
        into = step - int(self.steps * (1 - self.long_share))
        return self.long_cycle[into % len(self.long_cycle)] if into >= 0 else 0

    def lr_factor(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup) * (1 - step / self.steps)


@dataclass
class Log:
    """Lines to the screen and to a file, with the seconds since the start."""

    path: Path
    start: float = field(default_factory=time.time)

    def __call__(self, text: str) -> None:
        line = f"[{time.time() - self.start:6.1f}] {text}"
        print(line, flush=True)
        with self.path.open("a") as f:
            f.write(line + "\n")


class Stepper:
    """One training step over a static batch of one shape."""

    def __init__(
        self, model: Model, optimizer: Optimizer, plan: Plan, shape: Shape, total: Tensor
    ) -> None:
        self._model, self._optimizer, self._plan, self._total = model, optimizer, plan, total
        size, device = (shape.batch, shape.length), model.device
        self._ids = torch.zeros(size, dtype=torch.long, device=device)
        self._target = torch.zeros(size, dtype=torch.long, device=device)
        self._rate = torch.tensor(plan.dropout, device=device) if plan.dropout else None
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._replay: Callable[[], None] | None = None
        self.seconds = 0.0

    def _step(self) -> None:
        mean, entropy = self._model.loss(
            self._ids, self._target, self._dtype, self._rate, self._plan.z_loss
        )
        mean.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._model.balance(self._plan.balance)
        self._total.add_(entropy.mean())

    def capture(self, batch: tuple[Tensor, Tensor]) -> None:
        """Records the step as a CUDA graph and times it. The learning rate must be zero, and the
        caller resets the moments, the biases and the running loss afterwards."""
        self._ids.copy_(batch[0])
        self._target.copy_(batch[1])
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
                self._optimizer.clear_gradients()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._optimizer.clear_gradients()
        self._replay = graph.replay
        start = time.time()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        self.seconds = (time.time() - start) / 5

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._ids.copy_(batch[0])
        self._target.copy_(batch[1])
        if self._replay:
            self._replay()
        else:
            self._step()
            self._optimizer.clear_gradients()


def fit_to_time(plan: Plan, seconds: list[float], log: Log) -> Plan:
    """Fewer steps where the measured ones would outlast `plan.seconds`."""
    need = sum(seconds[plan.shape_at(s)] for s in range(plan.steps))
    log(f"step ms {[round(1000 * s, 2) for s in seconds]}, {plan.steps} steps need {need:.0f} s")
    if need > plan.seconds:
        plan = replace(plan, steps=int(plan.steps * plan.seconds / need))
        log(f"shortened to {plan.steps} steps")
    return plan


def make_steppers(
    model: Model, optimizer: Optimizer, plan: Plan, sources: list[Iterator[tuple[Tensor, Tensor]]]
) -> tuple[list[Stepper], Tensor]:
    """A stepper for each shape, captured on a GPU, and the running sum of their losses."""
    total = torch.zeros((), device=model.device)
    steppers = [Stepper(model, optimizer, plan, shape, total) for shape in plan.shapes]
    if model.device == "cuda":
        optimizer.set_factor(0.0)
        for stepper, source in zip(steppers, sources, strict=True):
            stepper.capture(next(source))
        optimizer.reset()
        model.bias.zero_()
        total.zero_()
    return steppers, total


def train(model: Model, data: Path, plan: Plan, log: Log, every: int) -> dict[str, object]:
    files = [TokenFile(p) for p in sorted(data.glob("train_*.npz"))]
    sources = [
        iter(Batches(files, s.batch, s.length, i > 0, model.device, plan.seed + i))
        for i, s in enumerate(plan.shapes)
    ]
    on_gpu = model.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    optimizer = Optimizer(
        model.parameters(), plan.muon_lr, plan.adam_lr, plan.weight_decay, capturable=on_gpu
    )
    steppers, total = make_steppers(model, optimizer, plan, sources)
    plan = fit_to_time(plan, [s.seconds for s in steppers], log)
    start, last, mean = time.time(), 0, 0.0
    for step in range(plan.steps):
        optimizer.set_factor(plan.lr_factor(step))
        which = plan.shape_at(step)
        steppers[which](next(sources[which]))
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            mean = total.item() / (step + 1 - last)
            busiest = (model.load.amax(-1) / model.load.mean(-1)).max().item()
            val = nats_per_token(model, data / "val.npz", dtype)
            log(f"step {step + 1} train {mean:.4f} val {val:.4f} busiest expert {busiest:.2f}x")
            total.zero_()
            last = step + 1
    return {"steps": plan.steps, "train_seconds": time.time() - start, "train_nats": mean}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1000, help="steps between validations")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 16384])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("steps", "seconds", "long_share", "muon_lr", "adam_lr", "dropout", "seed"):
        default = getattr(Plan, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, type=type(default), default=default
        )
    parser.add_argument("--shapes", nargs="*", help="BATCHxLENGTH, the short one first")
    parser.add_argument("--model", nargs="*", default=[], help="FIELD=VALUE of the model's Config")
    return parser.parse_args()


def plan_from(args: argparse.Namespace) -> Plan:
    names = [f.name for f in fields(Plan) if f.name != "shapes"]
    plan = Plan(**{n: getattr(args, n) for n in names if hasattr(args, n)})
    if args.shapes:
        sizes = [tuple(map(int, s.split("x"))) for s in args.shapes]
        plan = replace(plan, shapes=tuple(Shape(*s) for s in sizes))
    longest = len(plan.shapes) - 1
    return replace(plan, long_cycle=tuple(min(i, longest) for i in plan.long_cycle))


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "train.log")
    changes = dict(m.split("=") for m in args.model)
    cfg = Config(**{k: type(getattr(Config, k))(v) for k, v in changes.items()})
    plan = plan_from(args)
    torch.manual_seed(plan.seed)
    on_gpu = args.device == "cuda"
    model = Model(cfg, args.device, seed=plan.seed + 1, compiled=on_gpu)
    log(f"{model.count()} parameters; {cfg}; {plan}")
    figures: dict[str, object] = {"parameters": model.count()}
    figures |= train(model, args.data, plan, log, args.every)
    round_to_checkpoint(model)
    figures["weights_bytes"] = save(model, args.data / "tokenizer", args.out / "model")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    figures |= report(model, args.data, dtype, args.lengths)
    figures["total_seconds"] = time.time() - log.start
    if on_gpu:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    text = json.dumps(figures, indent=2)
    (args.out / "figures.json").write_text(text + "\n")
    log(text)


if __name__ == "__main__":
    main()
