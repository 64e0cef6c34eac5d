"""The scaler in a plain loop: what torch does, where torch is wrong, and what ours adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_scaler import ConfigError, GradScaler, OverflowStreakError, UnsupportedError

INF, NAN = float("inf"), float("nan")
Stock = torch.amp.GradScaler
KINDS = pytest.mark.parametrize("kind", [Stock, GradScaler])


def one(value: float = 1.0, lr: float = 0.5) -> tuple[nn.Parameter, torch.optim.SGD]:
    p = nn.Parameter(torch.full((2,), value))
    return p, torch.optim.SGD([p], lr=lr)


def window(scaler: Any, optimizer: Any, value: float = 1.0) -> None:
    """Backward with slope ``value`` for every parameter, step, update, zero."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(sum((p * value).sum() for p in params)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def fused_adamw(p: nn.Parameter) -> torch.optim.AdamW:
    return torch.optim.AdamW([p], lr=0.1, fused=True)


@pytest.mark.parametrize("scale", [1024.0, 8])
def test_a_number_in_front_is_the_scale(scale: float) -> None:
    """As in ``torch.cuda.amp.GradScaler``."""
    stock, ours = Stock("cpu", scale, growth_interval=2), GradScaler(scale, growth_interval=2)
    _, optimizer = one()
    for scaler in (stock, ours):
        for _ in range(2):
            window(scaler, optimizer)
    assert stock.get_scale() == ours.get_scale() == 2.0 * scale
    assert stock.state_dict().items() <= ours.state_dict().items()


@pytest.mark.parametrize("device", ["tpu", True, float("inf"), "cpu:x"])
def test_what_is_no_device_and_no_number_is_named(device: Any) -> None:
    with pytest.raises(ConfigError, match=rf"device={device!r}.*expected"):
        GradScaler(device, enabled=False)


def test_more_numbers_in_front_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device=65536\.0.*growth_factor.*by name"):
        GradScaler(65536.0, 2.0, 0.5, 2000, True)  # type: ignore[arg-type]


def test_f8_a_sum_of_flags_skips_a_fused_step() -> None:
    """As if gradients had overflowed on two devices: torch adds the flags."""
    found, after = (torch.device("cpu"), torch.device("cpu", 0)), {}
    for kind in (Stock, GradScaler):
        p = nn.Parameter(torch.ones(4))
        optimizer, scaler = fused_adamw(p), kind("cpu", init_scale=4.0)
        window(scaler, optimizer)
        before = p.detach().clone()
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        flags = {device: torch.tensor(1.0) for device in found}
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        scaler.step(optimizer)
        after[kind] = (torch.equal(p, before), float(optimizer.state[p]["step"]))
        scaler.update()
        assert scaler.get_scale() == 2.0
    assert after[Stock] == (False, 0.0), "torch applies the update and takes the step count back"
    assert after[GradScaler] == (True, 1.0)


def test_f9_an_overflow_on_the_first_step_leaves_no_momentum_behind() -> None:
    def overflow_first(kind: type[Stock], fused: bool) -> tuple[Tensor, bool]:
        p = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=fused)
        scaler = kind("cpu", init_scale=4.0)
        window(scaler, optimizer, INF)
        kept = "momentum_buffer" in optimizer.state.get(p, {})
        window(scaler, optimizer, 2.0)
        return p.detach(), kept

    reference, _ = overflow_first(Stock, fused=False)
    ours, ours_kept = overflow_first(GradScaler, fused=True)
    _, stock_kept = overflow_first(Stock, fused=True)
    assert stock_kept, "torch keeps a buffer that no kernel has written"
    assert not ours_kept
    assert torch.equal(ours, reference)
    assert torch.equal(ours, torch.full((4,), 0.8))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_f10_a_gradient_laid_out_unlike_its_parameter(make: Any) -> None:
    def three_steps(kind: type[Stock], fused: bool) -> Tensor:
        torch.manual_seed(1)
        p = nn.Parameter(torch.randn(4, 6))
        optimizer, scaler = make([p], lr=0.1, fused=fused), kind("cpu", init_scale=4.0)
        for _ in range(3):
            scaler.scale(torch.zeros(()))
            p.grad = torch.randn(6, 4).t() * 4.0
            assert p.grad.stride() != p.stride()
            scaler.step(optimizer)
            scaler.update()
        return p.detach()

    reference = three_steps(Stock, fused=False)
    assert (three_steps(Stock, fused=True) - reference).abs().max() > 0.01
    torch.testing.assert_close(three_steps(GradScaler, fused=True), reference, rtol=1e-6, atol=1e-6)


