"""attach and detach: what changes on an accelerator, and that it comes back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, GradScalerKwargs
from support import mlp, stock, weights
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from accel_scaler import (
    ConfigError,
    GradScaler,
    OrderError,
    ScaledAccelerator,
    ScalerConfig,
    UnsupportedError,
    attach,
    detach,
)
from accel_scaler.integrations.optimizer import ScaledOptimizer

INF = float("inf")


def cpu(**kwargs: Any) -> Any:
    """Accelerate's fp16 on a CPU, as a user makes it."""
    return Accelerator(cpu=True, mixed_precision="fp16", **kwargs)


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 3, factor: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        accelerator.backward(model(x).square().mean() / 16 * factor)
        optimizer.step()
        optimizer.zero_grad()
    return model


def prepared(accelerator: Any) -> tuple[Any, Any]:
    model = mlp()
    return tuple(accelerator.prepare(model, SGD(model.parameters(), lr=0.1)))  # type: ignore[return-value]


def inner_dtype(model: Any) -> torch.dtype:
    """What the first layer inside puts out."""
    seen: list[torch.dtype] = []
    handle = model[0].register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    model(torch.ones(2, 8))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("build", [stock, cpu], ids=["as on a GPU", "on a CPU"])
@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
def test_attach_and_detach(build: Any, late: bool) -> None:
    accelerator = build()
    stocks_scaler, native_amp = accelerator.scaler, accelerator.native_amp
    if late:
        model, optimizer = prepared(accelerator)
    assert attach(accelerator, ScalerConfig()) is accelerator
    if not late:
        model, optimizer = prepared(accelerator)
    assert type(accelerator) is ScaledAccelerator
    assert type(accelerator.scaler) is GradScaler
    assert type(optimizer) is ScaledOptimizer
    assert optimizer.scaler is accelerator.scaler
    assert inner_dtype(model) is torch.float16
    train(accelerator, model, optimizer)
    assert accelerator.scaler_history.boundaries == 3
    assert detach(accelerator) is accelerator
    assert type(accelerator) is Accelerator
    assert type(optimizer) is AcceleratedOptimizer
    assert accelerator.scaler is stocks_scaler
    assert optimizer.scaler is stocks_scaler
    assert accelerator.native_amp is native_amp
    assert "_attachment" not in accelerator.__dict__
    assert not {"_attachment", "_hooks"} & set(optimizer.__dict__)
    assert inner_dtype(model) is (torch.float16 if native_amp else torch.float32)
    if not native_amp:
        assert not {"forward", "_original_forward"} & set(model.__dict__)
    before = weights(model)
    train(accelerator, model, optimizer)
    assert not torch.equal(weights(model), before)


