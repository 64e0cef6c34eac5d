"""``overlap`` computes what ``sync`` computes, bit for bit, whatever the model and the optimizer.

Where nothing else is said the optimizer thread is the lazy one of ``async_support``: a use of a
parameter that does not wait for its update sees the old value, every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from async_support import assert_same, lazy, one_part_each
from support import reset
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.optimizer_step.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")

INF = float("inf")
STEPS = 18
ACCUMULATION = 2
OVERFLOWS = frozenset({0, 3, 4})
"""Windows whose gradients overflow."""
SCALER = {"init_scale": 2.0**12, "growth_interval": 9}

Trace = dict[str, Any]
"""All that a run shows of itself, a value a step or micro-batch."""


def assert_lively(trace: Trace, steps: int) -> None:
    """The reference has trained, skipped where it should, and grown its scale."""
    skips = {n for n, skipped in enumerate(trace["skipped"]) if skipped}
    assert skips >= {n for n in OVERFLOWS if n < steps}
    assert len(skips) < steps // 4
    assert any(b > a for a, b in pairwise(trace["scales"]))
    assert len(set(trace["losses"])) > steps // 2


@contextmanager
def accelerator_for(mode: str, accumulation: int = ACCUMULATION) -> Iterator[Any]:
    """A fresh attached accelerator, detached at the end."""
    reset()
    accelerator: Any = attach(
        Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=accumulation),
        ScalerConfig(step_mode=mode, **SCALER),  # type: ignore[arg-type]
    )
    try:
        yield accelerator
    finally:
        accelerator.scaler.abandon_window()  # detach would raise, and hide an error
        detach(accelerator)


def rate_of(step: int) -> float:
    """A learning rate that is another one after each step."""
    return 1.0 / (1.0 + 0.03 * step)


Loss = Callable[[Any, int], Tensor]
"""Of the model and a number that says which micro-batch."""


@dataclass
class Script:
    """What a user's training script says."""

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int = STEPS
    accumulation: int = ACCUMULATION

    def run(self, mode: str) -> Trace:
        with accelerator_for(mode, self.accumulation) as accelerator:
            return self.train(accelerator)

    def train(self, accelerator: Any) -> Trace:
        names = ("losses", "norms", "scales", "skipped", "rates")
        trace: Trace = {name: [] for name in names}
        model = self.model()
        inner = self.optimizer(model)
        schedule = LambdaLR(inner, rate_of)
        model, optimizer, scheduler = accelerator.prepare(model, inner, schedule)
        for step in range(self.steps):
            for micro in range(self.accumulation):
                with accelerator.accumulate(model):
                    loss = self.loss(model, step * self.accumulation + micro)
                    trace["losses"].append(loss.item())
                    overflows = step in OVERFLOWS and micro == step % self.accumulation
                    accelerator.backward(loss * INF if overflows else loss)
                    if accelerator.sync_gradients:
                        held = [p for group in optimizer.param_groups for p in group["params"]]
                        norm = accelerator.clip_grad_norm_(held, 0.5)
                        trace["norms"].append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            trace["scales"].append(accelerator.scaler.get_scale())
            trace["skipped"].append(optimizer.step_was_skipped)
            trace["rates"].append([float(group["lr"]) for group in optimizer.param_groups])
        weights = {n: t.detach().clone() for n, t in model.state_dict().items()}
        return {**trace, "weights": weights, "state": optimizer.state_dict()}


def check(script: Script) -> Trace:
    """Overlap equals sync, and the run was worth comparing."""
    reference = script.run("sync")
    with lazy():
        assert_same(script.run("overlap"), reference)
    assert_lively(reference, script.steps)
    return reference


def generator_of(number: int) -> torch.Generator:
    """Random numbers of one micro-batch."""
    return torch.Generator().manual_seed(1000 + number)


def regression(model: Any, number: int) -> Tensor:
    """For models from 8 numbers to 4."""
    generator = generator_of(number)
    x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
    return nn.functional.mse_loss(model(x).float(), y)


def layers(width: int = 8) -> nn.Sequential:
    """Four layers from 8 to 4."""
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def momentum(model: nn.Module, lr: float = 0.05) -> Optimizer:
    """SGD shows a wrong scale; its momentum shows a lost step for long."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def unlike_forward(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with and without decay, both in the opposite order of the forward."""
    params = list(reversed(list(model.parameters())))
    return [
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.05},
    ]


# Models.


class Strangers(nn.Module):
    """Uses parameters where their owners do not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.inner = nn.Linear(8, 8)
        self.captured = list(self.inner.parameters())
        self.lstm = nn.LSTM(8, 8, batch_first=True)  # keeps a list of its weights
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj's
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.autocast("cpu", enabled=False):
            x = x + self.lstm(x)[0]
        x = x + torch.tanh(F.linear(x, *self.captured))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + torch.tanh(self.normed(x))
        return F.linear(x, self.embedding.weight)


def strangers_loss(model: Any, number: int) -> Tensor:
    tokens = torch.randint(16, (2, 5), generator=generator_of(number))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def test_parameters_used_outside_their_owners() -> None:
    check(Script(Strangers, strangers_loss, momentum))


class Recomputed(nn.Module):
    """Forgets its activations; the backward computes them again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.rest, self.last = nn.Linear(8, 8), layers(), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.rest, F.dropout(x, 0.1), use_reentrant=self.use_reentrant)
        y: Tensor = self.last(x)
        return y


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    check(Script(partial(Recomputed, use_reentrant), regression, momentum))


# Optimizers.


# AdamW, Adam, SGD and RMSprop: the random histories. Optimizers that torch does not have:
# test_seed_loops.py.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw_tensor_lr": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
    "sgd_tensor_lr": lambda p, lr: torch.optim.SGD(p, lr=torch.tensor(lr), momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adagrad": partial(torch.optim.Adagrad, foreach=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_groups_unlike_the_forward(name: str) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        groups = unlike_forward(model)
        for group in groups:
            if "tensor_lr" in name:
                group.pop("lr", None)
            if name == "rprop":
                group.pop("weight_decay")
        return OPTIMIZERS[name](groups, lr=0.01)

    check(Script(layers, regression, optimizer, accumulation=1))


# Time.


def test_the_forward_begins_while_the_last_layers_update_has_not() -> None:
    events: list[str] = []
    may_end = threading.Event()
    step = Replica.step_part

    def stepping(self: Replica, part: Any, *args: Any) -> None:
        if part is self.parts[-1]:
            assert may_end.wait(60), "the first layer's forward has not run meanwhile"
        step(self, part, *args)
        events.append("updated " + " ".join(names[id(pair.param)] for pair in part.pairs))

    with accelerator_for("overlap", 1) as accelerator, one_part_each():
        model: Any = layers()
        names = {id(p): name for name, p in model.named_parameters()}
        model, optimizer = accelerator.prepare(model, momentum(model))
        accelerator.backward(regression(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(regression(model, 1))  # the order is learnt
        optimizer.synchronize()

        def ended(module: Any, *_: Any) -> None:
            events.append("forward of layer 1 ended")
            may_end.set()

        model[0].register_forward_hook(ended)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Replica, "step_part", stepping)
            optimizer.step()
            loss = regression(model, 2)
        events.append("forward ended")
        accelerator.backward(loss)
    first, last = events.index("forward of layer 1 ended"), events.index("forward ended")
    updated = [n for n, event in enumerate(events) if event.startswith("updated 4.")]
    assert first < updated[-1] < last
