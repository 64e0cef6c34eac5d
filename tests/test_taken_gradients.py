"""``zero_grad(set_to_none=False)`` after a step beside leaves ``.grad`` as stock leaves it.

Such a step takes the gradients, so that ``.grad`` is None until the next backward; zeros are then
what the next ``zero_grad`` means, and no later one. It matters: SGD with momentum moves a parameter
whose gradient is zero and leaves one that has none. The order of events is told as a list; both
sides play it, and every ``.grad`` and weight must agree after each event.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_scaler import ScalerConfig, attach, detach

pytestmark = pytest.mark.usefixtures("one_thread")

HISTORIES = {
    "zeroed to zeros": ["both", "step", "zeros"],
    "zeroed to zeros, twice": ["both", "step", "zeros", "zeros"],
    "to none by the model, later to zeros": ["both", "step", "model", "one", "step", "zeros"],
    "to none by hand, then to zeros twice": [
        "both",
        "step",
        "zeros",
        "model",
        "zeros",
        "both",
        "step",
    ],
    "to none after a window of zeros": [
        *("both", "step", "zeros", "one", "step", "zeros", "model", "one", "step", "zeros", "one"),
        *("step", "zeros"),
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
                model.zero_grad(set_to_none=True)
        else:
            x = torch.ones(1, 2) * (float("inf") if event.startswith("overflow") else 1.0)
            used = self.models[:1] if event in ("one", "overflow of one") else self.models
            loss = torch.stack([model(x).float().sum() for model in used]).sum()
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


@pytest.mark.parametrize("mode", ["sync", "overlap"])
@pytest.mark.parametrize("together", [False, True], ids=["two optimizers", "one"])
@pytest.mark.parametrize("name", HISTORIES)
def test_every_gradient_and_weight_is_that_of_stock(name: str, together: bool, mode: str) -> None:
    ours, stock = Pair(mode, together), Pair(None, together)
    for event in HISTORIES[name]:
        ours.play(event)
        stock.play(event)
        assert ours.weights() == stock.weights(), event
        if event != "step":  # which takes them, where it runs beside
            assert repr(ours.grads()) == repr(stock.grads()), event  # nan is not nan
    detach(ours.accelerator)