def test_attach_after_prepare_on_a_cpu_equals_before() -> None:
    """Both autocast and scale from the first step on, bit for bit."""
    ends = []
    for late in (False, True):
        accelerator = cpu()
        if not late:
            attach(accelerator, ScalerConfig(growth_interval=2))
        model, optimizer = prepared(accelerator)
        attach(accelerator, ScalerConfig(growth_interval=2))
        train(accelerator, model, optimizer, 6)
        ends.append((weights(model), accelerator.scaler.state_dict()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    unscaled = cpu()
    assert not torch.equal(weights(train(unscaled, *prepared(unscaled), 6)), ends[0][0])


def test_twice_changes_nothing() -> None:
    config = ScalerConfig(init_scale=256.0)
    accelerator = attach(cpu(), config)
    scaler, attachment = accelerator.scaler, accelerator._attachment
    for again in (None, config, ScalerConfig(init_scale=256.0)):
        attach(accelerator, again)
    assert (accelerator.scaler, accelerator._attachment) == (scaler, attachment)
    with pytest.raises(OrderError, match="detach"):
        attach(accelerator, ScalerConfig(init_scale=512.0))
    assert accelerator.scaler.get_scale() == 256.0
    detach(accelerator)
    assert detach(accelerator) is accelerator
    assert type(accelerator) is Accelerator
    attach(accelerator, ScalerConfig(init_scale=512.0))
    assert accelerator.scaler.get_scale() == 512.0


def test_the_stock_scaler_goes_on_with_the_present_scale() -> None:
    accelerator = attach(stock(), ScalerConfig(growth_interval=100))
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, 2, INF)
    train(accelerator, model, optimizer, 3)
    detach(accelerator)
    assert type(accelerator.scaler) is torch.amp.GradScaler
    state = accelerator.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (2.0**14, 3)
    train(accelerator, model, optimizer, 1, INF)
    assert accelerator.scaler.get_scale() == 2.0**13
    assert optimizer.step_was_skipped is True


def test_attach_in_the_middle_keeps_scale_and_tracker() -> None:
    """And the rest of the run is what stock would have done."""
    config = ScalerConfig(init_scale=4.0)
    ends = []
    for attached in (True, False):
        accelerator = stock(kwargs_handlers=[GradScalerKwargs(growth_interval=5)])
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer, 1, INF)
        train(accelerator, model, optimizer, 3)
        if attached:
            attach(accelerator, config)
            assert accelerator.scaler.get_scale() == 2.0**15
            assert accelerator.scaler._get_growth_tracker() == 3
        train(accelerator, model, optimizer, 3)
        assert accelerator.scaler.get_scale() == 2.0**16
        ends.append((weights(model), accelerator.scaler.state_dict()["_growth_tracker"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] == 1


class Mine(Accelerator):  # type: ignore[misc]
    """A user's own subclass with a method of its own and one overridden."""

    backwards = 0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.backwards += 1
        super().backward(loss, **kwargs)

    def hello(self) -> str:
        return "hello"


def test_a_users_own_subclass() -> None:
    accelerator: Any = attach(Mine(cpu=True, mixed_precision="fp16"), ScalerConfig())
    assert isinstance(accelerator, ScaledAccelerator)
    assert isinstance(accelerator, Mine)
    assert type(accelerator).__name__ == "ScaledMine"
    other = attach(Mine(cpu=True, mixed_precision="fp16"), ScalerConfig())
    assert type(other) is type(accelerator)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer, 2)
    assert (accelerator.backwards, accelerator.hello()) == (2, "hello")
    assert accelerator.scaler_history.boundaries == 2
    detach(accelerator)
    assert type(accelerator) is Mine


def test_scaled_accelerator_used_directly() -> None:
    config = ScalerConfig(init_scale=64.0)
    accelerator: Any = ScaledAccelerator(cpu=True, mixed_precision="fp16", scaler_config=config)
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    assert accelerator.scaler.get_scale() == 64.0
    assert accelerator.scaler_history.boundaries == 3
    detach(accelerator)
    assert type(accelerator) is ScaledAccelerator
    assert (accelerator._attachment, accelerator.scaler) == (None, None)
    assert accelerator.scaler_history.boundaries == 0
    attach(accelerator, ScalerConfig())
    train(accelerator, model, optimizer)
    assert accelerator.scaler_history.boundaries == 3
    detach(accelerator)
    assert type(accelerator) is ScaledAccelerator


SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def settings(scaler: Any) -> tuple[float, ...]:
    return (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )


@pytest.mark.parametrize("build", [stock, cpu], ids=["as on a GPU", "on a CPU"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (128.0, 3.0, 0.25, 7)),
        ({"growth_interval": 9}, (128.0, 3.0, 0.25, 9)),
        ({"init_scale": 32.0, "backoff_factor": 0.75}, (32.0, 3.0, 0.75, 7)),
    ],
)
def test_grad_scaler_kwargs_and_config(build: Any, changes: Any, expected: Any) -> None:
    """``GradScalerKwargs`` are honoured; what the config changes overrides them."""
    given = dict(zip(SETTINGS, (128.0, 3.0, 0.25, 7), strict=True))
    accelerator = build(kwargs_handlers=[GradScalerKwargs(**given)])
    attach(accelerator, ScalerConfig(**changes))
    assert settings(accelerator.scaler) == expected


