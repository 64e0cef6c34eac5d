"""``accel-scaler config``: the questions, and that the rest of the file stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from accel_scaler import ScalerConfig, cli
from accel_scaler.config_file import read_config, write_section
from accel_scaler.launch.ask import ASKED

HEAD = "# mine\ndistributed_type: 'NO' # quoted\n"
TAIL = "mixed_precision: fp16\n\n# the end\n"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is typed; prompts go where those of Accelerate go."""
    typed: list[str] = []

    def answer(prompt: str) -> str:
        print(prompt)
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    return typed


def ask(path: Path) -> int:
    return cli.main(["config", "--config_file", str(path)])


@pytest.mark.parametrize(
    ("section", "written"),
    [
        ("", "accel_scaler:\n  step_mode: overlap\n  offload: none\n"),
        ("accel_scaler:\n", "accel_scaler:\n  step_mode: overlap\n  offload: none\n"),
        (
            "accel_scaler: # ours\n    # why\n    min_scale: 2.0\n\n    fp32_modules:\n"
            "        - '*.wo'\n    offload:  cpu  # here\n    # later\n\n# of the next\n",
            "accel_scaler: # ours\n    # why\n    min_scale: 2.0\n\n    fp32_modules:\n"
            "        - '*.wo'\n    offload: none  # here\n    step_mode: overlap\n"
            "    # later\n\n# of the next\n",
        ),
        (
            "accel_scaler:\r\n  step_mode: 'sync'\r\n",
            "accel_scaler:\r\n  step_mode: overlap\r\n  offload: none\n",
        ),
    ],
)
def test_every_other_line_stays_as_it_is(tmp_path: Path, section: str, written: str) -> None:
    path = tmp_path / "c.yaml"
    for tail in (TAIL, "") if section else ("",):
        path.write_bytes((HEAD + section + tail).encode())
        for _ in range(2):
            write_section(path, {"step_mode": "overlap", "offload": "none"})
            assert path.read_bytes().decode() == HEAD + written + tail


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_is_answered_is_what_is_launched_with(
    tmp_path: Path, answers: list[str], capsys: pytest.CaptureFixture[str], form: str
) -> None:
    path = tmp_path / "c.yaml"
    config = ClusterConfig("LOCAL_MACHINE", "NO", "fp16", use_cpu=True, debug=False)
    getattr(config, f"to_{form}_file")(str(path))
    before = path.read_text()
    telemetry = 'C:\\runs \\1 #2: "x"\'.jsonl'
    answers += ["later", "overlap", "", "0", "4x", "3", telemetry]
    assert ask(path) == 0
    assert answers == []
    assert path.read_text().startswith(before.rstrip("\n}"))
    first = ScalerConfig(
        step_mode="overlap", skip_norm_above="4x", max_consecutive_skips=3, telemetry=telemetry
    )
    assert ScalerConfig.from_yaml(path) == first
    assert yaml.safe_load(read_config(path)[1] or "") == yaml.safe_load(before)
    out = capsys.readouterr().out
    asked = [line.split()[0] for line in out.splitlines() if line.endswith("]: ")]
    assert asked == [name for name in ASKED for _ in range(1 + (name in ASKED[::2][:2]))]
    assert "Expected 'sync', 'overlap', 'delayed' or 'auto'." in out
    assert f"accel-scaler launch --config_file {path} train.py" in out
    assert "`accelerate launch` refuses" in out
    with pytest.raises(ValueError, match=r"unknown keys.*accel_scaler"):
        load_config_from_file(str(path))
    # Again: Enter keeps what is there, none takes it out.
    answers += ["", "", "none", "", "none"]
    assert ask(path) == 0
    assert "skip_norm_above [4x]: " in capsys.readouterr().out
    assert ScalerConfig.from_yaml(path) == ScalerConfig(
        step_mode="overlap", max_consecutive_skips=3
    )


@pytest.mark.parametrize(
    ("text", "typed", "said"),
    [
        ("accel_scaler: {step_mode: sync}\n", [""] * 5, "By hand: accel_scaler: {.*mode: sync"),
        ("{accel_scaler: {step_mode: sync}}", [""] * 5, "cannot be edited .*By hand"),
        ("a: 1\n...\n", [""] * 5, "cannot be edited"),
        ("accel_scaler:\n  telemetry: >-\n    a\n    b\n", [""] * 5, "cannot be edited"),
        ("accel_scaler: {step_mod: sync}\n", [], "unknown field 'step_mod'"),
        ("accel_scaler: overlap\n", [], "expected a mapping"),
        ("- 1\n", [], "expected a mapping"),
        (HEAD, ["sync"], "the input ended before 'offload'; nothing was written"),
        ("accel_scaler:\n  master_weights: none\n", ["", "cpu", "", "", ""], "drop one of the two"),
        (None, [], "no such file. First: accelerate config --config_file "),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_one_line_and_changes_nothing(
    tmp_path: Path,
    answers: list[str],
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    typed: list[str],
    said: str,
) -> None:
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_text(text)
    answers += typed
    assert ask(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accel-scaler: error: ")
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(line)
    assert (path.read_text() if path.exists() else None) == text
