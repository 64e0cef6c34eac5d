"""The ``accel_scaler:`` section: fields with lines, the rest unchanged, every mistake named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_scaler import ConfigError, ScalerConfig
from accel_scaler.config_file import ConfigFile, find_config, read_config, shipped_configs

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


def read(folder: Path, text: str, name: str = "config.yaml") -> ConfigFile:
    return read_config(write(folder, text, name))


def refused(folder: Path, text: str, name: str = "config.yaml") -> str:
    """The error's message, with the path checked and left out."""
    path = write(folder, text, name)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
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
    file = read(tmp_path, text)
    assert file.values == {"step_mode": "overlap", "min_scale": 0.5}
    numbered = list(enumerate(text.splitlines(), 1))
    assert file.lines == {
        name: next(n for n, line in numbered if name in line) for name in file.values
    }
    assert file.rest is not None
    assert yaml.safe_load(file.rest) == REST


def test_a_json_section_is_read_with_its_lines_and_taken_out(tmp_path: Path) -> None:
    text = """{
\t"distributed_type": "NO", "fsdp_config": {"accel_scaler": {"min_scale": 7}},
\t"accel_scaler": {
\t\t"step_mode"
\t\t: "a \\" { tricky : [text", "offload": ["min_scale", {"max_scale": 1}],
\t\t"min_scale": 0.5}, "tpu_env": ["x:y", {"a": 1}]
}"""
    file = read(tmp_path, text, "config.json")
    assert file.values == {
        "step_mode": 'a " { tricky : [text',
        "offload": ["min_scale", {"max_scale": 1}],
        "min_scale": 0.5,
    }
    assert file.lines == {"step_mode": 4, "offload": 5, "min_scale": 6}
    assert file.rest is not None
    assert json.loads(file.rest) == {
        key: value for key, value in json.loads(text).items() if key != "accel_scaler"
    }


@pytest.mark.parametrize(("name", "text"), [("a.yaml", BEFORE + AFTER), ("a.json", '{"a": 1}')])
def test_a_file_without_the_section_needs_no_copy(tmp_path: Path, name: str, text: str) -> None:
    file = read(tmp_path, text, name)
    assert (file.values, file.lines, file.rest) == ({}, {}, None)


def test_an_empty_section_in_braces_is_a_section(tmp_path: Path) -> None:
    file = read(tmp_path, BEFORE + "accel_scaler: {}\n" + AFTER)
    assert file.values == {}
    assert yaml.safe_load(file.rest or "") == REST


def test_merge_keys_and_anchors_work_across_the_section(tmp_path: Path) -> None:
    text = (
        "accel_scaler: &s\n  <<: {min_scale: 2.0, hysteresis: 3}\n  min_scale: 1.0\n"
        "distributed_type: 'NO'\nfsdp_config: *s\n"
    )
    file = read(tmp_path, text)
    assert file.values == yaml.safe_load(text)["accel_scaler"]
    assert file.lines == {"hysteresis": 2, "min_scale": 3}
    expected = {key: yaml.safe_load(text)[key] for key in ("distributed_type", "fsdp_config")}
    assert yaml.safe_load(file.rest or "") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accel_scaler:\n  min_scale: 1\n  hysteresis: 2\n  min_scale: 2\n", "line 4: 'min_scale'"),
        ("a: 1\naccel_scaler: {}\nb: 2\naccel_scaler: {}\n", "line 4: a second `accel_scaler:`"),
        ("a: 1\naccel_scaler: overlap\n", "line 2: `accel_scaler:` must be a mapping"),
        ("a: 1\naccel_scaler:\nb: 1\n", "line 2: `accel_scaler:` must be a mapping"),
        ("a: 1\naccel_scaler: [step_mode]\n", "line 2: `accel_scaler:` must be a mapping"),
        ("a: 1\naccel_scaler:\n  5: 6\n", "line 3: 5 in `accel_scaler:` is no field's name"),
        ("a: 1\n b: 2\n", "line 2: not valid YAML"),
        ("a: 1\n--- \nb: 2\n", "line 2: not valid YAML"),
        ("a: !!bool 7\n", "a value that YAML cannot read"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1: not valid YAML"),
        ("accel_scaler:\n  min_scale: 2024-13-01\n", "a value that YAML cannot read"),
        ("- a\n- b\n", "expected a mapping of Accelerate's settings"),
        ("", "got an empty file"),
        ("a: " + "[" * 3000, "YAML"),
    ],
)
def test_a_broken_yaml_file_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"accel_scaler": {"min_scale": 1,\n"min_scale": 2}}', "line 2: 'min_scale' stands twice"),
        ('{"accel_scaler": {},\n\n"accel_scaler": {}}', "line 3: a second"),
        ('{"a": 1,\n"accel_scaler": 5}', "line 2: `accel_scaler:` must be a mapping"),
        ('{"a": 1,\n"b" 5}', "line 2: not valid JSON"),
        ("[1, 2]", "expected a mapping"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_broken_json_file_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(tmp_path, text, "config.json")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_config(path)


names = st.sampled_from(["accel_scaler", "a", "min_scale", "<<", "yes", "1e3", "ß", "#", ""])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    names,
)
documents = st.dictionaries(
    names,
    st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@given(documents, st.booleans(), st.sampled_from([None, True, False]))
@settings(max_examples=200, deadline=None)
def test_any_mapping_comes_back_in_two_parts(
    tmp_path_factory: pytest.TempPathFactory, document: Any, as_json: bool, style: bool | None
) -> None:
    folder = tmp_path_factory.getbasetemp()
    if as_json:
        name, text, load = "fuzz.json", json.dumps(document, indent=style), json.loads
    else:
        name, load = "fuzz.yaml", yaml.safe_load
        text = yaml.safe_dump(document, default_flow_style=style, allow_unicode=True)
    path = write(folder, text, name)
    expected: dict[str, Any] = dict(load(text))  # a "<<" that merged is the loader's business
    section = expected.pop("accel_scaler", {})
    if "accel_scaler" in document and not isinstance(section, dict):
        with pytest.raises(ConfigError, match="must be a mapping"):
            read_config(path)
        return
    file = read_config(path)
    assert file.values == section
    assert set(file.lines) == set(section)
    lines = text.splitlines()
    assert all(1 <= line <= len(lines) for line in file.lines.values())
    assert load(text if file.rest is None else file.rest) == expected


@given(st.text(alphabet="ab:{}[]\n -&*!<>'\"#|%@`,?=~.0123eTn\t\\", max_size=60), st.booleans())
@settings(max_examples=400, deadline=None)
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
    else:
        whole = (json.loads if as_json else yaml.safe_load)(text)
        assert file.values == whole.pop("accel_scaler")
        rest = (json.loads if as_json else yaml.safe_load)(file.rest or "")
        assert repr(rest) == repr(whole)  # repr: a NaN equals itself


def test_shipped_files_are_found_by_name_and_a_file_on_disk_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_configs()
    assert {"cpu_fp16", "gpu_fp16"} <= set(shipped)
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


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_file_has_fields_that_the_scaler_takes(name: str) -> None:
    file = read_config(shipped_configs()[name])
    ScalerConfig(**{k: v for k, v in file.values.items() if k != "attach"})