def test_the_environment_is_read_unless_a_config_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "512")
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "16")
    accelerator = attach(cpu())
    assert accelerator.scaler.get_scale() == 512.0
    assert accelerator.scaler._min_scale == 16.0
    detach(accelerator)
    attach(accelerator, ScalerConfig())
    assert accelerator.scaler.get_scale() == 2.0**16
    direct = ScaledAccelerator(cpu=True, mixed_precision="fp16")
    assert direct.scaler.get_scale() == 512.0


def test_a_wrong_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "many")
    accelerator = cpu()
    with pytest.raises(ConfigError, match="ACCEL_SCALER_INIT_SCALE"):
        attach(accelerator)
    assert_untouched(accelerator)
    assert_untouched(detach(accelerator))


def assert_untouched(accelerator: Any) -> None:
    """As ``cpu()`` left it, and still able to train."""
    assert type(accelerator) is Accelerator
    assert (accelerator.scaler, accelerator.native_amp) == (None, False)
    assert "_attachment" not in accelerator.__dict__
    assert all("_original_forward" not in model.__dict__ for model in accelerator._models)
    assert not any(isinstance(o, ScaledOptimizer) for o in accelerator._optimizers)
    model, optimizer = prepared(accelerator)
    before = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer)), before)


def test_a_disabled_scaler_stays_disabled() -> None:
    """The stock one that is replaced, or ours by its settings; detach hands the stock one back."""
    accelerator = attach(stock(kwargs_handlers=[GradScalerKwargs(enabled=False)]), ScalerConfig())
    assert accelerator.scaler.is_enabled() is False
    model, optimizer = prepared(accelerator)
    before = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer)), before)
    assert optimizer.step_was_skipped is False
    detach(accelerator)
    assert accelerator.scaler.is_enabled() is False
    accelerator = attach(stock(), ScalerConfig(enabled=False))
    assert accelerator.scaler.get_scale() == 1.0
    assert detach(accelerator).scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(("mode", "offload"), [("sync", "none"), ("overlap", "cpu")])
def test_several_optimizers_and_a_scheduler(mode: Any, offload: Any) -> None:
    """All step through one boundary, and the schedule waits for a skipped one."""
    accelerator = attach(cpu(), ScalerConfig(step_mode=mode, offload=offload))
    model = mlp()
    inner = [SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in inner]
    model, *both = accelerator.prepare(model, *inner)
    scheduled = [accelerator.prepare(s) for s in schedules]
    assert all(type(o) is ScaledOptimizer for o in both)
    for factor in (1.0, INF, 1.0):
        accelerator.backward(model(torch.ones(2, 8)).mean() / 16 * factor)
        for optimizer in both:
            optimizer.step()
        for schedule in scheduled:
            schedule.step()
        for optimizer in both:
            optimizer.zero_grad()
    assert [o.param_groups[0]["lr"] for o in inner] == [0.025, 0.025]
    assert accelerator.scaler_history.boundaries == 3
    assert accelerator.scaler.get_scale() == 2.0**15
    detach(accelerator)


@pytest.mark.parametrize(
    ("kind", "precision", "who"),
    [
        (DistributedType.DEEPSPEED, "fp16", "DeepSpeed's engine"),
        (DistributedType.MEGATRON_LM, "fp16", "Megatron-LM's optimizer"),
        (DistributedType.XLA, "fp16", "torch_xla"),
        (DistributedType.NO, "fp8", "TransformerEngine"),
    ],
)
def test_who_scales_elsewhere(kind: Any, precision: str, who: str) -> None:
    accelerator = cpu()
    _, optimizer = prepared(accelerator)
    accelerator.state.distributed_type, accelerator.state._mixed_precision = kind, precision
    with pytest.raises(UnsupportedError, match=f"{who}.*scales"):
        attach(accelerator, ScalerConfig())
    accelerator.state.distributed_type = DistributedType.NO
    accelerator.state._mixed_precision = "fp16"
    assert type(optimizer) is AcceleratedOptimizer
    assert_untouched(accelerator)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_nothing_to_scale(precision: str) -> None:
    """A warning, and a plain accelerator that trains as before."""
    accelerator: Any = Accelerator(cpu=True, mixed_precision=precision)
    with pytest.warns(UserWarning, match=f"{precision}.*needs no gradient scaling"):
        assert attach(accelerator, ScalerConfig()) is accelerator
    assert type(accelerator) is Accelerator
    assert (accelerator.scaler, "_attachment" in accelerator.__dict__) == (None, False)
    assert detach(accelerator) is accelerator
    with pytest.warns(UserWarning, match="needs no gradient scaling"):
        direct: Any = ScaledAccelerator(cpu=True, mixed_precision=precision)
    ends = []
    for a in (accelerator, direct):
        model, optimizer = prepared(a)
        a.backward(model(torch.ones(2, 8)).mean())
        norm = a.clip_grad_norm_(model.parameters(), 0.1)
        a.clip_grad_value_(model.parameters(), 0.05)
        a.unscale_gradients()
        optimizer.step()
        ends.append((weights(model), norm))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert direct.scaler_history.boundaries == 0


