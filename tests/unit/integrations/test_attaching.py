"""attach and detach: what changes on an accelerator, and that it comes back."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs
from attached import assert_untouched, cpu, inner_dtype, prepared, train
from support import mlp, stock, weights
from torch import Tensor, nn
from torch.optim import SGD

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
from accel_scaler.async_optimizer.async_stepper import AsyncStepper
from accel_scaler.integrations import Attachment, attach_default
from accel_scaler.integrations.optimizer import ScaledOptimizer
from accel_scaler.optimizer_step.stepper import async_stepper_of

INF = float("inf")


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


def test_the_optimizer_thread_ends_with_detach() -> None:
    threads = threading.active_count()
    accelerator = attach(cpu(), ScalerConfig(step_mode="overlap"))
    train(accelerator, *prepared(accelerator))
    attachment = accelerator._attachment
    assert threading.active_count() == threads + 1
    detach(accelerator)
    assert threading.active_count() == threads
    assert attachment.config.step_mode == "overlap"  # nor was it for the lack of a reference


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


def test_settings_outrank_those_that_a_launcher_attached_with() -> None:
    accelerator = cpu()
    attach_default(accelerator)
    attach(accelerator, ScalerConfig(init_scale=64.0))
    assert accelerator.scaler.get_scale() == 64.0
    with pytest.raises(OrderError, match="detach"):
        attach(accelerator, ScalerConfig(init_scale=16.0))


def test_the_settings_in_force_are_the_same_settings(tmp_path: Any) -> None:
    """Where nothing is scaled they are not those that were asked for."""
    config = ScalerConfig(step_mode="overlap", telemetry=str(tmp_path / "run.jsonl"))
    accelerator: Any = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="only telemetry"):
        attach(accelerator, config)
    in_force = accelerator._attachment.config
    assert in_force.step_mode == "sync"
    for again in (config, in_force):
        attach(accelerator, again)
    assert accelerator._attachment.config is in_force
    detach(accelerator)


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
    for _ in range(2):
        train(accelerator, model, optimizer)
        assert accelerator.scaler.get_scale() == 64.0
        assert accelerator.scaler_history.boundaries == 3
        detach(accelerator)
        assert type(accelerator) is ScaledAccelerator
        assert (accelerator._attachment, accelerator.scaler) == (None, None)
        assert accelerator.scaler_history.boundaries == 0
        attach(accelerator, config)
    detach(accelerator)


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


def settings_of(accelerator: Any) -> dict[str, Any]:
    """What is in force and no default."""
    changed: dict[str, Any] = accelerator._attachment.config.changed()
    return changed


MODE: dict[str, Any] = {"step_mode": "overlap", "min_scale": 4.0}


@pytest.mark.parametrize(
    ("config", "keywords", "expected"),
    [
        # By name: the environment says the rest.
        (None, MODE, {"init_scale": 512.0, **MODE}),
        (MODE, {}, {"init_scale": 512.0, **MODE}),
        ({}, {}, {"init_scale": 512.0, "min_scale": 16.0}),
        ({"min_scale": 8.0, "hysteresis": 2}, MODE,
         {"init_scale": 512.0, "hysteresis": 2, **MODE}),
        (None, {"min_scale": None}, {"init_scale": 512.0}),
        # It alone contradicts the default, and not what the environment says.
        (None, {"max_scale": 1024.0}, {"init_scale": 512.0, "min_scale": 16.0,
                                       "max_scale": 1024.0}),
        # A config says everything.
        (ScalerConfig(hysteresis=2), MODE, {"hysteresis": 2, **MODE}),
        (ScalerConfig(step_mode="delayed"), MODE, MODE),
    ],
)  # fmt: skip
def test_settings_by_name_outrank_the_config_and_that_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    keywords: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "512")
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "16")
    accelerator = attach(cpu(), config, **keywords)
    assert settings_of(accelerator) == expected
    detach(accelerator)
    if not keywords:  # the class has none
        direct = ScaledAccelerator(cpu=True, mixed_precision="fp16", scaler_config=config)
        assert settings_of(direct) == expected
        detach(direct)


def test_what_was_asked_for_by_name_is_there_or_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attached again: the settings that are named count, the environment and the rest do not."""
    accelerator = attach(cpu(), step_mode="overlap", fp32_modules=["*.none"], telemetry=None)
    attachment = accelerator._attachment
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "512")
    for config, keywords in (
        ({}, {}),
        (None, {"step_mode": "overlap"}),
        ({"fp32_modules": ("*.none",)}, {}),
        (attachment.config, {}),
        (ScalerConfig(fp32_modules=["*.none"]), {"step_mode": "overlap"}),  # type: ignore[arg-type]
    ):
        assert attach(accelerator, config, **keywords) is accelerator
    assert accelerator._attachment is attachment
    with pytest.raises(OrderError, match="hysteresis=1, not 2, step_mode='overlap', not 'sync'; c"):
        attach(accelerator, {"step_mode": "sync"}, hysteresis=2)
    with pytest.raises(OrderError, match=r"fp32_modules=\('\*.none',\), not \(\)"):
        attach(accelerator, ScalerConfig(step_mode="overlap"))
    with pytest.raises(ConfigError, match="attach: step_mode: got 'overlapp'"):
        attach(accelerator, step_mode="overlapp")
    assert accelerator._attachment is attachment
    detach(accelerator)


