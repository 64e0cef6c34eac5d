"""The ``accel_scaler:`` section: fields with lines, the rest unchanged, every mistake one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scaler import ConfigError, ScalerConfig
from accel_scaler.config_file import find_config, read_config, shipped_configs

BEFORE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'   # one process\n"
AFTER = "num_processes: 1\nmixed_precision: fp16\n"
REST = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_processes": 1,
    "mixed_precision": "fp16",
}


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path) -> str:
    """The error's message, the same from both ways in; the path is left out."""
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    with pytest.raises(ConfigError) as again:
        ScalerConfig.from_yaml(path)
    message = str(caught.value)
    assert str(again.value)[: len(str(path)) + 40] == message[: len(str(path)) + 40]
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 1_500
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    "section",
    [
        "accel_scaler:\n  step_mode: overlap\n  # why not\n  min_scale: 0.5\n",
        "'accel_scaler' :\n\n\n  'step_mode': overlap\n  min_scale: .5\n",
        "accel_scaler: {step_mode: overlap, min_scale: 0.5}\n",
    ],
)
def test_a_yaml_section_is_read_with_its_lines_and_taken_out(tmp_path: Path, section: str) -> None:
    text = BEFORE + section + AFTER
    file = read_config(write(tmp_path, text))
    assert file.values == {"step_mode": "overlap", "min_scale": 0.5}
    numbered = list(enumerate(text.splitlines(), 1))
    assert file.lines == {
        name: next(n for n, line in numbered if name in line) for name in file.values
    }
    assert file.rest is not None
    assert yaml.safe_load(file.rest) == REST


def test_a_json_section_is_read_and_taken_out_and_the_rest_stays_json(tmp_path: Path) -> None:
    document = {
        "distributed_type": "NO",
        "fsdp_config": {"accel_scaler": {"min_scale": 7}},
        "accel_scaler": {"step_mode": 'a " { tricky : [text', "min_scale": 1e-05},
    }
    file = read_config(write(tmp_path, json.dumps(document, indent="\t"), "config.json"))
    assert file.values == document.pop("accel_scaler")
    assert json.loads(file.rest or "") == document


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", BEFORE + AFTER), ("a.json", '{"a": 1}'), ("a.yaml", "")]
)
def test_a_file_without_the_section_needs_no_copy_and_gives_the_defaults(
    tmp_path: Path, name: str, text: str
) -> None:
    file = read_config(write(tmp_path, text, name))
    assert (file.values, file.lines, file.rest) == ({}, {}, None)
    assert ScalerConfig.from_yaml(file.path) == ScalerConfig()


def test_an_empty_section_in_braces_is_a_section(tmp_path: Path) -> None:
    file = read_config(write(tmp_path, BEFORE + "accel_scaler: {}\n" + AFTER))
    assert file.values == {}
    assert yaml.safe_load(file.rest or "") == REST


@pytest.mark.parametrize(
    ("text", "bad"), [("off", ""), ("'off'", ""), ("no", "False"), ("true", "True")]
)
def test_off_is_a_word_of_find_overflow_and_no_bool(tmp_path: Path, text: str, bad: str) -> None:
    path = write(tmp_path, f"use_cpu: off\naccel_scaler:\n  find_overflow: {text}\n  attach: on\n")
    assert yaml.safe_load(read_config(path).rest or "") == {"use_cpu": False}
    if bad:
        with pytest.raises(ConfigError, match=f"find_overflow: got {bad}, expected 'auto', 'rep"):
            ScalerConfig.from_yaml(path)
    else:
        assert ScalerConfig.from_yaml(path).find_overflow == "off"


def test_merge_keys_and_anchors_work_across_the_section(tmp_path: Path) -> None:
    text = (
        "accel_scaler: &s\n  <<: {min_scale: 2.0, hysteresis: 3}\n  min_scale: 1.0\n"
        "distributed_type: 'NO'\nfsdp_config: *s\n"
    )
    file = read_config(write(tmp_path, text))
    assert file.values == yaml.safe_load(text)["accel_scaler"]
    assert file.lines == {"hysteresis": 2, "min_scale": 3}
    expected = {key: yaml.safe_load(text)[key] for key in ("distributed_type", "fsdp_config")}
    assert yaml.safe_load(file.rest or "") == expected


BOOM = "boom"
"""What a file that is executed would make in the present folder."""

