"""Every setting: what it takes, what it refuses, and how it travels."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scaler import (
    AccelScalerError,
    ConfigError,
    OrderError,
    OverflowStreakError,
    ScalerConfig,
    UnsupportedError,
)
from accel_scaler.config import ENV_PREFIX, check_bounds, is_count, is_number, is_positive

FIELDS = {field.name: field for field in dataclasses.fields(ScalerConfig)}
NO_NUMBER = (math.nan, math.inf, -math.inf, True, "2", None, 10**400)
NO_COUNT = (0, -1, 1.0, 2.5, True, "3")
NO_FLOAT32 = (1e39, 1e-46)

ALLOWED: dict[str, tuple[Any, ...]] = {
    "init_scale": (1, 0.5, 2.0**24, 2.0**-149, 3.4028234663852886e38),
    "growth_factor": (1.0001, 2, 10.0),
    "backoff_factor": (0.5, 0.999, 1e-9),
    "growth_interval": (1, 2000, 10**9),
    "enabled": (True, False),
    "min_scale": (None, 1, 0.25, 65536.0),
    "max_scale": (None, 65536.0, 2.0**20),
    "hysteresis": (1, 2, 50),
    "max_consecutive_skips": (None, 1, 100),
    "step_mode": ("sync", "overlap", "delayed"),
    "delay_warmup_steps": (0, 1, 10**6),
    "offload": ("none", "cpu"),
    "optimizer_threads": ("auto", 1, 64),
    "fold_unscale": (True, False),
    "sharded": (True, False),
    "telemetry": (None, "run.jsonl", "out/rank{rank}.jsonl"),
    "underflow_interval": (1, 100),
    "find_overflow": (True, False),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "init_scale": (*NO_NUMBER, *NO_FLOAT32, 0, -1.0),
    "growth_factor": (*NO_NUMBER, 1, 1.0, 0.5, -2.0),
    "backoff_factor": (*NO_NUMBER, 0, 1, 1.0, -0.5, 2.0),
    "growth_interval": (*NO_COUNT, None, math.nan),
    "enabled": (1, 0, "true", None),
    "min_scale": (*(v for v in NO_NUMBER if v is not None), *NO_FLOAT32, 0, -1.0),
    "max_scale": (*(v for v in NO_NUMBER if v is not None), *NO_FLOAT32, 0, -1.0),
    "hysteresis": (*NO_COUNT, None),
    "max_consecutive_skips": NO_COUNT,
    "step_mode": ("", "SYNC", "async", None, 1),
    "delay_warmup_steps": (-1, 1.0, 0.0, True, False, None, "0"),
    "offload": ("", "gpu", None, 0, ["cpu"]),
    "optimizer_threads": (*NO_COUNT, None, "AUTO", ""),
    "fold_unscale": (1, "false", None),
    "sharded": (1, "false", None),
    "telemetry": ("", "  ", "None", 1, True, Path("run.jsonl"), "a\0b"),
    "underflow_interval": (*NO_COUNT, None),
    "find_overflow": (1, "false", None),
}


def test_the_tables_name_every_field() -> None:
    assert list(ALLOWED) == list(REFUSED) == list(FIELDS)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in ALLOWED.items() for v in vs])
def test_allowed(name: str, value: Any) -> None:
    assert getattr(ScalerConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}-{str(v)[:9]}") for n, vs in REFUSED.items() for v in vs],
)
def test_refused_with_field_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**{name: value})
    text = str(caught.value)
    assert text == f"{name}: got {value!r}, expected {FIELDS[name].metadata['allowed']}."


def test_defaults_are_torchs() -> None:
    config = ScalerConfig()
    assert (config.init_scale, config.growth_factor, config.backoff_factor) == (65536.0, 2.0, 0.5)
    assert (config.growth_interval, config.enabled, config.changed()) == (2000, True, {})


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScalerConfig().init_scale = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ScalerConfig(65536.0)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"min_scale": 8.0, "max_scale": 4.0}, ("min_scale=8.0", "max_scale=4.0")),
        ({"init_scale": 1.0, "min_scale": 2.0}, ("init_scale=1.0", "min_scale=2.0")),
        ({"init_scale": 9.0, "max_scale": 4.0}, ("init_scale=9.0", "max_scale=4.0")),
    ],
)
def test_bounds_that_contradict(values: dict[str, float], names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**values)  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in names)


def test_bounds_may_touch() -> None:
    check_bounds(4.0, 4.0, 4.0)
    with pytest.raises(ConfigError):
        check_bounds(4.0, 5.0, None)


def test_predicates() -> None:
    assert is_number(-1)
    assert is_number(0.5)
    assert is_count(1)
    assert is_positive(1e-40)
    assert not any(map(is_number, NO_NUMBER))
    assert not any(map(is_count, NO_COUNT))
    assert not any(map(is_positive, (*NO_NUMBER, *NO_FLOAT32, 0.0, -1)))


# Any float32; decimal text keeps it, as Python prints the shortest that reads back.
POSITIVE = st.floats(min_value=2.0**-60, max_value=2.0**60)


@st.composite
def configs(draw: st.DrawFn) -> ScalerConfig:
    low, middle, high = sorted(draw(st.lists(POSITIVE, min_size=3, max_size=3)))
    return ScalerConfig(
        init_scale=middle,
        growth_factor=draw(st.floats(1.0, 1e9, exclude_min=True)),
        backoff_factor=draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        growth_interval=draw(st.integers(1, 10**12)),
        enabled=draw(st.booleans()),
        min_scale=draw(st.sampled_from([None, low])),
        max_scale=draw(st.sampled_from([None, high])),
        hysteresis=draw(st.integers(1, 9)),
        max_consecutive_skips=draw(st.none() | st.integers(1, 99)),
        fold_unscale=draw(st.booleans()),
        sharded=draw(st.booleans()),
        telemetry=draw(st.none() | st.text("ab {}/.:#'", min_size=1).filter(str.strip)),
        underflow_interval=draw(st.integers(1, 10**6)),
        find_overflow=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(config=configs())
def test_the_environment_gives_the_same_config_again(config: ScalerConfig) -> None:
    variables = config.to_env()
    assert ScalerConfig.from_env(variables) == config
    assert all(isinstance(text, str) for text in variables.values())
    assert len(variables) == len(config.changed())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(config=configs())
def test_a_file_gives_the_same_config_again(
    tmp_path_factory: pytest.TempPathFactory, config: ScalerConfig
) -> None:
    import yaml

    path = tmp_path_factory.mktemp("config") / "c.yaml"
    document = {"mixed_precision": "fp16", "accel_scaler": config.changed()}
    path.write_text(yaml.safe_dump(document))
    assert ScalerConfig.from_yaml(path) == config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("INIT_SCALE", " 1024 ", 1024.0),
        ("INIT_SCALE", "1e3", 1000.0),
        ("GROWTH_INTERVAL", "7", 7),
        ("ENABLED", "No", False),
        ("ENABLED", "0", False),
        ("FOLD_UNSCALE", "on", True),
        ("FOLD_UNSCALE", "TRUE", True),
        ("MIN_SCALE", "none", None),
        ("MIN_SCALE", "", None),
        ("MAX_CONSECUTIVE_SKIPS", "null", None),
        ("MAX_CONSECUTIVE_SKIPS", "3", 3),
        ("STEP_MODE", " sync ", "sync"),
    ],
)
def test_variables_as_people_write_them(name: str, text: str, value: Any) -> None:
    config = ScalerConfig.from_env({ENV_PREFIX + name: text})
    assert getattr(config, name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("INIT_SCALE", "big"),
        ("INIT_SCALE", "nan"),
        ("INIT_SCALE", "none"),
        ("GROWTH_INTERVAL", "2.5"),
        ("GROWTH_INTERVAL", "0"),
        ("ENABLED", "maybe"),
        ("MIN_SCALE", "-1"),
        ("STEP_MODE", "overlapping"),
        ("OFFLOAD", ""),
    ],
)
def test_variables_that_cannot_be_used(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_env({ENV_PREFIX + name: text})
    message = str(caught.value).lower()
    assert name.lower() in message
    assert text in message
    assert FIELDS[name.lower()].metadata["allowed"] in str(caught.value)


def test_an_unknown_variable_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="ACCEL_SCALER_INIT_SCLAE") as caught:
        ScalerConfig.from_env({"ACCEL_SCALER_INIT_SCLAE": "1", "PATH": "/bin"})
    assert all(ENV_PREFIX + name.upper() in str(caught.value) for name in FIELDS)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "4")
    assert ScalerConfig.from_env().hysteresis == 4
    assert ScalerConfig.from_env({}).hysteresis == 1


def test_an_unknown_field_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="notes: unknown field 'scale'") as caught:
        ScalerConfig.from_mapping({"scale": 1.0}, "notes")
    assert all(name in str(caught.value) for name in FIELDS)


@pytest.mark.parametrize("text", ["", "mixed_precision: fp16\n", "accel_scaler: {}\n"])
def test_a_file_without_settings_gives_the_defaults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert ScalerConfig.from_yaml(path) == ScalerConfig()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "expected a mapping at the top, got list"),
        ("accel_scaler: [1]\n", "must be a mapping of fields, got [1]"),
        ("accel_scaler: {init_scale: [}\n", "line 1: not valid YAML"),
        ("accel_scaler: {nope: 1}\n", "unknown field 'nope'"),
        ("accel_scaler: {init_scale: 1e4}\n", "init_scale: got '1e4'"),
        ("accel_scaler: {growth_interval: true}\n", "growth_interval: got True"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_yaml(path)
    assert part in str(caught.value)
    assert "broken.yaml" in str(caught.value)


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
