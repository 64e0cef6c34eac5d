"""After a step beside ``.grad`` is what stock leaves there, whatever is done with it then.

Zeroed to None or to zeros, by the optimizer, the model or by hand, edited, or left: it matters, for
SGD with momentum moves a parameter whose gradient is zero and leaves one that has none. The order
of events is told as a list; both sides play it, and every ``.grad`` and weight must agree after
each event.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from async_support import lazy
from torch import Tensor, nn

from accel_scaler import AsyncOptimizer, ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

HISTORIES = {
    "zeroed to zeros": ["both", "step", "zeros"],
    "to none by the model, later to zeros": ["both", "step", "model", "one", "step", "zeros"],
    "to none after a window of zeros": [
        *("both", "step", "zeros", "one", "step", "zeros", "model", "one", "step", "zeros", "one"),
        *("step", "zeros"),
    ],
    "to zeros by hand": ["both", "step", "hand", "both", "step", "hand", "one", "step"],
    "to zeros through data": ["both", "step", "data", "both", "step", "data", "both", "step"],
    "scaled by hand": ["both", "step", "halved", "both", "step", "halved", "both", "step"],
    "never zeroed": ["both", "step", "both", "step", "one", "step"],
    "zeroed between the forward and the backward": [
        *("both", "step", "late", "step", "late zeros", "step", "late zeros", "step"),
    ],
    "an overflow in between": [
        *("both", "step", "model", "overflow", "step", "zeros", "one", "step", "zeros"),
    ],
    "to none, an overflow of one, to zeros": [
        *("both", "step", "model", "overflow of one", "step", "zeros", "both", "step", "zeros"),
    ],
}


class Pair:
    """Two models, one loss, and an optimizer each or one for both."""

    def __init__(self, mode: str | None, together: bool) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(2, 1) for _ in range(2)]
        owned = [list(m.parameters()) for m in self.models]
        owned = [owned[0] + owned[1]] if together else owned
        inner = [torch.optim.SGD(params, lr=0.125, momentum=0.5) for params in owned]
        self.optimizers: list[Any] = inner
        self.scaler: Any = None
        if mode is None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            return
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        config = ScalerConfig(init_scale=256.0, step_mode=mode)  # type: ignore[arg-type]
        self.accelerator: Any = attach(accelerator, config)
        prepared = self.accelerator.prepare(*self.models, *inner)
        self.models, self.optimizers = list(prepared[:2]), list(prepared[2:])

    def play(self, event: str) -> None:
        if event == "step":
            self.step()
        elif event == "zeros":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=False)
        elif event == "model":
            for model in self.models:
                model.zero_grad()
        elif event in ("hand", "data", "halved"):
            for p in [p for model in self.models for p in model.parameters()]:
                if p.grad is not None:
                    grad = p.grad.data if event == "data" else p.grad
                    grad.mul_(0.5 if event == "halved" else 0.0)
        else:
            x = torch.ones(1, 2) * (float("inf") if event.startswith("overflow") else 1.0)
            used = self.models[:1] if event in ("one", "overflow of one") else self.models
            loss = torch.stack([model(x).float().sum() for model in used]).sum()
            if event.startswith("late"):
                for model in self.models:
                    model.zero_grad(set_to_none=event == "late")
            if self.scaler is None:
                self.accelerator.backward(loss)
            else:
                self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        stepped = [o for o in self.optimizers if any(g is not None for g in self.of(o))]
        for optimizer in stepped:  # torch's raises where there are no gradients
            self.scaler.step(optimizer)
        self.scaler.update()

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
        return [p.grad for group in optimizer.param_groups for p in group["params"]]

    def grads(self) -> list[list[float] | None]:
        all_of = [p.grad for model in self.models for p in model.parameters()]
        return [None if g is None else g.flatten().tolist() for g in all_of]

    def weights(self) -> list[list[float]]:
        for optimizer in self.optimizers if self.scaler is None else ():
            optimizer.synchronize()
        return [p.flatten().tolist() for model in self.models for p in model.parameters()]


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("together", [False, True], ids=["two optimizers", "one"])
@pytest.mark.parametrize("looks", [False, True], ids=["at the end", "after each event"])
@pytest.mark.parametrize("name", HISTORIES)
def test_every_gradient_and_weight_is_that_of_stock(
    name: str, looks: bool, together: bool, mode: str
) -> None:
    """A delay changes nothing: the gradients are the same at all weights."""
    ours, stock = Pair(mode, together), Pair(None, together)
    overflowed = False
    with lazy():
        for event in HISTORIES[name]:
            ours.play(event)
            stock.play(event)
            overflowed = event.startswith("overflow") or (overflowed and event == "step")
            if looks:
                if not overflowed or mode == "sync":  # else they stay as they were found
                    assert repr(ours.grads()) == repr(stock.grads()), event  # nan is not nan
                assert ours.weights() == stock.weights(), event
        assert repr(ours.grads()) == repr(stock.grads())
        assert ours.weights() == stock.weights()
        detach(ours.accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("after", ["kept", "mended", "one zeroed", "zeroed late"])
def test_gradients_of_an_overflow_count_as_in_torch_where_they_are_kept(
    after: str, clips: bool, mode: str
) -> None:
    """torch has unscaled them, so they count for next to nothing beside scaled ones. Here some stay
    as they were found, and would count for a whole batch."""
    ours, stock = Pair(mode, True), Pair(None, True)
    for pair in (ours, stock):
        pair.play("overflow of one")
        params = [p for m in pair.models for p in m.parameters()]
        if clips and pair is ours:
            pair.accelerator.clip_grad_norm_(params, 1e9)
        pair.play("step")
        if after == "mended":
            for p in params:
                if p.grad is not None:
                    p.grad.data.nan_to_num_(0.0, 0.0, 0.0)
        elif after == "one zeroed":
            pair.models[0].zero_grad()
        pair.play("late zeros" if after == "zeroed late" else "both")
    assert repr(ours.grads()) == repr(stock.grads())
    for pair in (ours, stock):
        pair.play("step")
    assert repr(ours.weights()) == repr(stock.weights())
    detach(ours.accelerator)


@pytest.mark.parametrize("mode", ["sync", "overlap", "delayed"])
def test_gradients_written_after_an_overflow_are_the_users(mode: str) -> None:
    ours = Pair(mode, True)
    params = [p for m in ours.models for p in m.parameters()]
    for event in ("both", "overflow", "step"):
        ours.play(event)
    with torch.no_grad():
        for p in params:
            assert p.grad is not None
            p.grad.fill_(128.0)
    ours.accelerator.scaler.scale(torch.zeros(()))
    assert [p.grad.unique().tolist() for p in params] == [[128.0]] * 4  # type: ignore[union-attr]
    before = ours.weights()
    ours.play("step")
    assert ours.weights() == [(torch.tensor(w) - 0.125).tolist() for w in before]
    detach(ours.accelerator)


def test_views_of_a_bucket_are_copied_for_the_next_backward_writes_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DDP's, where there are ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    bucket = torch.arange(5.0)
    with lazy(), AsyncOptimizer(torch.optim.SGD(params, lr=0.5)) as optimizer:
        params[0].grad, params[1].grad = bucket[:3], bucket[3:]
        optimizer.step()
        bucket.fill_(100.0)
        optimizer.synchronize()
    assert torch.equal(torch.cat([p.detach() for p in params]), 1 - 0.5 * torch.arange(5.0))