TWICE = "stands twice in a mapping; keep one."
BROKEN = {
    "a field twice": (
        "accel_scaler:\n  a: 1\n  b: 2\n  a: 2\n",
        f", line 4: not valid YAML: 'a' {TWICE}",
    ),
    "a word": ("a: 1\naccel_scaler: overlap\n", "`accel_scaler:` must be a mapping of fields"),
    "wrong case": ("Accel_scaler: {}\n", "`Accel_scaler:`. Did you mean accel_scaler:?"),
    "wrong indent": ("a: 1\n b: 2\n", ", line 2: not valid YAML"),
    "no such day": ("accel_scaler:\n  min_scale: 2024-13-01\n", "not valid YAML: month must be"),
    "no mapping": ("- a\n- b\n", "got ['a', 'b'], expected a mapping of Accelerate's settings"),
    "a call": (f"accel_scaler: !!python/object/apply:os.mkdir [{BOOM}]\n", ", line 1: not valid"),
    "a call beside": (f"a: !!python/object/apply:os.mkdir [{BOOM}]\n", ", line 1: not valid YAML"),
}  # fmt: skip
BROKEN_JSON = {
    "a field twice": ('{"accel_scaler": {"a": 1, "a": 2}}', f": not valid JSON: 'a' {TWICE}"),
    "no colon": ('{"a": 1,\n"b" 5}', "not valid JSON: Expecting ':' delimiter: line 2"),
    "a list": ("[1, 2]", "got [1, 2], expected a mapping"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_yaml_file_is_refused_in_a_line_and_nothing_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text, part = BROKEN[name]
    assert part in refused(write(tmp_path, text))
    assert not Path(BOOM).exists()


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_a_broken_json_file_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    text, part = BROKEN_JSON[name]
    assert part in refused(write(tmp_path, text, "config.json"))


# What chance would hardly find: values of kinds that a setting is not.
WRONG_VALUES = {
    "{min_scale: .nan}": "min_scale: got nan",
    "{hysteresis: 0x" + "f" * 9000 + "}": "got an integer of 36000 bits",
    "{min_scale: 2001-02-03}": "min_scale: got datetime.date",
    "&a {min_scale: *a}": "min_scale: got {",
    "{" + "x" * 1_000 + ": 1}": "unknown field 'xxx",
}


@pytest.mark.parametrize("section", WRONG_VALUES, ids=lambda text: text[:20])
def test_a_value_that_no_setting_takes_is_shown_in_a_line(tmp_path: Path, section: str) -> None:
    path = write(tmp_path, f"accel_scaler: {section}\n")
    with pytest.raises(ConfigError) as caught:
        ScalerConfig.from_yaml(path)
    message = str(caught.value)
    assert WRONG_VALUES[section] in message
    assert message.startswith(f"{path}, line 1")
    assert len(message) < 1_500


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "folder.yaml").symlink_to(".")
    for name in ("bytes.yaml", "loop.yaml", "folder.yaml", "missing.yaml"):
        assert "cannot be read as UTF-8" in refused(tmp_path / name)


@given(st.text(alphabet="ab:{}[]\n -&*!<>'\"#|%@`,?=~.0123eTn\t\\", max_size=60), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str, as_json: bool
) -> None:
    name = "noise.json" if as_json else "noise.yaml"
    text = f'{{"accel_scaler": {{}} {text} }}' if as_json else f"accel_scaler: {{}}\n{text}"
    path = write(tmp_path_factory.getbasetemp(), text, name)
    message = ""
    try:
        file = read_config(path)
    except ConfigError as error:
        message = str(error)
    if message:
        assert message.startswith(str(path))
        assert "\n" not in message
        return
    whole = (json.loads if as_json else yaml.safe_load)(text)
    assert file.values == whole.pop("accel_scaler")
    rest = (json.loads if as_json else yaml.safe_load)(file.rest or "")
    assert repr(rest) == repr(whole)  # repr: a NaN equals itself


def test_shipped_files_are_found_by_name_and_a_file_on_disk_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_configs()
    assert find_config("cpu_fp16") == find_config("cpu_fp16.yaml") == shipped["cpu_fp16"]
    write(tmp_path, BEFORE, "cpu_fp16.yaml")
    assert find_config("cpu_fp16.yaml") == Path("cpu_fp16.yaml")
    assert find_config("cpu_fp16") == shipped["cpu_fp16"]


@pytest.mark.parametrize("name", ["nope", "nope.yaml", "elsewhere/cpu_fp16.yaml", "cpu_fp16.json"])
def test_a_file_that_is_not_there_names_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"does not exist.*cpu_fp16, .*gpu_fp16") as caught:
        find_config(name)
    assert repr(name) in str(caught.value)
    with pytest.raises(ConfigError, match="is not a file"):
        find_config(str(tmp_path))