def test_settings_by_name_outrank_the_replaced_scalers() -> None:
    """Also where they are the defaults; a config's defaults do not."""
    for config, keywords, scale, interval in (
        (None, {}, 1024.0, 7),
        (ScalerConfig(hysteresis=2), {}, 1024.0, 7),
        (None, {"init_scale": 65536.0}, 65536.0, 7),
        ({"growth_interval": 2000}, {}, 1024.0, 2000),
        (ScalerConfig(), {"init_scale": 65536.0, "growth_interval": 2000}, 65536.0, 2000),
    ):
        handler = GradScalerKwargs(init_scale=1024.0, growth_interval=7)
        accelerator = attach(stock(kwargs_handlers=[handler]), config, **keywords)
        scaler, attachment = accelerator.scaler, accelerator._attachment
        assert (scaler.get_scale(), scaler.get_growth_interval()) == (scale, interval)
        # What is in force is no other setting, and what is refused says what is.
        assert attach(accelerator, init_scale=scale, growth_interval=interval) is accelerator
        assert accelerator._attachment is attachment
        with pytest.raises(OrderError, match=f"init_scale={scale}, not 2.0; call"):
            attach(accelerator, init_scale=2.0)
        detach(accelerator)


def test_a_scaler_that_is_off_is_replaced_by_one_that_is_on_where_that_is_asked_for() -> None:
    for keywords, is_on in (({}, False), ({"enabled": True}, True)):
        accelerator = attach(stock(kwargs_handlers=[GradScalerKwargs(enabled=False)]), **keywords)
        assert accelerator.scaler.is_enabled() is is_on
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer)
        detach(accelerator)
        assert not accelerator.scaler.is_enabled()


def test_settings_that_a_launcher_attached_with_are_asked_for_or_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "512")
    for first, scale in (({"init_scale": 512.0}, 512.0), ({"init_scale": 64.0}, 64.0)):
        accelerator = cpu()
        attach_default(accelerator)
        assert attach(accelerator).scaler.get_scale() == 512.0
        assert attach(accelerator, first).scaler.get_scale() == scale
        with pytest.raises(OrderError, match=f"init_scale={scale}, not 8.0"):
            attach(accelerator, init_scale=8.0)
        detach(accelerator)


