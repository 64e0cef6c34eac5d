"""attach and detach: what changes on an accelerator, and that it comes back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs
from attached import assert_untouched, cpu, inner_dtype, prepared, train
from support import mlp, stock, weights
from torch import Tensor
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
from accel_scaler.integrations import attach_default
from accel_scaler.integrations.attachment import attachment_of, warn_once
from accel_scaler.integrations.optimizer import ScaledOptimizer

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
    assert isinstance(accelerator.scaler, GradScaler)
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


@pytest.mark.parametrize(
    ("launched", "precision", "world", "said"),
    [
        ("fp16", "no", {}, ["got 'no'", "expected 'fp16'", "launch with 'no'"]),
        ("FP16", "bf16", {}, ["got 'bf16'", "expected 'fp16'"]),
        ("bf16", "fp16", {}, ["got 'fp16'", "expected 'bf16'"]),
        ("fp16", None, {}, []),
        ("fp16", "fp16", {}, []),
        ("no", "fp16", {}, []),  # what a launcher leaves by default
        ("no", "no", {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["of 1 process", "expected 2"]),
        ("no", "no", {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, []),
        ("no", "no", {"WORLD_SIZE": "2"}, []),  # nobody has started ranks here
    ],
)
def test_an_accelerator_unlike_what_was_launched_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    launched: str, precision: str | None, world: dict[str, str], said: list[str],
) -> None:  # fmt: skip
    """Attached twice, as by the launcher and then by the script."""
    gc.collect()  # runs of other tests end with their verdict
    warn_once.cache_clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    attach_default(accelerator)
    detach(attach(accelerator, step_mode="overlap"))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == bool(said), texts
    assert all(part in texts[0] for part in said)


def test_the_settings_in_force_are_the_same_settings(tmp_path: Any) -> None:
    """Where nothing is scaled they are not those that were asked for: there is no scaler."""
    config = ScalerConfig(step_mode="overlap", telemetry=str(tmp_path / "run.jsonl"))
    accelerator: Any = Accelerator(cpu=True)
    attach(accelerator, config)
    in_force = attachment_of(accelerator).config
    assert (in_force.step_mode, in_force.enabled) == ("overlap", False)
    for again in (config, in_force):
        attach(accelerator, again)
    assert attachment_of(accelerator).config is in_force
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
        assert type(accelerator) is Accelerator
        assert (attachment_of(accelerator), accelerator.scaler) == (None, None)
        attach(accelerator, config)
    detach(accelerator)


def test_a_subclass_of_scaled_accelerator_is_not_detached() -> None:
    """Its methods would be lost. It goes on as before."""

    class Mine(ScaledAccelerator):
        def hello(self) -> str:
            return "hello"

    accelerator: Any = Mine(cpu=True, mixed_precision="fp16", scaler_config=ScalerConfig())
    model, optimizer = prepared(accelerator)
    scaler = accelerator.scaler
    with pytest.raises(UnsupportedError, match=r"got a Mine.*derive Mine from accelerate\."):
        detach(accelerator)
    assert (type(accelerator), accelerator.scaler) == (Mine, scaler)
    train(accelerator, model, optimizer)
    assert (accelerator.hello(), accelerator.scaler_history.boundaries) == ("hello", 3)


def settings_of(accelerator: Any) -> dict[str, Any]:
    """What is in force and no default."""
    changed: dict[str, Any] = attachment_of(accelerator).config.changed()
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
        (ScalerConfig(step_mode="overlap"), MODE, MODE),
    ],
)  # fmt: skip
def test_settings_by_name_outrank_the_config_and_that_the_environment(
    monkeypatch: pytest.MonkeyPatch, config: Any, keywords: dict[str, Any], expected: dict[str, Any]
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
    attachment = attachment_of(accelerator)
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "512")
    for config, keywords in (
        ({}, {}),
        (None, {"step_mode": "overlap"}),
        ({"fp32_modules": ("*.none",)}, {}),
        (None, {"fp32_modules": " *.none,", "min_scale": "none"}),
        (attachment.config, {}),
        (ScalerConfig(fp32_modules=["*.none"]), {"step_mode": "overlap"}),
    ):
        assert attach(accelerator, config, **keywords) is accelerator
    assert attachment_of(accelerator) is attachment
    with pytest.raises(OrderError, match="hysteresis=1, not 2, step_mode='overlap', not 'sync'; c"):
        attach(accelerator, {"step_mode": "sync"}, hysteresis=2)
    with pytest.raises(OrderError, match=r"fp32_modules=\('\*.none',\), not \(\)"):
        attach(accelerator, ScalerConfig(step_mode="overlap"))
    with pytest.raises(ConfigError, match="step_mode: got 'overlapp'"):
        attach(accelerator, step_mode="overlapp")
    assert attachment_of(accelerator) is attachment
    for _ in range(2):
        assert type(detach(accelerator)) is Accelerator


def test_settings_by_name_outrank_the_replaced_scalers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are the defaults, and in the environment; a config's defaults do not."""
    for config, keywords, scale, interval in (
        (None, {}, 1024.0, 7),
        (ScalerConfig(hysteresis=2), {}, 1024.0, 7),
        (None, {"init_scale": 65536.0}, 65536.0, 7),
        ({"growth_interval": 2000}, {}, 1024.0, 2000),
        (ScalerConfig(), {"init_scale": 65536.0, "growth_interval": 2000}, 65536.0, 2000),
        ("2000", {}, 1024.0, 2000),
        ("500", {"init_scale": 512.0}, 512.0, 500),
        ("500", {"growth_interval": 7}, 1024.0, 7),
    ):
        monkeypatch.delenv("ACCEL_SCALER_GROWTH_INTERVAL", raising=False)
        if isinstance(config, str):
            monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", config)
            config = None
        handler = GradScalerKwargs(init_scale=1024.0, growth_interval=7)
        accelerator = attach(stock(kwargs_handlers=[handler]), config, **keywords)
        scaler, attachment = accelerator.scaler, attachment_of(accelerator)
        assert (scaler.get_scale(), scaler.get_growth_interval()) == (scale, interval)
        # What is in force is no other setting, and what is refused says what is.
        assert attach(accelerator, init_scale=scale, growth_interval=interval) is accelerator
        assert attachment_of(accelerator) is attachment
        with pytest.raises(OrderError, match=f"init_scale={scale}, not 2.0; call"):
            attach(accelerator, init_scale=2.0)
        detach(accelerator)


