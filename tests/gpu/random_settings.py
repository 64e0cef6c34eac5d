"""Random settings on a device whose numbers are the CPU's, beside the same on the CPU, bit for bit.

    python tests/gpu/random_settings.py --minutes 5 [--seed S] [--only N] [--keep-going]

The device is a simulated one (``accelerators``). Where its module has ``set_delay``, each run has
other delays; where it has ``races``, a run fails on accesses that nothing orders, whatever its
numbers. Exit status 1 after a failure, with the seed and the settings.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS.parent)]

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerators import DEVICE, MISSING, is_simulated, module, on
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, GradScaler, ScalerConfig, attach, detach
from accel_scaler.integrations import cpu_float16

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}
DELAYS = [(0.0, 0, 0.0, 0), (0.1, 300, 0.1, 300), (0.0, 0, 0.5, 3000), (0.3, 1000, 0.0, 0)]
"""How probable and how long, in us: on the stream that trains, on side streams."""

GRADIENT_EDITS = ("grad in place", "grad.data", "grad replaced", "grad dropped")
ASIDE = ("read aside", "evaluate aside", "average aside")
AFTER = ("synchronize", "state dict", "evaluate", "edit", "resume", "litter", *ASIDE)


@dataclass(frozen=True)
class Settings:
    """All that a run depends on but the device."""

    model: str
    optimizer: str
    dtype: str
    mode: str
    offload: str
    through: str
    """"AsyncOptimizer", "Accelerate", or "plain loop": with torch's calls of the scaler."""
    scaled: bool
    fold_unscale: bool
    warmup: int
    clip: float | None
    accumulation: int
    scheduler: bool
    to_none: bool
    other_stream: bool
    """Trains on a stream that is not the default one."""
    dropped: bool
    """At the end without ``close``."""
    overflows: tuple[int, ...]
    edits: tuple[str, ...]
    """One for each step, or ""."""
    submits: tuple[bool, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))


def draw(r: random.Random) -> Settings:
    steps = r.randint(3, 8)
    through = r.choice(("AsyncOptimizer", "AsyncOptimizer", "Accelerate", "plain loop"))
    scaled = through != "AsyncOptimizer" or r.random() < 0.7
    mode = r.choice(("sync", "overlap", "overlap", "delayed"))
    # A folded clip may differ by one rounding, and off the CPU it is not folded.
    clip = r.choice((None, 0.5, 0.01))

    def sometimes(chance: float, names: Sequence[str]) -> str:
        return r.choice(names) if r.random() < chance else ""

    return Settings(
        model=r.choice(sorted(MODELS)),
        optimizer=r.choice(sorted(OPTIMIZERS)),
        # Accelerate's scaler refuses float16 gradients elsewhere than at a boundary of ours.
        dtype=r.choice(("float32", "float16", "both")) if through != "plain loop" else "float32",
        mode=mode,
        offload=r.choice(("none", "cpu")),
        through=through,
        scaled=scaled,
        fold_unscale=r.random() < 0.3 and through != "plain loop" and clip is None,
        warmup=r.choice((0, 0, 2)),
        clip=clip,
        accumulation=r.choice((1, 1, 2)),
        scheduler=r.random() < 0.5,
        to_none=r.random() < 0.8,
        other_stream=r.random() < 0.3,
        dropped=r.random() < 0.2,
        overflows=tuple(step for step in range(steps) if scaled and r.random() < 0.15),
        edits=tuple(sometimes(0.2, GRADIENT_EDITS) for _ in range(steps)),
        submits=tuple(through == "AsyncOptimizer" and r.random() < 0.15 for _ in range(steps)),
        after=tuple(sometimes(0.35, AFTER) for _ in range(steps)),
    )


def without(s: Settings, names: Sequence[str]) -> Settings:
    """To look for one fault beside others that are known."""
    left: dict[str, Any] = {
        "edits": tuple("" if name in names else name for name in s.edits),
        "after": tuple("" if name in names else name for name in s.after),
    }
    if "submit" in names:
        left["submits"] = (False,) * len(s.submits)
    if "accumulation" in names:
        left["accumulation"] = 1
    for name in {"dropped", "other_stream"} & set(names):
        left[name] = False
    if "offload" in names:
        left["offload"] = "none"
    return replace(s, **left)