@pytest.mark.parametrize("target", [None, 3, mlp(), torch.amp.GradScaler("cpu")])
def test_a_target_of_another_type(target: Any) -> None:
    with pytest.raises(ConfigError, match=f"got a {type(target).__name__}, expected an acc"):
        attach(target)


def half_frozen() -> nn.Sequential:
    """An adapter: float32 on a frozen float16 base."""
    base, adapter = nn.Linear(8, 8).half(), nn.Linear(8, 1)
    base.requires_grad_(False)
    return nn.Sequential(base, adapter)


@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
def test_frozen_fp16_parameters_train(late: bool) -> None:
    accelerator, model = cpu(), half_frozen()
    if late:
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
    attach(accelerator, ScalerConfig())
    if not late:
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=0.1))
    base, adapter = weights(model[0]), weights(model[1])
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 8)).mean() / 16)
        assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) < 1.0
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.step_was_skipped is False
    assert torch.equal(weights(model[0]), base)
    assert not torch.equal(weights(model[1]), adapter)


def masters_by_hand(steps: int) -> list[Tensor]:
    """Float16 parameters stepped through float32 copies, in a plain loop."""
    model = mlp().half()
    masters = [p.detach().float() for p in model.parameters()]
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        (out.float().square().mean() / 16 * 2.0**16).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master -= FP16_LR * (p.grad.float() / 2.0**16)
            p.data.copy_(master)
            p.grad = None
    return [p.detach() for p in model.parameters()]


FP16_LR = 0.004


@pytest.mark.parametrize(("late", "mode"), [(False, "overlap"), (True, "sync")])
def test_trainable_fp16_parameters_train_through_masters(late: bool, mode: Any) -> None:
    """Each step is too small for float16, their sum is not."""
    accelerator, model = cpu(), mlp().half()
    config = ScalerConfig(step_mode=mode)
    start = weights(model)
    if late:
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=FP16_LR))
    attach(accelerator, config)
    if not late:
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=FP16_LR))
    train(accelerator, model, optimizer, 30)
    assert optimizer.step_was_skipped is False
    for p, expected in zip(model.parameters(), masters_by_hand(30), strict=True):
        assert p.dtype is torch.float16
        assert torch.equal(p.detach(), expected)
    assert not torch.equal(weights(model), start)
    detach(accelerator)
    assert type(optimizer) is AcceleratedOptimizer
    assert not any("accel_scaler" in name for name in vars(optimizer.optimizer))


class OtherWrapper(AcceleratedOptimizer):  # type: ignore[misc]
    """Somebody else's optimizer wrapper, whose ``step`` may do anything."""


def refuse_closure(accelerator: Any) -> Any:
    return accelerator.prepare(torch.optim.LBFGS(mlp().parameters()))


def refuse_wrapper(accelerator: Any) -> Any:
    other = accelerator.prepare(SGD(mlp().parameters(), lr=0.1))
    other.__class__ = OtherWrapper


def refuse_compiled(accelerator: Any) -> Any:
    return accelerator.prepare(torch.compile(mlp(), backend="eager"))


