"""One short training: attached, as users write it, and the same in plain torch.

Six windows of two micro-batches with clipping and a schedule; in the fifth the loss of the last
rank is inf. Each rank has data of its own. In both runs Accelerate prepares autocast, and DDP where
there are ranks; :func:`reference` writes out everything after a backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env
from torch import Tensor, nn

from ..config import ScalerConfig
from ..integrations import attach, detach
from ..scaling import pause_before_the_end

WINDOWS, MICRO_BATCHES, OVERFLOW = 6, 2, 4
SCALE: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
CLIP, LR, MOMENTUM = 0.5, 0.05, 0.9
LIMIT = timedelta(seconds=60)
"""A rank that waits longer for another one fails."""


class Case(NamedTuple):
    """How a training runs; the settings are fields of ``ScalerConfig``, the widths those of the
    hidden layers."""

    settings: dict[str, Any]
    adam: bool = False
    weights: torch.dtype = torch.float32
    widths: tuple[int, int] = (32, 16)


class Window(NamedTuple):
    """Scale and learning rate after a window, and the norm before clipping."""

    skipped: bool
    scale: float
    lr: float
    norm: float


class Seen(NamedTuple):
    """The outcome of a run; the tensors are float32, on the CPU, of shape (n,)."""

    windows: list[Window]
    weights: Tensor
    state: Tensor


@contextmanager
def joined() -> Iterator[PartialState]:
    """Joins the launched ranks, if there are some. Accelerate's state is new at both ends."""
    AcceleratorState._reset_state(True)
    state = PartialState(parse_flag_from_env("ACCELERATE_USE_CPU"), timeout=LIMIT)
    try:
        yield state
    finally:
        pause_before_the_end()
        state.destroy_process_group()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@contextmanager
def lacks() -> Iterator[None]:
    """Make errors of Accelerate or torch in the block ``NotImplementedError``, for this device."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise NotImplementedError(str(error)) from error


@contextmanager
def attached(**settings: Any) -> Iterator[Any]:
    """A new fp16 accelerator with these settings alone; detached at the end."""
    plugin = GradientAccumulationPlugin(num_steps=MICRO_BATCHES)
    with lacks():
        accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_plugin=plugin)
    attach(accelerator, ScalerConfig(**settings))
    yield accelerator
    detach(accelerator)


def network(case: Case) -> nn.Sequential:
    """A network with the same weights on each call and each rank, on the device."""
    a, b = case.widths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        layers = [nn.Linear(8, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 1)]
        return nn.Sequential(*layers).to(PartialState().device, case.weights)


def loss_of(model: nn.Module, window: int, micro: int) -> Tensor:
    """float32, shape (); inf on the last rank in the window that overflows."""
    state = PartialState()
    seed = (window * MICRO_BATCHES + micro) * state.num_processes + state.process_index
    rows = torch.randn(16, 9, generator=torch.Generator().manual_seed(seed)).to(state.device)
    out = model(rows[:, :8].to(next(model.parameters()).dtype))
    loss: Tensor = (out.float() - rows[:, 8:]).square().mean()
    is_last = state.process_index == state.num_processes - 1
    return loss * math.inf if window == OVERFLOW and is_last else loss


def optimizer_of(params: Iterable[Tensor], adam: bool = False) -> torch.optim.Optimizer:
    if not adam:
        return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
    with lacks():
        return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))


def trained(case: Case) -> Seen:
    """An attached run."""
    seen = []
    with attached(**(SCALE | case.settings)) as accelerator:
        model: Any = network(case)
        optimizer: Any = optimizer_of(model.parameters(), case.adam)
        schedule: Any = schedule_of(optimizer)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        for window in range(WINDOWS):
            for micro in range(MICRO_BATCHES):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, window, micro))
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            now, (rate,) = accelerator.scaler.get_scale(), schedule.get_last_lr()
            seen.append(Window(optimizer.step_was_skipped, now, rate, float(norm)))
        return _ended(seen, accelerator.unwrap_model(model), optimizer)


def reference(case: Case) -> Seen:
    """The same in plain torch: its scaler, float32 masters."""
    seen, scaler = [], torch.amp.GradScaler(PartialState().device.type, **SCALE)
    with attached() as accelerator:
        model = accelerator.prepare(network(case))
        params = list(model.parameters())
        masters = [p.detach().to(torch.float32, copy=True) for p in params]
        optimizer = optimizer_of(masters, case.adam)
        schedule = schedule_of(optimizer)
        for window in range(WINDOWS):
            for micro in range(MICRO_BATCHES):
                is_last = micro == MICRO_BATCHES - 1
                with nullcontext() if is_last else accelerator.no_sync(model):
                    scaled = scaler.scale(loss_of(model, window, micro) / MICRO_BATCHES)
                    with accelerator.autocast():  # it has float16 products on every CPU
                        torch.autograd.backward(scaled)
            for p, master in zip(params, masters, strict=True):
                master.grad = p.grad.float()
            model.zero_grad()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(masters, CLIP)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            scale = scaler.get_scale()
            if not (skipped := scale < before):
                for _ in range(accelerator.num_processes):  # as Accelerate's scheduler does
                    schedule.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
            (rate,) = schedule.get_last_lr()
            size = math.inf if skipped else float(norm)
            seen.append(Window(skipped, scale, float(rate), size))
        return _ended(seen, model, optimizer)


def _ended(windows: list[Any], model: nn.Module, optimizer: Any) -> Seen:
    weights = model.state_dict().values()  # it waits for the step in flight
    state = sorted(optimizer.state_dict()["state"].items())
    values = [v for _, entry in state for key, v in sorted(entry.items()) if key != "master"]
    flat = [torch.cat([t.float().cpu().flatten() for t in each]) for each in (weights, values)]
    return Seen(windows, *flat)
