"""Accelerate config files with a section of ours: read whole, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scaler import ConfigError, ScalerConfig
from accel_scaler.config_file import find_config, read_config, shipped_configs

REST = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "fp16"}


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "section",
    [
        "accel_scaler:\n  step_mode: overlap\n  # why not\n  min_scale: 0.5\n",
        "'accel_scaler' : {'step_mode': overlap, min_scale: 0.5}\n",
    ],
)
def test_a_yaml_section_is_read_as_texts_and_taken_out(tmp_path: Path, section: str) -> None:
    path = write(tmp_path, section + yaml.safe_dump(REST))
    found, rest = read_config(path)
    assert found == {"step_mode": "overlap", "min_scale": "0.5"}
    assert yaml.safe_load(rest or "") == REST
    assert ScalerConfig.from_yaml(path) == ScalerConfig(step_mode="overlap", min_scale=0.5)


@pytest.mark.parametrize(
    "section", ["accel_scaler:\n  # step_mode: overlap\n", "accel_scaler: {min_scale: ~}"]
)
def test_a_section_without_values_has_the_defaults(tmp_path: Path, section: str) -> None:
    path = write(tmp_path, f"compute_environment: LOCAL_MACHINE\n{section}")
    assert ScalerConfig.from_yaml(path) == ScalerConfig()


def test_a_json_file_is_read_as_yaml(tmp_path: Path) -> None:
    document = {**REST, "accel_scaler": {"step_mode": "overlap", "min_scale": 1e-05}}
    path = write(tmp_path, json.dumps(document, indent=2), "config.json")
    assert ScalerConfig.from_yaml(path) == ScalerConfig(step_mode="overlap", min_scale=1e-05)
    assert yaml.safe_load(read_config(path)[1] or "") == REST


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: 1"), ("a.json", "{}"), ("a.yaml", "")])
def test_a_file_without_the_section_gives_the_defaults(
    tmp_path: Path, name: str, text: str
) -> None:
    path = write(tmp_path, text, name)
    assert read_config(path) == ({}, None)
    assert ScalerConfig.from_yaml(path) == ScalerConfig()


BROKEN = {
    "a word": ("a: 1\naccel_scaler: overlap\n", "got 'overlap', expected a mapping"),
    "no mapping": ("- a\n- b\n", "got ['a', 'b'], expected a mapping"),
    "wrong indent": ("a: 1\n b: 2\n", "line 2"),
    "no such day": ("accel_scaler:\n  min_scale: 2024-13-01\n", "month must be"),
    "a call": ("accel_scaler: !!python/object/apply:os.mkdir [boom]\n", "line 1"),
    "a call beside": ("a: !!python/object/apply:os.mkdir [boom]\n", "line 1"),
    "no colon.json": ('{"a": 1,\n"b" 5}', "line 2"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_a_line_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text, part = BROKEN[name]
    path = write(tmp_path, text, name if name.endswith(".json") else "config.yaml")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert part in message
    assert "\n" not in message
    assert not Path("boom").exists()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("bytes.yaml", "folder.yaml", "missing.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            ScalerConfig.from_yaml(tmp_path / name)


@given(st.text(alphabet="ab:{}[]\n -&*!<>'\"#|%@`,?=~.0123eTn\t\\", max_size=60))
@example("a:\n::")  # keys that sort otherwise
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    text = f"accel_scaler: {{}}\n{text}"
    path = write(tmp_path_factory.getbasetemp(), text, "noise.yaml")
    refusal = ""
    try:
        _, rest = read_config(path)
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(str(path))
        assert "\n" not in refusal
        return
    whole = yaml.safe_load(text)
    del whole["accel_scaler"]
    assert repr(yaml.safe_load(rest or "")) == repr(whole)  # repr: a NaN equals itself


def test_shipped_files_are_found_by_name_and_a_file_on_disk_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_configs()
    assert find_config("cpu_fp16") == shipped["cpu_fp16"]
    write(tmp_path, "", "cpu_fp16")
    assert find_config("cpu_fp16") == Path("cpu_fp16")
    for name in ("nope", str(tmp_path)):
        with pytest.raises(ConfigError, match=r"one of cpu_fp16, .*gpu_fp16") as caught:
            find_config(name)
        assert repr(name) in str(caught.value)
