"""``heal``: a module that overflows at any scale runs in float32, as if it always had."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs, TorchDynamoPlugin
from async_support import assert_same
from support import Loud
from telemetry_runs import attached, sgd
from torch import Tensor, nn

from accel_scaler import attach

pytestmark = pytest.mark.usefixtures("one_thread")

EACH_MODE = pytest.mark.parametrize("mode", ["sync", "overlap"])


class Steep(nn.Linear):
    """Finite forward; its backward is beyond float16 at a scale of 1."""

    steep = 1e6

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return (x / self.steep) * self.steep if x.dtype is torch.float32 else Cliff.apply(x)


class Cliff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 6e4 * 6e4


class Net(nn.Module):
    def __init__(self, sick: type[nn.Linear] = Loud, half: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.before = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.sick: Any = sick(8, 8)
        self.drop = nn.Dropout(0.2)
        self.after = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        if half:
            self.half()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.sick(self.before(x.to(self.before[0].weight.dtype))))
        out = self.after(x.to(self.before[0].weight.dtype) if self.training else x)
        return {"loss": (out.float() - 1).square().mean() / 8, "out": out}


def rows(count: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, generator=generator) for _ in range(count)]


def train(
    net: nn.Module,
    count: int = 8,
    skips_first: int = 0,
    accumulation: int = 1,
    dynamo_plugin: Any = None,
    **settings: Any,
) -> Any:
    """``skips_first``: windows that are thrown away, as a skip does."""
    torch.manual_seed(11)
    given = {"init_scale": 256.0, "growth_interval": 4} | settings
    with attached(
        None, accumulation=accumulation, dynamo_plugin=dynamo_plugin, **given
    ) as accelerator:
        model, optimizer = accelerator.prepare(net, sgd(net.parameters(), momentum=0.9))
        for number, x in enumerate(rows(count * accumulation)):
            with accelerator.accumulate(model):
                accelerator.backward(model(x)["loss"])
                if number // accumulation >= skips_first:
                    optimizer.step()
                elif accelerator.sync_gradients:
                    accelerator.scaler.abandon_window()
                optimizer.zero_grad()
        records = list(accelerator.scaler_history.records)
        return {
            "weights": {k: v.detach().clone() for k, v in net.state_dict().items()},
            "state": copy.deepcopy(optimizer.state_dict()["state"]),
            "scale": accelerator.scaler.get_scale(),
        }, records


@EACH_MODE
@pytest.mark.parametrize("half", [False, True])
def test_a_healed_run_equals_one_with_the_module_in_float32(mode: str, half: bool) -> None:
    """Bit for bit the run with the line in its config that leaves out the window that was lost."""
    given = {"growth_interval": 99, "step_mode": mode}
    healed, records = train(Net(half=half), heal=True, **given)
    assert [r.skipped for r in records] == [True] + [False] * 7
    assert [r.healed for r in records] == [("sick",)] + [()] * 7
    assert {r.scale for r in records} == {256.0}
    named, _ = train(Net(half=half), 8, 1, fp32_modules=["sick"], **given)
    assert_same(healed, named)


@pytest.mark.parametrize("retry", [False, True])
def test_a_module_and_a_scale_that_is_too_high_in_one_window(retry: bool) -> None:
    """First the module is put on float32, then the scale is lowered: by the next window, or with
    skips."""
    given: dict[str, Any] = {"on_overflow": "retry"} if retry else {}
    healed, records = train(Net(), 12, heal=True, init_scale=2.0**24, growth_interval=99, **given)
    assert [r.healed for r in records] == [("sick",)] + [()] * 11
    skips = sum(r.skipped for r in records)
    assert records[0].next_scale == 2.0**24
    assert (skips == 1) == retry
    named, _ = train(
        Net(), 12, skips, fp32_modules=["sick"], init_scale=records[-1].scale, growth_interval=99
    )
    assert_same(healed["weights"], named["weights"])


def test_a_backward_is_healed_when_scale_1_is_too_much_three_times_in_a_row() -> None:
    healed, records = train(Net(Steep), heal=True)
    assert [r.skipped for r in records] == [True] * 3 + [False] * 5
    assert [r.healed for r in records] == [(), (), ("sick",)] + [()] * 5
    assert [r.scale for r in records[:4]] == [256.0, 128.0, 64.0, 64.0]
    named, _ = train(Net(Steep), 8, 3, fp32_modules=["sick"])
    assert_same(healed["weights"], named["weights"])


def test_a_scale_that_is_too_high_heals_nothing() -> None:
    plain, _ = train(Net(nn.Linear), 12, init_scale=2.0**24)
    healed, records = train(Net(nn.Linear), 12, init_scale=2.0**24, heal=True)
    assert sum(r.skipped for r in records) >= 3
    assert not any(r.healed for r in records)
    assert_same(healed, plain)


class Apart(nn.Module):
    """The sick place is in the code of a module, between those in it."""

    def __init__(self, *_: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second((x * 3e4 * 3e4) / 9e8)


class Own(nn.Linear):
    """Enters autocast itself, so that it cannot be cast."""

    @torch.autocast("cpu", dtype=torch.float16)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3e4 * 1e2) / 3e6


@pytest.mark.parametrize("sick", [Apart, lambda *_: nn.Sequential(nn.Linear(8, 8), nn.ReLU())])
def test_the_smallest_module_that_helps(sick: Any) -> None:
    net = Net(sick)
    if isinstance(net.sick, nn.Sequential):
        net.sick[0].weight.data *= 1e6
        net.sick.append(nn.LayerNorm(8))
    _, records = train(net, heal=True)
    assert records[0].healed == (("sick",) if sick is Apart else ("sick.0",))
    assert [r.skipped for r in records] == [True] + [False] * 7


def half_of_it() -> Net:
    net = Net()
    net.before, net.after = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 1))
    net.before[0].weight = net.sick.weight
    return net


def beyond_float16() -> Net:
    """As a checkpoint in another dtype, cast by ``half()``."""
    net = Net()
    with torch.no_grad():
        net.sick.weight[0, 0] = 1e6
    return net.half()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Net(Own), "no module in float32 cures it"),
        (half_of_it, "50%"),
        (beyond_float16, "If weights are inf or NaN"),
    ],
)
def test_nothing_is_healed_where_nothing_helps_or_it_would_be_too_much(
    make: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, records = train(make(), 4, heal=True)
    assert all(r.skipped and not r.healed for r in records)
    said = [r.getMessage() for r in caplog.records]
    (logged,) = [text for text in said if "heal: " in text]
    assert why in logged
    where = records[0].first["text"]
    assert where.partition(",")[0] in logged
    assert [where in text for text in said].count(True) == 2, "when it overflowed, and the verdict"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_running_statistics_that_were_loaded_before_the_first_window_are_not_lost(
    accumulate: int,
) -> None:
    """The window's own are inf, and as the loss is the script's it is lost: they are as before."""
    net = Net()
    net.before.append(nn.BatchNorm1d(8))
    net.after = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    with attached(None, init_scale=256.0, heal=True) as accelerator:
        accelerator.gradient_accumulation_steps = accumulate
        model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
        loaded = net.state_dict()
        loaded["after.0.running_mean"] = torch.full((8,), 5.0)
        net.load_state_dict(loaded)
        for x in rows(accumulate):
            with accelerator.accumulate(model):
                accelerator.backward((model(x)["out"] - 1).square().mean() / 8)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.scaler_history.healed == ("sick",)
    assert torch.equal(net.after[0].running_mean, torch.full((8,), 5.0))
    assert net.after[0].running_var.isfinite().all()


def test_a_run_that_goes_on_from_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    """Also where it does not heal itself."""

    def go(net: Net, load: bool, count: int, **settings: Any) -> tuple[Any, Any]:
        with attached(None, init_scale=256.0, **settings) as accelerator:
            model, optimizer = accelerator.prepare(net, sgd(net.parameters(), momentum=0.9))
            if load:
                accelerator.load_state(str(tmp_path / "saved"))
            for x in rows(9)[9 - count :] if load else rows(9)[:count]:
                accelerator.backward(model(x)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            if not load and count < 9:
                accelerator.save_state(str(tmp_path / "saved"))
            skips = accelerator.scaler_history.skips
            return copy.deepcopy(net.state_dict()), skips

    torch.manual_seed(1)
    whole, _ = go(Net(), False, 9, heal=True)
    torch.manual_seed(1)
    _, skips = go(Net(), False, 5, heal=True)
    assert skips == 1
    other = Net()
    rest, skips = go(other, True, 4)
    assert skips == 0
    assert_same(rest, whole)
    assert "forward" not in vars(other.sick)  # detach took it off
    state = torch.load(tmp_path / "saved" / "scaler.pt", weights_only=True)
    assert state["fp32_modules"] == ["sick"]
    torch.amp.GradScaler("cpu").load_state_dict(state)


@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model(regional: bool) -> None:
    """It is run again uncompiled, and compiled anew with the module in float32."""
    torch._dynamo.reset()  # past its limit of variants, which tests before add to, nothing compiles

    def plain() -> Net:
        net = Net()
        net.drop = nn.Identity()  # compiled, it draws other numbers
        return net

    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    healed, records = train(plain(), heal=True, dynamo_plugin=plugin)
    assert [r.healed for r in records] == [("sick",)] + [()] * 7
    named, _ = train(plain(), 8, 1, fp32_modules=["sick"], dynamo_plugin=plugin)
    assert_same(healed["weights"], named["weights"])


def test_a_model_that_the_loop_compiled_is_not_said_to_be_past_cure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It cannot be run again, so no module was tried."""
    net = Net()
    net.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        _, records = train(net, 4, heal=True)
    assert [r.skipped for r in records] == [True] * 4
    assert "running the step again" in caplog.text
    assert "heal: no module" not in caplog.text


def test_a_scaler_that_is_disabled_has_no_rule_of_growth() -> None:
    """As Accelerate makes it of ``torch.cuda`` on other devices."""
    handlers = [GradScalerKwargs(enabled=False)]
    accelerator = attach(
        Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers), heal=True
    )
    net = nn.Linear(4, 4)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters()))
    accelerator.backward(net(torch.randn(3, 4)).float().mean())
    optimizer.step()
    assert not optimizer.step_was_skipped