@pytest.mark.parametrize(
    ("config", "keywords", "said"),
    [
        ("overlap", {}, "attach: got 'overlap' as config, expected a ScalerConfig or a mapping"),
        (ScalerConfig, {}, "attach: got <class .*ScalerConfig'> as config"),
        ({"step_mod": "overlap"}, {}, "attach: unknown field 'step_mod'. Did you mean step_mode"),
        (None, {"step_mod": "overlap"}, "attach: unknown field 'step_mod'. Did you mean step_mod"),
        (ScalerConfig(), {"heel": True}, "attach: unknown field 'heel'. Did you mean heal?"),
        ({3: 4}, {}, "attach: unknown field 3. The fields are init_scale, "),
        ({"min_scale": "4"}, {}, "attach: min_scale: got '4', expected a finite number"),
        (ScalerConfig(min_scale=8.0), {"max_scale": 4.0}, "min_scale=8.0 is above max_scale=4.0"),
        (None, {"min_scale": 2.0**17}, "init_scale=65536.0 is below .*min_scale: attach"),
    ],
)
def test_what_cannot_be_asked_for_changes_nothing(
    config: Any, keywords: dict[str, Any], said: str
) -> None:
    accelerator = cpu()
    with pytest.raises(ConfigError, match=said) as caught:
        attach(accelerator, config, **keywords)
    assert "\n" not in str(caught.value)
    assert_untouched(accelerator)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"telemetry": "."}, "telemetry: got '.', which .* it is a folder"),
        ({"telemetry": "file/x.jsonl"}, "file is no folder"),
        ({"telemetry": "file"}, "exists and is not a telemetry file"),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x\n")
    accelerator = cpu()
    with pytest.raises(ConfigError, match=said) as caught:
        attach(accelerator, **settings)
    assert "\n" not in str(caught.value)
    assert_untouched(accelerator)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    accelerator = attach(cpu(), telemetry=path)
    train(accelerator, *prepared(accelerator))
    assert attach(accelerator, telemetry=str(path)) is accelerator
    detach(accelerator)
    assert '"kind":"window"' in path.read_text().replace(" ", "")


@pytest.mark.parametrize("target", [None, 3, mlp(), torch.amp.GradScaler("cpu")])
def test_a_target_of_another_type(target: Any) -> None:
    with pytest.raises(ConfigError, match=f"got a {type(target).__name__}, expected an acc"):
        attach(target)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("direct", [False, True])
def test_nothing_to_scale(precision: str, direct: bool) -> None:
    """A warning, and a plain accelerator that trains as before."""
    build: Any = ScaledAccelerator if direct else lambda **kwargs: attach(Accelerator(**kwargs))
    with pytest.warns(UserWarning, match=f"{precision}.*needs no gradient scaling"):
        ours = build(cpu=True, mixed_precision=precision)
    assert type(ours) is (ScaledAccelerator if direct else Accelerator)
    assert (ours.scaler, "_attachment" in ours.__dict__) == (None, False)
    assert detach(ours) is ours
    ends = []
    for a in (ours, Accelerator(cpu=True, mixed_precision=precision)):
        model, optimizer = prepared(a)
        a.backward(model(torch.ones(2, 8)).mean())
        norm = a.clip_grad_norm_(model.parameters(), 0.1)
        a.clip_grad_value_(model.parameters(), 0.05)
        a.unscale_gradients()
        optimizer.step()
        ends.append(torch.cat([weights(model), norm.reshape(1)]))
    assert torch.equal(*ends)


class OtherWrapper(AcceleratedOptimizer):  # type: ignore[misc]
    """Somebody else's optimizer wrapper, whose ``step`` may do anything."""


def refuse_wrapper(accelerator: Any) -> Any:
    other = accelerator.prepare(SGD(mlp().parameters(), lr=0.1))
    other.__class__ = OtherWrapper


def refuse_compiled(accelerator: Any) -> Any:
    return accelerator.prepare(torch.compile(mlp(), backend="eager"))


def refuse_sharing(accelerator: Any) -> Any:
    """A master of each would overwrite the other's."""
    shared = nn.Parameter(torch.ones(4))
    return accelerator.prepare(*(SGD([shared], lr=0.1) for _ in range(2)))