@pytest.mark.parametrize(
    ("refused", "mode"),
    [
        (refuse_closure, "overlap"),
        (refuse_wrapper, "sync"),
        (refuse_compiled, "sync"),
    ],
)
def test_a_refusal_leaves_everything_as_it_was(refused: Any, mode: Any) -> None:
    """Also what was prepared before the one that is refused."""
    accelerator = cpu()
    model, optimizer = prepared(accelerator)
    refused(accelerator)
    with pytest.raises(UnsupportedError):
        attach(accelerator, ScalerConfig(step_mode=mode))
    assert type(optimizer) is AcceleratedOptimizer
    assert not any("accel_scaler" in name for name in vars(optimizer.optimizer))
    assert inner_dtype(model) is torch.float32
    assert_untouched(accelerator)


@pytest.mark.parametrize(
    ("optimizer", "mode", "why"),
    [(OtherWrapper, "sync", "OtherWrapper"), (torch.optim.LBFGS, "overlap", "LBFGS.*closure")],
)
def test_a_refusal_in_prepare_leaves_nothing_prepared(optimizer: Any, mode: Any, why: str) -> None:
    accelerator = attach(cpu(), ScalerConfig(step_mode=mode))
    params = mlp().parameters()
    if optimizer is OtherWrapper:
        refused = OtherWrapper(SGD(params, lr=0.1))
        refused._is_accelerate_prepared = True
    else:
        refused = optimizer(params)
    with pytest.raises(UnsupportedError, match=why):
        accelerator.prepare(refused)
    assert accelerator._optimizers == []


def rounds(model: Any) -> bool:
    """Whether the model computes in float16: hooks are not seen through a compiled graph."""
    exact = mlp()
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    return not torch.equal(model(x).detach(), exact(x).detach())


@pytest.mark.parametrize("late", [False, True], ids=["before prepare", "after prepare"])
def test_compiled_by_accelerate(late: bool) -> None:
    """Accelerate compiles outside of autocast, so it can be put in and taken out at any time."""
    accelerator = cpu(dynamo_backend="eager")
    if not late:
        attach(accelerator, ScalerConfig())
    model = accelerator.prepare(mlp())
    if late:
        assert not rounds(model)
        attach(accelerator, ScalerConfig())
    assert rounds(model)
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    detach(accelerator)
    assert not {"forward", "_original_forward"} & set(inner.__dict__)
    assert not rounds(model)


def test_compiled_by_the_user() -> None:
    """Before ``prepare`` it works, and comes back; after it there is no way in."""
    accelerator = attach(cpu(), ScalerConfig())
    compiled = torch.compile(mlp(), backend="eager")
    model = accelerator.prepare(compiled)
    assert rounds(model)
    detach(accelerator)
    assert not rounds(model)
    with pytest.raises(UnsupportedError, match="compiled without autocast"):
        attach(accelerator, ScalerConfig())
    assert not rounds(model)


def test_detach_with_an_open_window() -> None:
    """Refused, until it was stepped or given up."""
    accelerator = attach(stock(), ScalerConfig())
    model, optimizer = prepared(accelerator)
    for end in (optimizer.step, accelerator.scaler.abandon_window):
        accelerator.backward(model(torch.ones(2, 8)).mean() / 16)
        with pytest.raises(OrderError, match="window is open"):
            detach(accelerator)
        assert type(accelerator) is ScaledAccelerator
        end()
        optimizer.zero_grad()
    detach(accelerator)
    assert type(accelerator) is Accelerator


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_prepared_optimizer_steps_by_itself(through: Any) -> None:
    """It has its own scaler with the same scale, and leaves the accelerator's alone."""
    accelerator = attach(stock(), ScalerConfig(init_scale=1024.0))
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    twin = through(optimizer)
    assert type(twin) is ScaledOptimizer
    assert twin.scaler is not optimizer.scaler
    params = [p for group in twin.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    twin.scaler.scale(sum((p * 2).sum() for p in params)).backward()
    twin.step()
    assert twin.step_was_skipped is False
    for p, start in zip(params, before, strict=True):
        torch.testing.assert_close(start - p.detach(), torch.full_like(start, 0.2))
    assert accelerator.scaler_history.boundaries == 3
    kept = weights(model)
    assert not torch.equal(weights(train(accelerator, model, optimizer)), kept)
    assert accelerator.scaler_history.boundaries == 6


def test_free_memory_before_detach_leaves_no_optimizer_behind() -> None:
    accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig())
    optimizer = accelerator.prepare(SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    accelerator.free_memory()
    detach(accelerator)
    assert type(optimizer) is AcceleratedOptimizer
    assert "_attachment" not in optimizer.__dict__
    assert optimizer.scaler is None


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (ScalerConfig(init_scale=2.0**18, min_scale=2.0**17), 2.0**17),
        (ScalerConfig(init_scale=4.0, max_scale=8.0), 8.0),
    ],
)
def test_new_bounds_hold_for_a_scale_that_training_has_reached(
    config: ScalerConfig, scale: float
) -> None:
    accelerator = stock()
    accelerator.scaler.scale(torch.ones(()))
    attach(accelerator, config)
    assert accelerator.scaler.get_scale() == scale


