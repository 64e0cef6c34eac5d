"""The command ``accel-scaler``: what it offers, and errors on one line with status 2."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from places import ROOT

from accel_scaler import ConfigError, cli
from accel_scaler import __main__ as main_module

ONE_GOOD = "distributed_type: 'NO'\nuse_cpu: true\naccel_scaler:\n  step_mode: {}\n"


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of an error with status 2."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("accel-scaler: error: ")
    return err


@pytest.fixture
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script and a config file."""
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    (tmp_path / "config.yaml").write_text(ONE_GOOD.format("overlap"))
    (tmp_path / "wrong.yaml").write_text(ONE_GOOD.format("later"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.process
def test_help_names_the_commands_and_loads_nothing_big() -> None:
    code = (
        "import sys; from accel_scaler import cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print([m for m in ('transformers', 'matplotlib', 'accelerate.commands.launch')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "launch" in done.stdout
    assert "report" in done.stdout
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""


def test_python_m_and_the_console_script_are_the_same_command() -> None:
    assert main_module.main is cli.main
    found = entry_points(group="console_scripts", name="accel-scaler")
    assert all(point.load() is cli.main for point in found)
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\naccel-scaler = "accel_scaler.cli:main"\n' in text


@pytest.mark.parametrize("argv", [[], ["lunch"], ["--launch"], ["--", "launch"], ["--", "report"]])
def test_no_command_or_a_wrong_one_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: accel-scaler" in capsys.readouterr().err


@pytest.mark.usefixtures("quiet_home")
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train.py", "--config_file", "no.yaml"], None),
        (["--config_file", "no.yaml", "train.py"], "'no.yaml' does not exist"),
        (["--config_file", "wrong.yaml", "train.py"], "wrong.yaml, line 4: step_mode: got 'later'"),
        (["--config_file", "config.yaml", "no.py"], "the script 'no.py' does not exist"),
        (["--no_python", "no-such-tool"], "'no-such-tool' is no executable"),
        (["--min_scale", "low", "train.py"], "--min_scale: got 'low', expected a finite number"),
        (["--cpu", "--min_scale", "9", "--init_scale", "4", "train.py"], "min_scale: --min_scale"),
        (["--use_deepspeed", "train.py"], "DeepSpeed's engine scales the loss"),
        (["--tpu", "train.py"], "an XLA device"),
    ],
)
def test_a_wrong_launch_is_one_line_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    expected: str | None,
) -> None:
    monkeypatch.setattr("accel_scaler.launch.launcher.default_config_file", "/nowhere")
    started = []
    monkeypatch.setattr("accel_scaler.launch.launcher.launch_command", started.append)
    if expected is None:  # after the script come the script's own arguments
        assert cli.main(["launch", *argv]) == 0
        assert len(started) == 1
        return
    assert expected in fails(capsys, "launch", *argv)
    assert not started


@pytest.mark.usefixtures("quiet_home")
def test_a_report_of_a_file_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no.jsonl" in fails(capsys, "report", "no.jsonl")


def test_an_error_of_several_lines_becomes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(argv: object) -> int:
        raise ConfigError("first\n  second")

    monkeypatch.setattr("accel_scaler.launch.launcher.main", refused)
    assert "first second" in fails(capsys, "launch", "x.py")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_ctrl_c_ends_with_130_and_what_is_not_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def broken(argv: object) -> int:
        raise error

    monkeypatch.setattr("accel_scaler.launch.launcher.main", broken)
    if error is KeyboardInterrupt:
        assert cli.main(["launch", "x.py"]) == 130
    else:
        with pytest.raises(error):
            cli.main(["launch", "x.py"])