def test_settings_that_a_launcher_attached_with_are_asked_for_or_replaced_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_INIT_SCALE", "many")
    with pytest.raises(ConfigError, match="environment: init_scale: got 'many'"):
        attach(cpu())
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
        ({"step_mod": "overlap"}, {}, "unknown field 'step_mod'. Did you mean step_mode"),
        (ScalerConfig(), {"heel": True}, "unknown field 'heel'. Did you mean heal?"),
        ({"min_scale": "low"}, {}, "min_scale: got 'low', expected a finite number"),
        (ScalerConfig(min_scale=8.0), {"max_scale": 4.0}, "min_scale=8.0, .* max_scale=4.0"),
        (None, {"telemetry": "."}, "telemetry: got '.', which .* Is a directory"),
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


def test_accelerate_itself_refuses_our_config_among_its_handlers() -> None:
    """As docs/start.md says."""
    with pytest.raises(AssertionError, match=r"^Unsupported kwargs handler passed: ScalerConfig"):
        Accelerator(cpu=True, kwargs_handlers=[ScalerConfig()])


@pytest.mark.parametrize("target", [None, 3, mlp(), torch.amp.GradScaler("cpu")])
def test_a_target_of_another_type(target: Any) -> None:
    with pytest.raises(ConfigError, match=f"got a {type(target).__name__}, expected an acc"):
        attach(target)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("direct", [False, True])
def test_where_nothing_is_scaled_there_is_no_scaler(precision: str, direct: bool) -> None:
    """What it trains: tests/integration/test_every_precision.py."""
    build: Any = ScaledAccelerator if direct else Accelerator
    ours = attach(build(cpu=True, mixed_precision=precision))
    assert (type(ours), ours.scaler) == (ScaledAccelerator, None)
    ours.unscale_gradients()
    assert detach(ours) is ours
    assert (type(ours), ours.scaler) == (Accelerator, None)


class OtherWrapper(AcceleratedOptimizer):  # type: ignore[misc]
    """Somebody else's optimizer wrapper, whose ``step`` may do anything."""


def refuse_wrapper(accelerator: Any) -> Any:
    other = accelerator.prepare(SGD(mlp().parameters(), lr=0.1))
    other.__class__ = OtherWrapper


def refuse_compiled(accelerator: Any) -> Any:
    return accelerator.prepare(torch.compile(mlp(), backend="eager"))


@pytest.mark.parametrize("refused", [refuse_wrapper, refuse_compiled])
def test_a_refusal_leaves_everything_as_it_was(refused: Any) -> None:
    """Also what was prepared before the one that is refused."""
    accelerator = cpu()
    model, optimizer = prepared(accelerator)
    refused(accelerator)
    with pytest.raises(UnsupportedError):
        attach(accelerator)
    assert type(optimizer) is AcceleratedOptimizer
    assert not any("accel_scaler" in name for name in vars(optimizer.optimizer))
    assert inner_dtype(model) is torch.float32
    assert_untouched(accelerator)


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


def test_detach_with_an_open_window() -> None:
    """Refused, until it was stepped or given up."""
    accelerator = attach(stock(), ScalerConfig())
    model, optimizer = prepared(accelerator)
    for end in (optimizer.step, accelerator.scaler.abandon_window):
        accelerator.backward(model(torch.ones(2, 8)).mean() / 16)
        with pytest.raises(OrderError, match="a step is under way"):
            detach(accelerator)
        assert type(accelerator) is ScaledAccelerator
        end()
        optimizer.zero_grad()
    detach(accelerator)
    assert type(accelerator) is Accelerator