def _last_micro_batch(accelerator: Any, model: Any) -> None:
    accelerator.backward(model(torch.ones(4, 8)).float().square().mean())


@pytest.mark.parametrize(
    ("come", "call", "mode"),
    [
        ("attach on a CPU", "step", "sync"),
        ("attach on a CPU", "clip", "overlap"),
        ("attach as on a GPU", "unscale", "sync"),
        ("attach as on a GPU", "step", "delayed"),
        ("prepare", "clip", "sync"),
        ("prepare", "step", "overlap"),
    ],
)
def test_gradients_from_before_attach_are_not_added_to(come: str, call: str, mode: Any) -> None:
    """Not scaled, or by another scaler: what they were scaled by cannot be known.

    It moved 1,000 times too little, or too far.
    """
    config = ScalerConfig(init_scale=1024.0, step_mode=mode, optimizer_threads=1)
    accelerator = stock() if come == "attach as on a GPU" else cpu()
    model: Any = mlp()
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if come == "prepare":
        attach(accelerator, config)
        model = accelerator.prepare(model)
        model(torch.ones(4, 8)).float().square().mean().backward()  # a look at the gradients, say
        optimizer = accelerator.prepare(inner)
    else:
        model, optimizer = accelerator.prepare(model, inner)
        _last_micro_batch(accelerator, model)  # of two, half of the window
        attach(accelerator, config)
        optimizer = accelerator._optimizers[0]
    before = weights(model)
    _last_micro_batch(accelerator, model)
    with pytest.raises(OrderError, match="had gradients before it was given to this scaler"):
        {
            "step": optimizer.step,
            "clip": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
            "unscale": accelerator.unscale_gradients,
        }[call]()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    train(accelerator, model, optimizer)
    optimizer.synchronize()
    # Beside it: attached before there was anything.
    other = attach(stock() if come == "attach as on a GPU" else cpu(), config)
    right: Any = mlp()
    right, its = other.prepare(right, SGD(right.parameters(), lr=0.1, momentum=0.9))
    train(other, right, its)
    its.synchronize()
    assert torch.equal(weights(model), weights(right))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_after_attach_are_no_ones(set_to_none: bool) -> None:
    """As in a loop that zeroes before its backward."""
    accelerator = stock()
    model, optimizer = prepared(accelerator)
    _last_micro_batch(accelerator, model)
    optimizer.step()
    attach(accelerator, ScalerConfig())
    optimizer.zero_grad(set_to_none)
    before = weights(model)
    _last_micro_batch(accelerator, model)
    optimizer.step()
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_gradients_of_a_window_that_was_given_up_are_not_added_to(mode: Any) -> None:
    """Clipped ones are unscaled."""
    accelerator = attach(cpu(), ScalerConfig(step_mode=mode, optimizer_threads=1))
    model, optimizer = prepared(accelerator)
    _last_micro_batch(accelerator, model)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.scaler.abandon_window()
    before = weights(model)
    for _ in range(2):  # nor in the window after that
        _last_micro_batch(accelerator, model)
        with pytest.raises(OrderError, match=r"sat out the window before .* are unscaled"):
            optimizer.step()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    _last_micro_batch(accelerator, model)
    optimizer.step()
    optimizer.synchronize()
    assert not torch.equal(weights(model), before)
