"""The command ``accel-scaler``: what it offers, and errors on one line with status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from places import ROOT
from telemetry_files import end, start, window, write

from accel_scaler import ConfigError, __version__, cli
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


SHORT = 24
"""Lines of a terminal."""


@pytest.mark.process
@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"], ["launhc"]])
def test_what_is_typed_first_is_answered_without_torch(argv: list[str]) -> None:
    """And without anything else that takes a while; so from both of its entrances."""
    code = (
        "import atexit, sys; from importlib.metadata import entry_points\n"
        "seen = lambda: [m for m in ('torch', 'accelerate', 'numpy', 'yaml') if m in sys.modules]\n"
        "atexit.register(lambda: print(seen(), file=sys.stderr))\n"
    )
    ways = ["from accel_scaler.cli import main; sys.exit(main())", MODULE]
    ends = []
    for way in ways:
        done = subprocess.run(
            [sys.executable, "-c", code + way, *argv], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        )  # fmt: skip
        assert done.stderr.endswith("[]\n"), done.stderr
        ends.append((done.returncode, done.stdout, done.stderr))
    assert ends[0] == ends[1]
    status, out, err = ends[0]
    if argv == ["--version"]:
        assert (status, out, err) == (0, f"accel-scaler {__version__}\n", "[]\n")
    elif argv == ["launhc"]:
        told = "accel-scaler: error: unknown command 'launhc'. Did you mean launch?\n"
        assert (status, out, err) == (2, "", told + "[]\n")
    else:
        assert (status, err) == (0, "[]\n")
        lines = out.splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) < SHORT
        for name in cli.COMMANDS:
            assert sum(line.startswith(f"    {name} ") for line in lines) == 1
        assert (
            "  accel-scaler launch --mixed_precision fp16 --telemetry run.jsonl train.py" in lines
        )


@pytest.mark.process
def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", [start(), *map(window, range(3)), end(3)])
    code = (
        "import sys; from accel_scaler.cli import main\n"
        "assert main(['report', 'run.jsonl', '--text']) == 0\n"
        "assert main(['report', 'run.jsonl', '-o', 'page.html']) == 0\n"
        "print([m for m in ('torch', 'accelerate', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 windows" in done.stdout
    assert done.stdout.endswith("\n[]\n")
    assert (tmp_path / "page.html").is_file()


MODULE = "import runpy; runpy.run_module('accel_scaler', run_name='__main__', alter_sys=True)"


def test_python_m_and_the_console_script_are_the_same_command() -> None:
    assert main_module.main is cli.main
    found = entry_points(group="console_scripts", name="accel-scaler")
    assert all(point.load() is cli.main for point in found)
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\naccel-scaler = "accel_scaler.cli:main"\n' in text


@pytest.mark.parametrize("argv", [["--launch"], ["--", "launch"], ["--", "report"]])
def test_a_command_that_does_not_come_first_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: accel-scaler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("lunch", "unknown command 'lunch'. Did you mean launch?"),
        ("Report", "unknown command 'Report'. Did you mean report?"),
        ("train.py", "unknown command 'train.py'. The commands are launch, report."),
        ("", "unknown command ''. The commands are "),
    ],
)
def test_a_command_that_is_none(
    capsys: pytest.CaptureFixture[str], command: str, expected: str
) -> None:
    assert expected in fails(capsys, command, "--help")


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
