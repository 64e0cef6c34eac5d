"""The public names, and what the two commands and the packaging promise."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from places import ROOT
from torch.amp import GradScaler as Stock

import accel_scaler
from accel_scaler import AccelScalerError, GradScaler


def test_public_names() -> None:
    assert set(accel_scaler.__all__) == {
        "AccelScalerError",
        "AsyncOptimizer",
        "ConfigError",
        "GradScaler",
        "OrderError",
        "OverflowStreakError",
        "ScaledAccelerator",
        "ScalerConfig",
        "StepError",
        "UnsupportedError",
        "attach",
        "detach",
        "offloaded",
    }

    errors = [getattr(accel_scaler, n) for n in accel_scaler.__all__ if n.endswith("Error")]
    assert all(issubclass(error, AccelScalerError) for error in errors)


def test_every_method_of_torchs_scaler_is_there_and_documented() -> None:
    assert issubclass(GradScaler, Stock)
    for name, method in inspect.getmembers(Stock, inspect.isfunction):
        if not name.startswith("_"):
            ours = getattr(GradScaler, name)
            theirs = list(inspect.signature(method).parameters)
            assert list(inspect.signature(ours).parameters)[: len(theirs)] == theirs
            assert ours.__doc__, name
    settings = list(inspect.signature(Stock).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())[: len(settings)]
    assert [p.name for p in ours] == [p.name for p in settings]
    assert [p.default for p in ours[1:]] == [p.default for p in settings[1:]]
    assert ours[0].default is None, "the accelerator that is there, and not CUDA"


USE = """
from accel_scaler import ScalerConfig, attach
class Own: ...
own: Own = attach(Own(), step_mode="overlap", fp32_modules="*.wo", skip_norm_above="4x")
attach(3, ScalerConfig(heal=True), hysteresis=2, telemetry=None, min_scale=1)
attach(own, step_mod="overlap")
attach(own, step_mode="later")
ScalerConfig(growth_intervall=2)
other: int = attach(own)
"""
WRONG = {6: "did you mean", 7: "'overlap'", 8: "did you mean", 9: "int"}
"""Lines of ``USE`` that mypy refuses, and a part of what it says."""


@pytest.mark.process
def test_mypy_knows_the_settings_as_keywords_and_that_attach_returns_its_target(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nhide_error_codes = true\n[mypy-torch.*,accelerate.*,transformers.*]\n"
        "follow_imports = skip\nignore_missing_imports = true\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "use.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    said = dict(re.findall(r"^use.py:(\d+): error: (.*)", done.stdout, re.M))
    assert list(map(int, said)) == list(WRONG), done.stdout + done.stderr
    assert all(WRONG[int(line)] in text for line, text in said.items())


def test_the_oldest_set_is_the_one_that_the_package_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["trainer"]]
    pinned = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    for name, least in re.findall(r"([\w-]+)>=([\d.]+)", " ".join(needs)):
        assert f"{name}=={least}.0" in pinned


def test_requirements_are_few_and_private_names_have_an_upper_bound() -> None:
    """psutil and PyYAML are Accelerate's, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.match(r"(\w+)(.*)", need).groups() for need in project["dependencies"])  # type: ignore[union-attr]
    assert set(bounds) == {"torch", "accelerate", "psutil", "PyYAML"}
    assert bounds["torch"].endswith(",<3")
    assert bounds["accelerate"].endswith(",<2")


def test_no_path_of_a_machine_in_the_project() -> None:
    for path in [*ROOT.glob("*.*"), *ROOT.glob("[a-z]*/**/*.py"), ROOT / "Makefile"]:
        if (
            path.is_file()
            and not {".git", ".venv", "out"} & set(path.parts)
            and path != Path(__file__)
        ):
            text = path.read_text(encoding="utf-8", errors="ignore")
            assert not re.search(r"(?<![\w.])/(?:work|root|home)/\w", text), path


def test_a_warning_has_a_sender_where_a_script_configures_no_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    ours, others = logging.getLogger("accel_scaler"), logging.getLogger("of_a_script")
    for logger in (ours, others):
        logger.info("no one asked for this")
        logger.warning("step %d overflowed", 2)
    assert capsys.readouterr().err == "accel_scaler: step 2 overflowed\nstep 2 overflowed\n"
    for configured in (ours, logging.root):  # by the script: that handler prints, no other
        handler = logging.StreamHandler(sys.stderr)
        configured.addHandler(handler)
        ours.warning("step 3 overflowed")
        configured.removeHandler(handler)
        assert capsys.readouterr().err == "step 3 overflowed\n"