class Tied(nn.Module):
    """An embedding whose weight is used twice; a layer that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        held = self.table(x.abs().mul(5).long().clamp(max=11)).mean(1)
        held = self.norm(held.to(self.norm.weight.dtype)).to(self.table.weight.dtype)
        return (held @ self.table.weight.t()).float()


class Plain(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(8, width)]
        for _ in range(depth):
            layers += [nn.ReLU(), nn.Linear(width, width)]
        self.layers = nn.Sequential(*layers)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        held = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            held = layer(held.to(layer.weight.dtype) if isinstance(layer, nn.Linear) else held)
        return held.float() + self.shift


MODELS = {"tied": Tied, "small": lambda: Plain(16, 1), "wide": lambda: Plain(192, 2)}


class Run:
    """One run of ``settings`` on one device; :attr:`seen` is what it came to."""

    def __init__(self, settings: Settings, device: str) -> None:
        self.s, self.device = settings, torch.device(device)
        self.is_host = self.device.type == "cpu"
        self.seen: list[tuple[str, Any]] = []
        self.side = None if self.is_host else torch.Stream(device)
        self.kept: list[Tensor] = []
        self.average: list[Tensor] = []
        self.accelerator: Any = None

    def build(self, saved: Sequence[Any] | None = None) -> None:
        """A model, an optimizer and a scaler, anew; ``saved`` is loaded."""
        s = self.s
        torch.manual_seed(3)
        model: Any = MODELS[s.model]()
        layers = [m for m in model.modules() if next(m.parameters(False), None) is not None]
        for number, layer in enumerate(layers):
            if isinstance(layer, nn.LayerNorm):
                continue  # its float16 backward is not everywhere
            if s.dtype == "float16" or (s.dtype == "both" and number % 2):
                for p in layer.parameters(False):
                    p.data = p.data.half()
        self.model = model.to(self.device)
        self.inner = OPTIMIZERS[s.optimizer](self.model.parameters())
        arguments = {"init_scale": 1024.0, "growth_interval": 3}
        named = {"step_mode": s.mode, "offload": s.offload, "fold_unscale": s.fold_unscale}
        named["delay_warmup_steps"] = s.warmup if s.mode == "delayed" else 0
        self.scaler: Any = None
        if s.through == "Accelerate":
            self.accelerator = Accelerator(
                cpu=self.is_host,
                mixed_precision="fp16",
                gradient_accumulation_steps=s.accumulation,
            )
            assert self.accelerator.device.type == self.device.type
            # Accelerate makes one for CUDA, which is not there.
            self.accelerator.scaler = torch.amp.GradScaler(self.device.type, **arguments)
            attach(self.accelerator, ScalerConfig(**arguments, **named))
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.inner)
            self.scaler = self.accelerator.scaler
        else:
            named["mode"] = named.pop("step_mode")
            if s.scaled:
                self.scaler = GradScaler(self.device.type, **arguments)
            own = self.scaler if s.through == "AsyncOptimizer" else None
            self.optimizer = AsyncOptimizer(self.inner, self.model, scaler=own, **named)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda n: 1 / (1 + 0.1 * n))
        if saved is not None:
            parts = [self.model, self.optimizer, self.schedule, self.scaler]
            for part, state in zip(parts, saved, strict=True):
                if part is not None:
                    part.load_state_dict(state)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a second stream, ordered with this one as torch asks for."""
        if self.side is None:
            yield
            return
        present = torch.accelerator.current_stream(self.device)
        self.side.wait_stream(present)
        with on(self.side):
            yield
        present.wait_stream(self.side)

    def note(self, name: str, *tensors: Any) -> None:
        """Without a wait: a copy on the present stream."""
        self.seen += [(name, t.detach().clone() if isinstance(t, Tensor) else t) for t in tensors]

    def steps(self) -> None:
        stream = nullcontext()
        if self.s.other_stream and not self.is_host:
            stream = on(torch.Stream(self.device))  # type: ignore[assignment]
        with stream:
            self.build()
            for step in range(len(self.s.after)):
                self.window(step)
            self.end()

    def loss(self, step: int, micro: int) -> Tensor:
        seeded = torch.Generator().manual_seed(100 * step + micro)
        x = torch.randn(4, 8, generator=seeded).to(self.device)
        wanted = self.s.through == "Accelerate" or (self.s.scaled and self.s.dtype == "float32")
        with torch.autocast(self.device.type, torch.float16, enabled=wanted):
            made = self.model(x)
        loss: Tensor = made.float().square().mean()
        return loss * float("inf") if step in self.s.overflows else loss

    def window(self, step: int) -> None:
        for micro in range(self.s.accumulation):
            if self.accelerator is not None:
                with self.accelerator.accumulate(self.model):
                    loss = self.loss(step, micro)
                    self.accelerator.backward(loss)
                    self.ending(step, micro)
            else:
                loss = self.loss(step, micro)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                self.ending(step, micro)
            self.note(f"loss of step {step}", loss)

    def ending(self, step: int, micro: int) -> None:
        """What follows a backward."""
        last = micro == self.s.accumulation - 1
        if last:
            self.edit_gradients(self.s.edits[step])
        if self.accelerator is not None:
            if self.accelerator.sync_gradients and self.s.clip is not None:
                self.clip(step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.s.to_none)
        elif last:
            self.boundary(step)
        if not last:
            return
        skipped = self.optimizer.step_was_skipped
        if self.s.scheduler and not skipped:
            self.schedule.step()
        self.note(f"lr of step {step}", self.schedule.get_last_lr()[0])
        if self.s.through != "plain loop":
            self.note(f"whether step {step} was skipped", skipped)
        if self.scaler is not None:
            self.note(f"scale after step {step}", self.scaler.get_scale())
        self.afterwards(self.s.after[step], step)

    def boundary(self, step: int) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        plain = self.s.through == "plain loop"
        if self.s.submits[step]:
            if scaler is None:
                optimizer.submit(optimizer.step)
            else:

                def job() -> None:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)

                optimizer.submit(job)
                scaler.update()
        elif plain:
            if self.s.clip is not None:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.s.clip)
                if step not in self.s.overflows:
                    self.note(f"norm of step {step}", norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            if self.s.clip is not None:
                self.clip(step)
            optimizer.step()
        optimizer.zero_grad(set_to_none=self.s.to_none)

    def clip(self, step: int) -> None:
        clipper = self.optimizer if self.accelerator is None else self.accelerator
        if self.accelerator is None:
            norm = clipper.clip_grad_norm_(self.s.clip)
        else:
            norm = clipper.clip_grad_norm_(self.model.parameters(), self.s.clip)
        if step not in self.s.overflows:
            self.note(f"norm of step {step}", norm)

    def edit_gradients(self, how: str) -> None:
        p = next(p for p in self.model.parameters() if p.dim() > 1)
        if p.grad is None or not how:
            return
        if how == "grad dropped" and self.s.optimizer == "fused sgd":
            return  # torch's fails where some have a momentum buffer and others get their first
        if how == "grad in place":
            p.grad[:1] = 0.0
        elif how == "grad.data":
            p.grad.data[:1] = 0.0
        elif how == "grad replaced":
            p.grad = p.grad * 0.5
        else:
            p.grad = None

    def afterwards(self, what: str, step: int) -> None:
        name = f"{what} after step {step}"
        params = list(self.model.parameters())
        if what == "synchronize":
            self.optimizer.synchronize()
            self.note(name, *params)
        elif what == "state dict":
            self.note(name, *tensors_in(self.state()))
        elif what == "evaluate":
            with torch.no_grad():
                self.note(name, self.model(torch.ones(2, 8, device=self.device)))
        elif what == "edit":
            self.optimizer.synchronize()
            with torch.no_grad():
                params[0].mul_(0.5)
        elif what == "resume" and self.accelerator is None:
            saved = copy.deepcopy(self.state())
            self.optimizer.close()
            self.build(saved)
            if self.s.dropped:
                self.litter()
        elif what == "litter":
            self.litter()
        elif what == "read aside":
            if self.s.mode == "delayed":
                self.optimizer.synchronize()
            with self.aside():
                self.note(name, *params)
        elif what == "evaluate aside":
            with self.aside(), torch.no_grad():
                self.note(name, self.model(torch.ones(2, 8, device=self.device)))
        elif what == "average aside":
            with self.aside(), torch.no_grad():
                if not self.average:
                    self.average = [torch.zeros_like(p, dtype=torch.float32) for p in params]
                for mean, p in zip(self.average, params, strict=True):
                    mean.lerp_(p.detach().float(), 0.25)

    def litter(self) -> None:
        """Memory of the parameters' sizes, taken by somebody else."""
        for p in self.model.parameters():
            self.kept.append(torch.full(p.shape, 3.0, dtype=p.dtype, device=self.device))

    def state(self) -> list[Any]:
        parts = [self.model, self.optimizer, self.schedule, self.scaler]
        found = [None if part is None else part.state_dict() for part in parts]
        if self.s.through == "plain loop":  # on a device nobody reads there whether it skipped
            found[-1].pop("_consecutive_skips")
        return found

    def end(self) -> None:
        if self.s.dropped and self.accelerator is None:
            # What an update in hand comes to is nobody's; it may only not touch what others have.
            self.loss(0, 0).backward()
            self.optimizer.step() if self.scaler is None else None
            held = [(p.shape, p.dtype) for p in self.model.parameters()]
            del self.optimizer, self.inner, self.model, self.schedule, self.scaler
            gc.collect()
            self.kept += [
                torch.full(shape, 3.0, dtype=dtype, device=self.device)
                for shape, dtype in held
                for _ in range(4)
            ]
        else:
            self.note("at the end", *tensors_in(self.state()))
            if self.accelerator is None:
                self.optimizer.close()
            else:
                detach(self.accelerator)
        self.note("averages", *self.average)
        self.note("others' memory", *self.kept)

    def found(self) -> list[tuple[str, Any]]:
        return [(name, t.cpu() if isinstance(t, Tensor) else t) for name, t in self.seen]


def tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, float, int)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def run(settings: Settings, device: str) -> list[tuple[str, Any]]:
    named = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    if device != "cpu":
        named["ACCELERATE_TORCH_DEVICE"] = device
    with mock.patch.dict(os.environ, named, clear=True):
        try:
            made = Run(settings, device)
            made.steps()
            if device != "cpu":
                torch.accelerator.synchronize(device)
            return made.found()
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()
            PartialState._reset_state()


