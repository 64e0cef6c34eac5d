"""Every setting: what it takes, what it refuses, and which of several sources wins."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from accel_scaler import (
    AccelScalerError,
    ConfigError,
    OrderError,
    OverflowStreakError,
    ScalerConfig,
    UnsupportedError,
    attach,
    cli,
)
from accel_scaler.config import (
    ENV_PREFIX,
    FIELDS,
    GROUPS,
    in_environment,
    in_flags,
    in_section,
    resolve,
    variable_of,
)
from accel_scaler.config_file import ConfigFile, read_config
from accel_scaler.errors import RETIRED

NO_NUMBER = (math.nan, math.inf, -math.inf, True, "2", None, 10**400)
NO_COUNT = (0, -1, 1.0, True, "3", 2**53 + 1)
NO_SCALE = (math.nan, math.inf, True, "2", 0, -1.0, 1e39, 1e-46)
NO_SWITCH = (1, 0, "true", None)

# Of each field: values that it takes, and values that it refuses.
VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "init_scale": ((1, 2.0**-149, 3.4028234663852886e38), (*NO_SCALE, None)),
    "growth_factor": ((1.0001, 2, 10.0), (*NO_NUMBER, 1, 0.5, -2.0)),
    "backoff_factor": ((0.5, 0.999, 1e-9), (*NO_NUMBER, 0, 1, -0.5, 2.0)),
    "growth_interval": ((1, 2**53), (*NO_COUNT, None, math.nan)),
    "enabled": ((True, False), NO_SWITCH),
    "min_scale": ((None, 1, 0.25), NO_SCALE),
    "max_scale": ((None, 65536.0, 2.0**20), NO_SCALE),
    "hysteresis": ((1, 50), (*NO_COUNT, None)),
    "max_consecutive_skips": ((None, 1, 100), NO_COUNT),
    "step_mode": (("sync", "overlap", "delayed"), ("", "SYNC", "async", None, 1)),
    "delay_warmup_steps": ((0, 1, 2**53), (-1, 0.0, False, None, "0")),
    "delay_compensation": (
        ("auto", "preview", "none"),
        ("", "Auto", None, False, "linear"),
    ),
    "offload": (("none", "cpu"), ("", "gpu", None, 0, ["cpu"])),
    "master_weights": (("auto", "fp32", "none"), ("", "fp16", "float32", None, True)),
    "optimizer_threads": (("auto", 1, 64), (*NO_COUNT, None, "AUTO", "")),
    "fold_unscale": ((True, False), NO_SWITCH),
    "sharded": ((True, False), NO_SWITCH),
    "telemetry": (
        (None, "run.jsonl", "out/{rank}.jsonl"),
        ("", "  ", "None", 1, True, b"a", Path("None"), "a\0b"),
    ),
    "underflow_interval": ((1, 100), (*NO_COUNT, None)),
    "find_overflow": (
        ("auto", "replay", "always", "off"),
        (True, False, 1, "", "true", "false", None, "ALWAYS"),
    ),
    "heal": ((True, False), NO_SWITCH),
    "fp32_modules": (
        ((), ("*.wo",), ("h.[0-3].mlp", "a?")),
        ("*.wo", None, True, 1, ("",), (1,), ("a b",), ("a,b",), {"a"}),
    ),
}


def allowed(name: str) -> str:
    return str(FIELDS[name].metadata["kind"].allowed)


def test_defaults_are_torchs() -> None:
    config = ScalerConfig()
    assert (config.init_scale, config.growth_factor, config.backoff_factor) == (65536.0, 2.0, 0.5)
    assert (config.growth_interval, config.enabled, config.changed()) == (2000, True, {})
    assert list(VALUES) == [field.name for field in dataclasses.fields(ScalerConfig)]


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScalerConfig().init_scale = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        ScalerConfig(65536.0)  # type: ignore[misc]


def test_help_has_of_every_field_its_text_type_default_and_what_is_allowed() -> None:
    text = pydoc.render_doc(ScalerConfig, renderer=pydoc.plaintext)
    said = " ".join(text.replace("|", " ").split())
    assert "\n\nAttributes:\n    init_scale (float): Scale of" in (
        inspect.getdoc(ScalerConfig) or ""
    )
    parameters = inspect.signature(ScalerConfig).parameters
    assert list(parameters) == list(VALUES)
    for spec in dataclasses.fields(ScalerConfig):
        about = spec.metadata["about"]
        row = f"({spec.type}): {about} Takes {allowed(spec.name)}. Default: {spec.default!r}."
        assert f"{spec.name} {' '.join(row.replace('|', ' ').split())}" in said
        assert parameters[spec.name].default == spec.default
        assert not isinstance(parameters[spec.name].annotation, str)
        assert spec.metadata["group"] in GROUPS
        assert about.endswith(".")
    assert max(map(len, text.splitlines()[4:90])) < 104


def test_paths_are_kept_as_texts() -> None:
    config = ScalerConfig(telemetry=Path("a") / "b")
    assert config.telemetry == os.path.join("a", "b")
    assert ScalerConfig.from_env(config.to_env()) == config


def test_a_name_that_is_no_field_is_told_the_nearest() -> None:
    wrong: Any = {"step_mod": "overlap"}
    told = "unknown field 'step_mod'. Did you mean step_mode?"
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**wrong)
    assert str(caught.value) == f"ScalerConfig: {told}"
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(ScalerConfig(), **wrong)
    assert str(caught.value) == f"ScalerConfig: {told}"
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_mapping(wrong, "notes")
    assert str(caught.value) == f"notes: {told}"
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_env({"ACCEL_SCALER_STEP_MOD": "overlap"})
    assert str(caught.value) == (
        "the environment: unknown field 'ACCEL_SCALER_STEP_MOD'. Did you mean "
        "ACCEL_SCALER_STEP_MODE?"
    )
    with pytest.raises(ConfigError, match=r"unknown field 'nothing_like'\. The fields are init_"):
        ScalerConfig(nothing_like=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("step_mode", "overlapp", " Did you mean 'overlap'?"),
        ("step_mode", "Delay", " Did you mean 'delayed'?"),
        ("step_mode", "async", ""),  # not sync
        ("find_overflow", "repaly", " Did you mean 'replay'?"),
        ("offload", "CPU", " Did you mean 'cpu'?"),
        ("offload", "gpu", ""),
    ],
)
def test_a_value_that_is_nearly_one(name: str, value: str, meant: str) -> None:
    end = f"got {value!r}, expected {allowed(name)}.{meant}"
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name}: {end}"
    with pytest.raises(ConfigError) as caught:
        resolve(in_flags({name: value}))
    assert str(caught.value) == f"--{name}: {end}"


@pytest.mark.parametrize("name", VALUES)
def test_each_value_is_taken_or_refused_with_field_value_and_what_is_allowed(name: str) -> None:
    taken, refused = VALUES[name]
    for value in taken:
        assert getattr(ScalerConfig(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError) as caught:
            ScalerConfig(**{name: value})
        assert str(caught.value).partition(" Did you mean ")[0] == (
            f"{name}: got {value!r}, expected {allowed(name)}."
        )


@pytest.mark.parametrize(
    "values",
    [
        {"min_scale": 8.0, "max_scale": 4.0},
        {"init_scale": 1.0, "min_scale": 2.0},
        {"init_scale": 9.0, "max_scale": 4.0},
    ],
)
def test_bounds_that_contradict(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScalerConfig(**values)  # type: ignore[arg-type]
    assert all(f"{name}={value}" in str(caught.value) for name, value in values.items())
    ScalerConfig(init_scale=4.0, min_scale=4.0, max_scale=4.0)  # they may touch


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("init_scale", " 1024 ", 1024.0),
        ("init_scale", "1e3", 1000.0),
        ("growth_interval", "7", 7),
        ("enabled", "No", False),
        ("enabled", "0", False),
        ("fold_unscale", "on", True),
        ("fold_unscale", "TRUE", True),
        ("min_scale", "none", None),
        ("max_consecutive_skips", "null", None),
        ("max_consecutive_skips", "3", 3),
        ("step_mode", " sync ", "sync"),
        ("optimizer_threads", "Auto", "auto"),
        ("find_overflow", " off ", "off"),
        ("fp32_modules", "*.wo, h.3.mlp,", ("*.wo", "h.3.mlp")),
        ("fp32_modules", "", ()),
    ],
)
def test_texts_as_people_write_them(tmp_path: Path, name: str, text: str, value: Any) -> None:
    assert getattr(ScalerConfig.from_env({ENV_PREFIX + name.upper(): text}), name) == value
    assert getattr(resolve(in_flags({name: text})).config, name) == value
    # YAML takes some of them for texts, too: 1e3, none, anything in quotes.
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler: {{{name}: '{text}'}}\n")
    assert getattr(ScalerConfig.from_yaml(path), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("init_scale", "big"),
        ("init_scale", "nan"),
        ("init_scale", "none"),
        ("growth_interval", "2.5"),
        ("enabled", "maybe"),
        ("min_scale", "-1"),
        ("step_mode", "inline"),
        ("offload", ""),
        ("find_overflow", "true"),
    ],
)
def test_a_text_that_cannot_be_used_is_named_with_its_source(
    tmp_path: Path, name: str, text: str
) -> None:
    end = f": got {text!r}, expected {allowed(name)}."
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_env({ENV_PREFIX + name.upper(): text})
    assert str(caught.value) == ENV_PREFIX + name.upper() + end
    with pytest.raises(ConfigError) as caught:
        # Refused, though a flag outranks it.
        resolve(in_environment({ENV_PREFIX + name.upper(): text}), in_flags({name: "1"}))
    assert str(caught.value) == ENV_PREFIX + name.upper() + end
    with pytest.raises(ConfigError) as caught:
        resolve(in_flags({name: text}))
    assert str(caught.value) == f"--{name}{end}"
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: '{text}'\n")
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_yaml(path)
    assert str(caught.value) == f"{path}, line 2: {name}{end}"


@pytest.mark.parametrize("key", ["ACCEL_SCALER_min_scale", "accel_scaler_MIN_SCALE"])
def test_a_variable_in_the_wrong_case_is_named_with_the_right_one(key: str) -> None:
    with pytest.raises(ConfigError, match=f"variable {key}. Did you mean ACCEL_SCALER_MIN_SCALE"):
        ScalerConfig.from_env({key: "1"})


@pytest.mark.parametrize("key", ["ACCEL_SCALER_NOPE", "ACCEL_SCALER_"])
def test_an_unknown_variable_is_named_with_what_there_is(key: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment: unknown field '{key}'") as caught:
        ScalerConfig.from_env({key: "1", "PATH": "/bin"})
    assert all(name in str(caught.value) for name in VALUES)


def test_an_unknown_field_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="notes: unknown field 'attach'"):
        ScalerConfig.from_mapping({"attach": True}, "notes")
    with pytest.raises(ConfigError, match="notes: min_scale: got -1"):
        ScalerConfig.from_mapping({"min_scale": -1}, "notes")
    path = tmp_path / "c.yaml"
    for written, shown in (("min_sacle", "'min_sacle'. Did you mean min_scale?"), ("5", "5. The")):
        path.write_text(f"accel_scaler:\n  {written}: 1\n")
        with pytest.raises(ConfigError) as caught:
            ScalerConfig.from_yaml(path)
        start = f"{path}, line 2, section `accel_scaler:`: unknown field {shown}"
        assert str(caught.value).startswith(start)
        assert ("Did you mean" in shown) or all(name in str(caught.value) for name in VALUES)


@pytest.mark.parametrize("name", [name for name in RETIRED if "=" not in name])
def test_a_retired_name_is_one_line_that_says_what_to_use_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: 1\n")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(1)")
    command = name.removeprefix("accel-scaler ").split()
    ways: dict[str, Callable[[], object]] = {
        name: lambda: ScalerConfig(**{name: 1}),
        f"{path}, line 2": lambda: ScalerConfig.from_yaml(path),
        "notes": lambda: ScalerConfig.from_mapping({name: 1}, "notes"),
        "attach": lambda: attach(Accelerator(cpu=True), {name: 1}),
        variable_of(name): lambda: ScalerConfig.from_env({variable_of(name): "1"}),
    }
    lines = []
    for where, way in ways.items() if name == command[0] else ():
        with pytest.raises(ConfigError) as caught:
            way()
        assert where in str(caught.value)
        lines.append(str(caught.value))
    argvs = [command]
    if name == command[0]:
        flag = name.replace("_", "-")
        argvs = [["launch", f"--{each}=1", str(script)] for each in (name, flag)]
        argvs.append(["launch", f"--{name}", "1", str(script)])
    for argv in argvs:
        assert cli.main(argv) == 2
        lines.append(capsys.readouterr().err.rstrip())
    for line in lines:
        assert line.endswith(f" is retired. Instead: {RETIRED[name]}")
        assert "\n" not in line


@pytest.mark.parametrize("written", [name for name in RETIRED if "=" in name])
def test_a_retired_value_is_one_line_that_says_what_to_use_instead(
    tmp_path: Path, written: str
) -> None:
    name, _, text = written.partition("=")
    value = text.strip("'")
    path = tmp_path / "c.yaml"
    path.write_text(f"accel_scaler:\n  {name}: {value}\n")
    ways: dict[str, Callable[[], object]] = {
        name: lambda: ScalerConfig(**{name: value}),
        f"{path}, line 2": lambda: ScalerConfig.from_yaml(path),
        "notes": lambda: ScalerConfig.from_mapping({name: value}, "notes"),
        "attach": lambda: attach(Accelerator(cpu=True), {name: value}),
        variable_of(name): lambda: ScalerConfig.from_env({variable_of(name): value}),
    }
    for where, way in ways.items():
        with pytest.raises(ConfigError) as caught:
            way()
        assert where in str(caught.value)
        assert str(caught.value).endswith(f"{written} is retired. Instead: {RETIRED[written]}")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "4")
    assert ScalerConfig.from_env().hysteresis == 4
    assert ScalerConfig.from_env({}).hysteresis == 1


# --- several sources ----------------------------------------------------------------------------


def file_of(text: str, folder: Path) -> ConfigFile:
    path = folder / "config.yaml"
    path.write_text(f"accel_scaler:\n{text}")
    return read_config(path)


def test_a_flag_outranks_a_variable_that_the_file_that_the_default(tmp_path: Path) -> None:
    names = ("hysteresis", "growth_interval", "max_consecutive_skips")
    file = file_of("".join(f"  {name}: 3\n" for name in names), tmp_path)
    environ = {ENV_PREFIX + name.upper(): "5" for name in names[:2]} | {"OTHER": "x"}
    flags = {names[0]: "7", "enabled": "false"}
    found = resolve(in_section(file), in_environment(environ), in_flags(flags))
    assert found.config == ScalerConfig(
        hysteresis=7, growth_interval=5, max_consecutive_skips=3, enabled=False
    )
    assert found.sources == {
        "hysteresis": "--hysteresis",
        "enabled": "--no_enabled",
        "growth_interval": "ACCEL_SCALER_GROWTH_INTERVAL",
        "max_consecutive_skips": f"{file.path}, line 4",
    }
    assert resolve().config == ScalerConfig()
    assert resolve().attach


def test_a_default_value_outranks_what_is_below_it(tmp_path: Path) -> None:
    file = file_of("  min_scale: 1.0\n  step_mode: overlap\n", tmp_path)
    environ = in_environment({"ACCEL_SCALER_MIN_SCALE": "none"})
    assert resolve(in_section(file), environ, in_flags({"step_mode": "sync"})).config == (
        ScalerConfig()
    )


def test_two_fields_that_contradict_name_both_places(tmp_path: Path) -> None:
    file = file_of("  min_scale: 70000.0\n", tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve(in_section(file), in_flags({"max_scale": "60000"}))
    assert f"min_scale: {file.path}, line 2; max_scale: --max_scale" in str(caught.value)
    # Each alone contradicts a default, and together they do not.
    good = resolve(in_section(file), in_environment({"ACCEL_SCALER_INIT_SCALE": "80000"}))
    assert good.config == ScalerConfig(min_scale=70000.0, init_scale=80000.0)


def test_a_script_that_reads_the_settings_itself_overlooks_the_launchers_own(
    tmp_path: Path,
) -> None:
    environ = {"ACCEL_SCALER_ATTACH": "0"}
    assert ScalerConfig.from_env(environ) == ScalerConfig()
    assert not resolve(in_environment(environ)).attach
    file = file_of("  attach: 'no'\n  min_scale: 2.0\n", tmp_path)
    assert ScalerConfig.from_yaml(file.path) == ScalerConfig(min_scale=2.0)
    assert not resolve(in_section(file)).attach


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