@pytest.mark.parametrize(
    ("refused", "mode"),
    [
        (refuse_sharing, "delayed"),
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


def interrupted_at_the_second(patched: pytest.MonkeyPatch, cls: type, name: str) -> None:
    """Ctrl-C in the second call of a method."""
    calls, own = count(), getattr(cls, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    patched.setattr(cls, name, method)


@pytest.mark.parametrize(
    ("cls", "name"), [(Attachment, "watch"), (AsyncStepper, "__init__"), (GradScaler, "manage")]
)
def test_whatever_ends_an_attach_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str
) -> None:
    """Both models and optimizers are as stock left them, and can be attached."""
    accelerator, config = cpu(), ScalerConfig(step_mode="overlap")
    pairs = [prepared(accelerator) for _ in range(2)]
    with monkeypatch.context() as patched:
        interrupted_at_the_second(patched, cls, name)
        with pytest.raises(KeyboardInterrupt):
            attach(accelerator, config)
    for model, optimizer in pairs:
        assert inner_dtype(model) is torch.float32
        assert type(optimizer) is AcceleratedOptimizer
        assert async_stepper_of(optimizer.optimizer) is None
    assert_untouched(accelerator)
    assert type(attach(accelerator, config)) is ScaledAccelerator
    detach(accelerator)


@pytest.mark.parametrize(("cls", "name"), [(AsyncStepper, "__init__"), (GradScaler, "manage")])
def test_whatever_ends_a_prepare_nothing_is_prepared(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str
) -> None:
    """Done again, it trains as where nothing had happened."""
    ends: list[Tensor] = []
    for fails in (False, True):
        accelerator = attach(cpu(), ScalerConfig(step_mode="overlap"))
        model = mlp()
        optimizers = [SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
        if fails:
            with monkeypatch.context() as patched:
                interrupted_at_the_second(patched, cls, name)
                with pytest.raises(KeyboardInterrupt):
                    accelerator.prepare(model, *optimizers)
            assert [] == accelerator._models == accelerator._optimizers
            assert not accelerator.scaler.managed
            assert not any(map(async_stepper_of, optimizers))
        model, *optimizers = accelerator.prepare(model, *optimizers)
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
        ends.append(weights(model))
        detach(accelerator)
    assert torch.equal(*ends)


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


def test_free_memory_before_detach_leaves_no_optimizer_behind() -> None:
    accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), ScalerConfig())
    optimizer = accelerator.prepare(SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    accelerator.free_memory()
    detach(accelerator)
    assert type(optimizer) is AcceleratedOptimizer
    assert "_attachment" not in optimizer.__dict__
    assert optimizer.scaler is None


def test_an_attach_that_was_interrupted_before_its_end_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator: Any = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.Linear(2, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("accel_scaler.integrations.attaching.scaled_class", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attach(accelerator)
    attach(accelerator)
    assert isinstance(accelerator, ScaledAccelerator)
    assert optimizer.scaler is accelerator.scaler
    detach(accelerator)
    assert type(accelerator) is Accelerator


@pytest.mark.parametrize("settings", [{}, {"offload": "cpu"}, {"step_mode": "delayed"}], ids=str)
def test_state_of_a_parameter_that_was_replaced_is_left_as_torch_leaves_it(
    settings: dict[str, Any],
) -> None:
    """torch steps on, and makes no state dict of it; detach ends, and training goes on stock."""
    accelerator = attach(cpu(), init_scale=256.0, **settings)
    model = mlp().to(torch.bfloat16)
    inner = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, inner)
    train(accelerator, model, optimizer)
    old = model[0].weight
    model[0].weight = new = nn.Parameter(old.detach() * 0.5)
    group = inner.param_groups[0]["params"]
    group[[id(p) for p in group].index(id(old))] = new
    train(accelerator, model, optimizer)
    detach(accelerator)
    assert type(accelerator) is Accelerator
    assert type(optimizer) is AcceleratedOptimizer
    assert set(inner.state) == {old, *model.parameters()}
    for p in model.parameters():
        buffer = inner.state[p]["momentum_buffer"]
        assert buffer.dtype is torch.bfloat16
        assert buffer.abs().sum() > 0
