"""``fp32_modules`` under Accelerate: ``prepare`` enables them, ``detach`` disables them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from async_support import lazy
from attached import cpu
from support import same
from torch import Tensor, nn

from accel_scaler import ConfigError, ScalerConfig, UnsupportedError, attach, detach

WIDTH = 8


class Net(nn.Module):
    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wi(x))
        if not self.by_hand:
            return x + self.wo(hidden)
        with torch.autocast("cpu", enabled=False):
            out = nn.functional.linear(hidden.float(), self.wo.weight.float(), self.wo.bias.float())
        return x + out


def made(by_hand: bool = False, half: bool = False) -> Any:
    torch.manual_seed(2)
    net = Net()
    net.by_hand = by_hand
    return net.half() if half else net


def config(**values: Any) -> ScalerConfig:
    return ScalerConfig(fp32_modules=("*wo",), init_scale=64.0, **values)


def forwards(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if "forward" in vars(each)]


def trained(accelerator: Any, model: Any, optimizer: Any, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        out = model(torch.randn(6, WIDTH).to(next(model.parameters()).dtype))
        accelerator.backward(out.float().square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(out.detach().clone())
    detach(accelerator)
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def run(model: nn.Module, settings: ScalerConfig, momentum: float = 0.9) -> list[Tensor]:
    accelerator = attach(cpu(), settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return trained(accelerator, *accelerator.prepare(model, optimizer))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_as_written_by_hand_in_every_step_mode(mode: str, half: bool) -> None:
    values = {"step_mode": mode}
    by_hand = run(made(by_hand=True, half=half), ScalerConfig(init_scale=64.0, **values))
    with lazy():  # a wait that is missing shows
        assert same(run(made(half=half), config(**values)), by_hand)
    plain = run(made(half=half), ScalerConfig(init_scale=64.0, **values))
    assert not torch.equal(plain[-1], by_hand[-1]), "float16 would have passed"


def test_attached_after_prepare() -> None:
    accelerator, model = cpu(), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared = accelerator.prepare(model, optimizer)
    attach(accelerator, config())
    assert "wo" in forwards(model)
    by_hand = run(made(by_hand=True), ScalerConfig(init_scale=64.0))
    assert same(trained(accelerator, *prepared), by_hand)
    assert forwards(model) == []


def test_a_glob_that_matches_nothing_is_refused_before_the_first_backward() -> None:
    settings = ScalerConfig(fp32_modules=("*wo", "discriminator"), init_scale=64.0)
    accelerator, model = attach(cpu(), settings), made()
    prepared = accelerator.prepare(model)
    loss = prepared(torch.ones(1, WIDTH)).sum()
    for _ in range(2):
        with pytest.raises(ConfigError, match="fp32_modules: 'discriminator' matches no module"):
            accelerator.backward(loss)
    assert model.wo.weight.grad is None
    assert not accelerator.scaler.has_begun
    detach(accelerator)


def test_what_cannot_be_cast_is_refused_before_anything_is_prepared() -> None:
    model = made()
    model.wo.table = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    accelerator, stock = attach(cpu(), config()), cpu()
    refused = pytest.raises(UnsupportedError, match=r"'wo' cannot run in float32.*int8")
    with refused:
        accelerator.prepare(model, torch.optim.SGD(model.wi.parameters(), lr=0.1))
    assert forwards(model) == []
    detach(accelerator)
    stock.prepare(model)
    before = forwards(model)
    with refused:
        attach(stock, config())
    assert forwards(model) == before


def test_in_bf16_the_modules_are_cast_too() -> None:
    accelerator = attach(Accelerator(cpu=True, mixed_precision="bf16"), fp32_modules=("*wo",))
    model = made()
    prepared = accelerator.prepare(model)
    assert "wo" in forwards(model)
    assert prepared(torch.ones(2, 8)) is not None
