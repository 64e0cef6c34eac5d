"""``accel-scaler doctor``: what it reads, which hazards it sees where, and that it starts nothing.

``test_config_files.py`` holds its words against launched ranks. Takes about 15 s.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from places import ROOT

from accel_scaler import ScalerConfig, cli
from accel_scaler.async_optimizer.worker import default_threads
from accel_scaler.config import ENV_PREFIX, FIELDS
from accel_scaler.console import written
from accel_scaler.doctor import command as doctor
from accel_scaler.doctor import environment as environment_module
from accel_scaler.doctor.environment import Devices
from accel_scaler.launch import launcher

T4S = Devices("cuda", ("Tesla T4", "Tesla T4"), True)
BARE = Devices(None, (), True)
SECTION = "distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\naccel_scaler:\n"


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, no default config file, no settings, a machine without accelerators."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "default_config_file", str(tmp_path / "default.yaml"))
    monkeypatch.setattr(
        "accelerate.commands.launch.default_config_file", str(tmp_path / "default.yaml")
    )
    monkeypatch.setattr(environment_module, "_devices", lambda: BARE)
    for key in list(os.environ):
        if key.startswith((ENV_PREFIX, "ACCELERATE_", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE")):
            monkeypatch.delenv(key)
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["doctor", "--json", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


# --- what it says -------------------------------------------------------------------------------


def test_every_setting_has_its_value_and_who_set_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.yaml").write_text(SECTION + "  hysteresis: 3\n  min_scale: 2.0\n  max_scale: null\n")
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "4")
    monkeypatch.setenv("ACCEL_SCALER_GROWTH_INTERVAL", "9")
    flags = ["--growth_interval", "7", "--no_enabled", "--fp32_modules", "*.wo, h.3"]
    found = ask(capsys, "--config_file", "mine.yaml", *flags)
    expected = {
        name: {"value": value, "source": "default"}
        for name, value in {"attach": True, **dataclasses.asdict(ScalerConfig())}.items()
    }
    expected["hysteresis"] = {"value": 3, "source": "mine.yaml, line 5"}
    expected["max_scale"] = {"value": None, "source": "mine.yaml, line 7"}
    expected["min_scale"] = {"value": 4.0, "source": "ACCEL_SCALER_MIN_SCALE"}
    expected["growth_interval"] = {"value": 7, "source": "--growth_interval"}
    expected["enabled"] = {"value": False, "source": "--no_enabled"}
    expected["fp32_modules"] = {"value": ["*.wo", "h.3"], "source": "--fp32_modules"}
    assert found["settings"] == expected
    assert list(found["settings"]) == list(FIELDS)
    assert found["config_file"] == "mine.yaml"


def test_the_words_say_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config_file", "cpu_fp16", "--step_mode", "overlap"]
    found = ask(capsys, *arguments)
    assert cli.main(["doctor", "--all", *arguments]) == 0
    text = capsys.readouterr().out
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line]
    for name, one in found["settings"].items():
        assert [name, f"{written(one['value'])} {one['source']}"] in [
            [line[0], " ".join(line[1].split())] for line in lines if len(line) == 2
        ]
    for hazard in (*found["hazards"], *found["mended"]):
        assert [hazard["id"], hazard["text"]] in lines
    for name, version in found["versions"].items():
        assert (f"{name} {version}" in text) == (version is not None)
    assert found["scaling"]["text"] in text
    assert "precision fp16, kind one process, device cpu" in text


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert cli.main(["doctor", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_what_is_wrong_comes_first_then_what_differs_from_the_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCEL_SCALER_MIN_SCALE", "4")
    monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "1")  # the default, so it does not differ
    arguments = ["--config_file", "gpu_fp16", "--step_mode", "overlap"]
    lines = said(capsys, *arguments)
    assert lines[0] == "what may go wrong"
    assert [line.split()[0] for line in lines[1:3]] == ["F11", "no-accelerator"]
    assert lines[3:5] == ["", "settings that differ from their defaults"]
    assert [line.split() for line in lines[5:8]] == [
        ["min_scale", "4", "ACCEL_SCALER_MIN_SCALE"],
        ["step_mode", "overlap", "--step_mode"],
        [],
    ]
    assert lines[-1].startswith("--all says the rest")
    assert "torch 2" not in "\n".join(lines)
    every = said(capsys, "--all", *arguments)
    assert every[:8] == lines[:8]
    assert [line.split()[0] for line in every[-len(FIELDS) :]] == list(FIELDS)
    monkeypatch.delenv("ACCEL_SCALER_MIN_SCALE")
    monkeypatch.delenv("ACCEL_SCALER_HYSTERESIS")
    calm = said(capsys, "--cpu", "--num_cpu_threads_per_process", "2")
    assert calm[0] == "nothing is seen that would go wrong"
    assert calm[1:3] == ["", "every setting is at its default"]


@pytest.mark.parametrize(
    ("is_terminal", "environ", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),  # no-color.org: "when present and not an empty string"
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    environ: dict[str, str],
    expected: bool,
) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **environ}.items():
        monkeypatch.setenv(name, value)
    bare = said(capsys, "--config_file", "gpu_fp16")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    lines = said(capsys, "--config_file", "gpu_fp16")
    assert lines[0] == ("\x1b[1mwhat may go wrong\x1b[0m" if expected else "what may go wrong")
    assert lines[1].startswith("\x1b[33m") == expected
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in lines] == bare
    assert all("\x1b" not in line for line in ask(capsys, "--cpu")["scaling"].values() if line)


def test_the_keys_are_those_that_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "--cpu")
    text = doctor.__doc__ or ""
    documented = [line.split()[0] for line in text.splitlines() if line[:4] == "    " != line[:5]
                  and line[4:5] != " " and line.split()[0] != "or,"]  # fmt: skip
    assert list(found) == documented
    for key in ("versions", "devices", "job", "scaling", "threads"):
        start = text.index(f"\n    {key} ")
        for name in found[key]:
            assert f'"{name}"' in text[start:], f"{key}: {name} is not documented"


@pytest.mark.parametrize(
    ("arguments", "scaler", "autocast"),
    [
        (["--cpu", "--mixed_precision", "fp16"], "accel_scaler", "float16"),
        (["--cpu", "--mixed_precision", "fp16", "--no_attach"], None, None),
        (["--cpu", "--mixed_precision", "fp16", "--no_enabled"], None, "float16"),
        (["--cpu", "--mixed_precision", "bf16"], None, "bfloat16"),
        (["--cpu"], None, None),
        (["--config_file", "gpu_fp16"], "accel_scaler", "float16"),
        (["--config_file", "gpu_fp16", "--no_attach"], "torch", "float16"),
        (["--use_deepspeed", "--num_processes", "2", "--no_attach"], "other", None),
        (["--mixed_precision", "fp8", "--num_processes", "1"], "other", None),
    ],
)
def test_it_says_who_scales(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    scaler: str | None,
    autocast: str | None,
) -> None:
    monkeypatch.setattr(environment_module, "_devices", lambda: T4S)
    found = ask(capsys, *arguments)["scaling"]
    assert (found["scaler"], found["autocast"]) == (scaler, autocast)


# --- the job ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "environ", "arguments", "job", "expected"),
    [
        (BARE, {}, "--config_file cpu_fp16", ("one process", "cpu", 1, 1, True), []),
        (BARE, {}, "--config_file gpu_fp16", ("one process", "cpu", 1, 1, True),
         ["no-accelerator"]),
        (T4S, {}, "--config_file gpu_fp16 --cpu", ("one process", "cpu", 1, 1, True), []),
        (T4S, {}, "--config_file multi_gpu_fp16", ("DDP", "cuda", 2, 2, True), []),
        (BARE, {}, "--config_file multi_gpu_fp16", ("DDP", "cpu", 2, 2, False),
         ["lone-processes"]),
        (BARE, {"ACCELERATE_USE_CPU": "true"}, "--config_file multi_gpu_fp16",
         ("DDP", "cpu", 2, 2, True), []),
        (T4S, {"ACCELERATE_USE_CPU": "true"}, "--config_file gpu_fp16",
         ("one process", "cuda", 1, 1, True), []),  # the launcher overwrites the variable
        (T4S, {}, "--config_file two_nodes_fp16 --num_processes 4", ("DDP", "cuda", 4, 2, True),
         []),
        (T4S, {}, "--config_file fsdp2_fp16", ("FSDP2", "cuda", 2, 2, True), []),
        (BARE, {"ACCELERATE_USE_CPU": "1"}, "--config_file fsdp2_fp16",
         ("FSDP2", "cpu", 2, 2, True), ["fsdp-on-cpu"]),
        (Devices("mps", ("mps",), None), {}, "--config_file multi_gpu_fp16",
         ("DDP", "mps", 2, 2, False), ["lone-processes"]),
    ],
)  # fmt: skip
def test_the_job_is_the_one_that_accelerate_would_start(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    devices: Devices,
    environ: dict[str, str],
    arguments: str,
    job: tuple[Any, ...],
    expected: list[str],
) -> None:
    monkeypatch.setattr(environment_module, "_devices", lambda: devices)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    found = ask(capsys, *arguments.split())
    keys = ("kind", "device", "processes", "processes_here", "joined")
    assert tuple(found["job"][key] for key in keys) == job
    assert found["job"]["precision"] == "fp16"
    assert [one["id"] for one in found["hazards"] if one["id"][0] != "F"] == expected


@pytest.mark.parametrize(("cores", "ranks", "auto"), [(16, 1, 15), (16, 4, 3), (2, 2, 1)])
def test_the_thread_plan_is_that_of_the_ranks(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    auto: int,
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    launch = ["--multi_gpu", "--num_processes", str(ranks)] if ranks > 1 else ["--cpu"]
    arguments = [*launch, "--mixed_precision", "fp16", "--offload", "cpu"]
    threads = ask(capsys, *arguments)["threads"]
    assert (threads["cores"], threads["auto"], threads["optimizer"]) == (cores, auto, auto)
    assert threads["own_thread"]
    assert not ask(capsys, *launch)["threads"]["own_thread"]
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_threads() == auto
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    threads = ask(capsys, *arguments, "--optimizer_threads", "2")["threads"]
    assert (threads["training"], threads["auto"], threads["optimizer"]) == (5, auto, 2)
    two_hosts = ask(capsys, "--config_file", "two_nodes_fp16", "--num_processes", str(2 * ranks))
    assert two_hosts["threads"]["auto"] == auto


# --- what cannot be used ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step_mod", "overlap"], "unknown flag --step_mod. Did you mean --step_mode?"),
        (["--min_scale"], "argument --min_scale/--min-scale: expected one argument"),
        (["--min_scale", "low"], "--min_scale: got 'low', expected a finite number"),
        (["--cpu", "no.py"], "the script 'no.py' does not exist"),
        (["--config_file", "keys.yaml"], "keys.yaml: Accelerate cannot use it: The config file at "
         "keys.yaml had unknown keys"),
        (["--use_deepspeed"], "DeepSpeed's engine scales the loss"),
        (["--multi_gpu", "--num_processes", "1"],
         "Accelerate refuses these arguments: You need to use at least 2 processes"),
    ],
)  # fmt: skip
def test_what_a_launch_would_refuse_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    Path("keys.yaml").write_text("num_proceses: 2\n" + SECTION + "  step_mode: sync\n")
    assert cli.main(["doctor", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("accel-scaler: error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert cli.main(["doctor", "--json", *arguments]) == 1
    line = err.removeprefix("accel-scaler: error: ").rstrip("\n")
    assert json.loads(capsys.readouterr().out) == {"format": 1, "error": line}


# --- what it leaves -----------------------------------------------------------------------------


def test_nothing_is_started_and_nothing_is_left(
    quiet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(quiet / "tmp"))
    (quiet / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    environment = dict(os.environ)
    ask(capsys, "--config_file", "multi_gpu_fp16_overlap", "--telemetry", "deep/run.jsonl")
    assert sorted(quiet.rglob("*")) == [quiet / "tmp"]
    assert dict(os.environ) == environment
    assert not logging.getLogger("accelerate.commands.launch").disabled
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state
    assert not torch.distributed.is_initialized()


@pytest.mark.process
def test_the_command_is_quiet_and_does_not_import_transformers() -> None:
    code = (
        "import sys; from accel_scaler import cli\n"
        "status = cli.main(['doctor', '--json', '--cpu'])\n"
        "big = [m for m in ('transformers', 'torch._dynamo', 'matplotlib') if m in sys.modules]\n"
        "print(status, big, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": os.getcwd()},
    )  # fmt: skip
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["format"] == doctor.FORMAT


@pytest.mark.process
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "accel_scaler", "doctor", "--cpu"], stdout=writer, check=True,
        stderr=subprocess.PIPE, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": os.getcwd()},
    )  # fmt: skip
    os.close(writer)
    assert done.stderr == ""