def test_backoff_ends_a_run_as_update_does_and_names_tensors() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0, max_consecutive_skips=1)
    scaler.parameter_names.add_module(net)
    scaler.scale(net.bias.sum() * INF + net.weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.backoff()
    net.zero_grad()
    scaler.scale(net.bias.sum() * INF + net.weight.sum()).backward()
    with pytest.raises(OverflowStreakError, match=r"Non-finite gradients in: bias\."):
        scaler.backoff()
    assert scaler.get_scale() == 16.0


def test_a_fused_step_on_a_cpu_names_what_it_is_skipped_for() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer, scaler = fused_adamw(p), GradScaler("cpu", max_consecutive_skips=1)
    for value in (1.0, INF):
        window(scaler, optimizer, value)
    with pytest.raises(OverflowStreakError, match=r"Non-finite gradients in: "):
        window(scaler, optimizer, INF)


@KINDS
def test_fp16_gradients_are_refused(kind: type[Stock]) -> None:
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), kind("cpu", init_scale=2.0)
    scaler.scale(p.sum()).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients"):
            call(optimizer)
    if kind is GradScaler:
        with pytest.raises(UnsupportedError, match=r"shape \(2, 3\) is float16.*model.float\(\)"):
            scaler.unscale_(optimizer)
    assert p.grad is not None
    assert torch.equal(p.grad, torch.full((2, 3), 2.0, dtype=torch.float16))


@KINDS
def test_an_interval_that_is_no_int_is_refused_by_update(kind: type[Stock]) -> None:
    """It would never be reached, and the scale would never grow."""
    (p, optimizer), scaler = one(), kind("cpu")
    scaler.set_growth_interval(1.5)  # type: ignore[arg-type]
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(TypeError):
        scaler.update()


@pytest.mark.parametrize(
    "bad",
    [*(0.0, -1.0, INF, NAN, "8", True, [8.0], 1e39, 1e-50, 0), *(torch.ones(2), torch.tensor(0.0))],
)
def test_a_new_scale_that_cannot_be_used(bad: Any) -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match=r"new_scale"):
        scaler.update(bad)
    assert scaler.get_scale() == 4.0
    scaler.update()
    assert scaler._get_growth_tracker() == 1, "the window was still open"


def test_backoff() -> None:
    p, optimizer = one()
    scaler = GradScaler("cpu", init_scale=64.0, backoff_factor=0.5, min_scale=4.0, hysteresis=3)
    with pytest.raises(AssertionError, match="Attempted backoff"):
        scaler.backoff()
    window(scaler, optimizer)
    assert scaler._get_growth_tracker() == 1
    scaler.scale(p.sum()).backward()
    scaler.backoff()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 0)
    scaler.backoff(0.25)
    assert scaler.get_scale() == 8.0
    scaler.backoff(0.25)
    assert scaler.get_scale() == 4.0, "the floor"
    scaler.scale(p.sum())
    scaler.update(1.0)
    assert scaler.get_scale() == 4.0, "of a new scale, too"
    for bad in (0.0, 1.0, -0.5, NAN, "0.5", True):
        with pytest.raises(ConfigError, match=r"backoff: got factor="):
            scaler.backoff(bad)  # type: ignore[arg-type]
    assert scaler.state_dict()["_consecutive_skips"] == 0, "nothing had overflowed"


def test_the_overflow_flag_is_about_the_open_window() -> None:
    """And is kept, once it is taken, whatever becomes of the gradients."""
    p, optimizer = one()
    q, second = one()
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum() + q.sum()).backward()
    assert scaler.get_overflow_flag() is False
    assert q.grad is not None
    q.grad[0] = NAN
    assert scaler.get_overflow_flag() is True, "it was found through the graph"
    assert scaler.get_overflow_flag(optimizer) is False
    assert scaler.get_overflow_flag(second) is True
    scaler.unscale_(optimizer)
    assert scaler.get_overflow_flag() is False, "only known optimizers, once there is one"
    scaler.unscale_(second)
    assert scaler.get_overflow_flag() is True
    q.grad.zero_()
    assert scaler.get_overflow_flag() is True
    scaler.step(second)
    assert torch.equal(q.detach(), torch.ones(2))


def test_without_a_device_it_takes_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's stands for CUDA."""
    here = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    assert GradScaler()._device == (here.type if here else "cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("xpu"), raising=False
    )
    assert GradScaler()._device == "xpu"
    assert GradScaler("cpu")._device == "cpu"
    assert not GradScaler(enabled=False).is_enabled()


@KINDS
def test_an_optimizer_that_takes_the_scaler_itself(kind: type[Stock]) -> None:
    seen = []

    class OldStyle(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
            seen.append(grad_scaler)

    p, _ = one()
    optimizer, scaler = OldStyle([p], lr=0.1), kind("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.warns(FutureWarning):
        scaler.step(optimizer)
    assert seen == [scaler]


@KINDS
def test_what_is_no_tensor_is_not_scaled(kind: type[Stock]) -> None:
    with pytest.raises(ValueError, match="iterable"):
        kind("cpu").scale(3)  # type: ignore[arg-type]
