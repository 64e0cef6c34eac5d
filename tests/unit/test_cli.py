"""The command ``accel-scaler``: what it offers, and errors on one line with status 2."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from launching import run
from places import ROOT
from telemetry_files import end, start, window, write

from accel_scaler import ConfigError, __version__, cli
from accel_scaler import __main__ as main_module

HEAVY = "[m for m in ('torch', 'accelerate', 'transformers') if m in sys.modules]"


@pytest.mark.process
@pytest.mark.parametrize(
    "argv",
    [[], ["--version"], ["report"], *([each, "--help"] for each in ("launch", "test"))],
)
def test_help_version_and_reports_import_no_torch(argv: list[str], tmp_path: Path) -> None:
    if argv == ["report"]:
        write(tmp_path / "run.jsonl", [start(), *map(window, range(3)), end(3)])
        argv = ["report", "run.jsonl", "-o", "page.html"]
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print({HEAVY}, file=sys.stderr))\n"
        f"sys.argv[1:] = {argv!r}\n"
        "runpy.run_module('accel_scaler', run_name='__main__', alter_sys=True)\n"
    )
    status, out, err = run([sys.executable, "-c", code], tmp_path, COLUMNS="80")
    assert (status, err) == (0, "[]\n")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    if argv == ["--version"]:
        assert lines == [f"accel-scaler {__version__}"]
    elif argv[:1] == ["launch"]:
        assert out.startswith("usage: accel-scaler launch [flags] script.py")
    elif argv[:1] == ["test"]:
        assert "--parameters SIZE" in out
    elif argv[:1] == ["report"]:
        assert (tmp_path / "page.html").is_file()
    else:
        assert {"test", "launch", "report"} <= {s.split()[0] for s in lines if s}


def test_python_m_and_the_console_script_are_the_same_command() -> None:
    assert main_module.main is cli.main
    found = entry_points(group="console_scripts", name="accel-scaler")
    assert all(point.load() is cli.main for point in found)
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\naccel-scaler = "accel_scaler.cli:main"\n' in text


@pytest.mark.parametrize("argv", [["lunch"], ["--launch"], ["train.py"], [""]])
def test_a_command_that_does_not_exist_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: accel-scaler" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConfigError("first\n  second"), KeyboardInterrupt()])
def test_an_error_of_ours_is_one_line_with_status_2_and_ctrl_c_ends_with_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse(argv: object) -> int:
        raise error

    monkeypatch.setattr("accel_scaler.launch.launcher.main", refuse)
    is_ours = isinstance(error, ConfigError)
    assert cli.main(["launch", "x.py"]) == (2 if is_ours else 130)
    line = "accel-scaler: error: first second\n" if is_ours else ""
    assert capsys.readouterr() == ("", line)