def differences(mine: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> list[str]:
    if [name for name, _ in mine] != [name for name, _ in expected]:
        counts = [Counter(name for name, _ in seen) for seen in (mine, expected)]
        more, less = counts[0] - counts[1], counts[1] - counts[0]
        return [f"seen more: {dict(more)}, seen less: {dict(less)}"]
    wrong = []
    for (name, a), (_, b) in zip(mine, expected, strict=True):
        if isinstance(a, Tensor):
            same = a.dtype is b.dtype and torch.equal(a, b)
            same = same or (a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()))
        else:
            same = a == b
        if not same:
            wrong.append(name)
    return list(dict.fromkeys(wrong))


def outcome(settings: Settings, device: str) -> Any:
    """What it saw, or how it failed."""
    try:
        return run(settings, device)
    except Exception as error:
        lines = "".join(traceback.format_exception(error))
        return f"{type(error).__name__}: {error}\n{lines}"


def compare(settings: Settings, delay: tuple[float, int, float, int]) -> str:
    """What is wrong; "" where nothing is."""
    expected = outcome(settings, "cpu")
    backend = module()
    if hasattr(backend, "set_delay"):
        backend.set_delay(*delay)
    if hasattr(backend, "clear_races"):
        backend.clear_races()
    mine = outcome(settings, DEVICE)
    found = []
    if isinstance(mine, str) or isinstance(expected, str):
        one, other = (x.partition("\n")[0] if isinstance(x, str) else "" for x in (mine, expected))
        if one.replace(DEVICE, "cpu") != other or not other.startswith("OrderError"):
            found.append(f"on {DEVICE}: {mine if one else 'ran'}\non the CPU: {other or 'ran'}")
    else:
        wrong = differences(mine, expected)
        if wrong:
            found.append("unlike on the CPU: " + "; ".join(wrong[:8]))
    gc.collect()
    torch.accelerator.synchronize(DEVICE)
    for what, count, where in getattr(backend, "races", list)():
        found.append(f"nothing orders: {count} x {what} ({where})")
    return "\n".join(found)


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--only", type=int, default=None, help="this run alone")
    parser.add_argument("--without", default="", help="names of what is not to be drawn, by commas")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, too")
    arguments = parser.parse_args(argv)
    if MISSING or not is_simulated():
        parser.error(MISSING or f"{DEVICE}: its numbers are not the CPU's")
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    torch.set_num_threads(1)
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    cpu_float16.has_float16_kernels = lambda: True  # on both devices torch's own
    end, number, failed = time.monotonic() + 60 * arguments.minutes, 0, 0
    seen: Counter[str] = Counter()
    numbers = iter([arguments.only]) if arguments.only is not None else iter(range(1 << 30))
    for number in numbers:
        if time.monotonic() > end:
            break
        r = random.Random(f"{seed}/{number}")
        settings, delay = without(draw(r), arguments.without.split(",")), r.choice(DELAYS)
        wrong = compare(settings, delay)
        seen["runs"] += 1
        seen["steps"] += len(settings.after)
        for name in (settings.mode, settings.through, *settings.after, *settings.edits):
            seen[name or "nothing"] += 1
        if wrong:
            failed += 1
            say(f"FAILED, --seed {seed} --only {number}, delay {delay}\n{settings}\n{wrong}")
            if not arguments.keep_going:
                break
    say(f"{seen['runs']} runs, {seen['steps']} steps, seed {seed}: {failed} failed")
    return 1 if failed or not seen["runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
