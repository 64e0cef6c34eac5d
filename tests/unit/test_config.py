"""Every setting: the values it takes and refuses, and the precedence of its sources."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_scaler import (
    AccelScalerError,
    AsyncOptimizer,
    ConfigError,
    OrderError,
    OverflowStreakError,
    ScalerConfig,
    UnsupportedError,
    attach,
)
from accel_scaler.config import ABOUT, ENV_PREFIX, FIELDS, KINDS, environment, merge
from accel_scaler.errors import shown

NO_NUMBER = (math.nan, math.inf, -math.inf, True, "two", None, 10**400)
NO_COUNT = (0, -1, 1.0, True, "1.5", 2**53 + 1)
NO_SCALE = (math.nan, math.inf, True, "two", 0, -1.0, 1e39, 1e-46)
NO_SWITCH = (1, 0, "maybe", None)

VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "init_scale": ((1, 2.0**-149, 3.4028234663852886e38), (*NO_SCALE, None)),
    "growth_factor": ((1.0001, 2, 10.0), (*NO_NUMBER, 1, 0.5, -2.0)),
    "backoff_factor": ((0.5, 0.999, 1e-9), (*NO_NUMBER, 0, 1, -0.5, 2.0)),
    "growth_interval": ((1, 2**53), (*NO_COUNT, None, math.nan)),
    "enabled": ((True, False), NO_SWITCH),
    "min_scale": ((None, 1, 0.25), NO_SCALE),
    "max_scale": ((None, 65536.0, 2.0**20), NO_SCALE),
    "hysteresis": ((1, 50), (*NO_COUNT, None)),
    "skip_nonfinite": ((True, False), NO_SWITCH),
    "skip_norm_above": (
        (None, 1, 0.5, "1x", "4x", "2.5x"),
        (*NO_SCALE, "-4", "x", "0.5x", "-2x", "4 x x"),
    ),
    "max_consecutive_skips": ((None, 1, 100), NO_COUNT),
    "step_mode": (("sync", "overlap"), ("", "SYNC", "async", None, 1)),
    "offload": (("none", "cpu"), ("", "gpu", None, 0, ["cpu"])),
    "offload_budget": (
        ("auto", 0, 2**40, "6GiB", "500 MB", "1.5G", "0"),
        (True, None, -1, 1.5, "", "all", "-1GiB", "6 gibs", 2**53, "9" * 400, "\u0663GiB"),
    ),
    "master_weights": (("auto", "fp32", "none"), ("", "fp16", "float32", None, True)),
    "sharded": ((True, False), NO_SWITCH),
    "telemetry": ((None, "run.jsonl", "out/{rank}.jsonl"), (1, True, b"a")),
    "find_overflow": (
        ("auto", "replay", "always", "off"),
        (True, False, 1, "", "true", "false", None, "ALWAYS"),
    ),
    "on_overflow": (("skip", "retry"), (True, False, 1, "", "RETRY", None)),
    "heal": ((True, False), NO_SWITCH),
    "log_values": ((True, False), NO_SWITCH),
    "fp32_modules": (
        ((), ("*.wo",), ("h.[0-3].mlp", "a?")),
        ("a b", None, True, 1, ("",), (1,), ("a b",), ("a,b",), {"a"}),
    ),
}
"""For each field: values that it takes, and values that it refuses."""


def allowed(name: str) -> str:
    return KINDS[name].allowed


def test_defaults_are_torchs() -> None:
    config = ScalerConfig()
    assert (config.init_scale, config.growth_factor, config.backoff_factor) == (65536.0, 2.0, 0.5)
    assert (config.growth_interval, config.enabled, config.changed()) == (2000, True, {})
    assert set(VALUES) == set(FIELDS)


def test_frozen_keyword_only_and_documented() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScalerConfig().init_scale = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ScalerConfig(65536.0)  # type: ignore[misc]
    assert list(ABOUT) == list(FIELDS), "help is read from the docstring, in the fields' order"
    assert all(text.endswith(".") for text in ABOUT.values())


def test_paths_are_kept_as_texts() -> None:
    config = ScalerConfig(telemetry=Path("a") / "b")
    assert config.telemetry == os.path.join("a", "b")
    assert ScalerConfig.from_env(config.to_env()) == config


@pytest.mark.parametrize("name", VALUES)
def test_each_value_is_taken_or_refused_with_field_value_and_what_is_allowed(name: str) -> None:
    taken, refused = VALUES[name]
    for value in taken:
        assert getattr(ScalerConfig(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            ScalerConfig(**{name: value})
        with suppress(ValueError):
            value = KINDS[name].convert(value) if isinstance(value, str) else value
        assert str(caught.value) == f"{name}: got {shown(value)}, expected {allowed(name)}."


@pytest.mark.parametrize(
    "values",
    [
        {"min_scale": 8.0, "max_scale": 4.0},
        {"init_scale": 1.0, "min_scale": 2.0},
        {"init_scale": 9.0, "max_scale": 4.0},
        {"master_weights": "none", "offload": "cpu"},
        {"heal": True, "find_overflow": "off"},
    ],
)
def test_fields_that_contradict_each_other(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**values)
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in values.items())
    ScalerConfig(init_scale=4.0, min_scale=4.0, max_scale=4.0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("init_scale", " 1024 ", 1024.0),
        ("growth_interval", "7", 7),
        ("enabled", "No", False),
        ("heal", "on", True),
        ("min_scale", "none", None),
        ("max_consecutive_skips", "null", None),
        ("step_mode", " sync ", "sync"),
        ("fp32_modules", "*.wo, h.3.mlp,", ("*.wo", "h.3.mlp")),
        ("fp32_modules", "", ()),
    ],
)
def test_texts_as_people_write_them(tmp_path: Path, name: str, text: str, value: Any) -> None:
    assert getattr(ScalerConfig.from_env({ENV_PREFIX + name.upper(): text}), name) == value
    assert getattr(ScalerConfig(**{name: text}), name) == value
    path = tmp_path / "c.yaml"
    for form in (f"'{text}'", text.strip()):
        if form and "*" not in form[:1]:
            path.write_text(f"accel_scaler:\n  {name}: {form}\n")
            assert getattr(ScalerConfig.from_yaml(path), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("init_scale", "big"),
        ("growth_interval", "2.5"),
        ("enabled", "maybe"),
        ("offload", ""),
        ("find_overflow", "true"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_with_its_source(
    tmp_path: Path, name: str, text: str
) -> None:
    try:
        value = KINDS[name].convert(text)
    except ValueError:
        value = text
    end = f"{name}: got {value!r}, expected {allowed(name)}."
    environ = {ENV_PREFIX + name.upper(): text}
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: '{text}'\n")
    ways: dict[str, Callable[[], object]] = {
        "environment: ": lambda: ScalerConfig.from_env(environ),
        f"{path}: ": lambda: ScalerConfig.from_yaml(path),
        "": lambda: attach(Accelerator(cpu=True), **{name: text}),  # type: ignore[arg-type]
    }
    for source, way in ways.items():
        with pytest.raises(ConfigError) as caught:
            way()
        assert str(caught.value) == source + end
    good = ("command line", {name: "auto"})
    with pytest.raises(ConfigError, match=r"^environment: "):  # though a flag takes precedence
        merge(environment(environ), good)


@pytest.mark.parametrize(
    ("name", "hint"), [("step_mod", "Did you mean step_mode?"), ("nothing_like", "The fields are ")]
)
def test_an_unknown_field_is_refused_with_the_nearest_or_all(
    tmp_path: Path, name: str, hint: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: 1\n")
    ways: dict[str, Callable[[], object]] = {
        str(path): lambda: ScalerConfig.from_yaml(path),
        "environment": lambda: ScalerConfig.from_env({ENV_PREFIX + name.upper(): "1"}),
        "": lambda: attach(Accelerator(cpu=True), **{name: 1}),
    }
    for source, way in ways.items():
        with pytest.raises(ConfigError) as caught:
            way()
        start = f"{source}: " if source else ""
        assert str(caught.value).startswith(f"{start}unknown field '{name}'. {hint}")


def test_a_later_source_takes_precedence_also_with_a_default() -> None:
    names = ("hysteresis", "growth_interval", "max_consecutive_skips")
    environ = {ENV_PREFIX + name.upper(): "5" for name in names[:2]} | {"OTHER": "x"}
    config, sources = merge(
        ("file", dict.fromkeys(names, 3)),
        environment(environ),
        ("command line", {"hysteresis": "1", "enabled": "false"}),
    )
    assert config == ScalerConfig(growth_interval=5, max_consecutive_skips=3, enabled=False)
    assert sources == {
        "hysteresis": "command line",
        "enabled": "command line",
        "growth_interval": "environment",
        "max_consecutive_skips": "file",
    }
    assert merge() == (ScalerConfig(), {})


def test_a_contradiction_names_its_sources() -> None:
    with pytest.raises(ConfigError, match=r"min_scale: file; max_scale: command line\)$"):
        merge(("file", {"min_scale": 7e4}), ("command line", {"max_scale": 6e4}))
    # Each contradicts a default; together they do not.
    assert merge(("a", {"min_scale": 7e4}), ("b", {"init_scale": 8e4}))[0].min_scale == 7e4


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ConfigError, (AccelScalerError, ValueError, AssertionError)),
        (OrderError, (AccelScalerError, RuntimeError)),
        (OverflowStreakError, (AccelScalerError, RuntimeError)),
        (UnsupportedError, (AccelScalerError, ValueError)),
    ],
)
def test_errors_are_also_what_torch_raises(
    error: type[Exception], bases: tuple[type[Exception], ...]
) -> None:
    assert all(issubclass(error, base) for base in bases)


GONE: dict[str, tuple[Any, str]] = {
    "delay_warmup_steps": (8, "drop it"),
    "delay_compensation": ("preview", "drop it"),
    "growth_headroom": (False, "drop it"),
    "fold_unscale": (True, "drop it"),
    "optimizer_threads": (2, "drop it"),
    "mode": ("sync", "write step_mode"),
    "step_mode=delayed": ("delayed", "offload='cpu'"),
    "step_mode=auto": ("auto", "'overlap'"),
}


@pytest.mark.parametrize("name", GONE)
def test_what_was_retired_is_named_with_what_to_use(name: str, tmp_path: Path) -> None:
    (value, instead), name = GONE[name], name.partition("=")[0]
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: {value}\n")
    given: Any = {name: value}
    parameter = torch.nn.Parameter(torch.ones(1))
    ways: list[Callable[[], object]] = [
        lambda: ScalerConfig(**given),
        lambda: ScalerConfig.from_env({ENV_PREFIX + name.upper(): str(value)}),
        lambda: ScalerConfig.from_yaml(path),
        lambda: attach(Accelerator(cpu=True), **given),
        lambda: AsyncOptimizer(torch.optim.SGD([parameter]), **given),
    ]
    for way in ways:
        with pytest.raises(ConfigError) as caught:
            way()
        (line,) = str(caught.value).splitlines()
        assert f"{name}" in line
        assert " is retired: " in line
        assert instead in line
